"""What the code of a graphed function can read, from the arguments of one call on."""

from __future__ import annotations

import collections
import enum
import itertools
import types
import weakref
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from te_graph import _C
from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import has_subclass, is_leaf, is_project_file, is_user_file
from te_graph.common.raw_contents import items_of
from te_graph.graphs.arguments.attributes import hides_slot
from te_graph.graphs.guards.plain_values import has_snapshot
from te_graph.graphs.guards.readers.asked_state import asked_state
from te_graph.graphs.guards.readers.attribute_counts import number_of_attributes
from te_graph.graphs.guards.readers.builtin_objects import builtin_contents
from te_graph.graphs.guards.readers.class_members import ClassMembers
from te_graph.graphs.guards.readers.guarded_sources import (
    GuardedSource,
    Inlined,
    is_filled,
    is_opaque,
    name_of_slot,
    slots_of,
)
from te_graph.graphs.guards.readers.hooks_of_all import hooks_of_all
from te_graph.graphs.guards.readers.library_namespaces import (
    classes_of_tensors,
    held_by_builtins,
    held_by_class,
    held_by_module,
)
from te_graph.graphs.guards.readers.library_objects import is_generator
from te_graph.graphs.guards.readers.loggers import LOGGERS, inside_logger, loggers_by_name
from te_graph.graphs.guards.readers.lookups import (
    absent_names,
    asked_of_module,
    descriptions,
    globals_by_name,
    is_project_module,
    is_readable_module,
    modules_of,
    shows,
)
from te_graph.graphs.guards.readers.metaclasses import given_by_metaclass, has_member, member_of
from te_graph.graphs.guards.readers.parts_of_containers import parts_that_lead_on
from te_graph.graphs.guards.readers.put_attributes import put_on_object
from te_graph.graphs.guards.sources import (
    HIDES_CLASS,
    HOOK_DICTS,
    MODULE_TABLES,
    contents,
    hides_class,
    is_handle,
    name_of,
    pretends,
)
from te_graph.graphs.guards.values import keys_of
from te_graph.graphs.tracing.calls import Call
from te_graph.graphs.tracing.code_names import globals_of
from te_graph.graphs.tracing.names import (
    LOOKS_ABOVE,
    SLOTS,
    Names,
    codes_of,
    is_implicit,
    is_of_compiler,
    strings_of,
    user_classes,
)
from te_graph.graphs.tracing.python_names import is_pythons

_Kind = _C.StepKind
_MAX_DEPTH = 16
_MAIN_GRAD = "main_grad"
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HISTORY = frozenset({"is_leaf", "grad_fn"})
_OF_GRADIENTS = frozenset({"retains_grad", "grad_dtype"})  # the latter of leaves alone, in torch 2.10 and newer


