"""The callables of a chain: whether they fit each other, and the samples in whose place results are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_graph.graphs.capture.layout import copy_with_gaps


def check_links(
    label: str, before: str, names: Sequence[str], samples: Sequence[Tensor], results: Sequence[Tensor], count: int
) -> None:
    """Raise ValueError unless the first ``count`` of the ``samples`` [...] of the callable ``label``, called ``names``,
    are as the first ``results`` [...] of the one ``before``, which it is to read."""
    for number in range(count):
        if number >= min(len(names), len(results)) or not names[number].startswith("args"):
            raise ValueError(
                f"{label}: expected a tensor as first argument and a tensor as first result of {before}, since "
                "chain=True feeds the one with the other"
            )
        for fact in ("shape", "dtype", "requires_grad"):
            expected, got = getattr(results[number], fact), getattr(samples[number], fact)
            if expected != got:
                raise ValueError(
                    f"{label}: expected sample {names[number]} with {fact} {expected}, as result {number} of {before} "
                    f"in the chain, got {got}; later samples may be left out"
                )


def in_place_of(result: Tensor | None, sample: Tensor) -> Tensor:
    """What stands for a ``result`` [...] that will be read in place: ``sample`` [...], like it, if that lies alike or
    there is no result, else a copy that does."""
    if result is None or sample.stride() == result.stride():
        return sample
    return copy_with_gaps(result).requires_grad_(sample.requires_grad)


def stand_in(sample: Tensor) -> Tensor:
    """What tells of ``sample`` [...] all but its values, without its memory."""
    return torch.empty_like(sample, device="meta").requires_grad_(sample.requires_grad)
