"""on_mismatch: what a call does that is not as at capture: raise an error, run eagerly, or be captured as well.

The reference is eager execution of a copy of the same module, changed in the same way, on the same inputs.
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from twins import eager_copy, gradients_of, run, snapshot

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
Arguments = tuple[tuple, dict[str, Any]]


class Net(nn.Module):
    """Layers with dropout, and arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.act, self.down = nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x: Tensor | list | tuple, shift: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        # x [n, 6], alone or two of them; shift [6] -> [n, 6]
        if not isinstance(x, Tensor):
            x = x[0] * (x[1] if isinstance(x, list) else -x[1])
        x = self.down(self.act(self.drop(self.up(x.to(self.up.weight.dtype))))) * scale
        return x if shift is None else x + shift


def batch(device: str, rows: int = 4, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    return torch.randn(rows, 6, device=device, dtype=dtype, requires_grad=requires_grad)  # [rows, 6]


def plain(device: str) -> Arguments:
    return (batch(device),), {}


def shift(device: str) -> Tensor:  # [6]
    return torch.randn(6, device=device)


def call(net: Callable, *args: Any, **kwargs: Any) -> Tensor:
    return net(*args, **kwargs)


def call_under_autocast(net: Callable, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return net(x)


@contextlib.contextmanager
def unchanged(net: Net) -> Iterator[None]:
    yield


@contextlib.contextmanager
def another_precision(net: Net) -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def not_deterministic(net: Net) -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def submodule_in_eval(net: Net) -> Iterator[None]:
    net.drop.eval()
    yield
    net.drop.train()


@contextlib.contextmanager
def parameter_moved(net: Net) -> Iterator[None]:
    memory = net.up.weight.data
    net.up.weight.data = memory.clone()
    yield
    net.up.weight.data = memory.copy_(net.up.weight.data)


@contextlib.contextmanager
def parameter_replaced(net: Net) -> Iterator[None]:
    first = net.up.weight
    net.up.weight = nn.Parameter(first.detach() * 3)
    yield
    net.up.weight = first


@contextlib.contextmanager
def parameter_frozen(net: Net) -> Iterator[None]:
    net.up.weight.requires_grad_(False)
    yield
    net.up.weight.requires_grad_(True)


@contextlib.contextmanager
def submodule_hooked(net: Net) -> Iterator[None]:
    hook = net.act.register_forward_hook(lambda module, args, output: output * 3)
    yield
    hook.remove()


@dataclass(frozen=True)
class Mismatch:
    """How a call differs from the capture: other arguments, or something that the graph takes for granted."""

    words: str
    sample: Callable[[str], Arguments] = plain
    other: Callable[[str], Arguments] | None = None
    change: Callable[[Net], contextlib.AbstractContextManager] = unchanged
    call: Callable = call

    @property
    def error(self) -> type[Exception]:
        return RuntimeError if self.other is None else ValueError


MISMATCHES = {
    "smaller last batch": Mismatch(
        r"expected args\[0\] of shape \[4, 6\], got \[2, 6\]", other=lambda device: ((batch(device, rows=2),), {})
    ),
    "other dtype": Mismatch(
        r"expected args\[0\] of dtype torch.float32, got torch.bfloat16",
        other=lambda device: ((batch(device, dtype=torch.bfloat16),), {}),
    ),
    "other requires_grad": Mismatch(
        r"expected args\[0\] with requires_grad=True, got requires_grad=False",
        other=lambda device: ((batch(device, requires_grad=False),), {}),
    ),
    "one more argument": Mismatch(
        r"expected 1 (tensors|positional argument).*, got 2",
        other=lambda device: ((batch(device), shift(device)), {}),
    ),
    "other nesting": Mismatch(
        r"expected args\[0\]( \(x\))? nested as at capture, got a list",
        sample=lambda device: (((batch(device), batch(device)),), {}),
        other=lambda device: (([batch(device), batch(device)],), {}),
    ),
    "keyword argument missing": Mismatch(
        "expected keyword argument shift, which was given at capture",
        sample=lambda device: ((batch(device),), {"shift": shift(device)}),
        other=plain,
    ),
    "keyword argument added": Mismatch(
        "got keyword argument scale, which was not given at capture",
        other=lambda device: ((batch(device),), {"scale": 0.5}),
    ),
    "other constant": Mismatch(
        r"expected kwargs\['scale'\] to be 4.0 as at capture, got 0.5",
        sample=lambda device: ((batch(device),), {"scale": 4.0}),
        other=lambda device: ((batch(device),), {"scale": 0.5}),
    ),
    "autocast": Mismatch("autocast is now on", call=call_under_autocast),
    "matrix precision": Mismatch("float32 precision of matrix products", change=another_precision),
    "deterministic algorithms": Mismatch("use_deterministic_algorithms changed", change=not_deterministic),
    "submodule eval": Mismatch("training flag of .*drop is now False", change=submodule_in_eval),
    "parameter moved": Mismatch("weight of .*up moved", change=parameter_moved),
    "parameter replaced": Mismatch("weight of .*up moved", change=parameter_replaced),
    "parameter frozen": Mismatch("weight of .*up changed requires_grad from True", change=parameter_frozen),
    "submodule hook": Mismatch("forward hooks of .*act changed", change=submodule_hooked),
}


class Pair:
    """A graphed module, or a function that uses one, and its eager twin, called one after the other."""

    def __init__(self, device: str, kind: str, mismatch: Mismatch, **options: Any) -> None:
        self.net = Net().to(device)
        self.twin = eager_copy(self.net)
        self.device, self.mismatch = device, mismatch
        args, kwargs = mismatch.sample(device)
        net = self.net
        target = net if kind == "module" else lambda *args, **kwargs: net(*args, **kwargs)
        self.graphed = make_graphed_callables(target, args, sample_kwargs=kwargs, **options)

    def call_as_at_capture(self) -> None:
        self._compare(call, self.mismatch.sample(self.device))

    def call_otherwise(self) -> None:
        self._compare(self.mismatch.call, (self.mismatch.other or self.mismatch.sample)(self.device))

    def _compare(self, how: Callable, arguments: Arguments) -> None:
        """Forward and backward of both: results, gradients, and the random numbers after them are the same."""
        args, kwargs = arguments
        seen, seed = [], int(torch.randint(2**31, ()))
        for net, owner in ((self.graphed, self.net), (self.twin, self.twin)):
            torch.manual_seed(seed)
            result = run(lambda *args, net=net, **kwargs: how(net, *args, **kwargs), *args, **kwargs)
            seen.append([result, gradients_of(list(owner.parameters())), torch.rand(3, device=self.device)])
        assert_bitwise_equal(*seen)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        with self.mismatch.change(self.net), self.mismatch.change(self.twin):
            yield


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "te_graph" and r.levelno >= logging.WARNING]


each_mismatch = pytest.mark.parametrize("name", MISMATCHES)
each_kind = pytest.mark.parametrize("kind", ["module", "function"])


@each_mismatch
@each_kind
@pytest.mark.one_of(5)
def test_raise_is_an_error_that_names_the_mismatch_and_changes_nothing(device, kind, name, caplog):
    mismatch = MISMATCHES[name]
    pair = Pair(device, kind, mismatch, on_mismatch="raise")
    pair.call_as_at_capture()
    with pair.changed():
        args, kwargs = (mismatch.other or mismatch.sample)(device)
        before = snapshot(pair.net)
        for _ in range(2):
            with pytest.raises(mismatch.error, match=mismatch.words) as refusal:
                mismatch.call(pair.graphed, *args, **kwargs)
            assert refusal.type is mismatch.error
            is_told = 'on_mismatch="eager" or "capture" lets such calls run' in str(refusal.value)
            assert is_told is (mismatch.error is ValueError)
        assert_bitwise_equal(snapshot(pair.net), before)
    pair.call_as_at_capture()
    info = pair.graphed.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["signatures"], info["eager_calls"]) == (2, 2, 1, {})
    assert warnings_of(caplog) == []


