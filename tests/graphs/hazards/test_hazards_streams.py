"""Silent hazards of graph replay on streams, and what replays ask of the host: they never wait for the GPU.

The reference is eager execution of a copy of the same module on the same inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from twins import eager_copy, gradients_of, run, snapshot

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

BUSY = 50_000_000  # clock ticks: tens of milliseconds, in which the host gets far ahead


def net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)


@contextlib.contextmanager
def beside(device: str, stream: torch.cuda.Stream | None, is_busy: bool) -> Iterator[None]:
    """What is inside goes to ``stream``, in order with the current one, and begins late where ``is_busy``."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if is_busy:
            torch.cuda._sleep(BUSY)
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("is_late", [False, True])
def test_one_buffer_that_is_refilled_for_every_call_is_read_before_it_is_overwritten(device, is_late):
    model = net(device)
    twin, buffer = eager_copy(model), batch(device, requires_grad=False)
    make_graphed_callables(model, (buffer,))
    stream = torch.cuda.Stream() if device == "cuda" else None
    inputs = [batch(device, requires_grad=False) for _ in range(6)]
    seen = []
    for x in inputs:
        buffer.copy_(x)
        with beside(device, stream, is_late):
            result = model(buffer)
            result.square().sum().backward()
        seen.append(result.detach())
    expected = [twin(x) for x in inputs]
    for result in expected:
        result.square().sum().backward()
    assert_bitwise_equal(seen, [result.detach() for result in expected])
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_a_buffer_that_is_refilled_before_the_backward_changes_no_gradient(device):
    """Eager execution refuses this; a graph has a copy of its own, and the gradients are those of the forward."""
    model = net(device)
    twin, buffer = eager_copy(model), batch(device, requires_grad=False)
    make_graphed_callables(model, (buffer,), max_in_flight=2)
    inputs = [batch(device, requires_grad=False) for _ in range(2)]
    results = [model(buffer.copy_(x)) for x in inputs]
    buffer.fill_(float("nan"))
    for result, x in zip(results, inputs, strict=True):
        result.square().sum().backward()
        twin(x).square().sum().backward()
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


