"""What ``graph_layers`` has captured, and what it has left out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from te_graph.common.reasons import said_by_reason

_MAX_SHOWN = 12  # reasons why layers are left out


@dataclass(frozen=True)
class GraphedLayers:
    """What ``graph_layers`` returns.

    Attributes:
        layers: names of the captured modules, in the order of their calls.
        chains: those that hand on their results without a copy, chain by chain.
        left_out: names of modules that stay eager -> why.
        graphs: how many there are: a forward and a backward for each layer and slot.
        fp8: how many of the layers compute in FP8.
        bytes: memory of the graphs.
        seconds: what the step and all captures took.
    """

    layers: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    left_out: dict[str, str]
    graphs: int
    fp8: int
    bytes: int
    seconds: float
    _modules: Sequence[weakref.ref[nn.Module]] = field(repr=False, compare=False)

    def reset(self) -> None:
        """Free the graphs: the layers run eagerly again."""
        for reference in self._modules:
            module = reference()
            handle = None if module is None else vars(module).get("te_graph")
            if handle is not None:
                handle.reset()

    def __str__(self) -> str:
        count = len(self.layers)
        lines = [
            f"{count} {'layer' if count == 1 else 'layers'} graphed: {self.graphs} graphs, "
            f"{self.bytes / 2**20:.1f} MiB, {self.seconds:.2f} s" + (f", {self.fp8} in FP8" if self.fp8 else "")
        ]
        lines += [f"  chain of {len(chain)}: {chain[0]} ... {chain[-1]}" for chain in self.chains]
        alone = [name for name in self.layers if not any(name in chain for chain in self.chains)]
        lines += [f"  {name}" for name in alone]
        reasons = said_by_reason(self.left_out)
        lines += [f"  eager: {reason}" for reason in reasons[:_MAX_SHOWN]]
        if len(reasons) > _MAX_SHOWN:
            lines.append(f"  eager: {len(reasons) - _MAX_SHOWN} more reasons in left_out")
        return "\n".join(lines)

    __repr__ = __str__
