"""In which order parameters are gathered, and by which modules they are waited for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from te_graph.common.capture_state import is_captured
from te_graph.common.own_objects import OwnObject
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.pending_gather import PendingGather, WaitForParameters
from te_graph.flat.reduction import Reduction
from te_graph.flat.side_stream import SideStream


class ParameterGather(OwnObject):
    """Gathers the parameters that other ranks have stepped, bucket by bucket in the order in which ``modules`` need
    them, beside what the caller does next. Each of these waits for its own when it is called; those that other modules
    use come first, and are there when the gather returns."""

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        reduction: Reduction,
        modules: Sequence[nn.Module],
        model: Any,
        side: SideStream,
    ) -> None:
        """``model``: what the parameters are of, a module perhaps, which may use them outside of ``modules``."""
        self._reduction, self._side = reduction, side
        self._device = buffers[0].data.device
        modules = modules if reduction.is_sharded else ()
        users = _first_users(modules, model)

        def first_user(pair: tuple[FlatBuffer, int]) -> int:
            buffer, place = pair
            return min(users.get(id(buffer.parameters[n]), -1) for n in buffer.layout.buckets[place].members)

        self._buckets = sorted(
            ((buffer, place) for buffer in buffers for place in range(len(buffer.layout.buckets))), key=first_user
        )
        self._joined_count = sum(first_user(pair) < 0 for pair in self._buckets)  # that a gather itself waits for
        is_overlapped = bool(modules) and self._device.type == "cuda"
        self._pending = PendingGather(self._device, len(self._buckets), is_overlapped)
        ends = {
            id(buffer.parameters[n]): order + 1
            for order, (buffer, place) in enumerate(self._buckets)
            for n in buffer.layout.buckets[place].members
        }
        self._handles = [
            handle
            for module in modules
            for handle in _call_before_use(
                module, WaitForParameters(self._pending, max(ends.get(id(one), 0) for one in module.parameters()))
            )
        ]
        if modules:
            _let_compiled_code_see_hooks()

    def run_(self) -> None:
        """Get from each rank its parts of the parameters."""
        self.wait()
        if not self._pending.is_overlapped or is_captured(self._device):
            for number in range(len(self._buckets)):
                self._gather_(number)
            return
        self._pending.begin()
        with self._side.behind_current():
            for number in range(len(self._buckets)):
                self._pending.launch(number, functools.partial(self._gather_, number))
        self._pending.wait(self._joined_count)

    def wait(self) -> None:
        """Let what comes on the current stream wait for all parameters; as of ``PendingGather``."""
        self._pending.wait()

    def close(self) -> None:
        """Wait for all, for the last time."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def _gather_(self, number: int) -> None:
        buffer, place = self._buckets[number]
        self._reduction.gather_(buffer, place)


def _let_compiled_code_see_hooks() -> None:
    """What was compiled of a module without hooks would also run for one of the same class that waits, by default."""
    import torch._dynamo  # takes a second, so not where nothing is overlapped

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()  # what was compiled before has no such guards


def _first_users(modules: Sequence[nn.Module], model: Any) -> dict[int, int]:
    """By parameters, the number of the first of ``modules`` that has them; -1: others of ``model`` do, too."""
    users: dict[int, int] = {}
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            users.setdefault(id(parameter), number)
    listed = {id(part) for module in modules for part in module.modules()}
    others: Iterable[nn.Module] = model.modules() if isinstance(model, nn.Module) else ()
    for module in others:
        if id(module) not in listed:
            users.update((id(one), -1) for one in module._parameters.values() if one is not None)
    return users


def _call_before_use(module: nn.Module, wait: WaitForParameters) -> Iterator[Any]:
    """Let ``wait`` be called when ``module`` is called, before its other hooks, and when it is saved or loaded. Returns
    handles that end that."""
    yield module.register_forward_pre_hook(wait, prepend=True)
    yield module.register_state_dict_pre_hook(wait)
    yield module.register_load_state_dict_pre_hook(wait)
