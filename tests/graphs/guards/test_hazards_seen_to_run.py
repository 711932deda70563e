"""What the code of a callable reads where no name in it leads: in constructors, comparisons, patterns, chosen closures.

The reference is the same program built again and run eagerly, changed in the same way.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import functools
import gc
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import replays
from mutations import assert_not_seen, assert_seen, batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from te_graph import graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")

Made = tuple[Callable[[Tensor], Tensor], Any]


class Config:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


def constructor() -> Made:
    config = Config()

    class Box:
        def __init__(self) -> None:
            self.gain = config.scale

    return lambda x: x * Box().gain, config


def comparison() -> Made:
    @dataclasses.dataclass(order=True)
    class Ranked:
        scale: float

    few, many = Ranked(2.0), Ranked(2.5)
    return lambda x: x * 5 if few < many else x, few


def comparison_of_everything() -> Made:
    class Own(Config):
        def __eq__(self, other: object) -> bool:
            return vars(self) == vars(other)

    one, other = Own(), Own()
    return lambda x: x * 5 if one == other else x, one


def every_attribute() -> Made:
    class Own:
        def __init__(self) -> None:
            self.table = Config()

        def __getattribute__(self, name: str) -> Any:
            table = object.__getattribute__(self, "table")
            if name.startswith("__"):
                return object.__getattribute__(self, name)
            return table if name == "config" else table.scale

    own = Own()
    return lambda x: x * own.anything, own.config


def mangled_slot() -> Made:
    class Own:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.scale = 2.0

        @property
        def scale(self) -> float:
            return self.__scale

        @scale.setter
        def scale(self, value: float) -> None:
            self.__scale = value

    own = Own()
    return lambda x: x * own.scale, own


def empty_slot() -> Made:
    class Own:
        __slots__ = ("__weakref__", "scale")

    own = Own()
    return lambda x: x * getattr(own, "scale", 2.0), own


def member_of_a_set() -> Made:
    config = Config()
    members = {config}
    return lambda x: x * sum(member.scale for member in members), config


def member_of_a_weak_set() -> Made:
    config = Config()
    members = weakref.WeakSet([config])
    return lambda x: x * sum(member.scale for member in members), config


def key_of_a_dict() -> Made:
    config = Config()
    table = {config: 1.0}
    return lambda x: x * sum(key.scale for key in table), config


def pattern() -> Made:
    @dataclasses.dataclass
    class Point:
        scale: float
        other: float

    point = Point(2.0, 3.0)

    def call(x: Tensor) -> Tensor:
        match point:
            case Point(found, _):
                return x * found
        return x

    return call, point


def pattern_without_match() -> Made:
    config = SimpleNamespace()

    def call(x: Tensor) -> Tensor:
        match config:
            case SimpleNamespace(scale=found):
                return x * found
        return x

    return call, config


def not_there_yet() -> Made:
    class Plain:
        pass

    plain = Plain()

    def call(x: Tensor) -> Tensor:
        with contextlib.suppress(AttributeError):
            return x * plain.scale
        return x

    return call, plain


def getter() -> Made:
    config, read = Config(), operator.attrgetter("scale")
    return lambda x: x * read(config), config


def value_of_an_enumeration() -> Made:
    class Kind(enum.Enum):
        ONE = Config()

    one = Kind.ONE
    return lambda x: x * one.value.scale, one.value


def attribute_of_a_number() -> Made:
    class Count(int):
        scale = 2.0

    count = Count(3)
    return lambda x: x * count.scale * count, count


def class_of_a_class() -> Made:
    class Above(type):
        scale = 2.0

    class Own(metaclass=Above):
        pass

    return lambda x: x * Own.scale, Above


def far_away() -> Made:
    class Scaled:
        def __init__(self) -> None:
            self.of = weakref.WeakKeyDictionary()

        def __get__(self, owner: Any, kind: type) -> Any:
            return self if owner is None else self.of[owner]

        def __set__(self, owner: Any, value: float) -> None:
            self.of[owner] = value

    class Own:
        scale = Scaled()

    own = Own()
    own.scale = 2.0
    return lambda x: x * own.scale, own


def chosen_closure() -> Made:
    def make(config: Config) -> Callable[[Tensor], Tensor]:
        return lambda x: x * config.scale

    configs = [Config(2.0), Config(2.0)]
    near, far = map(make, configs)
    choose = functools.lru_cache(lambda: far)
    choose()
    far = None
    return lambda x: near(x) + choose()(x), configs[1]


def name_put_together() -> Made:
    config, part = Config(), "cale"
    return lambda x: x * getattr(config, f"s{part}"), config


def names_one_after_the_other() -> Made:
    config = Config()
    outer = SimpleNamespace(inner=config)
    return lambda x: x * functools.reduce(getattr, f"inner.{'elacs'[::-1]}".split("."), outer), config


def name_put_together_by_a_descriptor() -> Made:
    class Stored:
        def __set_name__(self, kind: type, name: str) -> None:
            self.place = "s" + name[::-1]

        def __get__(self, owner: Any, kind: type) -> float:
            return getattr(owner, self.place, 2.0)

    class Own:
        elac = Stored()

    own = Own()
    return lambda x: x * own.elac, own


def without_an_instance_dictionary() -> Made:
    class Own:
        __slots__ = ("table",)

        def __init__(self, **table: Any) -> None:
            self.table = table

        def __getattr__(self, name: str) -> Any:
            return self.table[name]  # which raises another error than it should

    config = Config()
    own = Own(config=config)
    return lambda x: x * own.config.scale, config


def asked_whether_it_is_there() -> Made:
    class Plain:
        pass

    plain, part = Plain(), "cale"
    return lambda x: x * 3 if hasattr(plain, f"s{part}") else x, plain


WHERE = {
    made.__name__: made
    for made in (
        *(constructor, comparison, comparison_of_everything, every_attribute, mangled_slot, empty_slot),
        *(member_of_a_set, member_of_a_weak_set),
        *(key_of_a_dict, pattern, pattern_without_match, not_there_yet, getter, value_of_an_enumeration),
        *(attribute_of_a_number, class_of_a_class, far_away, chosen_closure, name_put_together),
        *(names_one_after_the_other, name_put_together_by_a_descriptor, asked_whether_it_is_there),
        without_an_instance_dictionary,
    )
}


@pytest.mark.parametrize("where", WHERE)
def test_a_change_is_seen(where: str, device: str) -> None:
    assert_seen(WHERE[where], lambda owner: setattr(owner, "scale", 3.0), "", device)


@pytest.mark.parametrize("where", WHERE.values())
def test_a_change_is_seen_by_a_graphed_function(where: Callable[[], Made], device: str) -> None:
    call, owner = where()
    function, x = graphed(lambda x: call(x)), torch.ones(3, device=device)
    for scale in (2.0, 3.0):
        for _ in range(4):
            assert torch.equal(function(x), call(x))
        owner.scale = scale + 1
    assert torch.equal(function(x), call(x))
    assert function.info()["forward_replays"] > 2


def test_a_forward_that_changes_an_attribute_with_a_name_put_together_is_refused(device: str) -> None:
    config, part = Config(), "cale"

    def call(x: Tensor) -> Tensor:
        setattr(config, f"s{part}", config.scale + 1)
        return x * 2

    with pytest.raises(RuntimeError, match=r"the forward changes .*scale"):
        make_graphed_callables(call, (batch(device),))


def test_a_capture_leaves_the_functions_of_python_as_they_were(device: str) -> None:
    before = dict(vars(builtins))

    def call(x: Tensor) -> Tensor:
        assert getattr(x, "de" + "vice") == x.device
        return x.unsqueeze_(0)

    with pytest.raises(RuntimeError, match="shape"):
        make_graphed_callables(call, (batch(device),))
    assert all(before[name] is now for name, now in vars(builtins).items())


def test_an_attribute_that_hides_what_getattr_made_up_is_seen(device: str) -> None:
    class Own:
        def __getattr__(self, name: str) -> float:
            if name == "scale":
                return 2.0
            raise AttributeError(name)

    def build() -> Made:
        own = Own()
        return lambda x: x * own.scale, own

    assert_seen(build, lambda own: setattr(own, "scale", 3.0), "scale", device)


def test_an_attribute_of_a_class_that_hides_that_of_its_class_is_seen(device: str) -> None:
    def build() -> Made:
        class Above(type):
            scale = 2.0

        class Own(metaclass=Above):
            pass

        return lambda x: x * Own.scale, Own

    assert_seen(build, lambda own: setattr(own, "scale", 3.0), "scale of class Own", device)


@pytest.mark.parametrize("in_class", [False, True])
def test_another_function_for_a_type_is_seen_and_calls_with_other_types_change_nothing(in_class, device: str) -> None:
    def build() -> Made:
        @functools.singledispatch
        def scale(value: Any) -> float:
            return 1.0

        class Own:
            @functools.singledispatchmethod
            def scale(self, value: Any) -> float:
                return 1.0

        if in_class:
            own = Own()
            return lambda x: x * own.scale(1), (Own.__dict__["scale"].register, own.scale)
        return lambda x: x * scale(1), (scale.register, scale)

    assert_not_seen(build, lambda owner: owner[1]("text"), device)
    assert_seen(build, lambda owner: owner[0](int, lambda *_: 3.0), "keys of functions of scale", device)


def test_functions_that_each_call_makes_anew_are_no_part_of_the_circumstances(device: str) -> None:
    def build() -> Made:
        config = Config()
        return lambda x: checkpoint(lambda y: torch.tanh(y * config.scale), x, use_reentrant=False), config

    assert_not_seen(build, lambda _: gc.collect(), device)
    assert_seen(build, lambda config: setattr(config, "scale", 3.0), "scale changed", device)


def test_functions_that_are_more_than_can_be_compared_are_refused_by_name(device: str) -> None:
    def make(scale: float) -> Callable[[Tensor], Tensor]:
        def scaled(x: Tensor) -> Tensor:
            return x * scale

        return scaled

    functions = [make(2.0) for _ in range(100)]
    choose = functools.lru_cache(lambda: functions[99])
    choose()
    kept, functions = iter(functions), None
    with pytest.raises(RuntimeError, match="100 functions scaled are more than can be compared"):
        make_graphed_callables(lambda x: choose()(x), (batch(device),))
    held = list(kept)
    replaying = make_graphed_callables(lambda x: held[99](x), (batch(device),))
    replaying(batch(device))
    assert replays(replaying) == 1


def test_a_capture_leaves_the_variables_of_closures_alone(device: str) -> None:
    """Looking at them keeps nothing alive, and changes nothing."""
    gone = []

    def build() -> Made:
        config = Config()

        def call(x: Tensor) -> Tensor:
            local = x * config.scale
            seen = weakref.ref(local)
            local = torch.tanh(local * 2)
            gone.append(seen() is None)
            return local

        return call, config

    call, config = build()
    with torch.no_grad():
        call(batch(device))
    replaying = make_graphed_callables(call, (batch(device),), ignore_attributes=("gone",))
    replaying(batch(device))
    assert replays(replaying) == 1
    assert config.scale == 2.0


def test_a_plain_layer_costs_no_search_of_all_objects(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of a training script is large. torch itself makes named tuples, whose code has no file."""

    def search(*objects: Any) -> list[Any]:
        raise AssertionError(f"searched for {objects}")

    monkeypatch.setattr(gc, "get_referrers", search)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
    make_graphed_callables(layer, (torch.randn(3, 4, device=device, requires_grad=True),))
    assert layer.te_graph.info()["signatures"] == 1
