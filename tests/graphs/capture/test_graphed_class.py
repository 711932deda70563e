"""The class of a graphed module: what users and torch do with classes goes on working, and leaves nothing behind."""

from __future__ import annotations

import abc
import copy
import copyreg
import gc
import inspect
import operator
import pickle
import sys
import typing
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from graphed_modules import Halved, assert_refused, assert_same_as_twin, batch, graphed
from own_copies import WithDeepcopy, WithReduce, rebuilt
from torch import Tensor, nn
from torch.nn.utils import parametrize

import te_graph as tg
from te_graph.graphs.callables import install

pytestmark = pytest.mark.usefixtures("repeatable")
T = typing.TypeVar("T")


def test_parametrized_after_capture_is_refused_until_reset() -> None:
    module = nn.Linear(4, 4)
    twin = copy.deepcopy(module)
    graphed(module)
    for one in (module, twin):
        parametrize.register_parametrization(one, "weight", Halved())
    assert_refused(module)
    module.te_graph.reset()
    assert type(module).__mro__[1:] == type(twin).__mro__[1:]
    assert_same_as_twin(module, twin)
    for one in (module, twin):
        parametrize.remove_parametrizations(one, "weight")
    assert type(module) is nn.Linear
    assert_same_as_twin(module, twin)


def test_parametrization_removed_before_reset() -> None:
    module = nn.Linear(4, 4)
    twin = copy.deepcopy(module)
    graphed(module)
    for one in (module, twin):
        parametrize.register_parametrization(one, "weight", Halved())
        parametrize.remove_parametrizations(one, "weight")
    assert_refused(module)
    module.te_graph.reset()
    assert type(module) is nn.Linear
    assert_same_as_twin(module, twin)


def test_parametrized_before_capture_and_changed_after() -> None:
    module = nn.Linear(4, 4)
    twin = copy.deepcopy(module)  # of a parametrized one it would share the class
    for one in (module, twin):
        parametrize.register_parametrization(one, "weight", Halved())
    graphed(module)
    assert_same_as_twin(module, twin)
    assert module.te_graph.info()["forward_replays"] == 1
    assert parametrize.type_before_parametrizations(module) is nn.Linear
    for one in (module, twin):
        parametrize.register_parametrization(one, "bias", Halved())
    assert_refused(module)
    for one in (module, twin):
        parametrize.remove_parametrizations(one, "weight")
    assert_refused(module)
    for one in (module, twin):
        parametrize.remove_parametrizations(one, "bias")
    assert_refused(module)
    module.te_graph.reset()
    assert type(module) is nn.Linear
    assert_same_as_twin(module, twin)
    graphed(module)
    assert_same_as_twin(module, twin)


class Mixed:
    """What FSDP2 puts before the class of a module."""

    def __deepcopy__(self, memo: dict) -> None:
        raise AssertionError("no copies")


def test_class_put_on_top_and_taken_away_again() -> None:
    module = nn.Linear(4, 4)
    twin = copy.deepcopy(module)
    graphed(module)
    for one in (module, twin):
        one.__class__ = type("MixedLinear", (Mixed, one.__class__), {})
    assert_same_as_twin(module, twin)
    assert type(module).__bases__[-1].__bases__ == (Mixed, nn.Linear)
    with pytest.raises(AssertionError, match="no copies"):
        copy.deepcopy(module)
    module.te_graph.reset()
    assert type(module).__bases__ == (Mixed, nn.Linear)
    module.__class__ = nn.Linear
    twin.__class__ = nn.Linear
    assert type(module) is nn.Linear
    assert_same_as_twin(module, twin)


def test_subclass_of_the_class_of_a_graphed_module_runs_its_own_forward() -> None:
    module = graphed(nn.Linear(4, 4))
    twin = copy.deepcopy(module)

    class Twice(type(module)):
        def forward(self, x: Tensor) -> Tensor:  # [2, 4]
            return super().forward(x) * 2

    module.__class__ = Twice
    module.te_graph.reset()
    x = batch()
    assert torch.equal(module(x), twin(x) * 2)


