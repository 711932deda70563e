"""What containers of Python's library, arrays, references and variables of a thread hold is guarded; iterators refused.

The reference is the same program built again and run eagerly, changed in the same way.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import itertools
import mmap
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import replays
from mutations import assert_not_seen, assert_seen, batch
from torch import Tensor, nn

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


class Held(nn.Module):
    """Scales by what ``read`` gets from the object ``held``: [3, 4] -> [3, 4]."""

    def __init__(self, held: Any, read: Callable[[Any], float], owner: Any = None) -> None:
        super().__init__()
        self.held, self.read, self.owner = held, read, owner

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.read(self.held)


class Config:
    def __init__(self) -> None:
        self.scale = 2.0


def local() -> threading.local:
    made = threading.local()
    made.scale = 2.0
    return made


class OwnDict(collections.UserDict):
    def __init__(self, **items: float) -> None:
        super().__init__(items)
        self.factor = 2.0

    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key) * self.factor


class OwnLocal(threading.local):
    scale_of_all = 1.0


def own_local() -> OwnLocal:
    made = OwnLocal()
    made.scale = 2.0
    return made


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any], str]] = {
    "UserDict": (
        lambda: collections.UserDict(a=2.0),
        lambda held: held["a"],
        lambda held: held.update(a=3.0),
        r"held\['a'\] changed from 2.0 to 3.0",
    ),
    "UserDict of one's own": (
        lambda: OwnDict(a=2.0),
        lambda held: held["a"],
        lambda held: held.update(a=3.0),
        r"held\['a'\] changed from 2.0 to 3.0",
    ),
    "factor of a UserDict of one's own": (
        lambda: OwnDict(a=2.0),
        lambda held: held["a"],
        lambda held: setattr(held, "factor", 3.0),
        r"held\.factor changed from 2.0 to 3.0",
    ),
    "method of a dictionary": (
        lambda: {"a": 2.0}.get,
        lambda held: held("a"),
        lambda held: held.__self__.update(a=3.0),
        r"object of held\['a'\] changed|object of held changed",
    ),
    "UserList": (
        lambda: collections.UserList([2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
        r"held\[0\] changed",
    ),
    "UserString": (
        lambda: collections.UserString("ab"),
        len,
        lambda held: setattr(held, "data", "abc"),
        "held changed from 'ab' to 'abc'",
    ),
    "ChainMap": (
        lambda: collections.ChainMap({}, {"a": 2.0}),
        lambda held: held["a"],
        lambda held: held.update(a=3.0),
        "held.*changed",
    ),
    "lower part of a ChainMap": (
        lambda: collections.ChainMap({}, {"a": 2.0}),
        lambda held: held["a"],
        lambda held: held.maps[1].update(a=3.0),
        "changed from 2.0 to 3.0",
    ),
    "array": (
        lambda: array.array("d", [2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
        "held changed",
    ),
    "mmap": (lambda: mmap.mmap(-1, 8), lambda held: 2 + held[0], lambda held: held.__setitem__(0, 3), "held changed"),
    "bytearray": (lambda: bytearray([2]), lambda held: held[0], lambda held: held.__setitem__(0, 3), "held changed"),
    "memoryview": (
        lambda: memoryview(bytearray([2])),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3),
        "held changed",
    ),
    "array of C": (
        lambda: (ctypes.c_double * 1)(2.0),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
        "held changed",
    ),
    "number of C": (
        lambda: ctypes.c_double(2.0),
        lambda held: held.value,
        lambda held: setattr(held, "value", 3.0),
        "held changed",
    ),
    "array of NumPy": (
        lambda: np.full(3, 2.0),
        lambda held: float(held[0]),
        lambda held: held.__setitem__(0, 3.0),
        "held changed",
    ),
    "deque": (
        lambda: collections.deque([2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
        "held changed",
    ),
    "deque that grows": (
        lambda: collections.deque([2.0]),
        len,
        lambda held: held.append(3.0),
        "held changed",
    ),
    "deque of lists": (
        lambda: collections.deque([[2.0]]),
        lambda held: held[0][0],
        lambda held: held[0].__setitem__(0, 3.0),
        r"held\[0\]\[0\] changed",
    ),
    "thread-local variable": (
        local,
        lambda held: held.scale,
        lambda held: setattr(held, "scale", 3.0),
        r"held\.scale changed",
    ),
    "thread-local variable of one's own class": (
        own_local,
        lambda held: held.scale,
        lambda held: setattr(held, "scale", 3.0),
        r"held\.scale changed",
    ),
    "context variable": (
        lambda: contextvars.ContextVar("scale", default=2.0),
        lambda held: held.get(),
        lambda held: held.set(3.0),
        "value of held changed",
    ),
    "dictionary with classes as keys": (
        lambda: {Config: 2.0, "a": 1.0},
        lambda held: held[Config],
        lambda held: held.update({Config: 3.0}),
        r"held\[Config\] changed from 2.0 to 3.0",
    ),
    "set of objects": (
        lambda: {Config()},
        len,
        lambda held: held.add(len),
        "held changed",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_object_of_the_library_holds_is_seen(device, case):
    make, read, change, words = CASES[case]

    def build() -> tuple[nn.Module, Any]:
        module = Held(make(), read)
        return module, module.held

    assert_seen(build, change, words, device)


OWNED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], float]]] = {
    "weak reference": (weakref.ref, lambda held: held().scale),
    "weak proxy": (weakref.proxy, lambda held: held.scale),
    "weak values": (lambda owner: weakref.WeakValueDictionary(a=owner), lambda held: held["a"].scale),
    "view of attributes": (lambda owner: types.MappingProxyType(vars(owner)), lambda held: held["scale"]),
    "values": (lambda owner: vars(owner).values(), lambda held: next(iter(held))),
}


@pytest.mark.parametrize("case", OWNED)
def test_what_a_reference_leads_to_is_seen(device, case):
    make, read = OWNED[case]

    def build() -> tuple[nn.Module, Config]:
        owner = Config()
        return Held(make(owner), read, owner), owner

    assert_seen(build, lambda owner: setattr(owner, "scale", 3.0), "changed from 2.0 to 3.0", device)


def test_what_is_kept_for_an_object_as_long_as_it_lives_is_seen(device):
    def build() -> tuple[nn.Module, Held]:
        owner = Config()
        module = Held(weakref.WeakKeyDictionary({owner: 2.0}), lambda held: sum(held.values()), owner)
        return module, module

    assert_seen(build, lambda module: module.held.update({module.owner: 3.0}), "changed from 2.0 to 3.0", device)


def test_a_weak_set_that_gets_another_member_is_seen(device):
    def build() -> tuple[nn.Module, Held]:
        owners = [Config(), Config()]
        module = Held(weakref.WeakSet(owners[:1]), len, owners)
        return module, module

    assert_seen(build, lambda module: module.held.add(module.owner[1]), "held changed", device)


@pytest.mark.parametrize("case", CASES)
def test_objects_of_the_library_that_stay_as_they_are_change_nothing(device, case):
    make, read, _, _ = CASES[case]

    def build() -> tuple[nn.Module, Held]:
        module = Held(make(), read)
        return module, module

    assert_not_seen(build, lambda module: setattr(module, "note", object()), device)


ITERATORS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter([1.0] * 50),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2]),
    "generator": lambda: (float(i) for i in range(50)),
    "zip": lambda: (i + j for i, j in zip(range(50), range(50), strict=True)),
}


@pytest.mark.parametrize("case", ITERATORS)
def test_an_iterator_that_the_code_names_is_refused(device, case):
    with pytest.raises(
        RuntimeError, match=r"Held: held is a \w+, which the callable may advance, and a replay would not"
    ):
        make_graphed_callables(Held(ITERATORS[case](), next), (batch(device),))


def test_an_iterator_may_freeze_where_that_is_asked_for(device):
    held = Held(itertools.count(5), next)
    graphed = make_graphed_callables(held, (batch(device),), ignore_attributes=("held",))
    x = batch(device)
    assert torch.equal(graphed(x).detach(), (x * 8).detach())  # after three iterations of the warm-up


@pytest.mark.parametrize(
    ("make", "advance"),
    [
        (lambda: collections.deque([1.0], maxlen=1), lambda held: held.append(held[0] + 1) or 1.0),
        (lambda: bytearray(2), lambda held: held.__setitem__(0, held[0] + 1) or 1.0),
        (lambda: np.zeros(2), lambda held: held.__setitem__(0, held[0] + 1) or 1.0),
        (lambda: collections.UserDict(n=0), lambda held: held.update(n=held["n"] + 1) or 1.0),
    ],
    ids=["deque", "bytearray", "NumPy", "UserDict"],
)
def test_a_counter_in_an_object_of_the_library_is_refused(device, make, advance):
    with pytest.raises(RuntimeError, match=r"Held: the forward changes held.*, and a replay would not"):
        make_graphed_callables(Held(make(), advance), (batch(device),))


def test_what_an_array_of_up_to_a_mebibyte_holds_is_seen(device):
    def build() -> tuple[nn.Module, np.ndarray]:
        held = np.full(2**17, 2.0)
        return Held(held, lambda held: float(held[-1])), held

    assert_seen(build, lambda held: held.__setitem__(-1, 3.0), "held changed", device)


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "array of NumPy": lambda: np.full(2**17 + 1, 2.0),
    "dates": lambda: np.full(2**17 + 1, 2, "datetime64[s]"),
    "array": lambda: array.array("d", [2.0]) * (2**17 + 1),
    "bytes": lambda: bytearray(2**20 + 1),
    "memory of C": lambda: (ctypes.c_double * (2**17 + 1))(),
    "objects": lambda: np.array([2.0, []], dtype=object),
}


@pytest.mark.parametrize("held", TOO_LARGE)
def test_an_array_that_cannot_be_compared_is_refused_by_name(held, device):
    make = TOO_LARGE[held]
    with pytest.raises(RuntimeError, match=r"held is a \S+ that is too large to be compared.*or holds objects"):
        make_graphed_callables(Held(make(), lambda held: float(len(held))), (batch(device),))
    frozen = Held(make(), lambda held: float(len(held)))
    make_graphed_callables(frozen, (batch(device),), ignore_attributes=("held",))
    frozen(batch(device))
    assert replays(frozen) == 1


def test_a_getter_of_a_scheduler_is_seen(device):
    def build() -> tuple[Callable, Any]:
        layer = nn.Linear(4, 4, device=device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return lambda x: layer(x) * schedule.get_last_lr()[0], (optimizer, schedule)

    def step(owners: tuple[Any, Any]) -> None:
        for owner in owners:
            owner.step()

    assert_seen(build, step, "_last_lr.* changed", device)


def test_a_scheduler_of_which_the_code_reads_nothing_may_step(device):
    def build() -> tuple[Callable, Any]:
        layer = nn.Linear(4, 4, device=device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        layer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return layer, (optimizer, layer.schedule)

    def step(owners: tuple[Any, Any]) -> None:
        for owner in owners:
            owner.step()

    assert_not_seen(build, step, device)
