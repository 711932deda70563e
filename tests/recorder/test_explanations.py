"""Captures that fail name callable, operation and line, on the recorder and where CUDA says one sentence for all.

The reference is the table of regions below: each one's operation, and the line of it inside the region. ``as cuda`` is
a capture on the CPU that fails as CUDA does.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import eager_copy, run, snapshot

from te_graph import CaptureError, graphed, make_graphed_callables
from te_graph.common.capture_state import is_recording
from te_graph.graphs.functions.region_watch import RegionWatch
from te_graph.graphs.tracing.backends import RecorderBackend
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.recorder import Recorder
from te_graph.graphs.tracing.refusals import reason_for_no_graph
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

BARE = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


def below_python(function: Callable) -> Callable:
    """Decorator: no line of it is the user's or torch's."""
    function.__code__ = function.__code__.replace(co_filename="<frozen stand-in>")
    return function


class CudaStandIn(TorchDispatchMode):
    """Fails, as a capture on CUDA, at calls that wait for the device; from then on the capture is lost."""

    is_lost = False

    @below_python
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.is_lost:
            raise torch.AcceleratorError(INVALIDATED)
        is_known = reason_for_no_graph(func, args, kwargs or {}, torch.device("cpu")) is not None
        if is_known or func is torch.ops.aten.linalg_inv_ex.default:
            self.is_lost = True
            raise torch.AcceleratorError(f"{BARE}\nCompile with `TORCH_USE_CUDA_DSA`\n")
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["recorder", "as cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a capture that fails in one of three ways."""

    @contextlib.contextmanager
    def capture(self: RecorderBackend, pool: None, states: object = None) -> Iterator[Recorder]:
        with CudaStandIn() as mode:
            yield Recorder()
        if mode.is_lost:
            raise torch.AcceleratorError(INVALIDATED)

    if request.param == "as cuda":
        monkeypatch.setattr(RecorderBackend, "capture", capture)
    return "cuda" if request.param == "cuda" else "cpu"


def read_scalar(x: Tensor) -> Tensor:  # [5] -> [5]
    return x * x.sum().item()


def branch_on_tensor(x: Tensor) -> Tensor:  # [5] -> [5]
    y = x * 2
    if y.sum() > 0:
        return y
    return -y


def mask(x: Tensor) -> Tensor:  # [5] -> []
    return x[x > 0].sum()


def repeat(x: Tensor) -> Tensor:  # [5] -> [10]
    times = torch.full((5,), 2, device=x.device)
    return x.repeat_interleave(times)


def swallow(x: Tensor) -> Tensor:  # [5] -> [5]
    try:
        return x * float(x.detach().sum())
    except RuntimeError:
        return x * 2


def swallow_all(x: Tensor) -> Tensor:  # [5] -> [5]
    try:
        return x * float(x.detach().sum())
    except RuntimeError:
        return x


