"""Which object a container is that is an argument or a result: code can tell by ``is``."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn

from te_graph import graph_layers, graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclasses.dataclass
class Config:
    gain: float = 2.0


def with_attribute() -> functools.partial:
    made = functools.partial(abs)
    made.gain = 4.0
    return made


WITHOUT_TENSORS = {
    "dict": dict,
    "list": lambda: [1.0],
    "tuple": lambda: (1.0, [2.0]),
    "set": lambda: {8, 1},
    "ordered": lambda: collections.OrderedDict(a=1.0),
    "dataclass": Config,
    "namespace": lambda: types.SimpleNamespace(a=1.0),
    "partial": with_attribute,
}


class Recognizes(nn.Linear):
    """Multiplies by 2 where it is given the container that it holds, else by 3."""

    def __init__(self, held: Any, device: str) -> None:
        super().__init__(4, 4, device=device)
        self.held = held

    def forward(self, x: Tensor, given: Any) -> Tensor:  # [3, 4]
        return super().forward(x) * (2.0 if given is self.held else 3.0)


def assert_same_as_forward(net: nn.Module, device: str, *args: Any) -> None:
    x = batch(device)
    assert_bitwise_equal(net(x, *args).detach(), type(net).forward(net, x, *args).detach())


@pytest.mark.parametrize("make", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_an_argument_without_tensors_is_the_very_object(device: str, make: Callable[[], Any]) -> None:
    held = make()
    net, x = Recognizes(held, device), batch(device)
    expected = net(x, held).detach()
    make_graphed_callables(net, (batch(device), held))
    assert_bitwise_equal(net(x, held).detach(), expected)
    assert net.te_graph.info()["forward_replays"] == 1


def test_one_inside_of_a_container_with_tensors(device: str) -> None:
    class Inner(Recognizes):
        def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:  # [3, 4]
            return super().forward(x, given["config"]) + given["more"]

    held = Config()
    net, x, more = Inner(held, device), batch(device), batch(device)
    expected = net(x, {"config": held, "more": more}).detach()
    make_graphed_callables(net, (batch(device), {"config": held, "more": batch(device)}))
    assert_bitwise_equal(net(x, {"config": held, "more": more}).detach(), expected)


def test_layers_are_given_the_very_object(device: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.layer = Recognizes(self.config, device)

        def forward(self, x: Tensor) -> Tensor:  # [3, 4]
            return self.layer(x, self.config)

    model, x = Model(), batch(device)
    expected = model(x).detach()
    graph_layers(model, (batch(device),), layers=["layer"])
    assert_bitwise_equal(model(x).detach(), expected)
    assert model.layer.te_graph.info()["forward_replays"] == 1


def attends(q: list[Tensor], kv: list[Tensor]) -> Tensor:  # [3, 4] in each
    return q[0] * (2.0 if q is kv else 3.0)


def test_one_container_with_tensors_in_two_places(device: str) -> None:
    pair = [batch(device)]
    function = make_graphed_callables(attends, (pair, pair))
    for x in (batch(device), batch(device)):
        given = [x]
        assert_bitwise_equal(function(given, given).detach(), attends(given, given).detach())
    assert function.te_graph.info()["forward_replays"] == 2


@pytest.mark.parametrize("is_one", [True, False])
def test_where_the_capture_had_it_otherwise_the_call_runs_eagerly(device: str, is_one: bool, recwarn: Any) -> None:
    x = batch(device)

    def given(is_one: bool, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:  # [3, 4]
        first = [x]
        return first, first if is_one else [x]

    function = make_graphed_callables(attends, given(is_one, x))
    args = given(not is_one, batch(device))
    assert_bitwise_equal(function(*args).detach(), attends(*args).detach())
    (words,) = function.te_graph.info()["eager_calls"]
    assert "args[1] and args[0] are " in words or words


def adds(x: Tensor, options: dict[str, float]) -> Tensor:  # [3, 4]
    return x * options.setdefault("gain", 2.0)


def fails(x: Tensor, options: dict[str, float]) -> Tensor:  # [3, 4]
    return x * options.setdefault("gain", 2.0) * x.sum().item()


@pytest.mark.parametrize("function", [adds, fails])
def test_a_refused_capture_leaves_an_argument_as_it_was(device: str, function: Callable) -> None:
    options: dict[str, float] = {}
    for _ in range(2):
        with pytest.raises(RuntimeError):
            make_graphed_callables(function, (batch(device), options))
        assert options == {}


class Returns(nn.Linear):
    """Returns what it holds beside its result."""

    def __init__(self, held: Any, device: str) -> None:
        super().__init__(4, 4, device=device)
        self.held = held

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:  # [3, 4]
        return super().forward(x), self.held


@pytest.mark.parametrize("make", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_a_result_that_was_there_is_the_very_object(device: str, make: Callable[[], Any]) -> None:
    net = Returns(make(), device)
    make_graphed_callables(net, (batch(device),))
    assert net(batch(device))[1] is net.held
    assert net.te_graph.info()["forward_replays"] == 1


def test_a_change_of_it_by_the_caller_is_seen(device: str) -> None:
    net = Returns({"calls": 0}, device)
    make_graphed_callables(net, (batch(device),))
    net(batch(device))[1]["calls"] += 1
    with pytest.raises(RuntimeError, match=r"held\['calls'\] changed from 0 to 1 since capture"):
        net(batch(device))


def test_one_new_container_in_two_places_of_a_result(device: str) -> None:
    def twice(x: Tensor) -> tuple[list[Tensor], dict[str, list]]:  # [2]
        pair = [x * 2, 1.0]
        return pair, {"again": pair}

    function, region = make_graphed_callables(twice, (batch(device),), max_in_flight=2), graphed(twice)
    x = torch.ones(2, device=device)
    results = [function(batch(device)), *(region(x) for _ in range(3))]
    assert all(first is rest["again"] for first, rest in results)
    assert results[0][0] is not function(batch(device))[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    x: Tensor


def keyed(key: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: ({key(x * 2): "sum"}, x * 3)


KEYED = {
    "a tensor": keyed(lambda y: y),
    "a tuple": keyed(lambda y: ("sum", y)),
    "a frozen set": keyed(lambda y: frozenset({y})),
    "a dataclass": keyed(Key),
    "a function": keyed(lambda y: lambda: y),
    "inside": lambda x: ([{x: "x"}], x * 3),
    "a default": lambda x: (collections.defaultdict(functools.partial(torch.clone, x * 2)), x * 3),
}


@pytest.mark.parametrize("function", KEYED.values(), ids=KEYED)
def test_tensors_in_keys_of_results_are_refused(device: str, function: Callable) -> None:
    words = r"result: a \w+ has a tensor in .*, which a replay would not make anew"
    with pytest.raises(TypeError, match=words):
        make_graphed_callables(function, (batch(device),))
    region, x = graphed(function), torch.ones(2, device=device)
    region(x)
    with pytest.raises(RuntimeError, match=words):
        region(x)


def holds_itself() -> list:
    made: list = [1.0]
    made += [made, made]
    return made


def deep() -> list:
    return functools.reduce(lambda inner, _: [inner], range(2000), 1.0)


@pytest.mark.parametrize("make", [holds_itself, deep])
def test_what_holds_itself_or_is_too_deep_is_refused(device: str, make: Callable[[], list]) -> None:
    words = "got list: it holds itself, or is nested deeper than 64 containers"
    with pytest.raises(TypeError, match=words):
        make_graphed_callables(lambda x, _: x * 2, (batch(device), make()))
    function = make_graphed_callables(lambda x, _: x * 2, (batch(device), [1.0]))
    with pytest.raises(ValueError, match=r"expected args\[1\] \(_\) nested as at capture"):
        function(batch(device), make())
    with pytest.raises(TypeError, match=words):
        make_graphed_callables(lambda x: (x * 2, make()), (batch(device),))


def shrunk(members: int = 40) -> set[int]:
    """Its members lie where there was room when there were many."""
    made = set(range(members))
    return made.difference_update(made - {8, 1}) or made


def test_the_order_of_a_set(device: str) -> None:
    def follows(x: Tensor, numbers: set[int]) -> Tensor:  # [3, 4]
        return functools.reduce(lambda y, number: y * number + 1, numbers, x)

    assert list(shrunk()) != list({8, 1})
    function, x = make_graphed_callables(follows, (batch(device), shrunk())), batch(device)
    assert_bitwise_equal(function(x, shrunk()).detach(), follows(x, shrunk()).detach())
    with pytest.raises(ValueError, match=r"expected args\[1\] \(numbers\) nested as at capture"):
        function(x, {8, 1})


def test_a_set_in_a_result(device: str) -> None:
    ordered = make_graphed_callables(lambda x: (x * 2, {8, 1}), (batch(device),))
    assert list(ordered(batch(device))[1]) == list({8, 1})
    shrinking = make_graphed_callables(lambda x: (x * 2, shrunk()), (batch(device),))
    assert shrinking(batch(device))[1] == shrunk()
