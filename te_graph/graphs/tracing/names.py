"""Which attribute names the code of a callable or function can say: what it never names it can hardly read."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import gc
import inspect
import itertools
import operator
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from te_graph.common.class_origins import HEAP_TYPE, module_of
from te_graph.common.dispatch import is_project_file, is_user_file
from te_graph.graphs.tracing.code_names import (
    BY_NAME,
    PATTERN,
    PUTS_ITEM,
    TELLS_APART,
    UNNAMED,
    asked_in,
    attributes_in_format,
    looks_up,
    may_be_name,
    said_in,
    strings_in,
)

# Code that says one of these gets to what a class has and another one before it hides.
LOOKS_ABOVE = frozenset({"super", "__mro__", "mro", "__bases__", "__base__"})
_READ_FIELDS = frozenset({"asdict", "astuple"})  # of dataclasses
_TELL_FIELDS = frozenset({"fields"})  # by whose names code may go on, as can be heard
_FILLS_IN = frozenset({"format", "format_map", "vformat"})
_NOT_RUN = frozenset(
    (
        *("__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__", "__set_name__"),
        *("__setattr__", "__delattr__", "__dir__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__"),
        *("__replace__", "__getstate__", "__setstate__", "__getattribute__", "__hash__", "__eq__", "__ne__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__post_init__"),
    )
)
# Of objects, which code may put there and read as it likes.
OF_OBJECTS = frozenset(
    {"__wrapped__", "__all__", "__orig_class__", "__name__", "__qualname__", "__doc__", "__file__", "__path__"}
)
# Code that says all of one of these may ask for modules by strings.
ASKS_FOR_MODULES = (
    *(frozenset({"sys", "modules"}), frozenset({"import_module"}), frozenset({"__import__"})),
    *(frozenset({"resolve_name"}), frozenset({"locate"})),  # of pkgutil and pydoc
)
_ADDRESSES = frozenset({"data_ptr", "storage_offset", "storage", "untyped_storage", "__cuda_array_interface__"})
_CALLS_EXTENSIONS = "(extension)"  # stands for a call of a function that may take the memory of tensors
# By these code may see the state of a generator, or put it back after a draw.
_STATES_OF_GENERATORS = frozenset(
    (
        *("getstate", "setstate", "get_state", "set_state", "state", "seed", "jumped"),
        *("__setstate__", "__reduce__", "__getstate__"),
    )
)
_IDENTITIES = frozenset({"id", "hash", "__hash__", "is_", "is_not", TELLS_APART})
_OF_TORCH = frozenset({"forward", "backward", "setup_context"})  # which torch calls
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
GETTERS = (operator.attrgetter, operator.methodcaller)
_MARK_OF_COMPILER = "_dynamo_"
TABLE_OF_FIELDS = "__dataclass_fields__"

# Under whatever name, and called by whatever: these may read any attribute of what they are given.
_LOOKERS = (getattr, hasattr, operator.attrgetter, operator.methodcaller, pickle.Pickler)
_MADE_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType)  # of these their names tell
_LOOKERS_OF_PYTHON = (
    *(torch.save, pickle._dump, pickle._dumps, pickle._Pickler.dump, copyreg._reduce_ex),
    *(vars(copy)[name] for name in ("copy", "deepcopy", "replace") if hasattr(copy, name)),
    *(vars(inspect)[name] for name in ("getmembers", "getmembers_static") if hasattr(inspect, name)),
)
TELLERS = frozenset(map(id, (id, hash, operator.is_, operator.is_not)))
CODES_OF_LOOKERS = frozenset(id(looker.__code__) for looker in _LOOKERS_OF_PYTHON)
CODES_OF_FIELDS = {
    **{id(reader.__code__): "asdict" for reader in (dataclasses.asdict, dataclasses.astuple, dataclasses.replace)},
    id(dataclasses.fields.__code__): "fields",
}


@dataclass(frozen=True)
class Names:
    """Names and strings in the code that a callable or function may run.

    Attributes:
        said: all of them.
        asked: those of attributes that code may look for while they are not there: strings where it has ``getattr``,
            ``__dict__`` or the like, all names where it may go on without.
        ran: identities of the code that was seen to run, by which methods count that Python calls by itself.
        is_all_seen: nothing else ran, and no other names were given to ``getattr`` and the like than are among these.
            Code of installed packages that did not run then does not count: what leads to it is compared.
        looked_up: attributes that code of Python and torch was seen to ask objects for by ``getattr`` and the like, or
            in vain, as (class, name).
        read_whole: classes of objects that functions of extension modules were given, which may read all attributes.
        around: methods that run around a replay: they count once another object was seen to run them.
    """

    said: frozenset[str] = _OF_TORCH
    asked: frozenset[str] = frozenset()
    ran: frozenset[int] = frozenset()
    is_all_seen: bool = False
    looked_up: frozenset[tuple[type, str]] = frozenset()
    read_whole: frozenset[type] = frozenset()
    around: frozenset[types.CodeType] = frozenset()

    @property
    def is_enough(self) -> bool:
        """No code looks at attributes without naming them."""
        return not self.said & UNNAMED

    @property
    def asks_for_names(self) -> bool:
        """Code has strings for names of attributes, which it may put together at run time."""
        return not self.said.isdisjoint(BY_NAME)

    @property
    def asks_for_modules(self) -> bool:
        """Code may ask for modules by strings."""
        return any(names <= self.said for names in ASKS_FOR_MODULES)

    @property
    def asks_for_autocast_cache(self) -> bool:
        """Code looks at that switch. Else it is free: captures are made without the cache, calls come with it."""
        return "is_autocast_cache_enabled" in self.said

    @property
    def puts_items(self) -> bool:
        """The code may put something into a dictionary."""
        return not self.said.isdisjoint((PUTS_ITEM, "setdefault", "__setitem__"))

    @property
    def reads_variables_above(self) -> bool:
        """The code may read the variables of the functions that have called it."""
        return not self.said.isdisjoint(("f_locals", "getargvalues"))

    @property
    def handles_generators(self) -> bool:
        """The code may see or set the state of a generator: after any other use of one the state is another."""
        return not (self.is_enough and self.said.isdisjoint(_STATES_OF_GENERATORS))

    @property
    def reads_addresses(self) -> bool:
        """The code asks where tensors lie, perhaps for a kernel that no dispatcher sees: all of them count as used."""
        return not self.said.isdisjoint(_ADDRESSES)

    @property
    def calls_extensions(self) -> bool:
        """The code calls functions of extension modules, which may use tensors unseen: all of them count as used."""
        return _CALLS_EXTENSIONS in self.said

    @property
    def tells_objects_apart(self) -> bool:
        """The code asks which object something is, but for whether it is a constant such as None."""
        return self.reads_addresses or not self.said.isdisjoint(_IDENTITIES)

    def may_read(self, obj: Any, attribute: str) -> bool:
        """Whether the code may read ``attribute`` of ``obj``."""
        if not self.is_enough or attribute in self.said or not is_user_type(type(obj)):
            return True
        if type(obj) in self.read_whole or (type(obj), attribute) in self.looked_up:
            return True
        return isinstance(obj, nn.Module) and attribute in _own_attributes_of_modules()

    def with_code(self, running: Iterable[types.CodeType], types_met: Iterable[type]) -> Names:
        """These, and those in the code that is ``running`` and of the methods of ``types_met`` that it names."""
        kinds = dict.fromkeys(types_met)
        said, asked = set(self.said), set(self.asked)
        done: set[types.CodeType] = set()
        methods = [pair for kind in kinds for pair in _methods(kind)]
        codes = [code for code in running if is_user_file(code.co_filename) and not self.is_around(code)]
        codes += [code for name, code in methods if self._may_run(name, code, said)]
        while codes:
            for code in codes:
                said |= said_in(code)
                # Else it is known what was not there.
                if not self.is_all_seen or is_project_file(code.co_filename) or looks_up(code):
                    asked |= asked_in(code)
            done.update(codes)
            codes = [code for name, code in methods if code not in done and self._may_run(name, code, said)]
        if "unwrap" in said:  # of inspect
            said.add("__wrapped__")
        if PATTERN in said:
            said.update(names_in_patterns(kinds))
        if said & (_READ_FIELDS if self.is_all_seen else _READ_FIELDS | _TELL_FIELDS):
            said.update(fields_of(kinds))
        return replace(self, said=frozenset(said), asked=frozenset(asked))

    def with_strings(self, strings: Iterable[str]) -> Names:
        """These, and ``strings``, which code may pass to ``getattr``, fill in or import by, if any code does."""
        if self.asks_for_modules:
            strings = list(strings)
            found = itertools.chain.from_iterable(map(_names_in_path, filter(may_be_name, strings)))
            return replace(self, said=self.said.union(found))._with_strings(strings)
        return self._with_strings(strings)

    def _with_strings(self, strings: Iterable[str]) -> Names:
        fills_in, asks = not self.said.isdisjoint(_FILLS_IN), self.asks_for_names and not self.is_all_seen
        if not (fills_in or asks):
            return self
        strings = list(strings)
        read = frozenset().union(*map(attributes_in_format, strings)) if fills_in else frozenset()
        found = frozenset(filter(may_be_name, strings)) if asks else frozenset()
        return replace(self, said=self.said | read | found, asked=self.asked | found)

    def with_heard(self, names: Iterable[str]) -> Names:
        """These, and ``names`` that code was heard to ask for by ``getattr`` and the like."""
        return replace(self, said=self.said.union(names), asked=self.asked.union(names))

    def with_looked_up(self, looks: Iterable[tuple[type, str]]) -> Names:
        """These, and attributes that code of libraries was seen to look up, as (class, name)."""
        return replace(self, looked_up=self.looked_up.union(looks))

    def looked_up_of(self, kind: type) -> set[str]:
        """Attributes that code of libraries was seen to look up, of objects of ``kind``."""
        return {name for owner, name in self.looked_up if owner is kind}

    def with_read_whole(self, kinds: Iterable[type]) -> Names:
        """These, and classes of objects of which all attributes may be read."""
        return replace(self, read_whole=self.read_whole.union(kinds))

    def with_getters(self, getters: Iterable[Any]) -> Names:
        """These, and the names in objects of ``operator`` that read attributes or call methods."""
        return replace(self, said=self.said.union(*map(names_of_getter, getters)))

    def with_all_attributes(self, are_read: bool) -> Names:
        """These, and where ``are_read`` that code looks at attributes without naming them."""
        return replace(self, said=self.said | {"vars"}) if are_read else self

    def with_fields(self, readers: Iterable[str]) -> Names:
        """These, and ``readers`` of the fields of dataclasses, under whatever name code has called them."""
        return replace(self, said=self.said.union(readers))

    def with_extensions(self, are_called: bool) -> Names:
        """These, and where ``are_called`` that code calls functions of extension modules."""
        return replace(self, said=self.said | {_CALLS_EXTENSIONS}) if are_called else self

    def with_tellers(self, are_met: bool) -> Names:
        """These, and where ``are_met`` that code tells objects apart."""
        return replace(self, said=self.said | {TELLS_APART}) if are_met else self

    def is_around(self, code: types.CodeType) -> bool:
        """Whether ``code`` runs around a replay, as far as was seen."""
        return code in self.around and id(code) not in self.ran

    def _may_run(self, name: str, code: types.CodeType, said: set[str]) -> bool:
        is_called = is_implicit(name) or (name in said and not is_for_making(name))
        return ((is_called and self.may_run(code)) or id(code) in self.ran) and not self.is_around(code)

    def may_run(self, code: types.CodeType) -> bool:
        """Whether ``code``, which other code names, may run."""
        return not self.is_all_seen or id(code) in self.ran or is_project_file(code.co_filename)

    def has_run(self, member: Any) -> bool:
        """Whether ``member``, of a class, was seen to run."""
        return any(id(code) in self.ran for code in codes_of(member))


def _names_in_path(path: str) -> list[str]:
    """Of the name of a loaded module, or of something in one, such as ``package.module.name`` or ``module:name``: the
    module, and the names in it."""
    parts = path.replace(":", ".").split(".")
    for count in range(len(parts), 0, -1):
        if (name := ".".join(parts[:count])) in sys.modules:
            return [name, *parts[count:]]
    return []


def looks_at_all(obj: Any) -> bool:
    """True for functions of Python's that read whatever attributes there are, or those that they are given."""
    return any(obj is looker for looker in _LOOKERS) or (type(obj) in _MADE_IN_C and obj.__name__ in UNNAMED)


