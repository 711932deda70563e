"""What only the first call of a callable does, with its arguments: a capture would do it with those of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import base_name, is_operator, is_strided, storage_key, tensors_in, written_tensors
from te_graph.graphs.guards.effects.side_effects import SideEffects
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import TensorWatch

# They take shape, dtype and device from a tensor, and no value.
_LIKE = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_ADVICE = (
    "which later calls do not: a capture would do it with those of a sample. Call it once with real data before the "
    "capture"
)


class FirstCallWatch(TensorWatch):
    """A ``TensorWatch`` of the first iteration of a warm-up that follows what depends on the values of arguments, or is
    drawn at random.

    Args:
        samples: [...] each.
    """

    def __init__(self, samples: Sequence[Tensor]) -> None:
        super().__init__(owned=samples)
        self._dependent = {storage_key(sample) for sample in samples}
        self._dependent_externals: set[int] = set()
        self._reads_values = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        depends = is_operator(func) and self._depends(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if depends:
            self._reads_values |= not _READS.isdisjoint(func.tags)
            self._dependent.update(storage_key(tensor) for tensor in tensors_in(result) if is_strided(tensor))
            for tensor, _ in written_tensors(func, args, kwargs):
                if is_strided(tensor):
                    self._dependent.add(storage_key(tensor))
                    self._dependent_externals.add(storage_key(tensor))
        return result

    def _depends(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return True
        read = tensors_in((args, kwargs)) if base_name(func) not in _LIKE else ()
        return any(is_strided(tensor) and storage_key(tensor) in self._dependent for tensor in read)

    def _writes(self, source: Source) -> bool:
        key = storage_key(source.obj)
        return key in self.externals and self.externals[key].written

    def check(self, label: str, sources: Sequence[Source], last: WarmUpWatch, before: SideEffects) -> None:
        """Refuse what the first iteration has set and the last one, seen by ``last``, has not.

        Args:
            label: of the callable.
            sources: where its code can get to, after the last iteration.
            last: the watch of that iteration.
            before: what stood there before the first one.

        Raises:
            RuntimeError: names what was set.
        """
        for source in _tensors(sources):
            key = storage_key(source.obj)
            if key in self.produced_storages and key in self._dependent:
                raise RuntimeError(
                    f"{label}: the first call makes {source.name} of its arguments or of random numbers, {_ADVICE}"
                )
            is_written = self._writes(source) and key in self._dependent_externals
            if is_written and not (key in last.externals and last.externals[key].written):
                raise RuntimeError(
                    f"{label}: the first call writes {source.name} by its arguments or by random numbers, {_ADVICE}"
                )
        # Where the last one reads values, too, the capture says so.
        reads_at_first = self._reads_values and not last.notes.refusals
        written = next((source for source in _tensors(sources) if self._writes(source)), None)
        if (reads_at_first or written) and (change := before.first(sources, with_new=False)) is not None:
            # The write is undone, and what it left in Python may be why later calls do not write so.
            does = "reads values of its arguments" if written is None else f"writes {written.name}"
            raise RuntimeError(f"{label}: the first call {does} and sets {change}, {_ADVICE}")


def _tensors(sources: Iterable[Source]) -> Iterable[Source]:
    return (source for source in sources if isinstance(source.obj, Tensor) and is_strided(source.obj))
