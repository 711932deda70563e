"""Activations of an MLP, by the names of TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from te_graph import _C

_GELU_TANH = functools.partial(F.gelu, approximate="tanh")
# Name: the op's name, the function, and whether it is that of the first half of the features, times the second one.
_ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor], bool]] = {
    "gelu": ("gelu_tanh", _GELU_TANH, False),
    "geglu": ("gelu_tanh", _GELU_TANH, True),
    "gelu_erf": ("gelu", F.gelu, False),
    "geglu_erf": ("gelu", F.gelu, True),
    "relu": ("relu", F.relu, False),
    "reglu": ("relu", F.relu, True),
    "silu": ("silu", F.silu, False),
    "swiglu": ("silu", F.silu, True),
}


class Activation(nn.Module):
    """One of them.

    Args:
        name: "gelu" (by tanh, as TransformerEngine's), "gelu_erf", "relu", "silu"; "geglu", "geglu_erf", "reglu",
            "swiglu": of the first half of the features, times the second one.

    Attributes:
        is_gated: whether it has half as many results as features.

    Raises:
        ValueError: it is another name.
    """

    __constants__ = ("name", "is_gated", "_op")

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in _ACTIVATIONS:
            raise ValueError(f"te_graph: expected activation to be one of {sorted(_ACTIVATIONS)}, got {name!r}")
        self.name = name
        self._op, self._function, self.is_gated = _ACTIVATIONS[name]

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., features], or gated [..., 2 features]."""
        if not self.is_gated:
            return self._function(x)
        gate, up = x.chunk(2, dim=-1)
        return self._function(gate) * up

    def fused(self) -> _C.FusedActivation:
        """The same where its result is cast."""
        return _C.FusedActivation(self._op, self.is_gated)
