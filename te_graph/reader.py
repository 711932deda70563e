"""What an object leads to: of its attributes and its class, what code may read that says certain names."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import importlib.util
import io
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import has_subclass, is_own_file, is_user_file
from te_graph.facts import VIEWS, WRAPPERS, Fact, Inlined, is_opaque, slots_of
from te_graph.homes import HOOK_DICTS, contents, name_of
from te_graph.names import Names, globals_of, imports_of, is_implicit, user_classes
from te_graph.values import value_of

_Kind = _C.StepKind
_MAX_DEPTH = 16
_MAIN_GRAD = "main_grad"
_TABLES = ("_parameters", "_buffers", "_modules")
_CODE = (types.FunctionType, functools.cached_property, *WRAPPERS)


@dataclass(frozen=True)
class Reader:
    """Tells what the object at a place leads to.

    Attributes:
        names: that code says which may run.
        everything: attributes count that no code names, too.
    """

    names: Names
    everything: bool

    def contents(self, fact: Fact) -> Iterator[Fact]:
        """The places one step further."""
        obj, name = fact.obj, fact.name
        if isinstance(obj, Tensor):
            yield from self._tensor_contents(fact)
        elif fact.is_given:
            for child in contents(fact):
                child.name = f"argument {child.index if name == 'arguments' else child.key}"
                yield child
        elif fact.key in _TABLES and isinstance(fact.parent.parent.obj, nn.Module):
            yield from _table_contents(fact)
        elif isinstance(obj, Inlined):
            yield fact.attributes().item("__wrapped__", name)
        elif isinstance(obj, types.FunctionType):
            if fact.depth < _MAX_DEPTH:
                yield from self._function_contents(fact)
        elif isinstance(obj, type):
            if user_classes(obj) and fact.depth < _MAX_DEPTH:
                yield from self._class_contents(fact)
        elif isinstance(obj, types.ModuleType):
            yield from self._library_contents(fact)
        elif isinstance(obj, nn.Module):
            yield from self._module_contents(fact)
            yield from self._class_of(fact, fact.attributes())
        else:
            yield from _builtin_contents(fact)
            if not is_opaque(obj) and fact.depth < _MAX_DEPTH:
                yield from self._object_contents(fact)

    def _reads(self, obj: Any, attribute: str) -> bool:
        return self.everything or self.names.may_read(obj, attribute)

    def _tensor_contents(self, fact: Fact) -> Iterator[Fact]:
        tensor = fact.obj
        if has_subclass([type(tensor)]):
            yield from self._object_contents(fact)
            return
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if is_parameter or (tensor.is_leaf and tensor.grad is not None):
            yield fact.child(tensor.grad, name_of("grad", fact.name), _Kind.GRAD)
        members = fact.attributes()
        yield from (members.item(key, name_of(key, fact.name)) for key in list(members.obj))
        if is_parameter:
            expected = self.names.optional | ({_MAIN_GRAD} & self.names.said)
            for key in expected - members.obj.keys():
                if not hasattr(type(tensor), key):
                    yield members.child(None, name_of(key, fact.name), _Kind.ABSENT, key)

    def _module_contents(self, fact: Fact) -> Iterator[Fact]:
        members = fact.attributes()
        for key in list(members.obj):
            if key in _TABLES:
                yield members.item(key, name_of(key.strip("_"), fact.name))
            elif key != "te_graph" and self._reads(fact.obj, key):
                yield members.item(key, name_of(HOOK_DICTS.get(key, key), fact.name))

    def _library_contents(self, fact: Fact) -> Iterator[Fact]:
        """What the code names of a module of Python that the user wrote."""
        if is_own_file(getattr(fact.obj, "__file__", None) or "<frozen"):
            members = fact.attributes()
            yield from (members.item(key, f"{fact.name}.{key}") for key in list(members.obj) if key in self.names.said)

    def _function_contents(self, fact: Fact) -> Iterator[Fact]:
        function = fact.obj
        code = function.__code__
        yield fact.child(code, f"function {function.__name__}", _Kind.ATTRIBUTE, "__code__")
        if not is_user_file(code.co_filename):  # a wrapper, perhaps, around a function of the user's
            yield from (child for child in contents(fact) if child.kind == _Kind.CELL)
            return
        yield from contents(fact)
        scope = fact.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
        for variable in sorted(globals_of(code) - function.__globals__.keys()):  # of Python, until somebody hides it
            yield scope.child(None, f"global variable {variable}", _Kind.ABSENT, variable)
        members = fact.attributes()
        for key in list(members.obj):
            if key in self.names.said:
                yield members.item(key, f"{function.__name__}.{key}")
        for key in sorted(self.names.optional - members.obj.keys()):
            yield members.child(None, f"{function.__name__}.{key}", _Kind.ABSENT, key)
        package = function.__globals__.get("__package__") or ""
        for name, level in sorted(imports_of(code)):
            module = importlib.util.resolve_name("." * level + name, package) if level and package else name
            if module in sys.modules:
                table = fact.child(sys.modules, "", _Kind.CONSTANT, sys.modules)
                yield table.item(module, f"module {module}")

    def _object_contents(self, fact: Fact) -> Iterator[Fact]:
        """Attributes of an object, and its class."""
        obj, owner = fact.obj, fact.name or "self"
        members = fact.attributes()
        if isinstance(obj, threading.local):  # another one on each thread
            members = fact.child(obj.__dict__, fact.name, _Kind.ATTRIBUTE, "__dict__")
        if members is not None and not self.names.is_enough:
            yield members  # who asks for all attributes sees that there are more
        elif members is not None:
            keys = [key for key in members.obj if self._reads(obj, key)]
            yield from (members.item(key, f"{owner}.{key}") for key in keys)
        for key in slots_of(type(obj)):
            if self._reads(obj, key) and hasattr(obj, key):
                yield fact.child(getattr(obj, key), f"{owner}.{key}", _Kind.ATTRIBUTE, key)
        yield from self._class_of(fact, members)

    def _class_of(self, fact: Fact, members: Fact | None) -> Iterator[Fact]:
        """The class, and that the instance has no attribute of its own in the place of what the class has."""
        kind, owner = type(fact.obj), fact.name or "self"
        if not user_classes(kind):
            return
        yield fact.child(kind, kind.__name__, _Kind.TYPE)
        if members is None:
            return
        hidden = {key for base in user_classes(kind) for key in vars(base) if self._may_use(kind, key)}
        for key in sorted((hidden | self._expected(kind)) - members.obj.keys()):
            if not is_implicit(key):
                yield members.child(None, f"{owner}.{key}", _Kind.ABSENT, key)

    def _expected(self, kind: type) -> frozenset[str]:
        """Attributes that instances may get, and that code asks for also while they have not."""
        computes = any("__getattr__" in vars(base) for base in user_classes(kind))
        return self.names.said if computes else self.names.optional

    def _may_use(self, kind: type, key: str) -> bool:
        if is_implicit(key):
            member = next(vars(base)[key] for base in kind.__mro__ if key in vars(base))
            return isinstance(member, _CODE) and self.names.may_run(key)
        return key in self.names.said or not self.names.is_enough

    def _class_contents(self, fact: Fact) -> Iterator[Fact]:
        kind = fact.obj
        found: dict[str, Any] = {}
        for base in reversed(user_classes(kind)):
            found.update(vars(base))
        for key, member in found.items():
            is_shown = not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
            if is_shown and self._may_use(kind, key):
                yield fact.child(member, f"{fact.name}.{key}", _Kind.TYPE_ITEM, key)
        for key in sorted(self._expected(kind)):
            if not any(key in vars(base) for base in kind.__mro__):
                yield fact.child(None, f"{fact.name}.{key}", _Kind.TYPE_ABSENT, key)


def _table_contents(fact: Fact) -> Iterator[Fact]:
    """Submodules, parameters or buffers of a module, under the names that they have in messages."""
    owner = fact.parent.name
    for child in contents(fact):
        child.name = f"{owner}.{child.key}".lstrip(".") if fact.key == "_modules" else name_of(child.key, owner)
        yield child


def _builtin_contents(fact: Fact) -> Iterator[Fact]:
    """What containers and the like hold, which are classes of Python's own, or derived from them."""
    obj, name = fact.obj, fact.name
    if isinstance(obj, types.MethodType):
        yield fact.child(obj.__self__, name or "self", _Kind.ATTRIBUTE, "__self__")
        yield fact.child(obj.__func__, name, _Kind.ATTRIBUTE, "__func__")
    elif isinstance(obj, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = obj.__self__
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            yield fact.child(owner, f"object of {name}", _Kind.ATTRIBUTE, "__self__")
    elif isinstance(obj, dict):
        for key, value in obj.items():
            if value_of(key) is not None:
                yield fact.child(value, f"{name}[{key!r}]", _Kind.ITEM, key)
        if isinstance(obj, collections.defaultdict):
            yield fact.child(obj.default_factory, f"default of {name}", _Kind.ATTRIBUTE, "default_factory")
    elif isinstance(obj, list | tuple | functools.partial):
        yield from contents(fact)
    elif isinstance(obj, collections.deque):
        for index, value in enumerate(obj):
            yield fact.child(value, f"{name}[{index}]", _Kind.ELEMENT, index=index)
    elif isinstance(obj, VIEWS):
        yield fact.child(gc.get_referents(obj)[0], name, _Kind.REFERENT)
    elif isinstance(obj, contextvars.ContextVar):
        try:
            yield fact.child(obj.get(), f"value of {name}", _Kind.CONTEXT_VAR)
        except LookupError:
            yield fact.child(NotImplemented, f"value of {name}", _Kind.CONTEXT_VAR)
    elif isinstance(obj, weakref.ref):
        yield fact.child(obj(), name, _Kind.WEAK_REFERENCE)
    elif isinstance(obj, tuple(WRAPPERS)):
        for key in next(keys for kind, keys in WRAPPERS.items() if isinstance(obj, kind)):
            if isinstance(function := getattr(obj, key), types.FunctionType):
                yield fact.child(function, name, _Kind.ATTRIBUTE, key)
    elif isinstance(obj, functools.cached_property | functools._lru_cache_wrapper):
        key = "func" if isinstance(obj, functools.cached_property) else "__wrapped__"
        yield fact.attributes().item(key, name)
    elif isinstance(obj, set | frozenset):
        if value_of(obj) is None:
            yield fact.never(f"{name} is a set of objects without weak references, which cannot be compared")
    elif hasattr(type(obj), "__next__") and is_opaque(obj) and not isinstance(obj, io.IOBase):
        yield fact.never(f"{name} is a {type(obj).__name__}, which comparing would use up: pass a list")
