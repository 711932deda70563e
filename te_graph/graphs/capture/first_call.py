"""What only the first call of a callable does, with its arguments: a capture would do it with those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import base_name, is_operator, is_strided, storage_key, tensors_in, written_tensors
from te_graph.graphs.capture.forward_steps import ForwardSteps
from te_graph.graphs.capture.host_work import HostWork
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.host_access import MethodWatch
from te_graph.graphs.tracing.refusals import READS_VALUE, host_access, refuse_plan

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
    """A ``TensorWatch`` of one of the first iterations of a warm-up that follows what depends on the values of
    arguments, or is drawn at random.

    Args:
        samples: [...] each.
    """

    def __init__(self, samples: Sequence[Tensor]) -> None:
        super().__init__(owned=samples)
        self._dependent: dict[int, int] = {}  # storages; of the same in each call the numbers are alike
        self._count = 0
        self._depend(samples)
        self._dependent_externals: set[int] = set()
        self._reads_values = False
        self._reads: _Reads | None = None  # while it is entered, for it refers to this object
        self._steps = ForwardSteps()

    def __enter__(self) -> FirstCallWatch:
        self._reads = _Reads(self._note_read)
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        reads, self._reads = self._reads, None
        reads.__exit__(*failure)

    def note_plan(self, writes: Sequence[Tensor]) -> None:
        refuse_plan()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        depends = is_operator(func) and self._depends(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if depends:
            self._reads_values |= not _READS.isdisjoint(func.tags)
            written = [tensor for tensor, _ in written_tensors(func, args, kwargs) if is_strided(tensor)]
            self._steps.add(func, (args, kwargs), self._dependent, self.externals)
            self._depend([*tensors_in(result), *written])
            self._dependent_externals.update(map(storage_key, written))
        return result

    def note_arguments(self, given: Sequence[Tensor]) -> None:
        """The forward is called with ``given`` [...], which may be copies of the samples."""
        self._dependent, self._count, self._steps = dict.fromkeys(self._dependent, -1), 0, ForwardSteps()
        self._depend(given)

    def note_results(self, results: Sequence[Tensor]) -> None:
        """The forward has returned ``results`` [...]."""
        self._steps.close(results, self._dependent, self.externals)

    def _depend(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` [...] as dependent."""
        for tensor in filter(is_strided, tensors):
            if self._dependent.get(storage_key(tensor), -1) < 0:
                self._dependent[storage_key(tensor)] = self._count
                self._count += 1

    def _depends(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return True
        return base_name(func) not in _LIKE and self._are_any_dependent(tensors_in((args, kwargs)))

    def _are_any_dependent(self, tensors: Iterable[Tensor]) -> bool:
        return any(is_strided(tensor) and storage_key(tensor) in self._dependent for tensor in tensors)

    def _note_read(self, tensors: Iterable[Tensor]) -> None:
        """Of ``tensors`` [...] the values are read, by no operator."""
        self._reads_values |= self._are_any_dependent(tensors)

    def check(
        self, label: str, sources: Sequence[Source], work: HostWork, second: FirstCallWatch | None, last: WarmUpWatch
    ) -> None:
        """Refuse what the first iteration has done and the last one, seen by ``last``, has not.

        Args:
            label: of the callable.
            sources: where its code can get to, after the last iteration.
            work: what the iterations did in Python.
            second: the watch of the second one, if the first one changed something there.
            last: the watch of the last one.

        Raises:
            RuntimeError: names what was done.
        """
        # Where the last one reads values, too, the capture says so.
        reads_at_first = self._reads_values and not last.notes.refusals
        for source in _tensors(sources):
            key = storage_key(source.obj)
            if key in self.produced_storages and (key in self._dependent or reads_at_first):
                raise RuntimeError(
                    f"{label}: the first call makes {source.name} of its arguments or of random numbers, {_ADVICE}"
                )
            is_written = _is_written(source, self) and key in self._dependent_externals
            if is_written and not _is_written(source, last):
                raise RuntimeError(
                    f"{label}: the first call writes {source.name} by its arguments or by random numbers, {_ADVICE}"
                )
        if work.drawn_at_first is not None:
            raise RuntimeError(f"{label}: the first call draws from {work.drawn_at_first}, {_ADVICE}")
        written = [source for source in _tensors(sources) if _is_written(source, self)]
        kept = work.changed_at_first
        if kept is None:  # what later calls write as well does not depend on a tensor or flag
            written, kept = [one for one in written if not _is_written(one, last)], work.kept_at_first
        if kept is not None and (written or reads_at_first):
            # The write is undone, and what it left in Python may be why later calls do not write so.
            does = f"writes {written[0].name}" if written else "reads values of its arguments"
            raise RuntimeError(f"{label}: the first call {does} and sets {kept}, {_ADVICE}")
        if second is not None and (operator := self._steps.difference(second._steps)) is not None:
            raise RuntimeError(
                f"{label}: the first call sets {work.kept_at_first} and runs {operator} differently from the second: "
                "a replay would do what later calls do. Call it once before the capture"
            )


class _Reads(MethodWatch):
    """Calls ``on_read`` with tensors [...] whose values are about to be read by no operator."""

    def __init__(self, on_read: Callable[[Iterable[Tensor]], None]) -> None:
        self._on_read = on_read

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        found = host_access(func, args, kwargs)
        if found is not None and found[1] == READS_VALUE:
            self._on_read(tensors_in((args, kwargs)))


def _is_written(source: Source, watch: TensorWatch) -> bool:
    external = watch.externals.get(storage_key(source.obj))
    return external is not None and external.written


def _tensors(sources: Iterable[Source]) -> Iterable[Source]:
    return (source for source in sources if isinstance(source.obj, Tensor) and is_strided(source.obj))