@each_mismatch
@each_kind
@pytest.mark.one_of(5)
def test_eager_gives_the_eager_result_counts_it_and_says_so_once(device, kind, name, caplog):
    mismatch = MISMATCHES[name]
    pair = Pair(device, kind, mismatch, on_mismatch="eager")
    pair.call_as_at_capture()
    with pair.changed():
        for _ in range(3):
            pair.call_otherwise()
    pair.call_as_at_capture()
    info = pair.graphed.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["signatures"]) == (2, 2, 1)
    ((reason, count),) = info["eager_calls"].items()
    assert count == 3
    assert re.search(mismatch.words, reason)
    (told,) = warnings_of(caplog)
    assert told.startswith(info["name"]) and reason in told


@each_mismatch
@each_kind
@pytest.mark.one_of(5)
def test_capture_captures_other_arguments_beside_and_what_is_stale_in_its_place(device, kind, name, caplog):
    mismatch = MISMATCHES[name]
    pair = Pair(device, kind, mismatch, on_mismatch="capture", hooks="captured")
    pair.call_as_at_capture()
    replaced = weakref.ref(pair.graphed.te_graph._entry.graphed)
    with pair.changed():
        for _ in range(3):
            pair.call_otherwise()
    is_beside = mismatch.other is not None
    assert (replaced() is not None) is is_beside
    for _ in range(2):
        pair.call_as_at_capture()
    info = pair.graphed.te_graph.info()
    # What has been put back differs from the second capture again.
    assert (info["signatures"], info["graphs"], info["recaptures"]) == ((2, 4, 1) if is_beside else (1, 2, 2))
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (6, 6, {})
    assert warnings_of(caplog) == []