class Reading(torch.autograd.Function):
    """Identity whose backward reads a value on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...] -> [...]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [...] -> [...]
        return grad * (2 if grad.abs().sum().item() >= 0 else 3)


def read_in_backward(x: Tensor) -> Tensor:  # [5] -> [5]
    return Reading.apply(x) * 2


_SCALAR = "aten._local_scalar_dense.default"
_READS, _SHAPE = "it reads a tensor's value on the host", "the shape of its result depends on data"
REGIONS: dict[str, tuple[Callable[[Tensor], Tensor], str, str, Callable, int]] = {
    "item": (read_scalar, _SCALAR, _READS, read_scalar, 1),
    "branch": (branch_on_tensor, _SCALAR, _READS, branch_on_tensor, 2),
    "nonzero": (read := lambda x: x.nonzero() * x.sum(), "aten.nonzero.default", _SHAPE, read, 0),
    "mask": (mask, "aten.index.Tensor", _SHAPE, mask, 1),
    "repeat_interleave": (repeat, "aten.repeat_interleave.Tensor", _SHAPE, repeat, 2),
    "swallowed": (swallow, _SCALAR, _READS, swallow, 2),
    "swallowed to the end": (swallow_all, _SCALAR, _READS, swallow_all, 2),
    "in the backward": (read_in_backward, _SCALAR, _READS, Reading.backward, 2),
}


def leaf(device: str) -> Tensor:  # [5]
    return torch.randn(5, device=device, requires_grad=True)


def error_of(call: Callable[[], Any]) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        call()
    return caught.value


def refusal_of(call: Callable[[], Any]) -> str:
    return str(error_of(call))


@pytest.mark.parametrize("case", REGIONS)
def test_a_capture_that_fails_names_callable_operation_and_line(place, case, request):
    region, operation, reason, function, line = REGIONS[case]
    samples, code = ((leaf(place),), (leaf(place),)), function.__code__
    before = snapshot()
    error = error_of(lambda: make_graphed_callables((nn.Identity(), region), samples))
    assert (error.__cause__ is None) == (request.node.callspec.params["place"] == "recorder")
    message = str(error)
    assert message.startswith(f"callable 1 ({region.__name__}): {operation} cannot be captured: {reason}")
    assert message.endswith(f"; at {__file__}:{code.co_firstlineno + line} in {code.co_name}")
    assert_bitwise_equal(snapshot(), before)


def test_what_comes_after_a_capture_that_failed_is_captured_as_ever(device):
    refusal_of(lambda: make_graphed_callables(swallow, (leaf(device),)))
    model, x = nn.Linear(5, 3).to(device), leaf(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (leaf(device),))
    assert_bitwise_equal(run(model, x), run(twin, x))


def invert(x: Tensor) -> Tensor:  # [2, 2] -> [2, 2]
    y = x * 2
    return y.inverse()


@pytest.mark.parametrize("place", ["as cuda"], indirect=True)
def test_where_nothing_was_to_be_expected_all_operators_of_the_line_are_named(place):
    message = refusal_of(lambda: make_graphed_callables(invert, (torch.eye(2, device=place),)))
    assert message.startswith("invert: one of aten.linalg_inv_ex.default, ")
    line = invert.__code__.co_firstlineno + 2
    assert message.endswith(f" cannot be captured: {BARE}; at {__file__}:{line} in invert")


@pytest.mark.gpu
def test_a_line_that_calls_no_operator_is_named():
    def wait(x: Tensor) -> Tensor:  # [5] -> [5]
        torch.cuda.current_stream().synchronize()
        return x * 2

    message = refusal_of(lambda: make_graphed_callables(wait, (leaf("cuda"),)))
    assert message == f"wait: {BARE}; at {__file__}:{wait.__code__.co_firstlineno + 1} in wait"


METHODS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tolist": (lambda x: x * x.tolist()[0], "Tensor.tolist"),
    "print": (lambda x: x * len(str(x)), "Tensor.__repr__"),
    "cpu": (lambda x: x * x.detach().cpu()[0].item(), "Tensor.cpu"),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods_that_take_a_tensor_to_the_host_are_named_as_such(device, case):
    region, operation = METHODS[case]
    message = refusal_of(lambda: make_graphed_callables(region, (leaf(device),)))
    assert f"<lambda>: {operation} cannot be captured: " in message
    assert message.endswith(f"; at {__file__}:{region.__code__.co_firstlineno} in <lambda>")


@pytest.mark.gpu
def test_data_of_python_that_is_copied_to_the_device_is_named():
    region = lambda x: x * torch.tensor([2.0], device="cuda")  # noqa: E731
    message = refusal_of(lambda: make_graphed_callables(region, (leaf("cuda"),)))
    assert "lift_fresh.default cannot be captured: it copies Python data to the device" in message
    assert message.endswith(f"test_explanations.py:{region.__code__.co_firstlineno} in <lambda>")


def line_of(site: str) -> str:
    file, number = re.fullmatch(r"(.*):(\d+) in \w+", site).groups()
    return open(file).read().splitlines()[int(number) - 1].strip()


def test_where_the_callable_is_of_torch_its_line_is_named(place):
    """Never the line that asks for the capture."""
    model = nn.BatchNorm1d(5, momentum=None).to(place)
    message = refusal_of(lambda: make_graphed_callables(model, (torch.randn(3, 5, device=place),)))
    assert message.startswith(f"BatchNorm1d: {_SCALAR} cannot be captured")
    site = message.rpartition("; at ")[2]
    assert site.startswith(sys.modules[nn.BatchNorm1d.__module__].__file__)
    assert "float(self.num_batches_tracked)" in line_of(site)
    assert model.num_batches_tracked == 0


def test_a_graphed_module_of_torch_names_its_line_too(device):
    model = nn.BatchNorm1d(5, momentum=None).to(device).requires_grad_(False)
    step, x = graphed(model.forward), torch.randn(3, 5, device=device)
    step(x)
    message = refusal_of(lambda: step(x))
    assert f": {_SCALAR} cannot be captured" in message
    assert "float(self.num_batches_tracked)" in line_of(message.rpartition("; at ")[2])


def test_a_function_without_lines_is_named_as_such(device):
    message = refusal_of(lambda: make_graphed_callables(torch.nonzero, (torch.ones(3, device=device),)))
    assert message.startswith("nonzero: aten.nonzero.default cannot be captured: ")
    assert message.endswith("; at the callable itself")


def test_a_result_that_nobody_can_name_is_not_laid_to_the_line_that_captures(device):
    hidden = functools.cache(lambda: torch.ones(5, device=device))
    hidden()
    with pytest.raises(RuntimeError, match=r"the result uses a tensor of shape \[5\].*; at the callable itself$"):
        make_graphed_callables(lambda x: (x * 2, hidden()), (leaf(device),))


@pytest.mark.parametrize("case", [case for case in REGIONS if case != "in the backward"])
def test_graphed_functions_are_named(device, case):
    region, operation, reason, function, line = REGIONS[case]
    step, x = graphed(torch.no_grad()(region)), torch.ones(5, device=device)
    step(x)
    message = refusal_of(lambda: step(x))
    assert message.startswith(f"{region.__name__}: {operation} cannot be captured: {reason}")
    assert message.endswith(f"; at {__file__}:{function.__code__.co_firstlineno + line} in {region.__name__}")


def test_a_graphed_function_names_the_operation_of_whatever_cuda_refuses():
    """On a GPU it is watched in the capture itself."""
    watch, stand_in = RegionWatch(torch.device("meta")), CudaStandIn()
    with pytest.raises(CaptureError) as caught, stand_in, watch:
        stand_in.is_lost = True
        torch.ones(3, device="meta")
    assert str(caught.value).startswith(f"aten.ones.default cannot be captured: {INVALIDATED}; at {__file__}:")
    with pytest.raises(RuntimeError, match="reduction dim"), watch:
        torch.mm(torch.ones(2, 3, device="meta"), torch.ones(2, 3, device="meta"))


# What is allowed where it stands.


def captured(device: str) -> bool:
    return torch.cuda.is_current_stream_capturing() if device == "cuda" else is_recording()


def test_what_code_does_outside_captures_only_is_not_refused(device):
    def checked(x: Tensor) -> Tensor:  # [5] -> [5]
        if not captured(device) and x.detach().sum().item() > 1e9:
            raise ValueError("too large")
        return x * 2

    replaying = make_graphed_callables(checked, (leaf(device),))
    x = leaf(device)
    assert_bitwise_equal(replaying(x).detach(), x.detach() * 2)
    assert replaying.te_graph.info()["forward_replays"] == 1


@pytest.mark.gpu
def test_copies_of_pinned_memory_that_do_not_wait_are_not_refused():
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, device="cuda"))
            self.on_host = torch.arange(5.0).pin_memory()

        def forward(self, x: Tensor) -> Tensor:  # [5] -> [5]
            return x * self.weight + self.on_host.to("cuda", non_blocking=True)

    model, x = Offset(), leaf("cuda")
    twin = eager_copy(model)
    make_graphed_callables(model, (leaf("cuda"),))
    assert_bitwise_equal(run(model, x), run(twin, x))


META = torch.device("meta")
LIKELY: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "copy to the host": (lambda x: torch.ops.aten._to_copy(x, device="cpu"), "aten._to_copy.default"),
    "method": (lambda x: x.cpu(), "Tensor.cpu"),
    "copy from the host": (lambda x: torch.ones(3).to(META, non_blocking=True), "aten._to_copy.default"),
    "write from the host": (lambda x: x.copy_(torch.ones(3)), "aten.copy_.default"),
    "Python data": (lambda x: torch.ops.aten.lift_fresh(x), "aten.lift_fresh.default"),
    "value under a mask": (lambda x: x.index_put_((x > 0,), x.sum()), "aten.index_put_.default"),
    "generator": (lambda x: torch.rand(3, generator=torch.Generator(), device="cpu"), "aten.rand.generator"),
    "copy that does not wait": (lambda x: x.to("cpu", non_blocking=True), None),
    "number under a mask": (lambda x: x.index_put_((x > 0,), torch.tensor(1.0)), None),
    "constants of the host": (lambda x: torch.ones(3)[torch.ones(3) > 0].sum().item(), None),
    "another dtype": (lambda x: x.to(torch.float16), None),
    "copy on the device": (lambda x: x.copy_(x * 2), None),
    "memory that moves": (lambda x: torch.empty(3, device=META).set_(x), None),
    "data": (lambda x: setattr(x, "data", x * 2), None),
}


@pytest.mark.parametrize("case", LIKELY)
def test_what_is_noted_for_a_gpu_is_what_waits_there(case):
    region, operation = LIKELY[case]
    watch = WarmUpWatch(META)
    with watch, contextlib.suppress(NotImplementedError):  # of tensors without data
        region(torch.ones(3, device=META))
    noted = [(one.operation, site.rpartition("/")[2]) for site, one in watch.notes.refusals.items()]
    line = f"test_explanations.py:{region.__code__.co_firstlineno} in <lambda>"
    assert noted == ([] if operation is None else [(operation, line)])
