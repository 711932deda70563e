"""The state of a FlatOptimizer by parameters, whole, however it is divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from te_graph.flat.optimizer import Segment

MASTER = "master"  # of a parameter of lower precision, beside what the optimizer keeps


def flattened(values: Tensor, parameter: Tensor) -> Tensor:
    """``values`` [...] as [n], in the order of the memory of ``parameter`` [...]."""
    in_order = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)
    return in_order.as_strided((values.numel(),), (1,))


def whole_states(
    parameters: Sequence[Tensor], segments: Sequence[Sequence[Segment]], state: Any, group: ProcessGroup | None
) -> dict[int, dict[str, Any]]:
    """The state of each of ``parameters`` [...], by its number, in new memory.

    Args:
        segments: of each parameter, those of this rank.
        state: of the segments' masters.
        group: over which the others lie, all of whose ranks call this; None: there are none.
    """
    own = [[_state_of(segment, state) for segment in of_parameter] for of_parameter in segments]
    kinds = [_kinds(states) for states in own]
    if group is not None:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, kinds, group=group)
        kinds = [dict(pair for one in of_ranks for pair in one.items()) for of_ranks in zip(*everyone, strict=True)]
    whole: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        for key, kind in kinds[number].items():
            if isinstance(kind, torch.dtype):
                kind = _whole(parameter, segments[number], own[number], key, kind, group)
            whole.setdefault(number, {})[key] = kind
    return whole


def load_state(segment: Segment, parameter_state: dict[str, Any], state: Any) -> None:
    """Give the master of ``segment`` its part of ``parameter_state``, a state of the whole parameter."""
    parameter = segment.parameter
    if segment.is_copied:
        master = parameter_state.get(MASTER, parameter)
        part = flattened(master.detach().to(parameter.device), parameter)[segment.begin : segment.end]
        segment.master.data.copy_(part)
    loaded = {}
    for key, value in parameter_state.items():
        if key == MASTER:
            continue
        if isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim() > 0:
            value = flattened(value.to(parameter.device), parameter)[segment.begin : segment.end].clone()
        elif isinstance(value, Tensor):
            value = value.clone()
        loaded[key] = value
    state[segment.master] = loaded


def _state_of(segment: Segment, state: Any) -> dict[str, Any]:
    own = dict(state.get(segment.master, {}))
    return {**own, MASTER: segment.master.detach()} if own and segment.is_copied else own


def _kinds(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The dtype of what is divided as the parameter is, and the value of what is not."""
    return {key: _kind(value) for state in states for key, value in state.items()}


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype if value.dim() == 1 else value.cpu()
    return value


def _whole(
    parameter: Tensor,
    segments: Sequence[Segment],
    states: list[dict[str, Any]],
    key: str,
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> Tensor:
    """[...] like ``parameter``, put together from what all ranks have."""
    values = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    memory = values.as_strided((values.numel(),), (1,))
    for segment, state in zip(segments, states, strict=True):
        memory[segment.begin : segment.end] = state[key]
    if group is not None:
        # As integers: zeros elsewhere change no bit, as the sign of a zero would be.
        dist.all_reduce(memory.view(torch.uint8 if dtype.itemsize == 1 else torch.int32), group=group)
    return values