def test_each_reason_is_told_once_and_counted_by_itself(device, caplog):
    pair = Pair(device, "module", Mismatch(""), on_mismatch="eager")
    for rows in (2, 3, 2, 4, 3, 2):
        x = batch(device, rows)
        torch.manual_seed(rows)
        seen = run(pair.graphed, x)
        torch.manual_seed(rows)
        assert_bitwise_equal(seen, run(pair.twin, x))
    shapes = [f"expected args[0] of shape [4, 6], got [{rows}, 6]" for rows in (2, 3)]
    assert pair.graphed.te_graph.info()["eager_calls"] == {shapes[0]: 3, shapes[1]: 2}
    assert warnings_of(caplog) == [f"Net: {shape} (runs eagerly)" for shape in shapes]


def smaller_batch(net: Net, x: Tensor) -> Tensor:  # [4, 6] -> [2, 6]
    """A call that was not captured."""
    return net(x[:2].detach().requires_grad_())


def second_in_flight(net: Net, x: Tensor) -> Tensor:  # [4, 6] -> [4, 6]
    """A call while an earlier one waits for its backward."""
    waiting = net(x)
    try:
        return net(x)
    finally:
        del waiting


@pytest.mark.parametrize(
    ("options", "too_much"),
    [
        ({"on_mismatch": "eager"}, smaller_batch),
        ({"on_mismatch": "capture", "max_captures": 1}, smaller_batch),
        ({"on_exhausted": "eager"}, second_in_flight),
    ],
)
@pytest.mark.parametrize("is_made_by_user", [False, True])
def test_an_eager_call_that_would_miss_main_grad_is_an_error_that_names_it(device, options, too_much, is_made_by_user):
    net = Net().to(device, torch.bfloat16)
    if is_made_by_user:
        net.down.bias.main_grad = torch.zeros(6, device=device)
    x = batch(device, dtype=torch.bfloat16)
    make_graphed_callables(net, (x,), **options, grad_dtype=None if is_made_by_user else torch.float32)
    run(net, x)
    if "max_captures" in options:
        run(net, batch(device, 3, torch.bfloat16))  # the one that may be added
    before = snapshot(net)["modules"]
    with pytest.raises(RuntimeError, match=r"Net: .*eager.*\.grad instead of main_grad"):
        too_much(net, x)
    assert_bitwise_equal(snapshot(net)["modules"], before)
    main_grad = net.down.bias.main_grad.clone()
    with torch.no_grad():
        assert net(x[:2]).shape == (2, 6)
    run(net, x)
    assert not torch.equal(net.down.bias.main_grad, main_grad)
    assert net.down.bias.grad is None
    assert net.te_graph.info()["eager_calls"] == {"called under no_grad, captured with gradients": 1}


def with_its_argument(x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 6] -> [n, 6], x itself
    return x.sin(), x


def doubled(x: Tensor, other: Tensor) -> Tensor:  # [n, 6], [n, 6] -> [n, 6], changes x
    return x.mul_(2) + other


def used_twice(x: Tensor) -> Tensor:  # [n, 6] -> [n, n], which autocast casts once if it is a leaf
    return nn.functional.linear(x, x)


def rows_with_gaps(device: str, rows: int) -> tuple[Tensor]:  # [rows, 6]
    return (torch.randn(rows, 12, device=device)[:, ::2].requires_grad_(),)


def overlapping(device: str, rows: int) -> tuple[Tensor, Tensor]:  # [rows, 6] each
    both = torch.randn(rows + 1, 6, device=device)
    return both[:-1], both[1:]


def leaf(device: str, rows: int) -> tuple[Tensor]:  # [rows, 6]
    return (batch(device, rows),)


def apart(device: str, rows: int) -> tuple[Tensor, Tensor]:  # [rows, 6] each
    return torch.randn(rows, 6, device=device), torch.randn(rows, 6, device=device)


@pytest.mark.parametrize("rows", [4, 5], ids=["as at capture", "of another shape"])
@pytest.mark.parametrize(
    ("function", "sample", "arguments", "dtype"),
    [
        (with_its_argument, leaf, rows_with_gaps, None),
        (doubled, apart, overlapping, None),
        (used_twice, leaf, leaf, torch.bfloat16),
    ],
    ids=["with gaps", "overlapping", "leaf under autocast"],
)
def test_a_call_that_no_capture_can_serve_runs_eagerly_also_where_it_is_captured(
    device, function, sample, arguments, dtype, rows
):
    with torch.autocast(device, dtype, enabled=dtype is not None):
        graphed = make_graphed_callables(function, sample(device, 4), on_mismatch="capture")
        for seed in torch.randint(2**31, (2,)).tolist():
            seen = []
            for one in (graphed, function):
                torch.manual_seed(seed)
                args = arguments(device, rows)
                results = pytree.tree_leaves(one(*args))
                if results[0].requires_grad:
                    sum(t.float().square().sum() for t in results).backward()
                seen.append([[t.detach().clone() for t in results], [t.grad for t in args], args])
            assert_bitwise_equal(*seen)
    assert graphed.te_graph.info()["eager_calls"]
