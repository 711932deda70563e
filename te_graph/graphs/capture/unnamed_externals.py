"""Tensors that a callable uses and that no name in its code leads to: found in libraries, or held by an option."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.common.reasons import Reported
from te_graph.graphs.capture.options import Options
from te_graph.graphs.guards.build_guard import unnamed
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.readers.library_reader import LibraryReader, holders_of
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.externals import External, TensorWatch

_log = logging.getLogger("te_graph")
_Kind = _C.StepKind
KEEPS = "keep"  # the value of externals= by which they are held


class UnnamedExternals:
    """The external tensors of one callable that the names in its code do not lead to.

    Args:
        label: of the callable.
        root: the callable.
        options: as the user gave them.
        arguments: what its arguments are beside tensors, and may hold what code reads, by the names of messages.
        reported: warnings that the callables captured together have given.

    Attributes:
        holders: where libraries keep such tensors.
        reader_of: makes readers that know the holders.
        kept: tensors that are found nowhere, each with its version counter, if the options say to hold them.
    """

    def __init__(
        self, label: str, root: Any, options: Options, arguments: Sequence[tuple[str, Any]], reported: Reported
    ) -> None:
        self._label = label
        self._root = root
        self._options = options
        self._reported = reported
        self.holders: list[Source] = []
        self.kept: list[Source] = []
        self.reader_of = functools.partial(
            CallableReader, root, options.ignore_attributes, arguments=arguments, holders=self.holders
        )

    def look_for(self, sources: list[Source], walker: SourceWalker, watch: TensorWatch) -> bool:
        """Look in libraries for what the last iteration, seen by ``watch``, used and no source leads to.

        Returns:
            Whether another warm-up is needed, to see whether what was found changes and iterations use the same.
        """
        missing = unnamed(sources, watch.externals.keys())
        if missing:
            reader = LibraryReader(self._root, self._options.ignore_attributes, walker.names, walker.functions)
            self.holders += holders_of(reader, missing, sources)
        return bool(missing) and (bool(self.holders) or self._options.externals == KEEPS)

    def keep(self, sources: list[Source], last: TensorWatch, others: Iterable[TensorWatch]) -> list[Source]:
        """``sources``, and with ``externals="keep"`` one more for each tensor that the last iteration used and none of
        them leads to.

        Args:
            last: saw the last iteration.
            others: saw earlier ones that found, as later calls do, what the callable keeps.

        Raises:
            RuntimeError: a tensor cannot be held: another iteration used another one, or a replay would change it.
        """
        if self._options.externals != KEEPS:
            return sources
        lost = _uses(sources, last)
        for watch in others if lost else ():
            _check_same(self._label, lost, _uses(sources, watch))
        for external in lost:
            tensor = _tensor_of(self._label, external)
            facts = f"{tensor.dtype} of shape {list(tensor.shape)}"
            at = f"{external.op} at {external.site}"
            name = f"the tensor of {facts} that externals={KEEPS!r} holds ({at})"
            source = sources[0].child(tensor, name, _Kind.KNOWN)
            self.kept += [source, source.child(tensor._version, f"version of {name}", _Kind.ATTRIBUTE, "_version")]
            if self._reported.is_first(f"{facts}, {at}"):
                _log.warning(
                    "%s: externals=%r holds a tensor of %s that no name in the code leads to, used by %s: replays go "
                    "on with it where its library takes another one",
                    *(self._label, KEEPS, facts, at),
                )
        return [*sources, *self.kept]


def _uses(sources: list[Source], watch: TensorWatch) -> list[External]:
    """What ``watch`` saw used and ``sources`` do not lead to, in order."""
    keys = unnamed(sources, watch.externals.keys())
    return [external for key, external in watch.externals.items() if key in keys]


def _check_same(label: str, lost: list[External], others: list[External]) -> None:
    """Refuse two iterations that use different tensors, or the same ones at different places."""
    one, other = (list(map(_place_of, some)) for some in (lost, others))
    if one != other:
        shared = set(one) & set(other)
        odd = next((each for each in [*lost, *others] if _place_of(each) not in shared), lost[0])
        raise RuntimeError(
            f"{label}: externals={KEEPS!r} cannot hold what {odd.op} uses, a tensor of shape {list(odd.tensor.shape)}: "
            f"two warm-ups read different tensors there, so replays would go on with one of them; at {odd.site}"
        )


def _place_of(external: External) -> tuple[int, str, str]:
    return storage_key(external.tensor), external.op, external.site


def _tensor_of(label: str, external: External) -> Tensor:
    """The very object that was used.

    Raises:
        RuntimeError: it cannot be held.
    """
    tensor = next(iter(external.originals), None)
    if tensor is None or tensor.requires_grad:
        reason = "requires a gradient: pass it as an argument"
    elif external.written:
        reason = "is changed in place by the callable: pass it as an argument or register it as a buffer"
    elif tensor.is_inference():
        reason = "was made in inference mode and counts no changes: let the library make it outside of that"
    else:
        return tensor
    raise RuntimeError(
        f"{label}: externals={KEEPS!r} cannot hold a tensor of shape {list(external.tensor.shape)} that {external.op} "
        f"uses: it {reason}; at {external.site}"
    )
