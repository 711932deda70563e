"""A byte-level GPT from plain torch modules; te_graph appears nowhere in it."""

import math

import torch
import torch.nn.functional as F
from text_data import VOCABULARY
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        hidden: Width of the residual stream.
        heads: Number of attention heads; divides `hidden`.
        dropout: Probability used on the attention weights and on both residual branches.
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, seq, hidden] -> [batch, seq, hidden]
        x = x + self._drop(self.proj(self._attention(self.qkv(self.norm1(x)))))
        return x + self._drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def _attention(self, qkv: Tensor) -> Tensor:  # qkv: [batch, seq, 3 * hidden] -> [batch, seq, hidden]
        batch, seq, _ = qkv.shape
        # query, key, value: [batch, heads, seq, hidden / heads]
        query, key, value = qkv.view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return context.transpose(1, 2).reshape(batch, seq, -1)

    def _drop(self, x: Tensor) -> Tensor:  # x: [batch, seq, hidden] -> [batch, seq, hidden]
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Byte-level language model: embeddings, `layers` blocks, norm, linear head.

    Args:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Attention heads per block; divides `hidden`.
        seq_len: Longest sequence that the learned position embedding covers.
        dropout: Probability used inside the blocks and on the embeddings.
    """

    def __init__(self, *, layers: int, hidden: int, heads: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.bytes = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(seq_len, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.apply(_initialize)
        # 2 * layers branches are summed into the residual stream; this keeps its variance independent of the depth.
        for layer in self.layers:
            nn.init.normal_(layer.proj.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.normal_(layer.fc2.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats.

        Args:
            tokens: [batch, seq] int64, values below 256.
            targets: [batch, seq] int64, the byte that follows each token.

        Returns:
            Scalar fp32 loss, whatever the dtype of the weights.
        """
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]  # [batch, seq, hidden]
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()  # [batch, seq, 256]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(
    seed: int, device: str, dtype: torch.dtype, *, layers: int, hidden: int, heads: int, seq_len: int, dropout: float
) -> GPT:
    """Make a GPT whose initial weights depend on `seed` and the sizes alone.

    Seeds the global generators of the CPU and of every GPU. The weights are drawn on the CPU in fp32 and moved
    afterwards, so that they are the same on every device.

    Args:
        seed: Any integer that `torch.manual_seed` takes.
        device: Where the model goes.
        dtype: Dtype of all weights.
        layers, hidden, heads, seq_len, dropout: As for `GPT`.
    """
    torch.manual_seed(seed)
    model = GPT(layers=layers, hidden=hidden, heads=heads, seq_len=seq_len, dropout=dropout)
    return model.to(device=device, dtype=dtype)
