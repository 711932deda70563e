"""The two kinds of graph: CUDA graphs on a GPU, recordings on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph._build import check_is_built_for
from te_graph.common.environment import switch
from te_graph.graphs.tracing.random_states import CudaStates
from te_graph.graphs.tracing.recorded_states import RecordedStates
from te_graph.graphs.tracing.recorder import Recorder
from te_graph.graphs.tracing.refusals import CaptureError

ERROR_MODES = ("global", "thread_local", "relaxed")


class RecorderBackend:
    """Captures on the CPU with a ``Recorder``; ``TE_GRAPH_POISON=1`` turns its ``poison`` on."""

    name = "recorder"

    def __init__(self) -> None:
        self._poison = switch("TE_GRAPH_POISON", default=False)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around all warm-ups and captures: the generator is afterwards where it was."""
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def watch_generator(self, label: str) -> contextlib.AbstractContextManager[None]:
        """The recorder sees by itself where the generator is set."""
        return contextlib.nullcontext()

    def new_pool(self) -> None:
        """Recordings keep all their memory; there is nothing to share."""

    def new_states(self) -> RecordedStates:
        """What a forward and its backward share that note and restore states of the generator."""
        return RecordedStates()

    @contextlib.contextmanager
    def capture(self, pool: None, states: RecordedStates | None = None) -> Iterator[Recorder]:
        graph = Recorder(poison=self._poison)
        with graph.capture(states):
            yield graph

    def results(self, tensors: list[Tensor | None], graph: Recorder) -> list[Tensor | None]:
        """Results of ``graph``, [...] each, that are read before the next graph of its pool runs: the tensors."""
        return tensors

    def nodes(self, graph: Recorder) -> int:
        """Calls that a replay makes."""
        return len(graph.ops())

    def nbytes(self, groups: list[list[Recorder]]) -> list[int]:
        """Bytes of memory that belong to the graphs of each group."""
        return [sum(graph.nbytes for graph in graphs) for graphs in groups]


class CudaBackend:
    """Captures CUDA graphs on the stream that ``torch.cuda.graph`` uses.

    Args:
        device: the GPU.
        capture_error_mode: as for ``torch.cuda.graph``.
        stream: to capture on, instead of that one.

    Raises:
        RuntimeError: te_graph was built without CUDA code.
    """

    name = "cuda"

    def __init__(self, device: torch.device, capture_error_mode: str, stream: torch.cuda.Stream | None = None) -> None:
        check_is_built_for(device)
        self._device = device
        self._error_mode = capture_error_mode
        self._stream = stream

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around all warm-ups and captures: side stream, and generators that are afterwards where they were.

        All captures of a process use one stream, because cuBLAS keeps a workspace for each.
        """
        host_state, states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        with torch.cuda.device(self._device):
            if torch.cuda.graph.default_capture_stream is None:
                torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
            stream = self._stream or torch.cuda.graph.default_capture_stream
            if stream.device != self._device:
                stream = torch.cuda.Stream(self._device)
            torch.cuda.synchronize()
            # As torch.cuda.graph does. Without the second one the host allocator keeps a record of each pool for ever.
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                torch.cuda.synchronize()
                torch.cuda.set_rng_state_all(states)
                torch.set_rng_state(host_state)

    @contextlib.contextmanager
    def watch_generator(self, label: str) -> Iterator[None]:
        """Around the warm-up of one callable: refuse it if it seeds the generator, which a replay would not do.

        The generator runs from a seed that no other code would set.
        """
        generator = torch.cuda.default_generators[self._device.index]
        seed = int.from_bytes(os.urandom(7), "little")
        generator.manual_seed(seed)
        yield
        if generator.initial_seed() != seed:
            raise CaptureError(
                f"{label}: sets the seed of the default random generator (torch.manual_seed); a replay draws on from "
                "the generator's present state"
            )

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_states(self) -> CudaStates:
        """As of ``RecorderBackend``."""
        return CudaStates(self._device)

    @contextlib.contextmanager
    def capture(self, pool: Any, states: CudaStates | None = None) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        if states is not None:
            states.prepare(graph)
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode=self._error_mode)
        try:
            with states or contextlib.nullcontext():
                yield graph
        except BaseException:
            self._abandon(graph, pool)
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._abandon(graph, pool)
            raise
        graph.instantiate()

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed, so that allocator and generators work as before it."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            return
        # torch leaves its allocators and generators in capture mode when ending fails.
        _C.abandon_pool(self._device.index, pool)
        probe = torch.cuda.CUDAGraph()
        scratch = torch.zeros(1, dtype=torch.float32, device=self._device)
        torch.cuda.synchronize()
        probe.capture_begin(capture_error_mode=self._error_mode)
        scratch.add_(1)
        probe.capture_end()

    def results(self, tensors: list[Tensor | None], graph: torch.cuda.CUDAGraph) -> list[Tensor | None]:
        """As of ``RecorderBackend``: tensors over the same memory that leave it to later captures into the pool, and
        keep the graph with its pool alive."""
        return _C.borrow(tensors, graph)

    def nodes(self, graph: torch.cuda.CUDAGraph) -> int:
        """Nodes of one graph."""
        return _C.node_count(graph.raw_cuda_graph())

    def nbytes(self, groups: list[list[torch.cuda.CUDAGraph]]) -> list[int]:
        """Bytes of the memory pools of the graphs of each group."""
        sizes: Counter[tuple] = Counter()
        for segment in torch.cuda.memory_snapshot():
            sizes[tuple(segment["segment_pool_id"])] += segment["total_size"]
        return [sum(sizes[pool] for pool in {tuple(graph.pool()) for graph in graphs}) for graphs in groups]
