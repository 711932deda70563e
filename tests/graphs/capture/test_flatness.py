"""Memory and objects of a process stay as many, however often something is captured, replayed and reset.

The reference is the process itself: what there is after some rounds is what there is after many more. The first rounds
are left out, for allocators, caches of torch and the interpreter fill up during them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, run, snapshot

import te_graph as tg
from te_graph import _C
from te_graph.common.dispatch import is_user_file
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

ROWS, WIDTH = 128, 64
MANY_ROWS = 1024  # where there are few rounds: each then allocates over 2 MiB
# One round allocates over 256 KiB for its graphs, and a round that leaked even a tenth of that would grow by more than
# this in the rounds that are compared. What fragments in allocators does not grow with the number of rounds.
HOST_TOLERANCE = 8 << 20
# The driver's share (executables of graphs, code that is loaded late) comes in blocks of 2 MiB. One leaked memory pool
# per round would be hundreds of them.
DEVICE_TOLERANCE = 16 << 20


# What watches no dictionary, and must outlive its registration.
ON_CHANGE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: 0)


class Layer(nn.Module):
    """[ROWS, WIDTH] -> the same. Fails on purpose where ``fails_in`` says."""

    def __init__(self, fails_in: str = "nothing") -> None:
        super().__init__()
        self.linear, self.norm, self.fails_in = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), fails_in

    def forward(self, x: Tensor) -> Tensor:  # [ROWS, WIDTH] -> the same
        y = self.norm(torch.dropout(self.linear(x), 0.1, True)).relu()
        if self.fails_in == "warm-up":
            raise ArithmeticError("on purpose")
        if self.fails_in == "forward":
            y = y * y[0, 0].item()
        return ReadsGradient.apply(y) if self.fails_in == "backward" else y


class ReadsGradient(torch.autograd.Function):
    """The identity, whose backward a graph cannot hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...] -> the same
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [...] -> the same
        return grad * (1 + 0 * grad[0, 0].item())


def batch(device: str, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, device=device, requires_grad=True)  # [rows, WIDTH]


class Counted:
    """Makes objects of one kind and knows those that are alive."""

    def __init__(self, kind: type) -> None:
        self._kind, self.made, self.alive = kind, 0, weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._kind(*args, **kwargs)
        self.made += 1
        self.alive.add(made)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)


Live = dict[str, Counted]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Objects of C++, which the garbage collector does not know. What was there before the test does not count."""
    kinds = {
        name: Counted(getattr(_C, name))
        for name in ("ReplayOrder", "CallableGuard", "GradientTable", "GraphedCallable")
    }
    for name, kind in kinds.items():
        monkeypatch.setattr(_C, name, kind)
    gc.collect()
    gc.freeze()
    yield kinds
    gc.unfreeze()


def objects(live: Live) -> dict[str, int]:
    """How many there are of everything that a capture makes, and how long te_graph's own tables are."""
    gc.collect()
    counts = collections.Counter({name: len(kind.alive) for name, kind in live.items()})
    for obj in gc.get_objects():
        if _is_ours(type(obj).__module__) or isinstance(obj, Tensor | torch.cuda.CUDAGraph | nn.Module):
            counts[type(obj).__qualname__] += 1
    for module_name in filter(_is_ours, list(sys.modules)):
        for name, value in vars(sys.modules[module_name]).items():
            if value is is_user_file:
                continue  # an entry for each file of code that has run
            if hasattr(value, "cache_info"):
                counts[f"{module_name}.{name}"] = value.cache_info().currsize
            elif isinstance(value, Sized) and not isinstance(value, type | str):
                counts[f"{module_name}.{name}"] = len(value)
    counts["free dictionary watchers"] = free_dict_watchers()
    return dict(counts)


def free_dict_watchers() -> int:
    """How many more watchers of dictionaries the interpreter has to give. Of the few there are te_graph takes one."""
    api = ctypes.pythonapi
    if not hasattr(api, "PyDict_AddWatcher"):
        return 0
    taken = []
    with contextlib.suppress(RuntimeError):  # none is left
        while True:
            taken.append(api.PyDict_AddWatcher(ON_CHANGE))
    for number in taken:
        api.PyDict_ClearWatcher(number)
    return len(taken)


