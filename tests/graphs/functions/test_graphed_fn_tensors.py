"""graphed(): what code and autograd can tell of the tensors that a function gets and gives, besides their elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import assert_follows, counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Doubling(Tensor):
    """Multiplies by twice as much."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return result * 2 if func is Tensor.mul else result


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (lambda x: x * 3, lambda x: x.as_subclass(Doubling)),
        (lambda x: x + 1 if isinstance(x, nn.Parameter) else x + 2, lambda x: nn.Parameter(x, requires_grad=False)),
    ],
)
def test_a_tensor_of_another_class_in_the_same_memory(function: Callable, other: Callable, device: str) -> None:
    x = torch.randn(3, device=device)
    replayed = graphed(function)
    for given in (x, other(x), x):
        for _ in range(3):
            assert_bitwise_equal(replayed(given).as_subclass(Tensor).clone(), function(given).as_subclass(Tensor))
    assert counts(replayed) == (2, 7, 1, 2)


@pytest.mark.parametrize("asks", [lambda x: x.is_leaf, lambda x: x.grad_fn is None])
def test_a_tensor_that_is_no_longer_a_leaf_of_autograd(asks: Callable[[Tensor], bool], device: str) -> None:
    @torch.no_grad()
    def function(x: Tensor) -> Tensor:
        return x * 2 if asks(x) else x * 3

    memory, factor = torch.randn(3, device=device), torch.randn(3, device=device, requires_grad=True)
    replayed = graphed(function)
    for given in (memory.detach().requires_grad_(), memory.detach().mul_(factor)):
        assert given.data_ptr() == memory.data_ptr()
        for _ in range(3):
            assert_bitwise_equal(replayed(given).clone(), function(given))
    assert counts(replayed) == (2, 4, 1, 2)


@pytest.mark.parametrize(
    ("make", "asks", "change"),
    [
        (lambda leaf: leaf * 1, lambda t: t.retains_grad, lambda t: t.retain_grad()),
        (lambda leaf: leaf, lambda t: t.grad_dtype is None, lambda t: setattr(t, "grad_dtype", None)),
    ],
    ids=["retains_grad", "grad_dtype"],
)
def test_what_it_asks_about_gradients_of_a_tensor_that_it_does_not_use(
    make: Callable, asks: Callable, change: Callable, device: str, request: pytest.FixtureRequest
) -> None:
    if "grad_dtype" in request.node.name and not hasattr(Tensor, "grad_dtype"):
        pytest.skip("this version of torch has no grad_dtype")
    held = make(torch.ones(3, device=device, requires_grad=True))
    assert_follows(lambda x: x * (2.0 if asks(held) else 3.0), lambda: change(held), device)


VIEWS = {
    "slice": lambda x: x[1:],
    "transpose": lambda x: x.T,
    "detached": lambda x: x.detach(),
    "of a detached one": lambda x: x.detach()[0],
    "without gradients": torch.no_grad()(lambda x: x[0]),
    "one of several": lambda x: x.unbind(0)[1],
    "complex": torch.view_as_complex,
    "negative": torch._neg_view,
}


def _as_autograd_sees_it(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    """What becomes of the view ``function(x)``, of ``x`` [3, 2], when both are changed in place with gradients."""
    factor, told = torch.full((), 3.0, device=x.device, requires_grad=True), []
    seen = function(x)
    told += [seen.detach().clone(), seen.is_neg(), seen.requires_grad, seen._is_view(), seen._base is x]
    try:
        seen.mul_(factor)
    except RuntimeError as error:
        return [*told, str(error).partition(" is a view and is being modified")[0]]
    told += [x.requires_grad, x.detach().clone()]
    if x.requires_grad:
        told += torch.autograd.grad(x.square().sum(), factor)
    return told


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [2, 4], ids=["whole", "part"])
def test_a_view_of_an_argument_is_one_to_autograd(name: str, width: int, device: str) -> None:
    function, memory = VIEWS[name], torch.empty(3, width, device=device)
    replayed = graphed(function)

    def argument(of: Tensor, values: Tensor) -> Tensor:  # [3, width], [3, 2]
        given = of.detach() if width == 2 else of.detach()[:, :2]
        with torch.no_grad():
            return given.copy_(values)

    for number in range(4):
        values = torch.randn(3, 2, device=device)
        given = argument(memory, values)
        if number == 1 and width == 4 and name in ("complex", "negative"):
            with pytest.raises(CaptureError, match="result 0 reads argument 0 as another dtype or as a conjugate"):
                replayed(given)
            return
        expected = _as_autograd_sees_it(function, argument(torch.empty_like(memory), values))
        assert_bitwise_equal(_as_autograd_sees_it(replayed, given), expected)
    assert counts(replayed) == (1, 3, 0, 1)


