"""The form of the state of an FP8 module that goes into checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from te_graph.fp8.scale_block import Role

_VERSION, _USUAL_LENGTH = 1, 1024
HEADER = 8  # entries of a row before the history, behind the version:
LENGTH, SCALE, CAST_SCALE, IS_CAST, HAS_SCALE, LARGEST, DUE = range(1, HEADER)
IS_DUE, _NOT_DUE = 1, -1  # what is at the last one; 0 in states of before, which do not say
_SAID = {Role.INPUT: "the input", Role.WEIGHT: "the weight", Role.GRAD: "the gradient of the result"}


def check_state(state: Tensor) -> None:
    """Raise ValueError if ``state`` [...] is none that ``Member.state`` returned: what others have cast or changed has
    other scales, with which a training would go on without an error.

    Stream and capture: the headers are copied to the host, which is waited for; not inside a capture.
    """
    if state.dim() != 2 or len(state) != 3 or state.shape[1] <= HEADER or state[0, 0] != _VERSION:
        raise ValueError(f"te_graph.Linear: expected FP8 state of version {_VERSION}, got shape {list(state.shape)}")
    if state.dtype is not torch.float32:
        raise ValueError(
            f"te_graph.Linear: expected FP8 state of torch.float32, got one of {state.dtype}: a checkpoint whose "
            "tensors were cast; cast all but the FP8 state"
        )
    longest = state.shape[1] - HEADER
    for role, header in zip(Role, state[:, :HEADER].tolist(), strict=True):
        length, scales = header[LENGTH], [header[SCALE]]
        if not (length.is_integer() and 0 <= length <= longest):
            raise ValueError(
                "te_graph.Linear: expected FP8 state with a history length of a whole number up to "
                f"{longest}, got {length:g} for {_SAID[role]}"
            )
        if header[IS_CAST]:
            scales.append(header[CAST_SCALE])
        for scale in scales:
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(
                    "te_graph.Linear: expected FP8 state with a scale that is finite and positive, got "
                    f"{scale:g} for {_SAID[role]}: were the tensors of the checkpoint cast?"
                )


def without_cast(state: Tensor) -> Tensor:
    """A copy of ``state`` [3, n] that goes with another weight than that which was cast."""
    state = state.clone()
    state[Role.WEIGHT, CAST_SCALE : IS_CAST + 1] = 0
    return state


def new_state(device: torch.device, length: int = 0) -> Tensor:
    """What ``Member.state`` returns of a module that has no amaxes yet, [3, n] fp32.

    Args:
        device: where it is.
        length: of the histories; 0: none.
    """
    state = torch.zeros(3, HEADER + max(length, _USUAL_LENGTH), dtype=torch.float32, device=device)
    state[:, 0], state[:, LENGTH], state[:, SCALE], state[:, DUE] = _VERSION, length, 1, _NOT_DUE
    return state