def _is_ours(module_name: str) -> bool:
    return module_name.partition(".")[0] == "te_graph"


def memory(device: str) -> dict[str, int]:
    """Bytes in use: of the process, of torch's allocator, of the GPU where no other worker of pytest uses it."""
    with open("/proc/self/statm") as statm:
        used = {"host": int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) == 1:
            free, total = torch.cuda.mem_get_info()
            used["device"] = total - free
    return used


def assert_flat(device: str, live: Live, action: Callable[[], None], early: int, late: int) -> None:
    """After ``late`` rounds of ``action`` there is as much as after ``early``.

    The heap of the process may grow once, in the gaps that earlier tests have left; what leaks grows every time.
    """
    tolerance = {"host": HOST_TOLERANCE, "allocated": 0, "reserved": 0, "device": DEVICE_TOLERANCE}

    def measure(rounds: int) -> tuple[Any, dict[str, int]]:
        for _ in range(rounds):
            action()
        return objects(live), memory(device)

    counts, used = measure(early)
    growths = []
    for _ in range(3):
        counts_late, used_late = measure(late - early)
        kinds = counts.keys() | counts_late.keys()
        more = {kind: counts_late.get(kind, 0) - counts.get(kind, 0) for kind in kinds}
        assert not any(more.values()), f"grown by { ({kind: number for kind, number in more.items() if number}) }"
        growths.append({what: used_late[what] - used[what] for what in used})
        if all(growths[-1][what] <= tolerance[what] for what in used):
            return
        used = used_late
    raise AssertionError(f"grown by {growths} bytes in {late - early} rounds each")


def run_from_one_seed(model: nn.Module, x: Tensor) -> Any:  # [ROWS, WIDTH]
    torch.manual_seed(1)
    return run(model, x)


def test_hundreds_of_captures_replays_and_resets_of_a_module_leave_nothing_behind(device: str, live: Live) -> None:
    module, x = Layer().to(device), batch(device)
    kept, late = [], 100 if device == "cpu" else 500

    def capture_replay_and_reset() -> None:
        tg.make_graphed_callables(module, (x,), num_warmup_iters=1)
        result = module(x)
        result.sum().backward()
        kept[:] = [result.detach()]
        module.te_graph.reset()

    assert_flat(device, live, capture_replay_and_reset, early=late // 5, late=late)
    assert all(kind.made >= late for kind in live.values())
    assert not any(kind.alive for kind in live.values())
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (x,))
    assert_bitwise_equal(*(run_from_one_seed(model, x) for model in (module, twin)))


