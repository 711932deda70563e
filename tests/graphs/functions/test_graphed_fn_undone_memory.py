"""A refused call of a graphed function puts back what it did to memory without an operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from memory_changes import CHANGES, Held
from torch import Tensor

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("change", CHANGES)
def test_a_refused_call_leaves_no_trace(device: str, change: Callable) -> None:
    held = Held(change).to(device)

    def step(x: Tensor) -> Tensor:  # [3, 6]
        return x * 2 if torch.no_grad()(held)(x).sum().item() > 1e9 else x

    x, step = torch.ones(3, 6, device=device), graphed(step)
    step(x)
    before = held.state()
    with pytest.raises((CaptureError, RuntimeError)):
        for _ in range(3):  # one that differs from the call before is not captured, but runs
            before = held.state()
            step(x)
    assert_bitwise_equal(held.state(), before)


class One:
    n = 1


class Other(One):
    n = 2


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


def default(n: int = 0, *, m: int = 0) -> int:
    return n + m


class State:
    """What code may change without a name, or an operator, that tells."""

    def __init__(self) -> None:
        self.one, self.default = One(), default
        self.number, self.numbers, self.point = ctypes.c_int(0), (ctypes.c_int * 3)(), Point()
        self.table = np.arange(6)
        self.view, self.generator = memoryview(bytearray(3)), torch.Generator()


def other_code(n: int = 0, *, m: int = 0) -> int:
    return n - m + 7


def _change_code(s: State) -> None:
    s.default.__code__, other_code.__code__ = other_code.__code__, s.default.__code__


CHANGES_OF_OBJECTS: dict[str, tuple[Callable[[State], object], Callable[[State], object]]] = {
    "class": (lambda s: setattr(s.one, "__class__", Other if type(s.one) is One else One), lambda s: s.one.n),
    "dictionary": (lambda s: setattr(s.one, "__dict__", {"k": getattr(s.one, "k", 0) + 1}), lambda s: vars(s.one)),
    "defaults": (lambda s: setattr(s.default, "__defaults__", (s.default() + 1,)), lambda s: s.default()),
    "keyword defaults": (
        lambda s: setattr(s.default, "__kwdefaults__", {"m": s.default() + 1}),
        lambda s: s.default(),
    ),
    "code": (_change_code, lambda s: s.default()),
    "number": (lambda s: setattr(s.number, "value", s.number.value + 1), lambda s: s.number.value),
    "array": (lambda s: s.numbers.__setitem__(1, s.numbers[1] + 1), lambda s: list(s.numbers)),
    "structure": (lambda s: setattr(s.point, "y", s.point.y + 1), lambda s: (s.point.x, s.point.y)),
    "shape": (lambda s: setattr(s.table, "shape", (2, 3) if s.table.ndim == 1 else (6,)), lambda s: s.table),
    "memory": (lambda s: s.view.__setitem__(1, s.view[1] + 1), lambda s: s.view.tobytes()),
    "generator": (lambda s: (s.generator.manual_seed(1), torch.rand(2, generator=s.generator)), lambda s: s.generator),
}


@pytest.mark.parametrize("name", CHANGES_OF_OBJECTS)
def test_a_refused_call_puts_objects_back(name: str, device: str) -> None:
    change, look = CHANGES_OF_OBJECTS[name]
    state, x = State(), torch.ones(3, device=device)

    def look_at() -> object:
        found = look(state)
        return found.get_state().tolist() if isinstance(found, torch.Generator) else repr(found)

    def step(x: Tensor) -> Tensor:  # [3] -> [3]
        change(state)
        return x * 2

    step = graphed(step)
    with pytest.raises(CaptureError):
        for _ in range(3):
            before = look_at()
            step(x)
            state.generator.manual_seed(2)
    assert look_at() == before


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_view_of_memory_that_is_released(when: str, device: str) -> None:
    view, total = memoryview(bytearray(b"a")), torch.zeros(3, device=device)
    if when == "before":
        view.release()

    def step(fails: bool) -> None:
        total.add_(1 if view is not None else 0)
        if fails:
            view.release()
            total.sum().item()

    step = graphed(step)
    for _ in range(4):
        step(False)
    assert_bitwise_equal(total, torch.full_like(total, 4))
    if when == "inside":
        step(True)
        with pytest.raises((CaptureError, RuntimeError), match="item"):
            [step(True) for _ in range(2)]


def test_an_expanded_tensor_is_written_by_each_call(device: str) -> None:
    scale, calls = torch.ones(1, device=device).expand(4), torch.zeros(2, device=device)

    @graphed
    def step(value: Tensor) -> Tensor:  # []
        calls.add_(1)
        return scale.fill_(0.5) + value

    value = torch.ones((), device=device)
    for number in range(1, 5):
        assert step(value).tolist() == [1.5] * 4
        assert scale.tolist() == [0.5] * 4
        assert calls.tolist() == [number] * 2
    assert step.info()["forward_replays"] > 0
