"""Collectives in graphs and traces: one op in warm-up, capture, replay, eager and compiled code.

The reference is the sum, in the order of the ranks, of numbers that all ranks draw alike. On a GPU a graph is a
torch.cuda.CUDAGraph, on a CPU a Recorder that fills with NaN what a CUDA graph would have given to others.
"""

import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_ranks import FOUR_GPUS, capture, open_group, reference_reduce
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import all_same_bits, same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import te_graph as tg
from te_graph.common.capture_state import is_recording

WORLDS = [*WORLDS, FOUR_GPUS]
GPU_WORLDS = [world for world in WORLDS if world.values[0][0] == "cuda"]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
gpu_ranks = pytest.fixture(ranks_of, scope="module", params=GPU_WORLDS)
ops = torch.ops.te_graph
BUFFER_BYTES = 1 << 20  # bytes: small, so that sizes on both its sides are quick
WIDTH = 256  # columns of fp32: 1024 rows are as large as the buffer


def is_cpu(rank: Rank) -> bool:
    return rank.device == "cpu"


def draw(rank: Rank, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has."""
    return torch.randn(rank.world, *shape, device=rank.device)


class Delays:
    """Times that differ between ranks, before what they do together."""

    def __init__(self, rank: Rank, seed: int) -> None:
        self._random = random.Random(seed * 8 + rank.rank)
        self._is_cpu = is_cpu(rank)

    def wait(self) -> None:
        microseconds = self._random.choice([0, 0, 20, 50, 200])
        if self._is_cpu:
            time.sleep(microseconds * 10e-6)
        else:
            torch.cuda._sleep(microseconds * 1500)


# Traces.


def layer(rank: Rank, group: tg.PeerGroup) -> nn.Module:
    """linear -> all_reduce -> rms_norm: [n, 16] -> [n, WIDTH], and the sum before the norm."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, WIDTH, bias=False, device=rank.device)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 16]
            total = tg.all_reduce(self.linear(x), group)
            return total, F.rms_norm(total, (WIDTH,))

    return Layer().requires_grad_(False)


def expected_of(module: nn.Module, all_ranks: Tensor) -> tuple[Tensor, Tensor]:  # [world, n, 16]
    total = reference_reduce(torch.stack([module.linear(x) for x in all_ranks]))
    return total, F.rms_norm(total, (WIDTH,))


def assert_is_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """A compiler may fuse what is around the op, and libraries choose kernels by size: the last bits differ."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def assert_replays(rank: Rank, module: nn.Module, call: Callable[[Tensor], Any], rows: int) -> None:
    """Capture ``call`` and replay it with other numbers: as its eager self bit for bit, and as the reference."""
    static = torch.zeros(rows, 16, device=rank.device)
    call(static)
    graph, outputs = capture(rank, lambda: call(static))
    for _ in range(3):
        all_ranks = draw(rank, rows, 16)
        static.copy_(all_ranks[rank.rank])
        graph.replay()
        assert_is_close(outputs, expected_of(module, all_ranks))
        assert all_same_bits(outputs, call(all_ranks[rank.rank].clone()))


def scenario_compiled(rank: Rank, backend: str) -> None:
    """One trace, made before any capture, for eager calls and captures of all sizes around the buffer's."""
    counter = CompileCounterWithBackend(backend)
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        module = layer(rank, group)
        call = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
        # No views: Dynamo compiles once more for those.
        for rows in (5, 3, 1023, 1024, 1025, 4100):
            all_ranks = draw(rank, rows, 16)
            assert_is_close(call(all_ranks[rank.rank].clone()), expected_of(module, all_ranks))
        assert counter.frame_count == 1, "a size was compiled anew"
        for rows in (7, 1030):
            assert_replays(rank, module, call, rows)
        assert counter.frame_count == 1, "a capture was compiled anew"
        all_ranks = draw(rank, 2000, 16)
        assert_is_close(call(all_ranks[rank.rank].clone()), expected_of(module, all_ranks))
        nodes = [node for node in counter.graphs[0].graph.nodes if "te_graph" in str(node.target)]
        assert [node.target for node in nodes] == [ops.all_reduce.default]
        group.check()
    torch._dynamo.reset()


def scenario_reduce_overhead(rank: Rank) -> None:
    """Graphs that torch.compile captures, 3 sizes in turn."""
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        module = layer(rank, group)
        call = torch.compile(module, fullgraph=True, dynamic=False, mode="reduce-overhead")
        for _ in range(20):
            for rows in (4, 256, 2048):
                torch.compiler.cudagraph_mark_step_begin()
                all_ranks = draw(rank, rows, 16)
                got = tuple(t.clone() for t in call(all_ranks[rank.rank]))
                assert_is_close(got, expected_of(module, all_ranks))
        group.check()
    torch._dynamo.reset()


def traced(module: nn.Module, x: Tensor, how: str) -> Callable[[Tensor], Any]:
    if how == "make_fx":
        return make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    if how == "make_fx, real":
        return make_fx(module)(x)
    if how == "export":
        return torch.export.export(module, (x,)).module()
    return torch.jit.trace(module, x)


def scenario_traced(rank: Rank, how: str) -> None:
    """What a tracer made of the Python wrapper, outside any capture, is captured and replayed."""
    with open_group(rank, name="traced", buffer_bytes=BUFFER_BYTES) as group:
        module = layer(rank, group)
        call = traced(module, torch.zeros(6, 16, device=rank.device), how)
        all_ranks = draw(rank, 6, 16)
        assert_is_close(call(all_ranks[rank.rank]), expected_of(module, all_ranks))
        assert_replays(rank, module, call, 6)
    # A trace holds the name alone: another group of that name will do, and none is an error.
    with open_group(rank, name="traced"):
        assert_replays(rank, module, call, 6)
    with pytest.raises(Exception, match=r"expected the name of a te_graph.PeerGroup, got 'traced'"):
        call(all_ranks[rank.rank])


# Graphs.


def several(all_ranks: list[Tensor], rank: Rank, group: tg.PeerGroup) -> list[Tensor]:
    """Different collectives one after the other. all_ranks: [world, n] each."""
    calls = (tg.all_reduce, tg.reduce_scatter, tg.all_gather)
    return [calls[i % 3](xs[rank.rank], group) for i, xs in enumerate(all_ranks)]


def several_expected(all_ranks: list[Tensor], rank: Rank) -> list[Tensor]:
    found = []
    for i, xs in enumerate(all_ranks):
        total = reference_reduce(xs)
        found.append((total, total.chunk(rank.world)[rank.rank], xs.flatten())[i % 3])
    return found


def scenario_several_in_a_graph(rank: Rank, count: int, replays: int) -> None:
    """Nothing waits between replays; each has its own numbers."""
    numels = [rank.world * n for n in (4, 5000, 17, 100_000, 1, 2051, 33_333)][:count]
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        static = [torch.zeros(rank.world, n, device=rank.device) for n in numels]
        graph, outputs = capture(rank, lambda: several(static, rank, group))
        inputs = [[draw(rank, n) for n in numels] for _ in range(replays)]
        found = []
        for fresh in inputs:
            for place, value in zip(static, fresh, strict=True):
                place.copy_(value)
            graph.replay()
            found.append([t.clone() for t in outputs])
        for got, fresh in zip(found, inputs, strict=True):
            assert all_same_bits(got, several_expected(fresh, rank))
        group.check()


def scenario_mutation(rank: Rank, seed: int, replays: int) -> None:
    """The input is written as soon as the collective is over here, whatever peers are still doing."""
    delays = Delays(rank, seed)
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        for numel in (40, 3000, 150_001):
            x = torch.zeros(numel, device=rank.device)

            def region(x: Tensor = x) -> list[Tensor]:
                first = tg.all_reduce(x, group)
                x.add_(1)
                second = tg.all_reduce(x, group)
                tg.all_reduce_(x, group)
                x.neg_()
                return [first, second, x, tg.all_gather(x[:7], group)]

            graph, outputs = capture(rank, region)
            all_ranks = draw(rank, numel)
            first, second = reference_reduce(all_ranks), reference_reduce(all_ranks + 1)
            expected = [first, second, -second, -second[:7].repeat(rank.world)]
            wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
            for _ in range(replays):
                x.copy_(all_ranks[rank.rank])
                delays.wait()
                graph.replay()
                for got, want in zip(outputs, expected, strict=True):
                    wrong += (got.view(torch.int32) != want.view(torch.int32)).sum()
            assert wrong.item() == 0, numel
        group.check()


def scenario_interleaved(rank: Rank, seed: int, steps: int) -> None:
    """Eager calls and replays of several graphs, in any order, at sizes that differ by algorithm and grid."""
    order, delays = random.Random(seed), Delays(rank, seed)
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        sizes = (3, 600, 70_000, 400_000)
        graphs = []
        for numel in sizes:
            static = torch.zeros(rank.world, numel, device=rank.device)
            graphs.append((static, *capture(rank, lambda x=static: tg.all_reduce(x[rank.rank], group))))
        for step in range(steps):
            number = order.randrange(8)
            static, graph, output = graphs[number % 4]
            all_ranks = draw(rank, sizes[number % 4])
            delays.wait()
            if number < 4:
                got = tg.all_reduce(all_ranks[rank.rank], group)
            else:
                static.copy_(all_ranks)
                graph.replay()
                got = output
            assert same_bits(got, reference_reduce(all_ranks)), (step, number)
        group.check()


def scenario_recaptured(rank: Rank, times: int, collectives: int) -> None:
    """Nothing of a graph that is gone stays, and nothing fills up."""
    gc.collect()
    gc.freeze()  # a capture collects garbage, and what was there before is no concern of this test
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        all_ranks = draw(rank, 512)
        static, expected = all_ranks[rank.rank].clone(), reference_reduce(all_ranks)
        memory = []
        for _ in range(times):
            graph, outputs = capture(rank, lambda: [tg.all_reduce(static, group) for _ in range(collectives)])
            graph.replay()
            assert all(same_bits(got, expected) for got in (outputs[0], outputs[-1]))
            gone = weakref.ref(outputs[0].untyped_storage())
            del graph, outputs
            gc.collect()
            assert gone() is None, "the group, or the operator, holds what a graph made"
            if not is_cpu(rank):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                memory.append(torch.cuda.memory_reserved())
        assert len(set(memory[2:])) <= 1, memory
        group.check()
    gc.unfreeze()


def scenario_views(rank: Rank, is_expandable: bool) -> None:
    """Inputs at odd places of large blocks, and graphs that share a pool."""
    if is_expandable:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
            block = torch.zeros(3, 1 << 20, device=rank.device)
            if is_expandable:
                assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
            static = [block[0, 1:4098], block[1, 13::3], block[:, 999_999:], block[2, 77:78]]
            pool = None if is_cpu(rank) else torch.cuda.graph_pool_handle()
            graphs = [
                capture(rank, lambda x=x: tg.all_reduce(x * 2, group) + tg.all_reduce(x, group), pool) for x in static
            ]
            for _ in range(3):
                for x, (graph, output) in zip(static, graphs, strict=True):
                    all_ranks = draw(rank, *x.shape)
                    x.copy_(all_ranks[rank.rank])
                    graph.replay()
                    assert same_bits(output, reference_reduce(all_ranks * 2) + reference_reduce(all_ranks))
            group.check()
    finally:
        if is_expandable:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def scenario_warm_up(rank: Rank) -> None:
    """Warm-ups find the right values, as do calls on a capture's stream that are not captured."""
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        all_ranks = draw(rank, 5000)
        static, expected = all_ranks[rank.rank].clone(), reference_reduce(all_ranks)
        if is_cpu(rank):
            _, output = capture(rank, lambda: tg.all_reduce(static, group))
            assert same_bits(output, expected)
        else:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                assert same_bits(tg.all_reduce(static, group), expected)
        warm_ups = []

        class Doubled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("expected", expected)

            def forward(self, x: Tensor) -> Tensor:  # [5000]
                y = tg.all_reduce(x, group)
                if not (is_recording() if is_cpu(rank) else torch.cuda.is_current_stream_capturing()):
                    warm_ups.append(same_bits(y, self.expected))
                return y * 2

        module = Doubled()
        tg.make_graphed_callables(module, (static,), ignore_attributes=("warm_ups",))
        assert warm_ups and all(warm_ups)
        assert same_bits(module(static), expected * 2)


def scenario_freed(rank: Rank) -> None:
    """What was input to a collective inside a graph is gone, and others have filled memory since."""
    with open_group(rank, buffer_bytes=BUFFER_BYTES) as group:
        static = torch.zeros(50_000, device=rank.device)

        def region() -> Tensor:
            total = tg.all_reduce(static * 2, group)
            for _ in range(3):
                total = tg.all_reduce(total + static, group)
            return total

        graph, output = capture(rank, region)
        gc.collect()
        if not is_cpu(rank):
            torch.cuda.empty_cache()
        fill = [torch.full((1 << (20 if is_cpu(rank) else 28),), float("nan"), device=rank.device) for _ in range(2)]
        for _ in range(3):
            all_ranks = draw(rank, 50_000)
            static.copy_(all_ranks[rank.rank])
            graph.replay()
            expected = reference_reduce(all_ranks * 2)
            for _ in range(3):
                expected = reference_reduce(expected + all_ranks)
            assert same_bits(output, expected)
        assert all(block.isnan().all() for block in fill)


def test_a_compiled_layer_is_right_at_any_size_eagerly_and_captured(ranks, seed):
    ranks.run(scenario_compiled, seed, "aot_eager")


def test_a_layer_of_inductor_is_right_at_any_size_eagerly_and_captured(gpu_ranks, seed):
    gpu_ranks.run(scenario_compiled, seed, "inductor")


def test_compiled_code_that_torch_captures_is_right(gpu_ranks, seed):
    gpu_ranks.run(scenario_reduce_overhead, seed)


@pytest.mark.parametrize("how", ["make_fx", "make_fx, real", "export", "jit"])
def test_a_trace_made_before_any_capture_is_right_when_captured(ranks, seed, how):
    ranks.run(scenario_traced, seed, how)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_several_collectives_in_a_graph_are_right_at_each_replay(ranks, seed, count):
    ranks.run(scenario_several_in_a_graph, seed, count, 20)


def test_inputs_may_be_written_right_after_a_collective(ranks, seed):
    ranks.run(scenario_mutation, seed, seed, 15 if ranks.is_slow else 1000)


def test_eager_calls_and_replays_alternate(ranks, seed):
    ranks.run(scenario_interleaved, seed, seed, 60 if ranks.is_cpu else 200)


def test_captures_leave_nothing_behind(ranks, seed):
    ranks.run(scenario_recaptured, seed, *((4, 8) if ranks.is_cpu else (500, 64)))


def test_inputs_are_views_at_odd_offsets(ranks, seed):
    ranks.run(scenario_views, seed, False)


def test_inputs_lie_in_expandable_segments(gpu_ranks, seed):
    gpu_ranks.run(scenario_views, seed, True)


def test_warm_ups_find_the_right_values(ranks, seed):
    ranks.run(scenario_warm_up, seed)


def test_memory_of_inputs_inside_a_graph_stays_its_own(ranks, seed):
    ranks.run(scenario_freed, seed)
