"""Containers among arguments and results: dataclasses, subclasses of dict, list and tuple, registered types."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutputWithPast

from te_graph import make_graphed_callables
from te_graph.graphs.arguments.nest import flatten, unflatten
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclasses.dataclass
class Plain:
    x: Tensor
    more: Any = None
    counted: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made = "by the constructor"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    more: Any = None


class Base(dict):
    def __init__(self, source: str, **items: Any) -> None:
        super().__init__(**items)
        self.source = source


class Stack(list):
    pass


class TopDown(list):
    """Shows the last one first."""

    def __iter__(self) -> Any:
        return reversed([self[number] for number in range(list.__len__(self))])

    def __len__(self) -> int:
        return 2


class Ordered(OrderedDict):
    pass


class Defaulting(defaultdict):
    pass


def moved(x: Any, more: Any) -> OrderedDict:
    made = OrderedDict(more=more, x=x)
    made.move_to_end("more")
    return made


def with_gain(partial: functools.partial) -> functools.partial:
    partial.gain = 2.0
    return partial


Pair = namedtuple("Pair", ["x", "more"])


class Triple(Pair):
    """A subclass of a named tuple, with an instance dictionary."""


class ItemsAsAttributes(dict):
    """Says KeyError where others say AttributeError; has no instance dictionary."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


class MakesAnythingUp(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, name: str) -> Any:
        return MakesAnythingUp()


class Registered:
    def __init__(self, x: Tensor, more: Any) -> None:
        self.x, self.more = x, more


pytree.register_pytree_node(
    Registered,
    lambda one: ([one.x, one.more], "registered"),
    lambda children, _: Registered(*children),
    serialized_type_name="test_nests.Registered",
)


def base(x: Any, more: Any) -> Base:
    return Base("here", x=x, more=more)


def filled(kind: type, *args: Any) -> Any:
    def make(x: Any, more: Any) -> Any:
        made = kind(*args)
        made.update(x=x, more=more)
        return made

    return make


MAKERS = {
    "dataclass": Plain,
    "frozen dataclass with slots": Frozen,
    "dict with attributes": base,
    "ordered": filled(OrderedDict),
    "ordered anew": moved,
    "subclass of OrderedDict": filled(Ordered),
    "defaultdict": filled(defaultdict, list),
    "subclass of defaultdict": filled(Defaulting, list),
    "items as attributes": filled(ItemsAsAttributes),
    "makes anything up": filled(MakesAnythingUp),
    "UserDict": filled(UserDict),
    "list that shows another order": lambda x, more: TopDown([x, more]),
    "list subclass": lambda x, more: Stack([x, more]),
    "UserList": lambda x, more: UserList([x, more]),
    "deque": lambda x, more: deque([x, more], maxlen=4),
    "namedtuple": Pair,
    "subclass of namedtuple": Triple,
    "namespace": lambda x, more: types.SimpleNamespace(x=x, more=more),
    "registered": Registered,
    "partial with an attribute": lambda x, more: with_gain(functools.partial(torch.add, x, more=more)),
    "partial": lambda x, more: functools.partial(torch.add, x, more=more),
    "model output": lambda x, more: BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(more,)),
}


def parts(nest: Any) -> tuple[type, Any, Any, Any]:
    """The type and contents of what a maker made; the attributes of an object of its own, but for its fields."""
    kind = type(nest)
    if isinstance(nest, functools.partial):
        return kind, nest.args[0], nest.keywords["more"], (nest.func, vars(nest))
    if isinstance(nest, BaseModelOutputWithPast):
        assert nest.last_hidden_state is nest["last_hidden_state"]
        return kind, nest.last_hidden_state, nest.hidden_states[0], list(nest)
    if isinstance(nest, dict | UserDict):
        named = [] if hasattr(kind, "__getattr__") else ["source", "default_factory"]
        extra = (*(getattr(nest, name, None) for name in named), list(nest))
        return kind, nest["x"], nest["more"], extra
    if isinstance(nest, list | deque | UserList):
        return kind, nest[0], nest[1], (len(nest), getattr(nest, "maxlen", None))
    counted = getattr(nest, "counted", None)
    return kind, nest.x, nest.more, (getattr(nest, "made", None), counted)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_container_comes_back_as_it_was(make):
    first, second = torch.ones(2), torch.zeros(3)
    leaves, shape = flatten(make(first, [second, 1]))
    again = unflatten(leaves, shape)
    kind, x, (y, one), extra = parts(again)
    assert x is first and y is second and one == 1
    assert (kind, extra) == (type(make(0, 0)), parts(make(first, [second, 1]))[3])
    assert flatten(again)[1].matches(shape)
    assert not flatten(make(first, [second]))[1].matches(shape)
    assert not flatten([first, [second, 1]])[1].matches(shape)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.one_of(5)
