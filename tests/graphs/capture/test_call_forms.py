"""Calls that mean what the captured one meant, in another form: they replay, or run eagerly where code could tell."""

import logging
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from twins import eager_copy, leaf_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Scaled(nn.Module):
    """x -> weight * x * scale + bias, with everything but x optional."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(
        self,
        x: Tensor,  # [3, 4]
        scale: float = 1.0,
        *,
        bias: Tensor | None = None,  # [3, 4]
        sizes: tuple[int, ...] = (1, 2),
    ) -> Tensor:
        y = self.weight * x * scale * sizes[0]
        return y if bias is None else y + bias


def assert_replays(model: nn.Module, twin: nn.Module, calls: list[tuple[tuple, dict[str, Any]]]) -> None:
    """Each call replays, equal to the twin's, gradients of parameters included."""
    for number, (args, kwargs) in enumerate(calls):
        assert_bitwise_equal(run(model, *args, **kwargs), run(twin, *args, **kwargs))
        assert_bitwise_equal(model.weight.grad, twin.weight.grad)
        assert model.te_graph.info()["forward_replays"] == number + 1
    assert model.te_graph.info()["eager_calls"] == {}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1.0,), {}), ((), {"scale": 1.0}), ((), {"bias": None, "sizes": (1, 2)}), ((1.0,), {"sizes": (1, 2)})],
)
def test_arguments_by_name_by_position_and_by_default_are_one_signature(device, args, kwargs):
    model = Scaled().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), *args), sample_kwargs=kwargs)
    x = batch(device)
    forms = [
        ((x,), {}),
        ((), {"x": x}),
        ((x, 1.0), {}),
        ((x,), {"scale": 1.0}),
        ((), {"scale": 1.0, "x": x}),
        ((x,), {"sizes": (1, 2), "bias": None}),
        ((), {"bias": None, "x": x}),
    ]
    assert_replays(model, twin, forms)


def test_a_tensor_by_name_or_by_position(device):
    model = nn.Bilinear(4, 4, 2).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), sample_kwargs={"input2": batch(device)})
    x, y = batch(device), batch(device)
    forms = [((x, y), {}), ((x,), {"input2": y}), ((), {"input2": y, "input1": x}), ((), {"input1": x, "input2": y})]
    assert_replays(model, twin, forms)


def test_another_value_than_the_default_is_still_another_signature(device):
    model = Scaled().to(device)
    make_graphed_callables(model, (batch(device),))
    for kwargs, words in [
        ({"scale": 2.0}, "got keyword argument scale, which was not given at capture"),
        ({"scale": 1}, "got keyword argument scale"),
        ({"sizes": (1, 3)}, "got keyword argument sizes"),
        ({"bias": batch(device)}, "got keyword argument bias"),
    ]:
        with pytest.raises(ValueError, match=f"Scaled: {words}"):
            model(batch(device), **kwargs)
    model.te_graph.reset()
    make_graphed_callables(model, (batch(device), 2.0))
    with pytest.raises(ValueError, match="expected 2 positional arguments as at capture, got 1"):
        model(batch(device))
    with pytest.raises(ValueError, match=r"expected args\[1\] \(scale\) to be 2.0 as at capture, got 1.0"):
        model(batch(device), scale=1.0)


def test_arguments_that_eager_execution_refuses_are_refused(device):
    model = Scaled().to(device)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    for args, kwargs in [((), {}), ((x,), {"x": x}), ((x, 1.0, None), {}), ((x,), {"unknown": 1})]:
        with pytest.raises(ValueError, match="Scaled: "):
            model(*args, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"scale": 1.0}])
