"""Whether the callables of a chain fit each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
