"""What the code of a callable can read of the objects in its reach: what it never names is not guarded."""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import has_subclass, is_leaf, is_project_file, is_strided
from te_graph.graphs.arguments.nest import instance_dict
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.readers.asked_state import asked_state
from te_graph.graphs.guards.readers.attribute_counts import number_of_attributes
from te_graph.graphs.guards.readers.class_state import (
    SLOTS,
    class_objects,
    class_values,
    objects_behind,
    said_in,
)
from te_graph.graphs.guards.readers.containers import inside_container
from te_graph.graphs.guards.readers.guarded_sources import is_filled, name_of_slot, slots_of
from te_graph.graphs.guards.readers.library_names import called_in_library, names_in_library
from te_graph.graphs.guards.readers.library_namespaces import (
    classes_of_tensors,
    held_by_builtins,
    held_by_class,
    held_by_module,
    holds_more,
)
from te_graph.graphs.guards.readers.library_objects import inside
from te_graph.graphs.guards.readers.loggers import LOGGERS, inside_logger, loggers_by_name
from te_graph.graphs.guards.readers.lookups import (
    absent_globals,
    absent_names,
    asked_of_module,
    descriptions,
    globals_by_name,
    is_project_module,
    is_readable_module,
    modules_of,
    shows,
)
from te_graph.graphs.guards.readers.members_by_value import members_of_users
from te_graph.graphs.guards.readers.memos import is_for_messages, outside_of_memos
from te_graph.graphs.guards.readers.metaclasses import given_by_metaclass, has_member
from te_graph.graphs.guards.readers.user_classes import (
    bases_of,
    is_library_class,
    members_below,
    members_that_ran,
    methods_of_user,
    written_by_user,
)
from te_graph.graphs.guards.sources import (
    HOOK_DICTS,
    MODULE_TABLES,
    Source,
    TensorReader,
    contents,
    name_of,
    submodules,
    tells_tensors_apart,
)
from te_graph.graphs.tracing.code_names import LOOKS_AT_ALL
from te_graph.graphs.tracing.names import MARK_OF_COMPILER, Names, codes_of, is_implicit
from te_graph.graphs.tracing.python_names import is_pythons

_Kind = _C.StepKind
_CONTAINERS = (dict, list, tuple, set, frozenset)
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
_CHECKPOINTS = frozenset({"_gradient_checkpointing_func"})  # of Hugging Face: which one it is changes no result


def names_around(root: Any) -> Names:
    """To begin with: the call of a module runs around each replay, as it does around the ``forward`` captured."""
    if not isinstance(root, nn.Module):
        return Names()
    return Names(around=frozenset(code for kind in type(root).__mro__ for code in codes_of(vars(kind).get("__call__"))))


