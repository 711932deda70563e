"""The norm that a fused layer begins with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_graph import _C
from te_graph.fp8.parallel import Shard

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension.

    Args:
        features: its size.
        eps: added to the variance, or the mean square.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the weight is what is added to 1, and begins at zero.
        device, dtype: of the parameters.

    Attributes:
        weight: [features].
        bias: [features]; None of an RMS norm.

    Raises:
        ValueError: ``normalization`` is another name.
    """

    __constants__ = ("features", "eps", "normalization", "zero_centered_gamma")

    def __init__(
        self,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if normalization not in NORMALIZATIONS:
            names = " or ".join(map(repr, NORMALIZATIONS))
            raise ValueError(f"te_graph: expected normalization to be {names}, got {normalization!r}")
        self.features, self.eps = features, eps
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        has_bias = normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make it do nothing but normalize."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        zero_centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.features}, {self.normalization}, eps={self.eps}{zero_centered}"

    def forward(self, x: Tensor, shard: Shard | None = None) -> Tensor:
        """The norm of x [..., features] in high precision, of its dtype, for a layer that is split by ``shard``."""
        # Where ranks have rows between them, gradients are those of the rows of all.
        weight, bias = self.weight, self.bias
        if shard is not None:
            weight, bias = shard.whole_bias(weight), shard.whole_bias(bias)
        dtype = x.dtype
        if self.zero_centered_gamma:  # near 1 numbers of 16 bits are far apart
            wide = torch.promote_types(dtype, torch.float32)
            x, weight = x.to(wide), weight.to(wide) + 1
            bias = None if bias is None else bias.to(wide)
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (self.features,), weight, self.eps).to(dtype)
        return F.layer_norm(x, (self.features,), weight, bias, self.eps).to(dtype)

    def fused(self) -> _C.FusedNorm:
        """The same where its result is cast."""
        is_rms = self.normalization == "RMSNorm"
        return _C.FusedNorm(self.weight, self.bias, self.eps, is_rms, self.zero_centered_gamma)
