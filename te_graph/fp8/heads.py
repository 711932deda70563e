"""Layers whose results are logits or probabilities, where the precision of FP8 tells: heads and routers."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_graph.fp8.model_blocks import block_of

# Parts of a name ("head" of "head.fc"), wherever they stand outside of numbered blocks, and last inside of them.
HEADS = frozenset(
    (
        *("head", "lm_head", "embed_out", "unembed", "unembedding", "to_logits", "logits", "vocab_proj"),
        *("vocab_projector", "classifier", "score", "cls", "predictions", "pooler"),
    )
)
HEAD_SUFFIX = "_head"  # "value_head"
NO_HEADS = frozenset(("multi_head", "per_head"))
LAST_HEADS = frozenset(("fc", "output", "out"))  # of the model itself, where they are its last linear layer
ROUTERS = frozenset(("router",))
NARROW_ROUTERS = frozenset(("gate",))  # where their outputs are few: an FFN's gate is as wide as its input, or wider
_FEW = 4  # times fewer outputs than inputs


class Heads:
    """The heads and routers of ``model``, by its structure and by names."""

    def __init__(self, model: nn.Module) -> None:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._last = next(reversed(linear), None)
        self._by_size: dict[str, str] = {}
        for size, meaning in _sizes_of_results(model).items():
            names = [name for name, module in linear.items() if module.out_features == size]
            # An FFN may be as wide as the vocabulary by chance, where the head is elsewhere, or there is none.
            heads = [name for name in names if self._is_named_so(name, linear[name])]
            heads = heads or [name for name in names[-1:] if block_of(name) is None]
            self._by_size.update(dict.fromkeys(heads, f"a head: its outputs are {meaning} ({size})"))

    def reason_to_leave(self, name: str, module: nn.Linear) -> str | None:
        """Why the layer called ``name`` counts as a head or a router; None: it does not."""
        if name in self._by_size:
            return self._by_size[name]
        return "a head or a router, by its name" if self._is_named_so(name, module) else None

    def _is_named_so(self, name: str, module: nn.Linear) -> bool:
        parts = name.split(".")
        if not ROUTERS.isdisjoint(parts):
            return True
        if parts[-1] in NARROW_ROUTERS:
            return _FEW * module.out_features <= module.in_features
        if any(map(_is_head, parts if block_of(name) is None else parts[-1:])):
            return True
        is_square = module.out_features == module.in_features
        return name in LAST_HEADS and name == self._last and not is_square


def _is_head(part: str) -> bool:
    return part in HEADS or (part.endswith(HEAD_SUFFIX) and part not in NO_HEADS)


def _sizes_of_results(model: nn.Module) -> dict[int, str]:
    """Numbers of outputs by which heads are known, and what these are."""
    sizes: dict[Any, str] = {}
    config = getattr(model, "config", None)
    for owner, name in ((config, "num_labels"), (model, "num_classes")):
        sizes[getattr(owner, name, None)] = "the classes"
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    # One of positions may have as many rows as columns, and layers as many outputs.
    rows = [each.num_embeddings for each in embeddings if each.num_embeddings > each.embedding_dim]
    sizes[max(rows, default=None)] = "the vocabulary"
    sizes[getattr(config, "vocab_size", None)] = "the vocabulary"
    return {size: meaning for size, meaning in sizes.items() if isinstance(size, int)}
