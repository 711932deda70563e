"""Where libraries keep tensors that captured code uses: what nobody looks at as long as all tensors are found."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import is_strided, storage_key
from te_graph.graphs.guards.readers.cached_results import cached_results
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.sources import Source, walk

_Kind = _C.StepKind
_NO_HOLDERS = (types.ModuleType, types.FunctionType, types.MethodType, types.CellType)


class LibraryReader(CallableReader):
    """A ``CallableReader`` that looks into classes and objects of installed packages wherever code names them, at what
    ``functools.cache`` keeps, and at the classes that functions seen to run are of."""

    def beginnings(self) -> Iterator[Source]:
        """Where the walk begins."""
        yield from super().beginnings()
        root = Source(self.root, "")
        kinds = dict.fromkeys(kind for kind in map(_class_of, self._elsewhere) if kind is not None)
        yield from (root.child(kind, kind.__name__, _Kind.KNOWN) for kind in kinds)

    def _shows(self, module: types.ModuleType, found: Any) -> bool:
        return True

    def _inside(self, source: Source) -> Iterator[Source]:
        yield from super()._inside(source)
        if isinstance(source.obj, functools._lru_cache_wrapper):
            yield from cached_results(source)


def holders_of(reader: LibraryReader, storages: Collection[int], known: Iterable[Source]) -> list[Source]:
    """Where tensors of ``storages`` stand, as far as the furthest of their first places, and on the way there the first
    objects that are not ``known``: what code reads of these beside the tensors is to be compared, too."""
    met = {id(source.obj) for source in known}
    found: list[Source] = []
    missing = set(storages)
    for source in walk(reader):
        if not missing and source.distance > max(one.distance for one in found):
            break
        obj = source.obj
        if isinstance(obj, Tensor) and is_strided(obj) and storage_key(obj) in storages:
            found.append(source)
            missing.discard(storage_key(obj))
    tops = (next((one for one in _way_to(source) if _holds(one, met)), source) for source in found)
    return [*{id(top.obj): top for top in tops}.values(), *found]


def _way_to(source: Source) -> list[Source]:
    return [source] if source.parent is None else [*_way_to(source.parent), source]


def _holds(source: Source, met: Collection[int]) -> bool:
    is_namespace = source.kind == _Kind.INSTANCE_DICT or source.key in ("__globals__", "__closure__")
    return not (is_namespace or id(source.obj) in met or isinstance(source.obj, _NO_HOLDERS))


def _class_of(function: types.FunctionType) -> type | None:
    """The class that ``function`` is a method of, where the name that it was given leads there."""
    first, *rest = function.__qualname__.split(".")
    found = function.__globals__.get(first) if rest else None
    for name in rest[:-1]:
        found = vars(found).get(name) if isinstance(found, type) else None
    return found if isinstance(found, type) else None