class CallableReader(TensorReader):
    """Tells a walk what the objects lead to that a callable meets, and a guard what must be there, or must not.

    The code is that of the functions met, of those methods of classes met that it names itself, and what was seen to
    run, called by any code; of a module whose class torch wrote, or derives from such a one, also all that torch's
    methods name. Where code looks at attributes without naming them (``vars(self)``), it may read all of them. Names
    that are put together at run time are those that it was seen to ask for.

    Args:
        root: the callable.
        ignored: attributes that are passed over, as ``name`` or as ``module.path.name``.
        names: that the code says.
        elsewhere: functions that were seen to run, and no source leads to.
        holders: sources that lead to tensors which code uses, and were found where libraries are not looked into.
    """

    reach = 16

    def __init__(
        self,
        root: Any,
        ignored: Iterable[str],
        names: Names,
        elsewhere: Iterable[types.FunctionType] = (),
        holders: Iterable[Source] = (),
    ) -> None:
        super().__init__(root)
        self._ignored = _CHECKPOINTS.union(ignored)
        self._names = names
        self._looks_at_all = not names.is_enough
        self._elsewhere = elsewhere
        self._holders = holders
        self._library_names = functools.cache(lambda kind: names_in_library(kind, names.said))
        self._looked_up_of = functools.cache(names.looked_up_of)
        self._that_ran = functools.cache(lambda kind: members_that_ran(kind, names))
        self._holds_more = functools.cache(lambda kind: is_library_class(kind) and holds_more(kind, names.said))

    def beginnings(self) -> Iterator[Source]:
        """Where the walk begins."""
        root = Source(self.root, "")
        yield root
        yield from classes_of_tensors(root, self._names.said)
        yield from asked_state(root, self._names.said)
        yield from (root.child(function, function.__name__, _Kind.KNOWN) for function in self._elsewhere)
        yield from (holder.anew(root) for holder in self._holders)

    def is_end(self, source: Source) -> bool:
        """Whether the object there leads nowhere: a value, but for tuples and frozen sets with members of the user's
        classes."""
        is_tuple = isinstance(source.obj, tuple | frozenset)
        return super().is_end(source) and not (is_tuple and any(True for _ in members_of_users(source)))

    def contents(self, source: Source) -> Iterable[Source]:
        """What the object there leads to, as far as the code can name it."""
        return self._inside(source) if source.distance <= self.reach else ()

    def absent(self, source: Source) -> Iterator[str]:
        """Attributes that the object at ``source`` has not of its own, and that would change what the code does."""
        obj = source.obj
        members = vars(obj)
        kind = type(obj)
        said = self._names.said
        own = {name for name in methods_of_user(kind) if name in said}
        own.update(name for base in bases_of(kind) for name in class_values(base, said))
        own.update(name for base in bases_of(kind) for name in class_objects(base, said))
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
        yield from (name for name in names if not is_filled(source.obj, name))

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
    def puts_items(self) -> bool:
        """Whether the code may put something into a dictionary."""
        return self._names.puts_items

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
        if bases_of(type(kind)):
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
        return bool(bases_of(kind) or methods_of_user(kind) or bases_of(type(kind)))

    def functions(self, sources: Iterable[Source]) -> Iterator[types.FunctionType]:
        """Those that the user wrote, among ``sources``."""
        for source in sources:
            if source.again is None and (function := written_by_user(source.obj)) is not None:
                yield function

    def _is_followed(self, function: types.FunctionType) -> bool:
        """Those of installed packages once something ran: what their functions name may be half of the package."""
        if function is self.root or is_project_file(function.__code__.co_filename):
            return True
        return bool(self._names.ran) and self._names.may_run(function.__code__)

    def _reads(self, source: Source, name: str) -> bool:
        """Whether the code may read the attribute ``name`` of the object at ``source``."""
        if name == "te_graph" or self._is_ignored(source.name, name):
            return False
        if name in self._names.said or self._names.said & LOOKS_AT_ALL or type(source.obj) in self._names.read_whole:
            return True
        if name == "_value_" and isinstance(source.obj, enum.Enum):
            return True
        return name in self._library_names(type(source.obj)) or name in self._looked_up_of(type(source.obj))

    def _is_ignored(self, owner: str, name: str) -> bool:
        is_named = name in self._ignored or f"{owner}.{name}".lstrip(".") in self._ignored
        return is_named or name.startswith(MARK_OF_COMPILER)

    def _asked_of(self, obj: Any) -> set[str]:
        """Attributes that the code may ask ``obj`` for while it has them not."""
        if isinstance(obj, types.ModuleType):
            return set(asked_of_module(obj, self._names)) if is_project_module(obj) else set()
        kind = type(obj)
        if any("__getattr__" in vars(base) for base in bases_of(kind)):
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

    def _inside(self, source: Source) -> Iterator[Source]:
        obj = source.obj
        yield from members_of_users(source)
        if self._holds_more(type(obj)):
            yield source.child(type(obj), type(obj).__name__, _Kind.KNOWN)
        if isinstance(obj, nn.Module):
            yield from self._inside_module(source)
            yield from inside_container(source) if isinstance(obj, _CONTAINERS) else inside(source)
            return
        if isinstance(obj, (*_CONTAINERS, functools.partial)) and bases_of(type(obj)):
            yield from self._inside_object(source, source.name)
            yield from self._classes_of(source)
        if isinstance(obj, Tensor):
            yield from self._inside_tensor(source)
        elif isinstance(obj, _CONTAINERS):
            yield from inside_container(source)
        elif isinstance(obj, types.FunctionType | functools._lru_cache_wrapper):
            if isinstance(vars(obj).get("registry"), types.MappingProxyType):  # of functools.singledispatch
                yield source.attributes().item("registry", f"functions of {obj.__name__}")
            if "__wrapped__" in self._names.said & vars(obj).keys():
                yield source.attributes().item("__wrapped__", name_of("__wrapped__", source.name))
            if (function := written_by_user(obj)) is not None and function is not obj:
                yield source.child(function, source.name, _Kind.KNOWN)
                yield from self._inside_object(source, obj.__name__)
            elif function is not None and self._is_followed(function):
                yield from (child for child in contents(source) if not self._is_ignored_variable(child))
                found = globals_by_name(source, self._names.said)
                yield from (child for child in found if child.kind == _Kind.ITEM)
                yield from modules_of(source, self._names.said)
                yield from descriptions(source, self._names.said)
                yield from held_by_builtins(source)
                yield from loggers_by_name(source, self._names.said)
                yield from self._inside_object(source, obj.__name__)
        elif isinstance(obj, type):
            if not is_library_class(obj):
                yield from self._inside_class(source)
            else:
                yield from self._unless_ignored(source, held_by_class(source, self._names.said))
        elif isinstance(obj, types.ModuleType):
            if not is_readable_module(obj):
                yield from self._unless_ignored(source, held_by_module(source, self._names.said))
            else:
                yield from (one for one in self._inside_object(source, source.name) if self._shows(obj, one.obj))
                if "__getattr__" in vars(obj):
                    yield source.attributes().item("__getattr__", f"__getattr__ of {source.name}")
                if is_project_module(obj):
                    yield from self._classes_of(source)
        elif isinstance(obj, types.MethodType):
            yield from contents(source)
        elif isinstance(obj, functools.partial):
            yield from contents(source)
            yield from self._inside_object(source, source.name)
        elif isinstance(obj, LOGGERS):
            yield from inside_logger(source, self._names.said, self._reads)
            yield from self._in_slots(source)
            yield from self._classes_of(source)
        elif isinstance(obj, functools.singledispatchmethod):
            yield source.attributes().item("dispatcher", source.name)
        else:
            yield from inside(source)
            if not is_library_class(type(obj)):
                yield from self._inside_object(source, source.name or "self")
                yield from self._classes_of(source)

    def _shows(self, module: types.ModuleType, found: Any) -> bool:
        """Whether ``found``, which ``module`` has, is looked at."""
        return shows(module, found)

    def _inside_module(self, source: Source) -> Iterator[Source]:
        members = source.attributes()
        for key, value in list(members.obj.items()):
            if key == "_modules":
                yield from submodules(source)
            elif key in MODULE_TABLES and isinstance(value, dict):  # those of TorchScript are not
                table = members.item(key, name_of(key, source.name), distance=0)
                yield from (table.item(name, name_of(name, source.name), distance=0) for name in value)
            elif key not in HOOK_DICTS and key not in ("training", "forward") and self._reads(source, key):
                yield members.item(key, name_of(key, source.name))
        yield from self._in_slots(source)
        yield from self._classes_of(source)

    def _inside_tensor(self, source: Source) -> Iterator[Source]:
        """What was put on a parameter or another tensor, and the code names."""
        members = source.attributes()
        for key in list(members.obj) if members is not None else ():
            if self._reads(source, key):
                yield members.item(key, name_of(key, source.name))
        yield from self._in_slots(source)

    def _inside_object(self, source: Source, owner: str) -> Iterator[Source]:
        """Attributes, of the object itself and in slots."""
        members = source.attributes()
        if self._looks_at_all and members is not None and not isinstance(source.obj, types.ModuleType):
            yield members  # for attributes that come later
        for key in list(members.obj) if members is not None else ():
            if self._reads(source, key) and not is_pythons(key):
                yield members.item(key, f"{owner}.{key}")
        yield from self._in_slots(source)

    def _in_slots(self, source: Source) -> Iterator[Source]:
        """What stands in slots, which modules and tensors may have, too."""
        for key in slots_of(type(source.obj)):
            if self._reads(source, key) and is_filled(source.obj, key):
                yield source.child(getattr(source.obj, key), name_of_slot(source, key), _Kind.ATTRIBUTE, key)

    def _inside_class(self, source: Source) -> Iterator[Source]:
        """Constants that a class holds for all instances, and what its methods refer to."""
        said = self._names.said
        for key, value in class_values(source.obj, said).items():
            if not self._is_ignored(source.name, key):
                yield source.child(value, f"{source.name}.{key}", _Kind.ATTRIBUTE, key)
        for key, value in class_objects(source.obj, said).items():
            if not self._is_ignored(source.name, key):
                yield source.child(value, f"{source.name}.{key}", _Kind.TYPE_ITEM, key)
        for key, value in said_in(source.obj, said):  # the member itself is compared, and holds these for good
            yield from (source.child(part, f"{source.name}.{key}", _Kind.KNOWN) for part in objects_behind(value))
        for name, function in methods_of_user(source.obj).items():
            if (name in said or is_implicit(name)) and not self._names.is_around(function.__code__):
                yield source.child(function, name, _Kind.KNOWN, distance=0)
        yield from descriptions(source, said)
        if issubclass(source.obj, enum.Enum):  # code may go through them
            yield from (source.child(one, f"{source.name}.{one.name}", _Kind.KNOWN) for one in source.obj)
        yield from (source.child(base, base.__name__, _Kind.KNOWN) for base in bases_of(source.obj)[1:])
        yield from self._classes_of(source)

    def _classes_of(self, source: Source) -> Iterator[Source]:
        """The classes of an object, which lead to what their methods refer to."""
        yield from (source.child(base, base.__name__, _Kind.KNOWN) for base in bases_of(type(source.obj)))

    def _unless_ignored(self, owner: Source, held: Iterable[Source]) -> Iterator[Source]:
        return (one for one in held if not self._is_ignored(owner.name, one.key))

    def _is_ignored_variable(self, source: Source) -> bool:
        return source.name.rpartition(" variable ")[2] in self._ignored
