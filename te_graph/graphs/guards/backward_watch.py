"""Which objects Python code gets hold of that runs in a backward, under whatever names.

The forward names what it hands over: to ``ctx``, to variables and defaults of hooks, to ``functools.partial``. The code
in the backward has names of its own for it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from te_graph.graphs.arguments.attributes import in_slot, instance_dict
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, is_bulk, is_value
from te_graph.graphs.guards.readers.guarded_sources import VIEWS, is_filled, slots_of
from te_graph.graphs.guards.readers.library_objects import is_array
from te_graph.graphs.guards.sources import MODULE_TABLES, Source
from te_graph.graphs.tracing.code_names import LOOKS_AT_ALL, strings_in
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.subscripts import reads_unsaid_keys

# Attributes by which Python's library gets to what an object holds.
WITHIN = frozenset({"__self__", "__func__", "func", "args", "keywords", "data", "maps", "_value_"})
_NO_HOLDERS = (Tensor, type, types.ModuleType, types.FunctionType, types.CodeType)
_MAX_STEPS = 8
_MAX_OBJECTS = 10_000  # of one start of a function


class BackwardWatch(CodeWatch):
    """A ``CodeWatch`` of a backward that also notes which objects the user's code there can read.

    These are what its arguments and variables lead to when a function starts: by attributes that the function names,
    and by the members of containers. What it gives on, or reads by methods, the functions there are given in turn.

    Args:
        sources: where the callable can get to; no other objects are noted.
        aside: as of a ``CodeWatch``.

    Attributes:
        held: the identities of those objects, but for values and tensors.
    """

    def __init__(self, sources: Iterable[Source], aside: Iterable[Any] = ()) -> None:
        super().__init__(aside)
        found = (source.obj for source in sources)
        self._known = {id(obj): obj for obj in found if not (isinstance(obj, Tensor) or is_value(obj))}
        self.held: set[int] = set()
        # How far from its variables some code was when it looked into one of the known objects, by their identities.
        self._looked_into: dict[tuple[int, int], int] = {}

    def _wants_variables(self, code: types.CodeType) -> bool:
        return True

    def _note_variables(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        super()._note_variables(code, variables)
        met: dict[int, Any] = {}
        queue = deque((obj, 0) for obj in variables.values())
        while queue and len(met) < _MAX_OBJECTS:
            obj, distance = queue.popleft()
            if id(obj) in met or isinstance(obj, Tensor) or is_value(obj):
                continue
            met[id(obj)] = obj
            look = (id(code), id(obj))
            if distance < self._looked_into.get(look, _MAX_STEPS):
                queue.extend((member, distance + 1) for member in _members_read(obj, code))
                if id(obj) in self._known:  # else another object may come to have its identity
                    self._looked_into[look] = distance
            if id(obj) in self._known:
                self.held.add(id(obj))


def _members_read(obj: Any, code: types.CodeType) -> Iterator[Any]:
    """What ``code`` may read of ``obj``."""
    if isinstance(obj, _NO_HOLDERS) or is_bulk(obj):
        return
    names = strings_in(code)
    if isinstance(obj, dict):
        is_any = reads_unsaid_keys(code)
        items = itertools.islice(dict.items(obj), MAX_MEMBERS)
        yield from (value for key, value in items if is_any or type(key) is not str or key in names)
    elif isinstance(obj, list | tuple | set | frozenset | deque):
        yield from itertools.islice(obj, MAX_MEMBERS)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, obj.args, obj.keywords)
    elif isinstance(obj, types.MethodType):
        yield obj.__self__
    elif isinstance(obj, weakref.ref):
        yield weakref.ref.__call__(obj)
    elif isinstance(obj, VIEWS):
        yield gc.get_referents(obj)[0]
    elif is_array(obj):  # NumPy and memoryview have names for what they are views of
        yield from (getattr(obj, key) for key in ("base", "obj") if hasattr(obj, key))
    members = instance_dict(obj) or {}
    tables = [members.get(table) for table in MODULE_TABLES] if isinstance(obj, nn.Module) else []
    is_any = not LOOKS_AT_ALL.isdisjoint(names)
    for table in (members, *filter(None, tables)):
        yield from (value for key, value in list(table.items()) if is_any or key in names or key in WITHIN)
    yield from (in_slot(obj, key) for key in slots_of(type(obj)) if (is_any or key in names) and is_filled(obj, key))