@pytest.mark.gpu
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_step_on_another_stream_than_the_one_before_waits_for_it_without_being_told(is_chain):
    layers = [net("cuda") for _ in range(3)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), ((batch("cuda"),),) * 3, chain=is_chain)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [batch("cuda") for _ in range(9)]
    expected = [run(lambda x: twins[2](twins[1](twins[0](x))), x) for x in inputs]
    torch.cuda.synchronize()
    seen = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(BUSY // 10)
            seen.append(run(lambda x: layers[2](layers[1](layers[0](x))), x))
    torch.cuda.synchronize()
    assert_bitwise_equal(seen, expected)
    for layer, twin in zip(layers, twins, strict=True):
        assert_bitwise_equal(gradients_of(list(layer.parameters())), gradients_of(list(twin.parameters())))


@pytest.mark.gpu
def test_callables_captured_together_that_are_replayed_on_two_streams_do_not_overlap():
    layers = [net("cuda") for _ in range(2)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), ((batch("cuda"),),) * 2)
    streams = [torch.cuda.Stream() for _ in layers]
    inputs = [[batch("cuda") for _ in layers] for _ in range(4)]
    expected = [[run(twin, x) for twin, x in zip(twins, pair, strict=True)] for pair in inputs]
    torch.cuda.synchronize()
    seen = []
    for pair in inputs:
        seen.append([])
        for layer, stream, x in zip(layers, streams, pair, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY // 10)
                seen[-1].append(run(layer, x))
    torch.cuda.synchronize()
    assert_bitwise_equal(seen, expected)
    for layer, twin in zip(layers, twins, strict=True):
        assert_bitwise_equal(gradients_of(list(layer.parameters())), gradients_of(list(twin.parameters())))


class Forked(nn.Module):
    """Half of its work is done on a stream of its own."""

    def __init__(self, is_joined: bool) -> None:
        super().__init__()
        self.left, self.right, self.is_joined = nn.Linear(4, 4), nn.Linear(4, 4), is_joined
        self.stream = [torch.cuda.Stream()]

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        (side,) = self.stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            right = self.right(x).tanh()
        left = self.left(x).tanh()
        if not self.is_joined:
            return left
        torch.cuda.current_stream().wait_stream(side)
        right.record_stream(torch.cuda.current_stream())
        return left * right


def reserved_bytes() -> int:
    """What torch's allocator holds when it holds no more than it must."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.gpu
def test_a_side_stream_that_is_not_joined_is_refused_without_a_trace():
    forked, sample = Forked(is_joined=False).cuda(), batch("cuda")
    before, reserved = snapshot(forked.left, forked.right), []
    for _ in range(4):
        with pytest.raises(RuntimeError, match=r"(?i)unjoined"):
            make_graphed_callables(forked, (sample,))
        reserved.append(reserved_bytes())
    assert_bitwise_equal(snapshot(forked.left, forked.right), before)
    assert reserved[-1] == reserved[0]
    model = net("cuda")
    twin = eager_copy(model)
    make_graphed_callables(model, (sample,))
    x = batch("cuda")
    assert_bitwise_equal(run(model, x), run(twin, x))


@pytest.mark.gpu
def test_a_side_stream_that_is_joined_and_records_its_results_is_right_and_leaks_nothing():
    model, twin = Forked(is_joined=True).cuda(), Forked(is_joined=True).cuda()
    twin.load_state_dict(model.state_dict())
    reserved = []
    for _ in range(12):
        make_graphed_callables(model, (batch("cuda"),))
        for _ in range(2):
            x = batch("cuda")
            assert_bitwise_equal(run(model, x), run(twin, x))
        assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))
        model.te_graph.reset()
        reserved.append(reserved_bytes())
    assert min(reserved[-4:]) <= max(reserved[:4])  # what waits for the side stream differs from round to round


@pytest.mark.gpu
def test_other_threads_may_allocate_pin_and_ask_events_during_a_capture():
    """As a data loader's pinning thread and the watchdog of a process group do."""
    stop, errors, rounds = threading.Event(), [], []

    def disturb() -> None:
        try:
            stream = torch.cuda.Stream()
            while not stop.is_set():
                size = 1 << (12 + len(rounds) % 8)
                pinned = torch.empty(size + len(rounds), pin_memory=True)
                event = torch.cuda.Event()
                with torch.cuda.stream(stream):
                    on_device = pinned.to("cuda", non_blocking=True)
                    event.record()
                while not event.query() and not stop.is_set():
                    pass
                rounds.append(on_device.numel())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        models = [net("cuda") for _ in range(8)]
        twins = [eager_copy(model) for model in models]
        for model in models:
            make_graphed_callables(model, (batch("cuda"),))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert rounds
    for model, twin in zip(models, twins, strict=True):
        x = batch("cuda")
        assert_bitwise_equal(run(model, x), run(twin, x))


def steps(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Two steps of two micro-batches, whose results are kept."""
    kept = []
    for set_to_none in (True, False):
        for layer in layers:
            layer.zero_grad(set_to_none)
        for x in inputs:
            kept.append(layers[1](layers[0](x)))
            kept[-1].sum().backward()
    return kept


@pytest.mark.gpu
@pytest.mark.parametrize("is_chain", [False, True])
def test_replays_never_synchronise(is_chain):
    layers = [net("cuda") for _ in range(2)]
    make_graphed_callables(tuple(layers), ((batch("cuda"),),) * 2, chain=is_chain)
    inputs = [batch("cuda") for _ in range(2)]
    steps(layers, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(layers, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    def waits(rounds: int) -> int:
        for _ in range(2):  # the first profile of a process may miss calls
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
                for _ in range(rounds):
                    steps(layers, inputs)
        calls = [event.name for event in profiler.events()]
        assert any(name.startswith("cudaGraphLaunch") for name in calls)
        return sum("Synchronize" in name for name in calls)

    assert waits(5) == waits(1)


class Wide(nn.Module):
    """Adds up ``count`` scaled copies of its input: [3, 4] -> [3, 4]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return sum((x * scale for scale in self.scales), torch.zeros_like(x))


@pytest.mark.gpu
@pytest.mark.parametrize("set_to_none", [False, True])
def test_no_kernel_is_launched_per_parameter(set_to_none):
    def launches(count: int) -> int:
        model, gradient = Wide(count).cuda(), torch.ones(3, 4, device="cuda")
        make_graphed_callables(model, (batch("cuda"),))
        for _ in range(4):  # the first profile of a process may miss calls
            model.zero_grad(set_to_none)
            y = model(batch("cuda"))
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
                y.backward(gradient)
                torch.cuda.synchronize()
        calls = [event.name for event in profiler.events()]
        assert any(name.startswith("cudaGraphLaunch") for name in calls)
        return sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy")) for name in calls)

    assert launches(2) == launches(64)
