"""The state of a FlatOptimizer by parameters: their parts on this rank, or whole, however divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph.flat.segments import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

MASTER = "master"  # of a parameter of lower precision, beside what the optimizer keeps


class PartStates(Mapping[Tensor, dict[str, Any]]):
    """The state of each parameter's part on this rank, ``master`` among it.

    Attributes:
        are_made: whether a step or a load has made states. ``bool(self)`` is this, not whether the mapping is empty: a
            rank may have no part of any parameter, but torch.distributed.checkpoint calls ``step``, which has
            collectives, where states are empty.
    """

    def __init__(self, parameters: Sequence[Tensor], segments: Sequence[Segment], inner: Optimizer) -> None:
        self._parameters, self._known = parameters, {id(parameter) for parameter in parameters}
        self._segments = {id(segment.parameter): segment for segment in segments}
        self._inner = inner
        self.are_made = False

    def __bool__(self) -> bool:
        return self.are_made

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:  # [...]
        segment = self._segments.get(id(parameter))
        if segment is not None:
            state = self._inner.state.get(segment.master, {})
            return {**state, MASTER: segment.master.detach()} if segment.is_copied else state
        if id(parameter) not in self._known:
            raise KeyError(parameter)
        return {}

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter in self._parameters if self[parameter])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What ``group`` says but for its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def whole_states(
    parameters: Sequence[Tensor], segments: Sequence[Segment], inner: Optimizer, group: ProcessGroup | None
) -> dict[Tensor, dict[str, Any]]:
    """The state of each of ``parameters`` [...] that has one, in new memory.

    Args:
        segments: those of this rank.
        inner: the optimizer of their masters.
        group: over which the others lie, all of whose ranks call this; None: there are none.
    """
    own = {id(segment.parameter): segment for segment in segments}
    parts = [own.get(id(parameter)) for parameter in parameters]
    states = [{} if part is None else _state_of(part, inner) for part in parts]
    kinds = [
        {} if part is None else {key: _kind(value, part) for key, value in state.items()}
        for part, state in zip(parts, states, strict=True)
    ]
    if group is not None:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, kinds, group=group)
        kinds = [dict(pair for one in of_ranks for pair in one.items()) for of_ranks in zip(*everyone, strict=True)]
    whole: dict[Tensor, dict[str, Any]] = {}
    for parameter, part, state, of_parameter in zip(parameters, parts, states, kinds, strict=True):
        for key, kind in of_parameter.items():
            if isinstance(kind, torch.dtype):
                # A rank whose master is its parameter, widened, has not listed it, and still has values to contribute.
                value = part.master_now() if part is not None and key == MASTER else state.get(key)
                kind = _whole(parameter, part, value, kind, group)
            whole.setdefault(parameter, {})[key] = kind
    return whole


def check_shapes(segment: Segment, parameter_state: Mapping[str, Any]) -> None:
    """Raise ValueError where ``parameter_state`` can be no state of the parameter of ``segment``."""
    shape = segment.parameter.shape
    for key, value in parameter_state.items():
        is_like_one = isinstance(value, Tensor) and (key == MASTER or (value.dim() > 0 and value.numel() > 1))
        if is_like_one and value.shape != shape:
            raise ValueError(
                f"FlatOptimizer.load_state_dict: expected {key} of {segment.name} to have the shape {list(shape)}, got "
                f"{list(value.shape)}: it is of other parameters, or of these in another order"
            )


def load_part(segment: Segment, parameter_state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``parameter_state``, a state of the whole parameter, that is for ``segment``; its master gets it."""
    # torch.distributed.checkpoint puts an empty dictionary for what a flattened state has not.
    parameter_state = {
        key: value for key, value in parameter_state.items() if not (isinstance(value, dict) and not value)
    }
    if segment.is_copied:
        segment.master.data.copy_(segment.part_of(parameter_state.get(MASTER, segment.parameter).detach()))
    part = {}
    for key, value in parameter_state.items():
        if isinstance(value, Tensor):
            is_divided = value.shape == segment.parameter.shape and value.dim() > 0
            value = (segment.part_of(value) if is_divided else value).clone()
        if key != MASTER:
            part[key] = value
    return part


def _state_of(segment: Segment, inner: Optimizer) -> dict[str, Any]:
    """What ``inner`` keeps of the master of ``segment``, with the master if there is that, or if the parameter is a
    rounded one. Otherwise nothing: torch's optimizers take any state as a sign that a parameter has been stepped."""
    state = inner.state.get(segment.master, {})
    if not segment.is_copied or not (state or _is_more_precise(segment)):
        return state
    return {**state, MASTER: segment.master_now()}


def _is_more_precise(segment: Segment) -> bool:
    return not torch.equal(segment.master_now(), segment.data.to(segment.master.dtype))


def _kind(value: Any, segment: Segment) -> Any:
    """The dtype of what is divided as the parameter is, and the value of what is not."""
    if isinstance(value, Tensor):
        return value.dtype if value.dim() > 0 and value.shape == segment.master.shape else value.to("cpu", copy=True)
    return value


def _whole(
    parameter: Tensor, part: Segment | None, value: Tensor | None, dtype: torch.dtype, group: ProcessGroup | None
) -> Tensor:
    """[...] like ``parameter``, put together from what all ranks have: here ``value`` [n] of ``part``, or nothing."""
    values = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    memory = values.as_strided((values.numel(),), (1,))
    if part is not None and value is not None:
        memory[part.begin : part.end] = value.reshape(-1)
    if group is not None and values.numel() > 0:
        # As integers: zeros elsewhere change no bit, as the sign of a zero would be.
        dist.all_reduce(memory.view(torch.uint8), group=group)
    return values