def test_a_function_of_any_number_of_tensors(device, kwargs):
    def summed(*terms: Tensor, scale: float = 1.0) -> Tensor:  # [3, 4], each
        return sum(terms) * scale

    graphed = make_graphed_callables(summed, (batch(device), batch(device)), sample_kwargs=kwargs)
    x, y = batch(device), batch(device)
    for form in ({}, {"scale": 1.0}):
        assert_bitwise_equal(run(graphed, x, y, **form), run(summed, x, y, **form))
    assert graphed.te_graph.info()["forward_replays"] == 2
    for terms, form in (((x,), {}), ((x, y, batch(device)), {}), ((x, y), {"scale": 2.0})):
        with pytest.raises(ValueError, match="summed: "):
            graphed(*terms, **form)


def test_a_decorated_function_is_called_as_it_was_captured(device):
    """What stands between caller and function may take the one form for something else than the other."""

    def counts_names(*args: Any, **kwargs: Any) -> Tensor:
        return args[0] * 2 if args else kwargs["x"] * 3

    graphed = make_graphed_callables(counts_names, (batch(device),))
    with pytest.raises(ValueError, match="expected 1 positional argument as at capture, got 0"):
        graphed(x=batch(device))


def total(x: Tensor, **terms: Tensor) -> Tensor:  # [3, 4], each
    for term in terms.values():
        x = x * 0.5 + term
    return x


def joined(parts: dict[str, Tensor]) -> Tensor:  # [3, 4], each -> [n * 3, 4]
    return torch.cat(list(parts.values()))


def joined_inside(nest: list) -> Tensor:
    return joined(nest[1]["parts"])


def named(device: str, names: str) -> dict[str, Tensor]:
    return {name: torch.full((3, 4), float(ord(name)), device=device, requires_grad=True) for name in names}


@pytest.mark.parametrize("kind", ["argument", "nested", "keywords"])
def test_a_dictionary_in_another_order_runs_eagerly_with_a_warning_that_shows_both(device, kind, caplog):
    """Its order is for code to see: values() of it is what these functions go through."""
    orders = ("abc", "cab", "cab", "abc")
    if kind == "keywords":
        name, eager = "kwargs", total
        graphed = make_graphed_callables(total, (batch(device),), sample_kwargs=named(device, "abc"))
        calls = [((batch(device),), named(device, order)) for order in orders]
    elif kind == "nested":
        name, eager = "args[0][1]['parts']", joined_inside
        graphed = make_graphed_callables(joined_inside, ([1, {"parts": named(device, "abc")}],))
        calls = [(([1, {"parts": named(device, order)}],), {}) for order in orders]
    else:
        name, eager = "args[0]", joined
        graphed = make_graphed_callables(joined, (named(device, "abc"),))
        calls = [((named(device, order),), {}) for order in orders]
    with caplog.at_level(logging.WARNING, "te_graph"):
        for args, kwargs in calls:
            assert_bitwise_equal(run(graphed, *args, **kwargs), run(eager, *args, **kwargs))
    info = graphed.te_graph.info()
    reason = f"expected {name} in the order (a, b, c) as at capture, got (c, a, b): code may go by it, keep to one"
    assert (info["forward_replays"], info["eager_calls"]) == (2, {reason: 2})
    assert [record.getMessage() for record in caplog.records] == [f"{eager.__name__}: {reason} (runs eagerly)"]


@pytest.mark.parametrize("keys", [(1, 2.5), (torch.ones(2), torch.zeros(2)), (nn.ReLU(), None)])
def test_keys_that_are_no_names_in_another_order_run_eagerly(device, keys):
    graphed = make_graphed_callables(joined, (dict(zip(keys, named(device, "ab").values(), strict=True)),))
    for order in (keys, keys[::-1], keys):
        parts = dict(zip(order, named(device, "cd").values(), strict=True))
        assert_bitwise_equal(graphed(parts).detach(), joined(parts).detach())
    info = graphed.te_graph.info()
    assert (info["forward_replays"], sum(info["eager_calls"].values())) == (2, 1)


def test_a_key_of_another_type_that_is_equal_runs_eagerly(device):
    graphed = make_graphed_callables(joined, ({1: batch(device)},))
    x = batch(device)
    assert_bitwise_equal(graphed({True: x}).detach(), x.detach())
    assert list(graphed.te_graph.info()["eager_calls"].values()) == [1]