def names_in_patterns(kinds: Iterable[type]) -> Iterator[str]:
    """The names that a pattern goes by which says no names, for objects of ``kinds``."""
    return (name for kind in kinds for name in getattr(kind, PATTERN, ()))


def fields_of(kinds: Iterable[type]) -> Iterator[str]:
    """The names of the fields of those of ``kinds`` that are dataclasses."""
    return (name for kind in kinds for name in getattr(kind, TABLE_OF_FIELDS, ()))


def names_of_getter(getter: Any) -> set[str]:
    """The names that an object of ``operator`` reads or calls."""
    return {part for name in _strings_below(getter) for part in name.split(".")}


def _strings_below(obj: Any) -> Iterator[str]:
    for part in gc.get_referents(obj):
        if isinstance(part, str):
            yield part
        elif isinstance(part, tuple):
            yield from _strings_below(part)


def is_user_type(kind: type) -> bool:
    """True when all methods of ``kind`` are known to ``Names``: no base is of torch or the standard library."""
    return not any(is_of_library(base) for base in kind.__mro__ if base not in (object, nn.Module))


@functools.cache
def _own_attributes_of_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def user_classes(kind: type) -> list[type]:
    """Of ``kind`` and its bases, those that the user wrote."""
    return [base for base in kind.__mro__ if not is_of_library(base)]