@dataclass
class FunctionReader:
    """Tells a walk what the objects lead to that one call of a function meets: the function and its arguments,
    containers, closure variables, defaults, globals used, attributes, classes, modules, optimizers and their state,
    gradients.

    Attributes:
        call: function, arguments, keyword arguments.
        everything: attributes of the user's own classes count that no code names, too.
        names: that code says which may run.
        elsewhere: functions that are reached in ways that are not followed.
    """

    call: Call
    everything: bool
    names: Names
    elsewhere: Sequence[types.FunctionType] = ()
    _members: ClassMembers = field(init=False)
    _waiting: list[GuardedSource] = field(default_factory=list)  # dictionaries whose keys are objects
    _not_in_class: dict[type, set[str]] = field(default_factory=dict)  # names that were looked at

    def __post_init__(self) -> None:
        self._members = ClassMembers(self.names)

    def beginnings(self) -> Iterator[GuardedSource]:
        """Where the walk begins."""
        root = GuardedSource(self.call, "", is_ephemeral=True)
        yield root.child(self.call[0], "", _Kind.POSITION, index=0)
        for index, name in ((1, "arguments"), (2, "keyword arguments")):
            given = root.child(self.call[index], name, _Kind.POSITION, index=index)
            given.is_ephemeral = given.is_given = True
            yield given
        yield from hooks_of_all(root)
        yield from classes_of_tensors(root, self.names.said)
        yield from asked_state(root, self.names.said)
        yield from (root.child(one, f"function {one.__name__}", _Kind.KNOWN) for one in self.elsewhere)

    def is_end(self, source: GuardedSource) -> bool:
        """Whether the object there is not looked into."""
        return source.is_end

    def contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """The sources one step further."""
        obj, is_value = source.obj, source.value is not None
        if isinstance(obj, dict) and not is_value and not all(map(has_snapshot, dict.keys(obj))):
            self._waiting.append(source)
        parts = () if source.is_given else parts_that_lead_on(source, is_value)
        children = self._contents_of_value(source) if is_value else self._contents(source)
        count = None if self.names.is_enough or source.is_given else number_of_attributes(source)
        for child in itertools.chain(parts, children, filter(None, [count])):
            if type(child.obj) in weakref.ProxyTypes:  # which says that it is of the class behind it
                yield child.parent.never(f"{child.name} is a weak proxy, which cannot be compared: use weakref.ref")
            elif hides_class(child.obj):
                yield child.parent.never(f"{child.name} {HIDES_CLASS}")
            elif pretends(child.obj):
                yield child.parent.never(f"{child.name} is a proxy, which cannot be compared: hold what is behind it")
            elif isinstance(child.obj, UninitializedTensorMixin):  # torch refuses to tell anything about it
                yield child.parent.never(f"{child.name} is not initialized yet: call the lazy module once before")
            else:
                yield child.settled(source)

    def deferred(self, seen: dict[int, GuardedSource]) -> Iterator[GuardedSource]:
        """What stands under keys that are objects. Where a key is found nowhere else, the dictionary leads to it."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for source in (one for one in waiting if keys_of(one.obj) is not None):
            for number, (key, value) in enumerate(items_of(source.obj)):
                if has_snapshot(key):
                    continue
                key_source = seen.get(id(key))
                if key_source is None:
                    key_source = source.child(key, f"key {number} of {source.name}", _Kind.KNOWN).settled(source)
                    yield key_source
                name = f"{source.name}[{key_source.name or number}]"
                child = source.child(value, name, _Kind.ITEM_OF).settled(source)
                child.key_source = key_source
                yield child

    def _contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        obj, name = source.obj, source.name
        if isinstance(obj, Tensor):
            yield from self._tensor_contents(source)
        elif source.is_given:
            for child in contents(source):
                child.name = f"argument {child.index if name == 'arguments' else child.key}"
                yield child
        elif source.key in MODULE_TABLES and isinstance(source.parent.parent.obj, nn.Module):
            yield from _table_contents(source)
        elif isinstance(obj, Inlined):
            yield source.attributes().item("__wrapped__", name)
            yield from self._attributes_of_function(source, obj.__name__)
        elif isinstance(obj, types.FunctionType | type):
            if source.depth < _MAX_DEPTH:
                yield from self._class_contents(source) if isinstance(obj, type) else self._function_contents(source)
        elif isinstance(obj, types.ModuleType):
            yield from self._library_contents(source)
        elif isinstance(obj, torch.jit.ScriptModule):
            yield source.never(f"{name} is a ScriptModule, which keeps its attributes where they cannot be compared")
        elif isinstance(obj, nn.Module):
            yield from self._module_contents(source)
            yield from builtin_contents(source)
            yield from self._class_of(source, source.attributes())
        elif isinstance(obj, LOGGERS):
            if source.depth < _MAX_DEPTH:
                is_any = self.everything or not self.names.is_enough
                yield from inside_logger(source, self.names, lambda _, key: is_any or key in self.names.said)
                yield from self._slots(source)
                yield from self._class_of(source, source.attributes())
        else:
            if self.names.handles_generators and is_generator(obj):
                yield source.never(f"{name} is a generator of a derived class, whose state cannot be compared")
            yield from builtin_contents(source)
            if source.depth < _MAX_DEPTH:
                yield from self._opaque_contents(source) if is_opaque(obj) else self._object_contents(source)

    def _contents_of_value(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """The sources one step further from what is compared by value: what a class adds, and users put on it."""
        if source.depth < _MAX_DEPTH:
            if user_classes(type(source.obj)):
                yield from self._object_contents(source)
            else:
                yield from put_on_object(source, self.names.said)
                yield from self._unset(source)

    def _reads(self, obj: Any, attribute: str) -> bool:
        return self.everything or self.names.may_read(obj, attribute)

    def _tensor_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        tensor = source.obj
        if has_subclass([type(tensor)]):
            yield from self._object_contents(source)
            return
        if type(tensor) not in (Tensor, nn.Parameter):
            yield from self._class_of(source, source.attributes())
        is_parameter = is_leaf(tensor) and tensor.requires_grad
        if is_leaf(tensor):
            yield source.child(tensor.grad, name_of("grad", source.name), _Kind.GRAD)
        if tensor.requires_grad and not _HISTORY.isdisjoint(self.names.said):  # without a gradient it is a leaf
            yield source.child(tensor.is_leaf, name_of("is_leaf", source.name), _Kind.ATTRIBUTE, "is_leaf")
        for key in sorted(_OF_GRADIENTS & self.names.said):
            if key == "retains_grad" or (is_leaf(tensor) and hasattr(Tensor, key)):
                yield source.child(getattr(tensor, key), name_of(key, source.name), _Kind.ATTRIBUTE, key)
        hooks = {key: getattr(tensor, key) for key in _HOOKS_OF_TENSORS}
        # Else the guard sees that there are none. Behind one that was removed an empty dictionary is left.
        if any(value is not None for value in hooks.values()):
            for key, value in hooks.items():
                yield source.child(value, f"hooks on the gradient of {source.name}", _Kind.ATTRIBUTE, key)
        members = source.attributes()
        keys = [key for key in members.obj if not is_of_compiler(key)]
        yield from (members.item(key, name_of(key, source.name)) for key in keys)
        yield from self._slots(source)
        expected = frozenset() if source.is_ephemeral else self._members.expected(type(tensor))
        if is_parameter:
            expected |= {_MAIN_GRAD} & self.names.said
        for key in sorted(expected - members.obj.keys()):
            if not has_member(type(tensor), key):
                yield members.child(None, name_of(key, source.name), _Kind.ABSENT, key)

    def _module_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        members = source.attributes()
        for key in list(members.obj):
            if key in MODULE_TABLES:
                yield members.item(key, name_of(key.strip("_"), source.name))
            elif not is_handle(source.obj, key) and self._reads(source.obj, key):
                yield members.item(key, name_of(HOOK_DICTS.get(key, key), source.name))
        yield from self._slots(source)

    def _slots(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """What stands in slots, which modules and tensors may have, too."""
        yield from (_slot(source, key) for key in slots_of(type(source.obj)) if self._reads(source.obj, key))

    def _library_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """What the code names of a module of Python, and of a library's of what was put there."""
        if not is_readable_module(source.obj):
            yield from held_by_module(source, self.names.said)
            return
        members = source.attributes()
        said = self.names.said | {"__getattr__"}
        named = [key for key, value in list(members.obj.items()) if key in said and shows(source.obj, value)]
        yield from (members.item(key, f"{source.name}.{key}") for key in named)
        slots = (_slot(source, key) for key in slots_of(type(source.obj)) if key in said)
        yield from (slot for slot in slots if slot.is_end or shows(source.obj, slot.obj))
        if is_project_module(source.obj):
            asked = asked_of_module(source.obj, self.names) - members.obj.keys()
            for key in sorted(key for key in asked if not is_implicit(key)):
                yield members.child(None, f"{source.name}.{key}", _Kind.ABSENT, key)
            yield from self._class_of(source, members)

    def _function_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        function = source.obj
        code = function.__code__
        yield source.child(code, f"function {function.__name__}", _Kind.ATTRIBUTE, "__code__")
        if not (is_user_file(code.co_filename) and self.names.may_run(code)):
            if not is_user_file(code.co_filename):  # a wrapper, perhaps, around a function of the user's
                yield from (child for child in contents(source) if child.kind == _Kind.CELL)
            else:  # of a package, and did not run
                yield from descriptions(source, self.names.said)
            members = source.attributes()
            read = [key for key in members.obj if key in self.names.said and not is_pythons(key)]
            yield from (members.item(key, f"{function.__name__}.{key}") for key in read)
            return
        yield from contents(source)
        yield from descriptions(source, self.names.said)
        scope = source.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
        for variable in sorted(globals_of(code) - function.__globals__.keys()):  # of Python, until another one hides it
            yield scope.child(None, f"global variable {variable}", _Kind.ABSENT, variable)
        yield from self._attributes_of_function(source, function.__name__)
        yield from globals_by_name(source, self.names.said)
        yield from modules_of(source, self.names.said)
        yield from held_by_builtins(source)
        yield from loggers_by_name(source, self.names.said)
        yield from absent_names(source)

    def _attributes_of_function(self, source: GuardedSource, owner: str) -> Iterator[GuardedSource]:
        """Those that the code names; of what replays a function they are its own, not those of the function."""
        members = source.attributes()
        for key in list(members.obj):
            if key in self.names.said:
                yield members.item(key, f"{owner}.{key}")
        # Of functions of packages there are too many: of those that have run.
        codes = list(codes_of(source.obj))
        is_expected = not codes or any(is_project_file(one.co_filename) or id(one) in self.names.ran for one in codes)
        for key in sorted(self.names.asked - members.obj.keys()) if is_expected else ():
            yield members.child(None, f"{owner}.{key}", _Kind.ABSENT, key)

    def _object_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """Attributes of an object, and its class."""
        obj, owner = source.obj, source.name or "self"
        members = source.attributes()
        if members is not None and not self.names.is_enough:
            yield members  # code that asks for all attributes sees new ones
        elif members is not None:
            keys = [key for key in members.obj if self._reads(obj, key)]
            yield from (members.item(key, f"{owner}.{key}") for key in keys)
        yield from self._slots(source)
        yield from self._class_of(source, members)

    def _opaque_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """Of an object of Python's library: attributes that the code names, or that methods of it name that ran."""
        members = source.attributes()
        methods = (member for base in type(source.obj).__mro__ for member in vars(base).values())
        named = self.names.said.union(*(strings_of(one) for one in methods if self.names.has_run(one)))
        named |= self.names.looked_up_of(type(source.obj))
        for key in list(members.obj) if members is not None else ():
            if key in named and not is_implicit(key):
                yield members.item(key, f"{source.name}.{key}")
        is_wrapper = isinstance(source.obj, classmethod | staticmethod | property)
        if not (is_wrapper and source.kind == _Kind.TYPE_ITEM):  # of a class, once for each name
            yield from self._unset(source)
        for key in slots_of(type(source.obj)):
            if key in named:
                yield _slot(source, key)

    def _unset(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """Attributes that the code asks for, and neither the object there nor its class has."""
        kind, members = type(source.obj), source.attributes()
        for key in sorted(self._members.expected(kind) - members.obj.keys()) if members is not None else ():
            if not has_member(kind, key):
                yield members.child(None, f"{source.name}.{key}", _Kind.ABSENT, key)

    def _class_of(self, source: GuardedSource, members: GuardedSource | None) -> Iterator[GuardedSource]:
        """The class, and that neither the instance nor the class comes to hide what is read of the other."""
        kind, owner = type(source.obj), source.name or "self"
        above = source.child(kind, kind.__name__, _Kind.TYPE)
        yield above
        if members is None:
            return
        tables = [members.obj[table] for table in MODULE_TABLES] if isinstance(source.obj, nn.Module) else []
        read = {key for table in (members.obj, *tables) for key in self.names.said & table.keys()}
        for key in sorted(read - self._not_in_class.setdefault(kind, set())):
            self._not_in_class[kind].add(key)
            if user_classes(kind) and not has_member(kind, key):
                yield above.child(None, f"{key} of class {kind.__name__}", _Kind.TYPE_ABSENT, key)
        shown = {key for table in tables for key in table if self._reads(source.obj, key)}
        for key in sorted((self._members.hidden(kind) | self._members.expected(kind) | shown) - members.obj.keys()):
            yield members.child(None, f"{owner}.{key}", _Kind.ABSENT, key)

    def _class_contents(self, source: GuardedSource) -> Iterator[GuardedSource]:
        """What the code names of a class, also where it is hidden; of classes of torch, that they do not change."""
        kind, classes = source.obj, user_classes(source.obj)
        metaclass = type(kind)
        if user_classes(metaclass):
            at = source.child(metaclass, metaclass.__name__, _Kind.TYPE)
            yield at
            own = {key for base in kind.__mro__ for key in self.names.said & vars(base).keys() if not is_implicit(key)}
            for key in sorted(key for key in own if not has_member(metaclass, key)):  # until a descriptor hides it
                yield at.child(None, f"{key} of class {metaclass.__name__}", _Kind.TYPE_ABSENT, key)
        if classes and issubclass(kind, enum.Enum):  # code may go through them
            yield from (source.child(one, f"{source.name}.{one.name}", _Kind.KNOWN) for one in kind)
        if classes:
            yield from descriptions(source, self.names.said)
        else:
            yield from held_by_class(source, self.names.said)
        bases = source.child(kind.__mro__, f"bases of {source.name}", _Kind.ATTRIBUTE, "__mro__")
        nearer: set[str] = set()  # what classes have that are asked before
        for index, base in enumerate(kind.__mro__):
            if base in classes:
                below = source if base is kind else bases.child(base, base.__name__, _Kind.POSITION, index=index)
                for key, member in self._members.used(base).items():
                    if not isinstance(member, SLOTS):
                        at = below if key in nearer else source  # where code finds it by super(), or by this base
                        yield at.child(member, f"{source.name}.{key}", _Kind.TYPE_ITEM, key)
                yield from self._above(below, kind, index, nearer)
            nearer |= vars(base).keys()
        if classes:
            expected = self._members.expected(kind).union(given_by_metaclass(kind, self._members.hidden(metaclass)))
            if user_classes(metaclass):
                expected |= self._members.expected(metaclass)
            for key in sorted(expected):
                if not has_member(kind, key):
                    yield source.child(None, f"{source.name}.{key}", _Kind.TYPE_ABSENT, key)
        library = next((index for index, base in enumerate(kind.__mro__) if _is_of_torch(base)), None)
        if library is not None:
            base = kind.__mro__[library]
            below = source if base is kind else bases.child(base, base.__name__, _Kind.POSITION, index=library)
            yield below.child(None, f"class {base.__name__}", _Kind.TYPE_VERSION, index=_C.type_version(base))

    def _above(self, below: GuardedSource, kind: type, index: int, nearer: Set[str]) -> Iterator[GuardedSource]:
        """What ``super()`` passes by in base number ``index`` of ``kind``, which is at ``below``, and would find there
        before what is behind: of what ``nearer`` classes have."""
        if index == 0 or LOOKS_ABOVE.isdisjoint(self.names.said):
            return
        base = kind.__mro__[index]
        used = set().union(*map(self._members.used, user_classes(kind)))
        behind = collections.ChainMap(*map(vars, kind.__mro__[index + 1 :]))
        for key in sorted(key for key in (used & nearer) - vars(base).keys() if key in behind):
            name = f"{base.__name__}.{key}"
            if has_member(base, key):
                yield below.child(member_of(base, key), name, _Kind.TYPE_ITEM, key)
            else:
                yield below.child(None, name, _Kind.TYPE_ABSENT, key)


def _is_of_torch(kind: type) -> bool:
    """Tensors are left out: a capture patches methods of theirs."""
    return module_of(kind).partition(".")[0] == "torch" and not issubclass(kind, torch._C.TensorBase)


def _slot(source: GuardedSource, key: str) -> GuardedSource:
    name = name_of_slot(source, key)
    if hides_slot(type(source.obj), key):
        return source.never(f"{name} is a slot behind other code of its class, and cannot be compared")
    if is_filled(source.obj, key):
        return source.child(getattr(source.obj, key), name, _Kind.ATTRIBUTE, key)
    return source.child(None, name, _Kind.NO_ATTRIBUTE, key)


def _table_contents(source: GuardedSource) -> Iterator[GuardedSource]:
    """Submodules, parameters or buffers of a module, under the names that they have in messages."""
    owner = source.parent.name
    for child in contents(source):
        child.name = f"{owner}.{child.key}".lstrip(".") if source.key == "_modules" else name_of(child.key, owner)
        yield child
