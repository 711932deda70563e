"""What the objects lead to that the code of a callable meets, as far as it can name that."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.class_origins import is_of_python
from te_graph.common.dispatch import is_project_file
from te_graph.graphs.arguments.attributes import hides_slot, in_slot
from te_graph.graphs.guards.plain_values import is_compared_whole, is_value
from te_graph.graphs.guards.readers.asked_state import asked_state
from te_graph.graphs.guards.readers.class_state import (
    class_objects,
    class_values,
    objects_behind,
    said_in,
)
from te_graph.graphs.guards.readers.containers import inside_container
from te_graph.graphs.guards.readers.guarded_sources import NAMESPACES, is_filled, name_of_slot, slots_of
from te_graph.graphs.guards.readers.hidden_slots import hidden_slot
from te_graph.graphs.guards.readers.library_names import names_in_library
from te_graph.graphs.guards.readers.library_namespaces import (
    classes_of_tensors,
    held_by_builtins,
    held_by_class,
    held_by_module,
    holds_more,
)
from te_graph.graphs.guards.readers.library_objects import inside, is_array
from te_graph.graphs.guards.readers.loggers import LOGGERS, inside_logger, loggers_by_name
from te_graph.graphs.guards.readers.lookups import (
    descriptions,
    globals_by_name,
    is_project_module,
    is_readable_module,
    modules_of,
    shows,
)
from te_graph.graphs.guards.readers.parts_of_containers import parts_that_lead_on
from te_graph.graphs.guards.readers.put_attributes import put_on_object
from te_graph.graphs.guards.readers.user_classes import (
    bases_of,
    is_library_class,
    members_that_ran,
    methods_of_user,
    written_by_user,
)
from te_graph.graphs.guards.readers.wrapped_objects import held_by_function, held_by_object, wrappers_in
from te_graph.graphs.guards.sources import (
    HOOK_DICTS,
    MODULE_TABLES,
    Source,
    TensorReader,
    contents,
    is_handle,
    name_of,
    submodules,
)
from te_graph.graphs.tracing.code_names import LOOKS_AT_ALL
from te_graph.graphs.tracing.names import Names, is_implicit, is_of_compiler
from te_graph.graphs.tracing.python_names import is_supplied

_Kind = _C.StepKind
_CONTAINERS = (dict, list, tuple, set, frozenset)
_CHECKPOINTS = frozenset({"_gradient_checkpointing_func"})  # of Hugging Face: which one it is changes no result


class CallableContents(TensorReader):
    """Tells a walk what the objects lead to that a callable meets.

    The code is that of the functions met, of those methods of classes met that it names itself, and what was seen to
    run, called by any code; of a module whose class torch wrote, or derives from such a one, also all that torch's
    methods name. Where code looks at attributes without naming them (``vars(self)``), it may read all of them. Names
    that are put together at run time are those that it was seen to ask for.

    Args:
        root: the callable.
        ignored: attributes that are passed over, as ``name`` or as ``module.path.name``.
        names: that the code says.
        elsewhere: functions that were seen to run, and no source leads to.
        arguments: beside tensors, what may hold something for the code to read, by the names of messages.
        holders: sources that lead to tensors which code uses, and were found where libraries are not looked into.
    """

    reach = 16

    def __init__(
        self,
        root: Any,
        ignored: Iterable[str],
        names: Names,
        elsewhere: Iterable[types.FunctionType] = (),
        arguments: Iterable[tuple[str, Any]] = (),
        holders: Iterable[Source] = (),
    ) -> None:
        super().__init__(root)
        self._ignored = _CHECKPOINTS.union(ignored)
        self._names = names
        self._looks_at_all = not names.is_enough
        self._elsewhere = elsewhere
        self._arguments = arguments
        self._holders = holders
        self._bases_of, self._methods_of_user = functools.cache(bases_of), functools.cache(methods_of_user)
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
        yield from (root.child(one, name, _Kind.KNOWN) for name, one in self._arguments)
        yield from (holder.anew(root) for holder in self._holders)

    def is_argument(self, obj: Any) -> bool:
        """Whether ``obj`` is among the arguments."""
        return any(obj is one for _, one in self._arguments)

    def is_end(self, source: Source) -> bool:
        """Whether the object there leads nowhere: a value, but for tuples and frozen sets with members of the user's
        classes."""
        if not super().is_end(source):
            return False
        return not (isinstance(source.obj, tuple | frozenset) and any(True for _ in parts_that_lead_on(source)))

    def contents(self, source: Source) -> Iterable[Source]:
        """What the object there leads to, as far as the code can name it."""
        return self._inside(source) if source.distance <= self.reach else ()

    def _is_followed(self, function: types.FunctionType) -> bool:
        """Those of installed packages once something ran: what their functions name may be half of the package."""
        if function is self.root or is_project_file(function.__code__.co_filename):
            return True
        return bool(self._names.ran) and self._names.may_run(function.__code__)

    def _reads(self, source: Source, name: str) -> bool:
        """Whether the code may read the attribute ``name`` of the object at ``source``."""
        if is_handle(source.obj, name) or self._is_ignored(source.name, name):
            return False
        if name in self._names.said or self._names.said & LOOKS_AT_ALL or type(source.obj) in self._names.read_whole:
            return True
        if name == "_value_" and isinstance(source.obj, enum.Enum):
            return True
        return name in self._library_names(type(source.obj)) or name in self._looked_up_of(type(source.obj))

    def _is_ignored(self, owner: str, name: str) -> bool:
        is_named = name in self._ignored or f"{owner}.{name}".lstrip(".") in self._ignored
        return is_named or is_of_compiler(name)

    def _inside(self, source: Source) -> Iterator[Source]:
        obj = source.obj
        yield from parts_that_lead_on(source, _is_whole(obj))
        if self._holds_more(type(obj)):
            yield source.child(type(obj), type(obj).__name__, _Kind.KNOWN)
        if isinstance(obj, nn.Module):
            yield from self._inside_module(source)
            yield from inside_container(source) if isinstance(obj, _CONTAINERS) else inside(source)
            return
        if isinstance(obj, (*_CONTAINERS, functools.partial)) and self._bases_of(type(obj)):
            yield from self._inside_object(source, source.name)
            yield from self._classes_of(source)
        if isinstance(obj, Tensor):
            yield from self._inside_tensor(source)
        elif isinstance(obj, _CONTAINERS):
            yield from inside_container(source)
            yield from self._put_on(source)
        elif isinstance(obj, types.FunctionType | functools._lru_cache_wrapper):
            if isinstance(vars(obj).get("registry"), types.MappingProxyType):  # of functools.singledispatch
                yield source.attributes().item("registry", f"functions of {obj.__name__}")
            if "__wrapped__" in self._names.said & vars(obj).keys():
                yield source.attributes().item("__wrapped__", name_of("__wrapped__", source.name))
            if (function := written_by_user(obj)) is not None and function is not obj:
                yield source.child(function, source.name, _Kind.KNOWN)
                yield from held_by_function(source)
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
            elif function is None:
                yield from held_by_function(source)
                yield from self._put_on(source)
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
            yield from inside_logger(source, self._names, self._reads)
            yield from self._in_slots(source)
            yield from self._classes_of(source)
        elif isinstance(obj, functools.singledispatchmethod):
            yield source.attributes().item("dispatcher", source.name)
        else:
            found = list(inside(source))
            yield from found
            if is_of_python(type(obj)) and type(obj) not in NAMESPACES and not found:
                yield from held_by_object(source)
            if is_library_class(type(obj)):
                yield from self._put_on(source)
            else:
                yield from self._inside_object(source, source.name or "self")
                yield from self._classes_of(source)

    def _shows(self, module: types.ModuleType, found: Any) -> bool:
        """Whether ``found``, which ``module`` has, is looked at."""
        return shows(module, found)

    def _inside_module(self, source: Source) -> Iterator[Source]:
        members = source.attributes()
        for key, value in list(members.obj.items()):
            if key in MODULE_TABLES and isinstance(value, dict):  # those of TorchScript are not
                table = members.item(key, name_of(key, source.name), distance=0)
                yield from parts_that_lead_on(table, is_whole=False)
                if key != "_modules":
                    yield from (table.item(name, name_of(name, source.name), distance=0) for name in value)
            if key == "_modules":
                yield from submodules(source)
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
            if self._reads(source, key) and not is_supplied(source.obj, key):
                yield members.item(key, f"{owner}.{key}")
        yield from self._in_slots(source)

    def _put_on(self, source: Source) -> Iterator[Source]:
        return self._unless_ignored(source, put_on_object(source, self._names.said))

    def _in_slots(self, source: Source) -> Iterator[Source]:
        """What stands in slots, which modules and tensors may have, too."""
        for key in slots_of(type(source.obj)):
            if self._reads(source, key) and hides_slot(type(source.obj), key):
                yield from hidden_slot(source, key)
            elif self._reads(source, key) and is_filled(source.obj, key):
                yield source.child(in_slot(source.obj, key), name_of_slot(source, key), _Kind.ATTRIBUTE, key)

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
        for name, function in self._methods_of_user(source.obj).items():
            if (name in said or is_implicit(name)) and not self._names.is_around(function.__code__):
                yield source.child(function, name, _Kind.KNOWN, distance=0)
        for name, function in wrappers_in(source.obj):
            if name in said or is_implicit(name):
                yield source.child(function, f"{source.name}.{name}", _Kind.KNOWN, distance=0)
        yield from descriptions(source, said)
        if issubclass(source.obj, enum.Enum):  # code may go through them
            yield from (source.child(one, f"{source.name}.{one.name}", _Kind.KNOWN) for one in source.obj)
        yield from (source.child(base, base.__name__, _Kind.KNOWN) for base in self._bases_of(source.obj)[1:])
        yield from self._classes_of(source)

    def _classes_of(self, source: Source) -> Iterator[Source]:
        """The classes of an object, which lead to what their methods refer to."""
        yield from (source.child(base, base.__name__, _Kind.KNOWN) for base in self._bases_of(type(source.obj)))

    def _unless_ignored(self, owner: Source, held: Iterable[Source]) -> Iterator[Source]:
        return (one for one in held if not self._is_ignored(owner.name, one.key))

    def _is_ignored_variable(self, source: Source) -> bool:
        return source.name.rpartition(" variable ")[2] in self._ignored


def _is_whole(obj: Any) -> bool:
    """Whether the container ``obj`` is compared at once, so that no source leads to what it holds."""
    return is_compared_whole(obj) or (isinstance(obj, tuple) and is_value(obj)) or is_array(obj)