def test_names_of_parameters_in_another_order_replay(device):
    """What ``**`` collects beside them keeps its order."""

    def affine(x: Tensor, scale: Tensor, shift: Tensor, **more: Tensor) -> Tensor:  # [3, 4], each
        return total(x * scale + shift, **more)

    each = named(device, "abcde")
    given = dict(zip(("x", "scale", "shift", "first", "second"), each.values(), strict=True))
    graphed = make_graphed_callables(affine, (), sample_kwargs=given)
    for order in ("shift scale first x second", "first second shift x scale", "x scale shift first second"):
        kwargs = {name: given[name] for name in order.split()}
        assert_bitwise_equal(run(graphed, **kwargs), run(affine, **kwargs))
    assert (graphed.te_graph.info()["forward_replays"], graphed.te_graph.info()["eager_calls"]) == (3, {})


def test_a_dictionary_in_another_order_is_another_signature_that_is_captured(device):
    graphed = make_graphed_callables(joined, (named(device, "abc"),), on_mismatch="capture")
    for order in ("cab", "abc", "cab"):
        assert_bitwise_equal(run(graphed, named(device, order)), run(joined, named(device, order)))
    info = graphed.te_graph.info()
    assert (info["forward_replays"], info["signatures"], info["eager_calls"]) == (3, 2, {})


def test_another_order_does_not_hide_another_value(device):
    def scaled(x: Tensor, how: dict[str, float]) -> Tensor:  # [3, 4]
        return x * how["a"] + how["b"]

    graphed = make_graphed_callables(scaled, (batch(device), {"a": 1.0, "b": 2.0}))
    with pytest.raises(ValueError, match=r"expected args\[1\]\['a'\] \(how\) to be 1.0 as at capture, got 2.0"):
        graphed(batch(device), {"b": 2.0, "a": 2.0})


def told_apart(x: Tensor, y: Tensor) -> Tensor:  # [3, 4], [3, 4]
    return x * 2 if x is y else x * y


def test_one_tensor_where_the_capture_had_two_runs_eagerly_with_one_warning(device, caplog):
    """Code can tell by ``is``."""
    graphed = make_graphed_callables(told_apart, (batch(device), batch(device)))
    with caplog.at_level(logging.WARNING, "te_graph"):
        for _ in range(2):
            seen = []
            x = batch(device)
            for call in (graphed, told_apart):
                leaf = leaf_copy(x)
                y = call(leaf, leaf)
                y.square().sum().backward()
                seen.append([y.detach(), leaf.grad])
            assert_bitwise_equal(*seen)
    reason = "args[1] and args[0] are one tensor; at capture they were two"
    assert graphed.te_graph.info()["eager_calls"] == {reason: 2}
    assert [record.getMessage() for record in caplog.records] == [f"told_apart: {reason} (runs eagerly)"]
    assert_bitwise_equal(run(graphed, batch(device), batch(device))[0].shape, torch.Size([3, 4]))
    assert graphed.te_graph.info()["forward_replays"] == 1


def test_one_tensor_where_the_capture_had_two_is_another_signature_that_is_captured(device):
    model = nn.Bilinear(4, 4, 2).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), batch(device)), on_mismatch="capture")
    for _ in range(3):
        x = batch(device)
        assert_bitwise_equal(model(x, x).detach(), twin(x, x).detach())
    info = model.te_graph.info()
    assert (info["forward_replays"], info["recaptures"], info["eager_calls"]) == (3, 1, {})


def test_one_tensor_in_two_places_with_main_grads_is_refused_since_eager_gradients_would_be_lost(device):
    model = nn.Bilinear(4, 4, 2).to(device)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    make_graphed_callables(model, (batch(device), batch(device)))
    x = batch(device)
    with pytest.raises(RuntimeError, match="are one tensor; at capture they were two; an eager call would leave"):
        model(x, x)
