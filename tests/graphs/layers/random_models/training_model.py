"""Random models: how layers are kept, what they are called with, and what is done with their results."""

from __future__ import annotations

import contextlib
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .outcomes import rarely
from .training_layers import WIDTH, Attention, LayerOptions, Mlp, unpacked

TOKENS, LONGEST = 17, 9


@dataclass(frozen=True)
class ModelOptions:
    """What a model does around its layers.

    Attributes:
        kinds: classes of layers, in turn.
        count: of layers.
        container: "list", "dict", "nested" or "sequential".
        uses_first_again: the last layer is the first one.
        is_tied: the head's weight is that of the embedding.
        checkpointed: a layer with a checkpoint around it, or None.
        is_reentrant: that checkpoint.
        autocast: "on" in a region of the model's own, "off" or "".
        skip: an argument: "first" (hidden states), "weight", "none" (given as None) or "" (not given).
        config: a dictionary as argument, with "numbers", a "weight" or "tensors"; or "".
        has_flags: a tuple of constants is an argument.
        others: keywords that a layer takes by ``**``: "used", "ignored", "both" or "".
        without_grad: how many layers run under ``no_grad``.
        names_arguments: all arguments are given by keyword.
        between: what is done with results: "scaled", "added", "in place", "permuted" or "".
        sums_hidden: results are used again at the end.
        uses_extra: what layers return besides is in the loss.
        penalty: the end of names of weights that are in the loss, or "".
    """

    kinds: tuple[type[Mlp], ...]
    count: int
    container: str
    uses_first_again: bool
    is_tied: bool
    checkpointed: int | None
    is_reentrant: bool
    autocast: str
    skip: str
    config: str
    has_flags: bool
    others: str
    without_grad: int
    names_arguments: bool
    between: str
    sums_hidden: bool
    uses_extra: bool
    penalty: str

    @staticmethod
    def draw(rng: random.Random) -> ModelOptions:
        return ModelOptions(
            kinds=rng.choice(((Mlp,), (Attention,), (Mlp, Attention))),
            count=rng.choice((2, 3, 4)),
            container=rng.choice(("list", "dict", "nested", "sequential")),
            uses_first_again=rarely(rng, False, True),
            is_tied=rarely(rng, False, True),
            checkpointed=rarely(rng, None, 1, 2),
            is_reentrant=rng.random() < 0.3,
            autocast=rarely(rng, "", "on", "off"),
            skip=rarely(rng, "", "first", "weight", "none"),
            config=rarely(rng, "", "numbers", "weight", "tensors"),
            has_flags=rarely(rng, False, True),
            others=rarely(rng, "", "used", "ignored", "both"),
            without_grad=rarely(rng, 0, 1, 2),
            names_arguments=rng.random() < 0.3,
            between=rarely(rng, "", "scaled", "added", "in place", "permuted"),
            sums_hidden=rarely(rng, False, True),
            uses_extra=rng.random() < 0.5,
            penalty=rarely(rng, "", "up.weight", "gain", "norm.weight"),
        )