def test_containers_as_arguments_and_results(device, make):
    def both(given: Any) -> Any:
        _, x, more, _ = parts(given)
        return make(x * more["y"], {"z": more["y"].exp(), "n": more["n"]})

    def given() -> Any:
        return make(batch(device), {"y": batch(device), "n": 3})

    graphed = make_graphed_callables(both, (given(),))
    kept = []
    for _ in range(3):
        nest = given()
        seen = []
        for call in (graphed, both):
            _, x, more, _ = parts(nest)
            x.grad = more["y"].grad = None
            result = call(nest)
            kind, product, rest, extra = parts(result)
            (product.sum() + rest["z"].square().sum()).backward()
            seen.append([[kind.__name__, repr(extra), product, rest], x.grad, more["y"].grad])
            if call is graphed:
                kept.append((result, product.detach().clone()))
        assert_bitwise_equal(*seen)
    assert len({id(result) for result, _ in kept}) == 3
    for result, product in kept:
        assert_bitwise_equal(parts(result)[1].detach(), product)
    assert graphed.te_graph.info()["forward_replays"] == 3


def test_an_order_that_was_changed(device):
    def first(given: OrderedDict) -> Tensor:  # [3, 4] in each
        one, other = given.values()
        return one * 2 + other

    given = moved(batch(device), batch(device))
    graphed = make_graphed_callables(first, (moved(batch(device), batch(device)),))
    assert_bitwise_equal(graphed(given).detach(), first(given).detach())
    given.move_to_end("x")
    assert_bitwise_equal(graphed(given).detach(), first(given).detach())
    assert graphed.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.one_of(5)
def test_another_constant_in_a_container_is_refused(device, make):
    graphed = make_graphed_callables(lambda given: parts(given)[1] * 2, (make(batch(device), {"n": 3}),))
    with pytest.raises(ValueError, match=r"expected args\[0\].*\['n'\] \(given\) to be 3 as at capture, got 4"):
        graphed(make(batch(device), {"n": 4}))


def test_messages_name_the_field(device):
    graphed = make_graphed_callables(lambda given: given.x * 2, (Plain(batch(device), more={"a": [1]}),))
    words = r"expected args\[0\]\.more\['a'\]\[0\] \(given\) to be 1 as at capture, got 2"
    with pytest.raises(ValueError, match=words):
        graphed(Plain(batch(device), more={"a": [2]}))
    changed = Plain(batch(device), more={"a": [1]})
    changed.counted = 7
    with pytest.raises(ValueError, match=r"expected args\[0\]\.counted \(given\) to be 0 as at capture, got 7"):
        graphed(changed)
    changed.extra = 1
    words = r"expected args\[0\] \(given\) nested as at capture, got a Plain of another structure"
    with pytest.raises(ValueError, match=words):
        graphed(changed)


def test_keys_that_are_made_anew_for_each_call(device):
    graphed = make_graphed_callables(lambda given: given[0, "a"] * 2, ({(0, "a"): batch(device), (1, "b"): 3},))
    x = batch(device)
    assert_bitwise_equal(graphed({(0, "a"): x, (1, "b"): 3}).detach(), (x * 2).detach())
    with pytest.raises(ValueError, match="of another structure"):
        graphed({(0, "a"): x, (2, "b"): 3})


def test_an_item_and_an_attribute_of_one_name(device):
    def given(order: str) -> Base:
        made = Base("here", **{name: torch.full((2,), float(ord(name)), device=device) for name in order})
        made.a = torch.zeros(2, device=device)
        return made

    def joined(given: Base) -> Tensor:  # [2], each -> [6]
        return torch.cat([*given.values(), given.a])

    graphed = make_graphed_callables(joined, (given("ab"),))
    for order in ("ab", "ba"):
        assert_bitwise_equal(graphed(given(order)), joined(given(order)))
    assert graphed.te_graph.info()["forward_replays"] == 1


class Own:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_an_object_that_nobody_can_see_into_is_refused_with_advice(device):
    advice = "got Own: .*dataclass.*register_pytree_node"
    with pytest.raises(TypeError, match=rf"sample args\[0\]\[0\]: .*{advice}"):
        make_graphed_callables(lambda given: given[0].x * 2, ([Own(batch(device))],))
    with pytest.raises(TypeError, match=f"result: .*{advice}"):
        make_graphed_callables(lambda x: Own(x * 2), (batch(device),))


def test_one_tensor_in_two_places_of_a_result_is_one_tensor(device):
    def twice(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # [3, 4]
        y = x * 2
        return y, {"again": y}

    graphed = make_graphed_callables(twice, (batch(device),))
    x = batch(device)
    seen = []
    for call in (graphed, twice):
        x.grad = None
        first, rest = call(x)
        assert first is rest["again"]
        first.mul_(3)
        rest["again"].sum().backward()
        seen.append([first.detach(), x.grad])
    assert_bitwise_equal(*seen)


def pops(given: dict[str, Tensor]) -> Tensor:
    return given.pop("x") * 2


def appends(given: dict[str, Tensor]) -> Tensor:
    given["y"] = given["x"] * 2
    return given["y"] * 1


def exchanges(given: dict[str, Tensor]) -> Tensor:
    given["x"] = given["x"] * 2
    return given["x"] * 1


@pytest.mark.parametrize("function", [pops, appends, exchanges])
def test_a_callable_that_changes_a_container_it_was_given_is_refused(device, function):
    with pytest.raises(RuntimeError, match=f"{function.__name__}: changes a container among its arguments"):
        make_graphed_callables(function, ({"x": batch(device)},))
