"""KernelNode: a captured launch of one of te_graph's kernels, whose scalar arguments can be set between replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.environment import is_disabled
from te_graph.graphs.callables.handle import Handle
from te_graph.graphs.functions.graphed import GraphedFunction
from te_graph.graphs.tracing.recorder import RecordedCall, Recorder

_TYPES = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True)
class _Kernel:
    """The op that launches a kernel, and what can be set of it, by its name in the op's schema."""

    op: str
    arguments: dict[str, type]


_KERNELS = {
    name: _Kernel(op, {argument: _TYPES[kind] for argument, kind in arguments.items()})
    for name, (op, arguments) in _C.kernels().items()
}


class KernelNode:
    """A launch of one of te_graph's own kernels in a captured graph. Made by ``find``; keeps the graph alive.

    Its scalar arguments can be set between replays, without a capture. Each graph has its own copy of them, so two
    models never see each other's. A flag in device memory that kernels read (``StepState``) is one write for all of
    them; this is one call of the driver for each node, and nothing on the device.

    Attributes:
        kernel: the kernel's name.
        arguments: names of the arguments that can be set.
    """

    def __init__(self, kernel: str, node: _C.KernelNode | RecordedCall) -> None:
        self.kernel = kernel
        self.arguments = tuple(_KERNELS[kernel].arguments)
        self._node = node

    @staticmethod
    def find(graph: Any, kernel: str) -> list[KernelNode]:
        """The launches of ``kernel`` in ``graph``, in the order of their capture.

        Args:
            graph: captured, one of: a graph of ``create_graph()``; a ``torch.cuda.CUDAGraph(keep_graph=True)`` of the
                current device; a ``Recorder``; what ``make_graphed_callables`` or ``graphed`` returned. In the last
                two there is a graph for each signature, slot and direction, and the nodes of all of them are found.
                Child graphs are searched too, bodies of conditional nodes are not.
            kernel: its name: "amax_and_scale_update", the launch of ``amax_and_scale_update_inplace`` with
                ``update_weight_scale_inv`` a Python bool.

        Returns:
            One node for each launch; none where the kernel was not captured, or with ``TE_GRAPH_DISABLE=1``. A capture
            that comes later has other nodes, which pass what they were captured with.

        Raises:
            ValueError: there is no such kernel.
            TypeError: ``graph`` is none of these.
            RuntimeError: nothing is captured, or torch has freed the nodes because ``keep_graph`` was not asked for.
        """
        if kernel not in _KERNELS:
            raise ValueError(f"KernelNode.find: expected kernel to be one of {sorted(_KERNELS)}, got {kernel!r}")
        if is_disabled():
            return []
        return [KernelNode(kernel, node) for one in _graphs_of(graph) for node in _nodes_of(one, kernel)]

    def get(self, argument: str) -> Any:
        """What the next replay passes as ``argument``.

        Args:
            argument: its name, as of ``set_``.

        Returns:
            Its value, of the type that ``set_`` takes.

        Raises:
            ValueError: no such argument can be set.
            RuntimeError: the graph was reset.
        """
        self._type_of("get", argument)
        return self._node.get(argument)

    def set_(self, **arguments: Any) -> None:
        """Let later replays pass these arguments; all others stay. Does nothing where all are so already.

        Replays that are enqueued or running pass what they were launched with. Calls of a graphed callable that run
        eagerly know nothing of it.

        Args:
            arguments: ``update_weight_scale_inv``: bool.

        Raises:
            ValueError: no such argument can be set.
            TypeError: a value is of another type.
            RuntimeError: the graph was reset; or this thread is capturing, and a replay would not do it again.

        Stream and capture: changes the graph on the host. Launches, copies and waits for nothing. Not while another
            thread replays the graph.
        """
        for argument, value in arguments.items():
            expected = self._type_of("set_", argument)
            if type(value) is not expected:
                raise TypeError(
                    f"KernelNode.set_: expected {argument} of {self.kernel} to be a {expected.__name__}, got {value!r} "
                    f"({type(value).__name__})"
                )
        if is_captured():
            raise RuntimeError(f"KernelNode.set_: expected {self.kernel} to be set between replays, got a capture")
        self._node.set_(arguments)

    def _type_of(self, method: str, argument: str) -> type:
        types = _KERNELS[self.kernel].arguments
        if argument not in types:
            raise ValueError(
                f"KernelNode.{method}: expected an argument of {self.kernel} in {sorted(types)}, got {argument!r}"
            )
        return types[argument]


def _graphs_of(graph: Any) -> list[_C.CapturedGraph]:
    if isinstance(graph, torch.cuda.CUDAGraph | Recorder):
        return [_C.CapturedGraph(graph)]
    if isinstance(graph, tuple):
        return [one for part in graph for one in _graphs_of(part)]
    owner = getattr(graph, "te_graph", graph)
    if not isinstance(owner, Handle | GraphedFunction):
        raise TypeError(
            "KernelNode.find: expected graph to be a torch.cuda.CUDAGraph, a Recorder, or what make_graphed_callables "
            f"or graphed returned, got {type(graph).__name__}"
        )
    graphs = owner.graphs()
    if not graphs:
        raise RuntimeError(f"KernelNode.find: expected a captured graph, got a {type(graph).__name__} without a graph")
    return graphs


def _nodes_of(graph: _C.CapturedGraph, kernel: str) -> list[_C.KernelNode] | list[RecordedCall]:
    captured = graph.captured
    if isinstance(captured, Recorder):
        return captured.calls(_KERNELS[kernel].op)
    return _C.kernel_nodes(graph, kernel)
