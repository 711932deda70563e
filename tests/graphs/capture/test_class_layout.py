"""Modules whose first base has no attributes of its own, as `abc.ABC`, `typing.Generic` and mixins with empty slots."""

from __future__ import annotations

import abc
import collections.abc
import copy
import pickle
import typing
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from graphed_modules import Halved, assert_refused, assert_same_as_twin, graphed
from torch import Tensor, nn
from torch.nn.utils import parametrize

from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
T = typing.TypeVar("T")


class Slotted:
    """A first base of a module that has no attributes, and counts what is derived from it."""

    __slots__ = ()
    derived: ClassVar[list[str]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Slotted.derived.append(cls.__name__)


class Registered(type):
    pass


class WithMetaclass(metaclass=Registered):
    __slots__ = ()


class Weighs(nn.Module):
    """[2, 4] -> [2, 4]: a sum over a weight."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:  # [2, 4] -> [2, 4]
        return x @ self.weight


class AbstractFirst(abc.ABC, Weighs):
    pass


class AbstractLast(Weighs, abc.ABC):
    pass


class GenericFirst(typing.Generic[T], Weighs):
    pass


class GenericLast(Weighs, typing.Generic[T]):
    pass


class SlotsFirst(Slotted, Weighs):
    pass


class OwnSlot(AbstractFirst):
    __slots__ = ("more",)


class AboveOthers(Slotted, GenericFirst[int], AbstractFirst):
    pass


class OfMetaclass(WithMetaclass, Weighs):
    pass


class AbstractCall(collections.abc.Callable, Weighs):
    __call__ = nn.Module.__call__


LAYOUTS = (
    *(
        AbstractFirst,
        AbstractLast,
        GenericFirst,
        GenericLast,
        SlotsFirst,
        OwnSlot,
        AboveOthers,
        OfMetaclass,
        AbstractCall,
    ),
    GenericFirst[int],
)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_modules_whose_first_base_has_no_attributes(kind: Callable[[], nn.Module]) -> None:
    module, derived = kind(), list(Slotted.derived)
    base, twin = type(module), copy.deepcopy(module)
    graphed(module)
    assert (type(module).__name__, module.__class__, type(type(module))) == (base.__name__, base, type(base))
    assert isinstance(module, base)
    assert isinstance(module, nn.Module)
    assert issubclass(type(module), base)
    assert not isinstance(twin, type(module))
    assert Slotted.derived == derived
    assert_same_as_twin(module, twin)
    assert module.te_graph.info()["forward_replays"] == 1
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is base
        assert_bitwise_equal(other.weight, module.weight)
    for one in (module, twin):
        parametrize.register_parametrization(one, "weight", Halved())
    assert_refused(module)
    for one in (module, twin):
        parametrize.remove_parametrizations(one, "weight")
    module.te_graph.reset()
    assert type(module) is base
    assert_same_as_twin(module, twin)