def test_a_result_of_another_dtype_in_the_memory_of_an_argument_is_refused(device: str) -> None:
    replayed, x = graphed(lambda x: x.view(torch.int16)), torch.randn(3, device=device)
    replayed(x)
    with pytest.raises(CaptureError, match="result 0 reads argument 0 as another dtype"):
        replayed(x)


def test_a_result_that_is_a_view_of_another_one_is_one_to_autograd(device: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled, doubled[1:]

    replayed = graphed(function)
    x, weight = torch.randn(3, device=device), torch.randn(3, device=device, requires_grad=True)
    for _ in range(4):
        gradients = []
        for called_ in (replayed, function):
            whole, part = called_(x)
            whole.mul_(weight)
            assert part._base is whole
            gradients += torch.autograd.grad(part.square().sum(), weight)
        assert_bitwise_equal(*gradients)
    assert counts(replayed) == (1, 3, 0, 1)


def test_what_is_done_to_a_parameter_that_is_a_result_concerns_no_later_one(device: str) -> None:
    def function(x: Tensor) -> nn.Parameter:
        made = nn.Parameter(x * 2, requires_grad=False)
        made.scales = [1.0, 2.0]
        return made

    replayed, x = graphed(function), torch.randn(3, device=device)
    for _ in range(4):
        made = replayed(x)
        assert type(made) is nn.Parameter
        assert not made.requires_grad
        assert vars(made) == {"scales": [1.0, 2.0]}
        assert_bitwise_equal(made.clone(), function(x).clone())
        made.requires_grad_()
        made.seen = True
        made.scales.append(3.0)
    assert counts(replayed) == (1, 3, 0, 1)


@pytest.mark.parametrize("change", ["hook", "hook below", "in place"])
def test_a_backward_through_a_history_from_outside_is_refused(change: str, device: str) -> None:
    parameter = nn.Parameter(torch.randn(3, device=device))
    parameter.grad = torch.zeros(3, device=device)
    middle = parameter * 2
    outer = middle * 3

    def backward() -> None:
        parameter.grad.zero_()
        (outer * 2).sum().backward(retain_graph=True)

    replayed = graphed(backward)
    replayed()
    with pytest.raises(CaptureError, match="a backward goes on through what closure variable outer was computed from"):
        replayed()
    if change == "in place":
        outer.mul_(5)
    else:
        (outer if change == "hook" else middle).register_hook(lambda gradient: gradient * 5)
    backward()  # what was put up for the capture is gone
    assert_bitwise_equal(parameter.grad, torch.full((3,), 60.0, device=device))


def test_a_gradient_for_a_tensor_with_a_history_is_captured(device: str) -> None:
    outer = torch.randn(3, device=device, requires_grad=True) * 2
    replayed = graphed(lambda: torch.autograd.grad((outer * outer).sum(), outer))
    if device == "cuda":  # the history is on the default stream, on which nothing is captured
        replayed()
        with pytest.raises(CaptureError, match="a backward goes on through what closure variable outer was computed"):
            replayed()
        return
    for _ in range(4):
        assert_bitwise_equal(replayed()[0].clone(), outer.detach() * 2)
    assert counts(replayed) == (1, 3, 0, 1)


@pytest.mark.filterwarnings("ignore:Named tensors")
def test_names_of_dimensions_are_compared_and_such_calls_run_eagerly(device: str, caplog: Any) -> None:
    kept = torch.ones(3, device=device)

    def scaled(t: Tensor) -> Tensor:  # [3] -> [3]
        return t * (2 if t.names == kept.names == (None,) else 3)

    replayed, t = graphed(scaled), torch.randn(3, device=device)
    for named in (t, kept):
        for _ in range(3):
            assert_bitwise_equal(replayed(t).clone(), t * 2)
        for name in ("rows", "columns"):
            named.rename_(name)
            result = replayed(t)
            assert result.names == t.names
            assert_bitwise_equal(result.rename(None), t.rename(None) * 3)
        named.rename_(None)
    assert counts(replayed)[1] == 5
    assert "argument 0 has names of dimensions, which cannot be captured (runs eagerly)" in caplog.text


@pytest.mark.parametrize("place", ["argument", "module", "dictionary", "root"])
def test_calls_run_eagerly_while_a_parameter_in_reach_is_not_initialized(place: str, device: str, caplog: Any) -> None:
    later, w = nn.LazyLinear(3, device=device), torch.ones(3, device=device)
    kept = {"p": later.weight}
    reads = {
        "argument": lambda x, p: w * x if p is not None else x,
        "module": lambda x, p: w * x if later is not None else x,
        "dictionary": lambda x, p: w * x if kept else x,
        "root": lambda x, p: later(x) if x.sum() is None else w * x,
    }
    sequence, x = graphed(reads[place]), torch.randn(3, device=device)
    given = later.weight if place == "argument" else None
    for _ in range(5):
        assert_bitwise_equal(sequence(x, given).clone(), x)
    assert counts(sequence) == (0, 0, 0, 5)
    assert "is not initialized yet" in caplog.text
    later(x)
    for _ in range(17):
        assert_bitwise_equal(sequence(x, given).clone(), x)
    assert sequence.info()["forward_replays"] > 0


def test_a_call_that_initializes_parameters_is_not_captured(device: str) -> None:
    @torch.no_grad()
    def applied(net: nn.Module, x: Tensor) -> Tensor:  # [2] -> [3]
        return net(x)

    net, twin = (nn.LazyLinear(3, device=device) for _ in range(2))
    sequence, x = graphed(applied), torch.randn(2, device=device)
    for _ in range(5):
        results = []
        for call, module in ((sequence, net), (applied, twin)):
            torch.manual_seed(3)
            results.append(call(module, x).clone())
        assert_bitwise_equal(*results)
    assert counts(sequence)[0] == 1


def test_a_call_in_inference_mode_runs_eagerly_until_there_is_a_capture(device: str) -> None:
    total = torch.zeros(3, device=device)
    sequence, x = graphed(lambda x: total.add_(x) * 2), torch.ones(3, device=device)
    for number in range(1, 5):
        with torch.inference_mode():
            assert_bitwise_equal(sequence(x).clone(), x * 2 * number)
    assert counts(sequence)[0] == 0
    assert any("inference_mode" in reason for reason in sequence.info()["eager_calls"])
    for number in range(5, 9):
        assert_bitwise_equal(sequence(x).clone(), x * 2 * number)
    assert counts(sequence)[0] == 1


@pytest.mark.parametrize("is_on", [False, True], ids=["without autocast", "under autocast"])
def test_whether_autocast_keeps_its_casts_is_compared(is_on: bool, device: str) -> None:
    def scaled(t: Tensor) -> Tensor:  # [3] -> [3]
        return t * (2 if torch.is_autocast_cache_enabled() else 3)

    replayed = graphed(scaled)
    x = torch.randn(3, device=device)
    for keeps in (True, False) * 3:
        with torch.autocast(device, torch.bfloat16, enabled=is_on, cache_enabled=keeps):
            assert_bitwise_equal(replayed(x).clone(), scaled(x))
    assert counts(replayed) == (2, 4, 0, 2)


def test_gradients_are_summed_as_the_cache_of_autocast_says(device: str) -> None:
    weight = nn.Parameter(torch.randn(16, 16, device=device))

    def gradient(t: Tensor) -> Tensor:  # [4, 16] -> [16, 16]
        return torch.autograd.grad((t @ weight @ weight).float().square().sum(), weight)[0]

    replayed = graphed(gradient)
    x = torch.randn(4, 16, device=device)
    found = {}
    for keeps in (True, False) * 3:
        with torch.autocast(device, torch.bfloat16, cache_enabled=keeps):
            torch.clear_autocast_cache()
            found[keeps] = gradient(x)
            torch.clear_autocast_cache()
            assert_bitwise_equal(replayed(x).clone(), found[keeps])
    assert not torch.equal(found[True], found[False])
    assert replayed.info()["forward_replays"] == 4


def test_what_a_capture_writes_into_tensors_of_inference_mode_is_put_back(device: str) -> None:
    with torch.inference_mode():
        total, twin = (torch.zeros(3, device=device) for _ in range(2))

    def added(kept: Tensor, x: Tensor) -> Tensor:  # [3], [3] -> [3]
        with torch.inference_mode():
            kept.add_(x)
        return kept * 2

    replayed = graphed(lambda x: added(total, x))
    x = torch.randn(3, device=device)
    for _ in range(4):
        assert_bitwise_equal(replayed(x).clone(), added(twin, x))
        assert_bitwise_equal(total, twin)
    assert counts(replayed) == (1, 3, 0, 1)


def test_a_refused_capture_puts_back_what_it_wrote_into_tensors_of_inference_mode(device: str) -> None:
    with torch.inference_mode():
        total = torch.zeros(3, device=device)

    def read(x: Tensor) -> Tensor:  # [3] -> [3]
        with torch.inference_mode():
            total.add_(x)
        return x * x.sum().item()

    replayed, x = graphed(read), torch.randn(3, device=device)
    replayed(x)
    expected = total.clone()
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        replayed(x)
    assert_bitwise_equal(total, expected)


def test_a_view_whose_history_is_lost_can_be_used_without_gradients(device: str) -> None:
    weight, x = torch.ones((), device=device, requires_grad=True), torch.randn(3, device=device)

    def lost() -> Tensor:  # [3]
        base = torch.randn(4, device=device)
        with torch.no_grad():
            view = base[1:]
        base.mul_(weight)
        return view

    @torch.no_grad()
    def scaled(t: Tensor) -> Tensor:  # [3] -> [3]
        return t * 2 + x

    replayed, given = graphed(scaled), lost()
    with torch.no_grad():
        for _ in range(3):
            assert_bitwise_equal(replayed(given).clone(), scaled(given))
    assert counts(replayed) == (1, 2, 0, 1)


@pytest.mark.parametrize("place", [slice(None), slice(1, None)], ids=["whole", "part"])
def test_a_result_apart_may_be_changed_in_grad_mode(place: slice, device: str) -> None:
    x, weight = torch.randn(4, device=device), torch.ones((), device=device, requires_grad=True)
    replayed = graphed(lambda t: t[place].data)
    for _ in range(3):
        with torch.no_grad():
            result = replayed(x)
        expected = x[place].clone() * 2
        result.mul_(weight * 2)
        assert result.grad_fn.name() == "MulBackward0"
        assert_bitwise_equal(result.detach(), expected)


def test_views_by_data_and_by_reshape_in_inference_mode_are_as_the_limits_say(device: str) -> None:
    x = torch.randn(4, device=device)

    @torch.inference_mode()
    def flat(t: Tensor) -> Tensor:  # [4] -> [4]
        return t.reshape(-1)

    assert flat(x)._base is x
    data, reshaped = graphed(lambda t: t.data), graphed(lambda t: flat(t))
    for _ in range(3):
        result = data(x)
        assert_bitwise_equal(result, x)
        assert reshaped(x)._base is None
    before = x._version
    result.add_(1)
    assert x._version == before + 1
