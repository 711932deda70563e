"""Graphs by hand: create, capture, replay, the steps of ``graphed`` one by one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from te_graph._build import check_is_built_for
from te_graph.common.capture_state import capturing
from te_graph.common.environment import is_disabled
from te_graph.common.held_signals import signals_held
from te_graph.common.reasons import Reported
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.pool_and_stream import check_pool, check_stream
from te_graph.graphs.tracing.recorder import Recorder

_log = logging.getLogger("te_graph")


class NoGraph:
    """What ``create_graph`` returns with ``TE_GRAPH_DISABLE=1``: captures nothing, replays nothing."""

    def __init__(self) -> None:
        self._reported = Reported()

    def replay(self) -> None:
        """Do nothing; say so the first time."""
        reason = "TE_GRAPH_DISABLE=1"
        if self._reported.is_first(reason):
            _log.warning("replay_graph: does nothing, since %s: run what was captured eagerly instead", reason)


Graph = torch.cuda.CUDAGraph | Recorder | NoGraph


def create_graph() -> Graph:
    """An empty graph: a ``torch.cuda.CUDAGraph``; without CUDA a ``Recorder``; a ``NoGraph`` when disabled.

    The CUDA graph keeps its nodes after the capture (``keep_graph=True``), where ``KernelNode`` finds them.
    """
    if is_disabled():
        return NoGraph()
    return torch.cuda.CUDAGraph(keep_graph=True) if torch.cuda.is_available() else Recorder()


@contextlib.contextmanager
def capture_to_graph(graph: Graph, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Context manager: capture what the body does into ``graph``, without doing it. Nothing is checked at replay.

    A recorder runs the body; what it writes into tensors from outside is put back when the context ends, so that a
    program computes the same on both. With ``TE_GRAPH_DISABLE=1`` the body runs as if the context were not there.

    Args:
        graph: of ``create_graph()``, empty. Mutated.
        pool: memory pool that the graph shares with others, in the order of their capture; its own if None. Without
            meaning on the CPU.
        stream: to capture on; the one of ``torch.cuda.graph`` if None. Without meaning on the CPU.

    Raises:
        TypeError: an argument is wrong.
        CaptureError: the recorder met an operation that a graph cannot hold; names the user's line.
        RuntimeError: a CUDA graph, and te_graph was built without CUDA code.

    Stream and capture: synchronizes the device, then captures on ``stream`` with capture error mode "thread_local".
    """
    check_pool("capture_to_graph", pool)
    check_stream("capture_to_graph", stream)
    if isinstance(graph, NoGraph):
        yield
    elif isinstance(graph, Recorder):
        watch = TensorWatch()
        try:
            with signals_held(), capturing(), graph.capture(), watch:
                yield
        finally:
            watch.restore()
    elif isinstance(graph, torch.cuda.CUDAGraph):
        check_is_built_for(torch.device("cuda"))
        on_stream = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with signals_held(), on_stream, capturing():
            yield
        if _keeps_nodes(graph):
            graph.instantiate()  # torch would do it in the first replay
    else:
        raise TypeError(f"capture_to_graph: expected a graph of create_graph(), got {type(graph).__name__}")


def _keeps_nodes(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether ``graph``, captured, was made with ``keep_graph=True``, which torch shows in no other way."""
    try:
        graph.raw_cuda_graph()
    except RuntimeError:
        return False
    return True


def replay_graph(graph: Graph) -> None:
    """Do what was captured into ``graph``, on the same memory. With ``TE_GRAPH_DISABLE=1``: nothing, said once.

    Args:
        graph: of ``create_graph()``.

    Raises:
        TypeError: ``graph`` is none.
        RuntimeError: nothing was captured into it.

    Stream and capture: CUDA graphs are launched on the current stream; no synchronization.
    """
    if not isinstance(graph, torch.cuda.CUDAGraph | Recorder | NoGraph):
        raise TypeError(f"replay_graph: expected a graph of create_graph(), got {type(graph).__name__}")
    graph.replay()