class Model(nn.Module):
    """Embedding, layers, norm and head: tokens [batch, n] -> {"logits": [batch, n, 17]}, with labels the loss, too.

    Attributes:
        options: may be exchanged, as may the two below.
        checkpointed: see ``ModelOptions``.
        drops_last: the last layer is passed over.
    """

    def __init__(self, options: ModelOptions, layer_options: LayerOptions) -> None:
        super().__init__()
        self.options, self.checkpointed, self.drops_last = options, options.checkpointed, False
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)
        shared = nn.Linear(WIDTH, WIDTH)
        kinds = options.kinds
        made = [kinds[number % len(kinds)](layer_options, shared) for number in range(options.count)]
        if options.uses_first_again:
            made[-1] = made[0]
        if options.container == "dict":
            self.layers = nn.ModuleDict({f"layer{number}": layer for number, layer in enumerate(made)})
        elif options.container == "nested":
            self.layers = nn.ModuleList([nn.ModuleList(made[:2]), nn.ModuleList(made[2:])])
        else:
            self.layers = nn.Sequential(*made) if options.container == "sequential" else nn.ModuleList(made)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if options.is_tied:
            self.head.weight = self.embed.weight

    def each(self) -> list[Mlp]:
        """The layers in order."""
        if isinstance(self.layers, nn.ModuleDict):
            return list(self.layers.values())
        if self.options.container == "nested":
            return [layer for part in self.layers for layer in part]
        return list(self.layers)

    def _arguments(self, number: int, first: Tensor, extra: Any) -> dict[str, Any]:  # [batch, n, 12]
        """Those of layer ``number`` that are given by keyword."""
        options, arguments = self.options, {}
        if options.skip == "first":
            arguments["skip"] = first
        elif options.skip == "none" or (options.skip == "weight" and number % 2):
            arguments["skip"] = self.bias if options.skip == "weight" else None
        if options.config == "tensors":
            arguments["config"] = {"scale": torch.tensor(0.5), "bias": self.positions[0]}
        elif options.config:
            arguments["config"] = {"scale": 0.5, "bias": self.bias if options.config == "weight" else None}
        if options.has_flags:
            arguments["flags"] = (True, "a", None)
        if options.others in ("used", "both"):
            arguments["alpha"] = 0.75
        if options.others in ("ignored", "both"):
            arguments["ignored"] = extra
        return arguments

    def _call(self, number: int, x: Tensor, mask: Tensor | None, arguments: dict[str, Any]) -> Any:
        # [batch, n, 12], [batch, n] or [batch, n, 12]
        layer = self.each()[number]
        if self.checkpointed is not None and number == self.checkpointed % len(self.each()):
            if self.options.is_reentrant:
                return checkpoint(lambda hidden: layer(hidden, mask, **arguments), x, use_reentrant=True)
            return checkpoint(layer, x, mask, use_reentrant=False, **arguments)
        return layer(x=x, mask=mask, **arguments) if self.options.names_arguments else layer(x, mask, **arguments)

    def _between(self, number: int, x: Tensor, y: Tensor) -> Tensor:  # [batch, n, 12] each
        """What becomes of the result ``y`` of layer ``number``, which was called with ``x``."""
        between = self.options.between
        if between == "scaled":
            return y * 0.9
        if between == "added":
            return y + x
        if between == "in place" and number % 2:
            return y.add_(0.1)
        return y.transpose(0, 1).contiguous().transpose(0, 1) if between == "permuted" else y

    def _autocast(self) -> AbstractContextManager:
        if not self.options.autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", torch.bfloat16, enabled=self.options.autocast == "on")

    def forward(
        self,
        ids: Tensor,  # int64 [batch, n]
        labels: Tensor | None = None,  # int64 [batch, n]
        mask: Tensor | None = None,  # bool [batch, n] or [batch, n, 12]
        extra: Any = None,
    ) -> dict[str, Tensor]:
        first = x = self.embed(ids) + self.positions[: ids.shape[1]]
        hidden, extras = [], []
        with self._autocast():
            for number in range(len(self.each()) - self.drops_last):
                with torch.no_grad() if number < self.options.without_grad else contextlib.nullcontext():
                    result = self._call(number, x, mask, self._arguments(number, first, extra))
                y, other = unpacked(result)
                extras += [] if other is None else [other.float().mean()]
                x = self._between(number, x, y)
                hidden.append(x)
        dtype = self.norm.weight.dtype
        if self.options.sums_hidden:
            x = x.to(dtype) + 0.1 * sum(one.to(dtype) for one in hidden)
        logits = self.head(self.norm(x.to(dtype)))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": self._loss(logits, labels, extras)}

    def _loss(self, logits: Tensor, labels: Tensor, extras: list[Tensor]) -> Tensor:
        # [batch, n, 17], int64 [batch, n], [] each
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if extras and self.options.uses_extra:
            loss = loss + 0.01 * sum(extras)
        if self.options.penalty:
            chosen = [p for name, p in self.named_parameters() if name.endswith(self.options.penalty)]
            loss = loss + 1e-3 * sum(p.square().sum() for p in chosen)
        return loss
