"""A transformer layer of plain torch that computes what ``te_graph.TransformerLayer`` does outside of FP8."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-5


class PlainLayer(nn.Module):
    """A causal layer without dropout: LayerNorm, GELU by tanh, biases; or RMSNorm, SwiGLU, no biases.

    Args:
        layer: a ``te_graph.TransformerLayer``, whose parameters are copied, in their order.
        dtype: of the copies.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        attention, mlp = layer.self_attention, layer.layernorm_mlp
        self.groups, self.heads_per_group, self.head_dim = (
            attention.groups,
            attention.heads_per_group,
            attention.head_dim,
        )
        self.is_llama = mlp.activation.is_gated
        self.names = {name: name.replace(".", "_") for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            self.register_parameter(self.names[name], nn.Parameter(parameter.detach().to(dtype, copy=True)))

    def forward(self, x: Tensor) -> Tensor:
        """The layer of x [seq, batch, hidden]."""
        qkv = self._linear("self_attention.layernorm_qkv.linear", self._norm("self_attention.layernorm_qkv", x))
        x = x + self._linear("self_attention.proj", self._attend(qkv))
        hidden = self._linear("layernorm_mlp.fc1", self._norm("layernorm_mlp", x))
        if self.is_llama:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return x + self._linear("layernorm_mlp.fc2", hidden)

    def _attend(self, qkv: Tensor) -> Tensor:
        """The attention of qkv [seq, batch, groups of queries, key and value], [seq, batch, heads of queries]."""
        parts = qkv.unflatten(-1, (self.groups, self.heads_per_group + 2, self.head_dim)).permute(1, 2, 3, 0, 4)
        query, key, value = (part.flatten(1, 2) for part in parts.split([self.heads_per_group, 1, 1], dim=2))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.heads_per_group > 1)
        return y.permute(2, 0, 1, 3).flatten(2)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """The norm before a product, of x [seq, batch, hidden]."""
        weight, bias = self._of(f"{name}.layer_norm.weight"), self._of(f"{name}.layer_norm.bias")
        if self.is_llama:
            return F.rms_norm(x, x.shape[-1:], weight, EPSILON)
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """x [seq, batch, in] -> [seq, batch, out]."""
        return F.linear(x, self._of(f"{name}.weight"), self._of(f"{name}.bias"))

    def _of(self, name: str) -> Tensor | None:
        """The parameter [...] that the layer calls so, or None."""
        return getattr(self, self.names[name]) if name in self.names else None
