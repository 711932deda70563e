"""What the code of a callable can read of the objects in its reach: what it never names is not guarded."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import has_subclass, is_leaf, is_project_file, is_strided
from te_graph.graphs.arguments.attributes import hides_slot, instance_dict
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.readers.attribute_counts import number_of_attributes
from te_graph.graphs.guards.readers.callable_contents import CallableContents
from te_graph.graphs.guards.readers.class_state import class_objects, class_values
from te_graph.graphs.guards.readers.guarded_sources import is_filled, slots_of
from te_graph.graphs.guards.readers.library_names import called_in_library
from te_graph.graphs.guards.readers.lookups import (
    absent_globals,
    absent_names,
    asked_of_module,
    globals_by_name,
    is_project_module,
)
from te_graph.graphs.guards.readers.memos import is_for_messages, outside_of_memos
from te_graph.graphs.guards.readers.metaclasses import given_by_metaclass, has_member
from te_graph.graphs.guards.readers.user_classes import (
    bases_of,
    is_library_class,
    members_below,
    written_by_user,
)
from te_graph.graphs.guards.sources import MODULE_TABLES, Source, tells_tensors_apart
from te_graph.graphs.tracing.names import SLOTS, Names, codes_of, is_implicit
from te_graph.graphs.tracing.python_names import is_pythons

_Kind = _C.StepKind
_GOES_THROUGH_TABLES = frozenset(
    (
        *("_modules", "_parameters", "_buffers", "children", "named_children", "modules", "named_modules"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "apply"),
    )
)
# By the names of their classes. A graph of torch.fx makes its code anew when it is copied, and has its source as an
# attribute; what torch.compile made runs its original in captures (wrappers.py).
_EXCHANGED = {"GraphModule": ("forward", "__call__"), "OptimizedModule": ("__call__",)}
_AROUND = ("__call__", "_call_impl")  # of the callable itself: they run around each replay


def names_around(root: Any) -> Names:
    """To begin with: the call of a module runs around each replay, as it does around the ``forward`` captured."""
    if not isinstance(root, nn.Module):
        return Names()
    return Names(around=frozenset(code for kind in type(root).__mro__ for code in codes_of(vars(kind).get("__call__"))))


class CallableReader(CallableContents):
    """Tells a walk what the objects lead to that a callable meets, and a guard what must be there, or must not."""

    def absent(self, source: Source) -> Iterator[str]:
        """Attributes that the object at ``source`` has not of its own, and that would change what the code does."""
        obj = source.obj
        members = instance_dict(obj)
        kind = type(obj)
        said = self._names.said
        own = {name for name in self._methods_of_user(kind) if name in said}
        own.update(name for base in self._bases_of(kind) for name in class_values(base, said))
        own.update(name for base in self._bases_of(kind) for name in class_objects(base, said))
        own |= self._looked_up_of(kind)
        asked = {name for name in self._asked_of(obj) if not has_member(kind, name)}
        tables = [members[table] for table in MODULE_TABLES] if isinstance(obj, nn.Module) else []
        if isinstance(obj, nn.Module):
            own.discard("forward")  # see guard_module()
            own.update(called_in_library(kind))
        read = said | (self._library_names(kind) if tables else frozenset())
        hidden = {name for table in tables for name in table if name in read}  # until the instance has it
        for name in sorted((own | asked | hidden) - members.keys()):
            is_there = name not in hidden and any(name in table for table in tables)
            if not (is_there or is_pythons(name) or self._is_ignored(source.name, name)):
                yield name

    def missing_variables(self, function: Source) -> Iterator[Source]:
        """Variables and modules that are not there, and that ``function`` may look up, by ``globals()`` too."""
        yield from absent_names(function)
        yield from absent_globals(function)
        found = globals_by_name(function, self._names.said) if self._is_followed(function.obj) else ()
        yield from (child for child in found if child.kind == _Kind.ABSENT)

    def empty_slots(self, source: Source) -> Iterator[str]:
        """Of the slots of the object at ``source`` those in which there is nothing, and which the code may read."""
        names = (name for name in slots_of(type(source.obj)) if self._reads(source, name))
        yield from (name for name in names if not (is_filled(source.obj, name) or hides_slot(type(source.obj), name)))

    def may_use(self, source: Source) -> bool:
        """Whether a tensor at ``source`` may be used where no dispatcher sees it: by functions of extension modules."""
        tensor = source.obj
        if not (self._names.calls_extensions and isinstance(tensor, Tensor)):
            return False
        return is_strided(tensor) and not has_subclass([type(tensor)]) and is_leaf(tensor) and _C.has_memory(tensor)

    def compared(self, sources: list[Source]) -> list[Source]:
        """Those of ``sources`` where something else matters to the code."""
        return outside_of_memos(sources, self._names.ran)

    @property
    def names(self) -> Names:
        """Those that the code says."""
        return self._names

    def goes_through_tables(self, module: nn.Module) -> bool:
        """Whether the order of submodules, parameters or buffers of ``module`` may matter to the code."""
        return bool(_GOES_THROUGH_TABLES & (self._names.said | self._library_names(type(module))))

    def tells_tensors_apart(self, sources: Iterable[Source]) -> bool:
        """Whether the code may tell which object a tensor at ``sources`` is."""
        return tells_tensors_apart(self._names, sources)

    def counts(self, sources: Iterable[Source]) -> Iterator[Source]:
        """How many attributes objects at ``sources`` have, for code that may go through them."""
        for source in sources if self._looks_at_all else ():
            ignored = {name.removeprefix(f"{source.name}.") for name in self._ignored}
            if source.again is None and (count := number_of_attributes(source, ignored)) is not None:
                yield count

    def members(self, obj: Any) -> Iterator[tuple[str, Any]]:
        """What the class of ``obj``, or a class itself, has that the code may use, by name; NotImplemented where code
        asks for something that is not there."""
        kind = plain_class(obj if isinstance(obj, type) else type(obj))
        hidden = given_by_metaclass(kind, self._names.said | self._that_ran(type(kind)))
        asked = self._asked_of(obj) | self._asked_of(kind) | self._own_names(obj)
        yield from self._members(obj, kind, asked.union(hidden))

    def members_of_metaclass(self, obj: Any) -> Iterator[tuple[str, Any]]:
        """The same of the metaclass of that class, where the user wrote it, for code that asks the class itself."""
        kind = plain_class(obj if isinstance(obj, type) else type(obj))
        if self._bases_of(type(kind)):
            own = (self._names.said & vars(base).keys() for base in kind.__mro__)  # may come to be hidden, too
            yield from self._members(kind, type(kind), self._asked_of(kind).union(*own))

    def _members(self, obj: Any, kind: type, asked: Set[str]) -> Iterator[tuple[str, Any]]:
        """What ``kind``, the class of ``obj``, has that the code may use, and of ``asked`` what it has not."""
        is_module = issubclass(kind, nn.Module)
        names = self._names.said | self._looked_up_of(kind)
        names |= self._library_names(kind) | {"_call_impl"} if is_module else frozenset()
        around = set(_AROUND) if is_module and obj is self.root else set()
        around |= {name for base in kind.__mro__ for name in _EXCHANGED.get(base.__name__, ())}
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            found.update(vars(base))
        for name in sorted(found.keys() - around):
            is_method = isinstance(found[name], types.FunctionType) and is_implicit(name)
            is_method = is_method or name in self._that_ran(kind)
            is_shown = is_method or not (is_pythons(name) or isinstance(found[name], SLOTS))
            if not (is_method or name in names) or not is_shown or is_for_messages(kind, name):
                continue
            if not self._is_ignored(kind.__name__, name):
                yield name, found[name]
        absent = sorted(asked - found.keys())
        yield from ((name, NotImplemented) for name in absent if not self._is_ignored(kind.__name__, name))

    def members_below(self, sources: Iterable[Source]) -> Iterator[tuple[type, str, Any]]:
        """What the code gets to by ``super()`` of objects and classes at ``sources``, as (class, name, member)."""
        kinds = dict.fromkeys(one.obj if isinstance(one.obj, type) else type(one.obj) for one in sources)
        replayed = plain_class(type(self.root)) if isinstance(self.root, nn.Module) else None
        for kind in map(plain_class, itertools.filterfalse(is_library_class, kinds)):
            below = members_below(kind, self._names.ran, self._names.said)
            yield from (each for each in below if kind is not replayed or each[1] not in _AROUND)

    def is_users(self, kind: type) -> bool:
        """True for classes that the user wrote, or whose methods or class he wrote."""
        return bool(self._bases_of(kind) or self._methods_of_user(kind) or bases_of(type(kind)))

    def functions(self, sources: Iterable[Source]) -> Iterator[types.FunctionType]:
        """Those that the user wrote, among ``sources``."""
        for source in sources:
            if source.again is None and (function := written_by_user(source.obj)) is not None:
                yield function

    def _asked_of(self, obj: Any) -> set[str]:
        """Attributes that the code may ask ``obj`` for while it has them not."""
        if isinstance(obj, types.ModuleType):
            return set(asked_of_module(obj, self._names)) if is_project_module(obj) else set()
        kind = type(obj)
        if any("__getattr__" in vars(base) for base in self._bases_of(kind)):
            return self._names.said
        if isinstance(obj, type):
            is_asked = self.is_users(obj)
        elif isinstance(obj, types.FunctionType | functools._lru_cache_wrapper):  # of libraries there are too many
            function = written_by_user(obj)
            is_asked = function is not None and is_project_file(function.__code__.co_filename)
        else:
            is_asked = True
        return self._names.asked | self._looked_up_of(kind) if is_asked else set()

    def _own_names(self, obj: Any) -> set[str]:
        """Attributes that the code names and ``obj`` has of its own, in whose place its class may come to have a
        descriptor."""
        members = instance_dict(obj)
        if members is None or isinstance(obj, type):
            return set()
        tables = [members[table] for table in MODULE_TABLES] if isinstance(obj, nn.Module) else []
        return set().union(*(self._names.said & table.keys() for table in (members, *tables)))