def is_of_library(kind: type) -> bool:
    """True for classes of Python, torch and this package, and those of extension modules."""
    return not _is_user_written(kind)


def _is_user_written(kind: type) -> bool:
    """By where it is defined: torch and Python put functions of their own into classes of the user's."""
    is_of_python = bool(kind.__flags__ & HEAP_TYPE) and type(kind).__module__ != "pybind11_builtins"
    return is_of_python and is_users_module(module_of(kind))


def is_users_module(name: str) -> bool:
    """True unless the module of this name is of torch, Python or this package. One made by hand has no file."""
    file = file_of_module(sys.modules.get(name))
    if file:
        return is_user_file(file)
    package = name.partition(".")[0]
    return package not in ("torch", "te_graph", "builtins") and package not in sys.stdlib_module_names


def file_of_module(module: Any) -> str | None:
    """Where ``module`` says that it is from; no function ``__getattr__`` of it, which is the user's, is asked. What is
    no module, and may stand among these, has no file."""
    return vars(module).get("__file__") if isinstance(module, types.ModuleType) else None


def is_for_making(name: str) -> bool:
    """True for methods that run when an object is made, shown or gone: what they name counts once they have run."""
    return name in _NOT_RUN


def is_of_compiler(name: Any) -> bool:
    """True for attributes that torch.compile puts on what it meets, for itself. A dictionary of attributes may have
    keys that are no names."""
    return isinstance(name, str) and name.startswith(_MARK_OF_COMPILER)