class Registry(nn.Module):
    seen: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.seen.append(kind)


made: list[str] = []


class Counting(type):
    def __new__(cls, name: str, bases: tuple, members: dict) -> type:
        made.append(name)
        return super().__new__(cls, name, bases, members)

    def __init__(cls, name: str, bases: tuple, members: dict) -> None:
        super().__init__(name, bases, members)
        made.append(name)


class Sealing(Counting):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("sealed")


class CountingAbc(Counting, abc.ABCMeta):
    pass


@pytest.mark.parametrize("metaclass", [Counting, Sealing, abc.ABCMeta, CountingAbc])
def test_nothing_that_classes_do_to_their_subclasses_happens(metaclass: type) -> None:
    Registry.seen.clear()

    class Layer(Registry, kind="layer"):
        def forward(self, x: Tensor) -> Tensor:  # [2, 4]
            return x * 3

    class Special(nn.Module, metaclass=metaclass):
        def forward(self, x: Tensor) -> Tensor:  # [2, 4]
            return x * 3

    made.clear()
    for module in (Layer(), Special()):
        twin = copy.deepcopy(module)
        graphed(module)
        assert_same_as_twin(module, twin)
        assert not isinstance(nn.Linear(2, 2), type(module))
        assert isinstance(module, type(module))
        assert module.te_graph.info()["forward_replays"] == 1
    assert Registry.seen == ["layer"]
    assert made == []

    class Below(Layer, kind="below"):
        pass

    assert Registry.seen == ["layer", "below"]


class Sloted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # [2, 4]
        return self.linear(x)


def test_class_with_slots() -> None:
    module = Sloted()
    module.factor = 3
    twin = copy.deepcopy(module)
    graphed(module)
    assert_same_as_twin(module, twin)
    assert module.factor == 3
    assert module.te_graph.info()["forward_replays"] == 1


def test_module_shows_the_class_and_signature_that_it_had() -> None:
    module = graphed(nn.Linear(4, 4))
    assert module.__class__ is nn.Linear
    assert inspect.signature(module.forward) == inspect.signature(nn.Linear(2, 2).forward)
    assert isinstance(module, nn.Linear)


def test_classes_die_with_their_modules() -> None:
    def references() -> list[weakref.ref]:
        held = torch.zeros(3)

        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:  # [2, 4]
                return x * 2

            def unused(self) -> Tensor:
                return held

        module = graphed(Local())
        module(batch()).sum().backward()
        found = [weakref.ref(held), weakref.ref(Local), weakref.ref(type(module))]
        module.te_graph.reset()
        return found

    found = references()
    gc.collect()
    assert [reference() for reference in found] == [None] * 3


class WithCopy(nn.Linear):
    def __copy__(self) -> WithCopy:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new


class WithState(nn.Linear):
    def __getstate__(self) -> dict:
        return {"inner": self.__dict__}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state["inner"])


class Registered(nn.Linear):
    pass


copyreg.pickle(Registered, lambda module: (rebuilt, (Registered, dict(module.__dict__))))


@pytest.mark.parametrize("kind", [nn.Linear, WithDeepcopy, WithCopy, WithReduce, WithState, Registered])
@pytest.mark.parametrize("how", ["deepcopy", "copy", *(f"pickle{p}" for p in range(pickle.HIGHEST_PROTOCOL + 1))])
@pytest.mark.one_of(5)
def test_copies_are_eager_and_as_their_class_makes_them(kind: type, how: str) -> None:
    make = {"deepcopy": copy.deepcopy, "copy": copy.copy}.get(
        how, lambda module: pickle.loads(pickle.dumps(module, protocol=int(how[-1])))
    )
    module = kind(4, 4)
    module.note = "kept"
    expected = make(module)
    graphed(module)
    attributes, replaying = sorted(vars(module)), type(module)
    other = make(module)
    assert (type(module), sorted(vars(module))) == (replaying, attributes)
    assert type(other) is kind
    assert getattr(other, "te_graph", None) is None
    assert other.note == expected.note == "kept"
    x = batch()
    assert torch.equal(other(x), module(x))
    assert module.te_graph.info()["forward_replays"] == 1
    graphed(other)


