"""What parameters say of how ranks have them, in attributes by the names of Megatron-LM and TransformerEngine."""

from __future__ import annotations

from torch import Tensor, nn


def mark_as_split(parameter: nn.Parameter | None) -> None:
    """Say of ``parameter`` [...], if there is one, that ranks of its tensor-parallel group have different parts."""
    if parameter is not None:
        parameter.tensor_model_parallel = True


def is_split(parameter: Tensor) -> bool:
    """Whether ranks of the tensor-parallel group have different parts of ``parameter`` [...]; else all have all."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def is_copy(parameter: Tensor) -> bool:
    """Whether ``parameter`` [...] is that of another pipeline stage, too, where it counts."""
    return bool(getattr(parameter, "shared", False))