def is_implicit(name: str) -> bool:
    """True for methods that Python calls by itself, and not only when an object is made or shown."""
    return name.startswith("__") and name.endswith("__") and name not in _NOT_RUN and name not in OF_OBJECTS


def _methods(kind: type) -> Iterator[tuple[str, types.CodeType]]:
    """The functions of a class that the user wrote, as (name, code)."""
    for base in user_classes(kind):
        for name, member in vars(base).items():
            yield from ((name, code) for code in codes_of(member) if is_user_file(code.co_filename))


def codes_of(member: Any) -> Iterator[types.CodeType]:
    """The code of what a class has as a method, a property or the like, and of what that wraps."""
    if isinstance(member, property):
        parts = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property | functools.partialmethod | functools.singledispatchmethod):
        parts = [member.func]
    else:
        parts = [member.__func__ if isinstance(member, staticmethod | classmethod) else member]
    met: list[Any] = []
    for part in parts:
        while isinstance(part, types.FunctionType | functools._lru_cache_wrapper) and part not in met:
            met.append(part)
            part = getattr(part, "__wrapped__", None)
    yield from (part.__code__ for part in met if isinstance(part, types.FunctionType))


def has_code(member: Any) -> bool:
    """Whether what a class has is code of Python, or wraps it."""
    return next(codes_of(member), None) is not None


def is_untold(name: str, member: Any) -> bool:
    """Whether ``member``, of a class, is a special method without code of Python (a partial, ``None``, a function made
    in C): nothing tells whether it was called."""
    is_special = is_implicit(name) or is_for_making(name)
    is_method = callable(member) or hasattr(type(member), "__get__") or member is None
    return is_special and is_method and not isinstance(member, SLOTS) and not has_code(member)


def strings_of(member: Any) -> frozenset[str]:
    """Names and strings in the code of what a class has."""
    return frozenset().union(*(strings_in(code) for code in codes_of(member)))