def test_graph_module_is_copied_and_pickled() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    twin = copy.deepcopy(net)
    graphed(net)
    assert_same_as_twin(net, twin)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        assert getattr(other, "te_graph", None) is None
        x = batch()
        assert torch.equal(other(x), twin(x))
    assert_same_as_twin(net, twin)
    assert net.te_graph.info()["forward_replays"] == 2
    net.te_graph.reset()
    assert_same_as_twin(net, twin)


def test_graph_module_that_compiles_its_graph_anew_is_refused_until_reset() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    twin = copy.deepcopy(net)
    graphed(net)
    net.recompile()
    twin.recompile()
    assert_same_as_twin(net, twin)
    assert net.te_graph.info()["forward_replays"] == 1
    for one in (net, twin):
        (output,) = one.graph.find_nodes(op="output")
        with one.graph.inserting_before(output):
            output.args = (one.graph.call_function(torch.mul, (output.args[0], 2)),)
        one.recompile()
    assert_refused(net)
    net.te_graph.reset()
    assert_same_as_twin(net, twin)


def plain_function(x: Tensor) -> Tensor:  # [2, 4]
    return x * 2


def renamed(x: Tensor) -> Tensor:  # [2, 4]
    return x * 3


class Scaled:
    def __init__(self) -> None:
        self.factor = torch.tensor(3.0)

    def __call__(self, x: Tensor) -> Tensor:  # [2, 4]
        return x * self.factor


class Holder(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda held: pickle.loads(pickle.dumps(held))])
@pytest.mark.parametrize("make", [lambda: plain_function, Scaled])
def test_model_that_holds_a_graphed_function_is_copied_with_the_eager_one(how: Callable, make: Callable) -> None:
    function = make()
    replaying = tg.make_graphed_callables(function, (batch(),))
    x = batch()
    other = how(Holder(replaying)).function
    if how is copy.copy:
        assert other is replaying
        other = copy.copy(replaying)
    assert type(other) is type(function)
    assert torch.equal(other(x), replaying(x))
    assert replaying.te_graph.info()["forward_replays"] == 1


def test_graphed_function_under_its_own_name_is_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    replaying = tg.make_graphed_callables(renamed, (batch(),))
    monkeypatch.setattr(sys.modules[__name__], "renamed", replaying)
    assert pickle.loads(pickle.dumps(Holder(replaying))).function is replaying
    assert operator.attrgetter("renamed")(sys.modules[__name__]) is replaying


def test_forward_put_on_a_graphed_module_survives_reset() -> None:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x * 2
    graphed(module)
    module.forward = lambda x: x * 5
    x = batch()
    assert torch.equal(module(x), x * 5)
    module.te_graph.reset()
    assert torch.equal(module(x), x * 5)


def test_class_that_cannot_be_extended_is_found_before_anything_runs() -> None:
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:  # [2, 4]
            self.calls += 1
            return x

    first, second = nn.Linear(4, 4), Refusing()
    original = install.graphed_class

    def failing(kind: type) -> type:
        if kind is Refusing:
            raise TypeError("layout differs")
        return original(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "graphed_class", failing)
        with pytest.raises(TypeError, match="layout differs"):
            tg.make_graphed_callables((first, second), ((batch(),), (batch(),)))
    assert type(first) is nn.Linear
    assert not hasattr(first, "te_graph")
    assert second.calls == 0


def test_failure_at_installation_leaves_none_graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = nn.Linear(4, 4), nn.Linear(4, 4)
    modules[0].forward = own = lambda x: x * 2
    original = install.install

    def failing(target: nn.Module, handle: Any) -> Any:
        if target is modules[1]:
            raise MemoryError
        return original(target, handle)

    monkeypatch.setattr(install, "install", failing)
    with pytest.raises(MemoryError):
        tg.make_graphed_callables(modules, ((batch(),), (batch(),)))
    assert [type(module) for module in modules] == [nn.Linear] * 2
    assert vars(modules[0])["forward"] is own
    assert not any(hasattr(module, "te_graph") for module in modules)