def in_flight_together(layers: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
    """All forwards, then all backwards: twice, for what comes together again may be launched as one."""
    for _ in range(2):
        results = [functools.reduce(lambda y, layer: layer(y), layers, x) for x in batches]
        for result in results:
            result.square().sum().backward()


def smaller_batch_and_moved_weight(layers: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
    """A capture beside the first, and one in its place."""
    (layer,), (x,) = layers, batches
    layer(x[:7]).sum().backward()
    layer(x).sum().backward()
    layer.linear.weight.data = layer.linear.weight.data.clone()
    layer(x).sum().backward()


def hooked_parameters(layers: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
    """Gradients go through autograd because of a hook that was there before the forward, or came after it."""
    (layer,), (x,) = layers, batches
    early = layer.linear.weight.register_hook(lambda grad: grad * 2)
    result = layer(x)
    late = layer.norm.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    result.sum().backward()
    early.remove()
    late.remove()


class Case(NamedTuple):
    layers: int
    batches: int
    use: Callable[[Sequence[nn.Module], Sequence[Tensor]], None]
    options: dict[str, Any]


CASES = {
    "chain": Case(2, 2, in_flight_together, {"chain": True, "max_in_flight": 2}),
    "slots": Case(1, 3, in_flight_together, {"max_in_flight": 3, "accumulate_grads": False}),
    "captured again": Case(1, 1, smaller_batch_and_moved_weight, {"on_mismatch": "capture"}),
    "hooks": Case(1, 1, hooked_parameters, {"hooks": "captured", "autograd_params": ["linear.bias"]}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_captures_with_options_leave_nothing_behind_when_reset_or_dropped(device: str, live: Live, case: Case) -> None:
    layers = [Layer().to(device) for _ in range(case.layers)]
    batches = [batch(device, MANY_ROWS) for _ in range(case.batches)]
    rounds = itertools.count()

    def capture_use_and_let_go() -> None:
        is_dropped = next(rounds) % 2
        used = [eager_copy(layer) for layer in layers] if is_dropped else layers
        samples = ((batches[0],),) * case.layers
        tg.make_graphed_callables(tuple(used), samples, num_warmup_iters=1, **case.options)
        case.use(used, batches)
        for tensor in [*batches, *(parameter for layer in layers for parameter in layer.parameters())]:
            tensor.grad = None
        if not is_dropped:
            for layer in layers:
                layer.te_graph.reset()

    late = 24 if device == "cpu" else 100
    assert_flat(device, live, capture_use_and_let_go, early=4, late=late)
    assert all(kind.made >= late for kind in live.values())
    assert not any(kind.alive for kind in live.values())


def test_modules_that_were_graphed_and_dropped_leave_nothing_behind(device: str, live: Live) -> None:
    x = batch(device)

    def capture_replay_and_drop() -> None:
        first, second = nn.Linear(WIDTH, WIDTH, device=device), nn.Linear(WIDTH, WIDTH, device=device)
        second.weight = first.weight
        tg.make_graphed_callables((first, second), ((x,), (x,)), num_warmup_iters=1)
        second(first(x)).sum().backward()
        x.grad = None

    late = 50 if device == "cpu" else 250
    assert_flat(device, live, capture_replay_and_drop, early=10, late=late)
    assert all(kind.made >= late for kind in live.values())
    assert not any(kind.alive for kind in live.values())


@pytest.mark.parametrize("fails_in", ["warm-up", "forward", "backward"])
def test_captures_that_fail_leave_nothing_behind(device: str, live: Live, fails_in: str) -> None:
    module, x = Layer(fails_in).to(device), batch(device)
    before = snapshot(module)

    def fail() -> None:
        with pytest.raises((ArithmeticError, RuntimeError)):
            tg.make_graphed_callables(module, (x,), num_warmup_iters=1)

    assert_flat(device, live, fail, early=5, late=25 if device == "cpu" else 100)
    assert not any(kind.alive for kind in live.values())
    assert_bitwise_equal(snapshot(module), before)
    assert not hasattr(module, "te_graph")
    module.fails_in = "nothing"
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (x,))
    assert_bitwise_equal(*(run_from_one_seed(model, x) for model in (module, twin)))


def keep_handle(module: nn.Module, kept: list[Any]) -> None:
    kept.append(module.te_graph)


def keep_graph(module: nn.Module, kept: list[Any]) -> None:
    kept.append(module.te_graph._entry.graphed)


def keep_result(module: nn.Module, kept: list[Any]) -> None:
    kept.append(module(batch(next(module.parameters()).device)).detach())


def keep_memory(module: nn.Module, kept: list[Any]) -> None:
    # 32 MiB: too much for what earlier tests have left free in the heap.
    kept.append(torch.ones(1 << 23, device=next(module.parameters()).device).untyped_storage())


def keep_watcher(module: nn.Module, kept: list[Any]) -> None:
    if len(kept) < 3:
        kept.append(ctypes.pythonapi.PyDict_AddWatcher(ON_CHANGE))


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (keep_handle, "Handle"),
        (keep_graph, "GraphedCallable"),
        (keep_result, "Tensor"),
        (keep_memory, "grown by"),
        pytest.param(
            keep_watcher,
            "free dictionary watchers",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no such watchers before 3.12"),
        ),
    ],
)
def test_a_leak_on_purpose_is_found(device: str, live: Live, leak: Callable, words: str) -> None:
    module, x, kept = Layer().to(device), batch(device), []

    def capture_and_leak() -> None:
        tg.make_graphed_callables(module, (x,), num_warmup_iters=1)
        module(x).sum().backward()
        leak(module, kept)
        module.te_graph.reset()

    try:
        with pytest.raises(AssertionError, match=words):
            assert_flat(device, live, capture_and_leak, early=2, late=10)
    finally:
        if leak is keep_watcher:
            for number in kept:
                ctypes.pythonapi.PyDict_ClearWatcher(number)
