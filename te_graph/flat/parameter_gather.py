"""When which parameters are gathered, and what waits for them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.opaque import opaque
from te_graph.common.own_objects import OwnObject
from te_graph.common.replay_checks import before_replay, is_collecting
from te_graph.common.weak_method import weak_method
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.reduction import Reduction
from te_graph.flat.side_stream import SideStream


class ParameterGather(OwnObject):
    """Gathers the parameters that other ranks have stepped, bucket by bucket in the order in which ``modules`` need
    them, beside what the caller does next. Each of these waits for its own when it is called; those of none of them
    come first, and are there when the gather returns."""

    def __init__(
        self, buffers: Sequence[FlatBuffer], reduction: Reduction, modules: Sequence[nn.Module], side: SideStream
    ) -> None:
        self._reduction, self._side = reduction, side
        self._device = buffers[0].data.device
        self._is_overlapped = bool(modules) and self._device.type == "cuda"
        users: dict[int, int] = {}  # by parameters, the first module that has it
        for number, module in enumerate(modules):
            for parameter in module.parameters():
                users.setdefault(id(parameter), number)

        def first_user(pair: tuple[FlatBuffer, int]) -> int:
            buffer, place = pair
            return min(users.get(id(buffer.parameters[n]), -1) for n in buffer.layout.buckets[place].members)

        self._buckets = sorted(
            ((buffer, place) for buffer in buffers for place in range(len(buffer.layout.buckets))), key=first_user
        )
        places = {
            id(buffer.parameters[n]): place
            for place, (buffer, bucket) in enumerate(self._buckets)
            for n in buffer.layout.buckets[bucket].members
        }
        self._joined_count = sum(
            first_user(pair) < 0 for pair in self._buckets
        )  # buckets that a gather waits for itself
        self._events = [torch.cuda.Event() if self._is_overlapped else None for _ in self._buckets]
        self._stream: torch.cuda.Stream | None = None  # the caller's of the last gather
        self._waited_count = len(self._buckets)  # buckets that this stream has waited for since
        self._handles = [
            handle
            for module in modules
            for handle in _call_before_use(
                module,
                WaitForParameters(self, 1 + max(places.get(id(parameter), -1) for parameter in module.parameters())),
            )
        ]

    def run_(self) -> None:
        """Get from each rank its parts of the parameters."""
        self.wait()
        if not self._is_overlapped or is_captured(self._device):
            for number in range(len(self._buckets)):
                self._gather_(number)
        else:
            with self._side.behind_current():
                for number, event in enumerate(self._events):
                    self._gather_(number)
                    event.record()
            self._stream, self._waited_count = torch.cuda.current_stream(self._device), 0
            self.wait(self._joined_count)

    def wait(self, count: int | None = None) -> None:
        """Let what comes on the current stream wait for the first ``count`` buckets, or all; in a capture of
        ``graphed``, before each replay.

        Raises:
            RuntimeError: other code captures, whose replays would not wait.
        """
        count = len(self._buckets) if count is None else count
        if not self._is_overlapped:
            return
        if is_collecting():
            before_replay(functools.partial(weak_method(self, "wait"), count))
        if _C.is_stream_capturing(self._device):  # a capture begins by waiting for the device
            if not is_collecting():
                raise _not_in_replays()
            return
        if count > self._waited_count:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._events[count - 1])  # they come one after the other
            if current == self._stream:
                self._waited_count = count

    def wait_in_call(self, count: int) -> None:
        """As ``wait``, when a module is called, which may be what is captured.

        Raises:
            RuntimeError: it is, and replays would not wait.
        """
        if is_captured(self._device) and not is_collecting():
            raise _not_in_replays()
        self.wait(count)

    def close(self) -> None:
        """Wait for all, for the last time."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def _gather_(self, number: int) -> None:
        buffer, place = self._buckets[number]
        self._reduction.gather_(buffer, place)


class WaitForParameters:
    """Called before parameters are used, with whatever: by a module, or by what saves or loads it."""

    def __init__(self, gather: ParameterGather | None, count: int) -> None:
        self._gather = None if gather is None else weakref.ref(gather)
        self._count = count

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        gather = self._gather and self._gather()
        if gather is not None:
            gather.wait_in_call(self._count)

    def __reduce__(self) -> Any:
        """Copies of the module have parameters that are not gathered."""
        return WaitForParameters, (None, 0)


def _call_before_use(module: nn.Module, wait: WaitForParameters) -> Iterator[Any]:
    """Let ``wait`` be called when ``module`` is called, saved or loaded. Returns handles that end that."""
    yield module.register_forward_pre_hook(wait)
    yield module.register_state_dict_pre_hook(wait)
    yield module.register_load_state_dict_pre_hook(wait)


def _not_in_replays() -> RuntimeError:
    return RuntimeError(
        "FlatParameters: a module in overlap_param_gather waits for its parameters when it is called, which replays of "
        "what is being captured would not do: list the modules that are graphed, not what is in them, or capture by "
        "te_graph.graphed"
    )
