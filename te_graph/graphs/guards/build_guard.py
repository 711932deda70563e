"""Builds the guard of one callable from the sources that its code can get to."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import is_strided, is_user_file, storage_key
from te_graph.common.own_objects import OwnObject
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.guarded_modules import guard_hooks, guard_module, guard_tables
from te_graph.graphs.guards.guarded_objects import guard_source
from te_graph.graphs.guards.parametrizations import cache_source, is_parametrized
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.readers.lookups import is_project_module
from te_graph.graphs.guards.readers.parts_of_containers import CONTAINERS
from te_graph.graphs.guards.readers.user_classes import bases_of
from te_graph.graphs.guards.sources import (
    Source,
    TensorReader,
    is_own_tensor,
    name_of,
    own_tensors,
    submodules,
    walk,
)
from te_graph.graphs.tracing.externals import External

_Kind = _C.StepKind
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def build_callable_guard(
    reader: CallableReader,
    sources: list[Source],
    externals: dict[int, External],
    leaves: Iterable[Tensor] = (),
    called: Collection[int] = (),
    may_capture_hooks: bool = False,
) -> CallableGuard:
    """Find where the external tensors of a capture are reached from, and build the guard over them.

    ``sources`` are those that the code of the callable can get to, as ``reader`` found them: what is there is guarded,
    modules whole (submodules, flags, hooks, tables), values by value, tensors that are used wherever they stand. A used
    tensor that is not among them is looked for in everything that the callable refers to. ``leaves``, [...] each, are
    looked for as well: what gets a gradient need not have been read, such as the weight of a layer that reads an FP8
    copy of it. ``called``: identities of the modules that were called, so that their hooks ran.

    Raises:
        RuntimeError: an external tensor cannot be reached, so no guard could tell when it moves; or a module that is
            called has hooks and ``may_capture_hooks`` is False.
    """
    callable_guard = CallableGuard()
    root = sources[0].obj
    wanted = {*externals, *map(storage_key, leaves)}
    found = [source for source in sources if _has_tensor_of(source, wanted) or reader.may_use(source)]
    if missing := wanted - set(map(_storage_at, found)):
        found += _nearest(sources, missing)
        _check_all_are_found(externals, found)
    called = {*called, *_parts_of_own_layers(sources, root, called)}
    guarded: set[int] = set()
    modules: list[Source] = []
    tops = [source for source in sources if isinstance(source.obj, nn.Module) and source.again is None]
    for top in [*tops, *filter(None, (source.top_module() for source in found))]:
        for source in _modules_below(top):
            if id(source.obj) not in guarded:
                guarded.add(id(source.obj))
                guard_module(source, callable_guard, source.obj is root)
                if id(source.obj) in called:
                    guard_hooks(source, callable_guard, may_capture_hooks)
                modules.append(source)
    if any(is_parametrized(source.obj) for source in modules):
        callable_guard.expect_value(cache_source(sources[0]))
    for source in found:
        callable_guard.add(source)
    for source in modules:
        guard_tables(source, callable_guard, reader.goes_through_tables(source.obj))
    used = {id(source) for source in found}
    sources = reader.compared(sources)
    tells_apart = reader.tells_tensors_apart(sources)
    for source in sources:
        if id(source) not in used and source.parent is not None and not is_own_tensor(source):
            guard_source(source, callable_guard, reader.names, tells_apart)
        if source.again is None and not isinstance(source.obj, OwnObject):
            _guard_absence(source, callable_guard, reader)
    _guard_code(sources, modules, callable_guard, reader)
    for count in reader.counts(sources):
        callable_guard.enter(count)
    return callable_guard


def _parts_of_own_layers(sources: list[Source], root: Any, called: Collection[int]) -> Iterator[int]:
    """Identities of the modules in te_graph's own layers among those that were called: fused they do what calls would
    do, and where one has hooks they are called."""
    tops = [source.obj for source in sources if isinstance(source.obj, nn.Module) and source.again is None]
    for module in dict.fromkeys(below for top in tops for below in top.modules()):
        if (id(module) in called or module is root) and module_of(plain_class(type(module))).startswith("te_graph."):
            yield from map(id, module.modules())


def unnamed(sources: list[Source], storages: Iterable[int]) -> set[int]:
    """Those of ``storages`` of which no tensor stands at ``sources``, the callable first, or in what that refers to."""
    wanted = set(storages)
    missing = wanted - {_storage_at(source) for source in sources if _has_tensor_of(source, wanted)}
    return missing - set(map(_storage_at, _nearest(sources, missing))) if missing else missing


def _storage_at(source: Source) -> int:
    return storage_key(source.obj)


def _has_tensor_of(source: Source, storages: Collection[int]) -> bool:
    return isinstance(source.obj, Tensor) and is_strided(source.obj) and storage_key(source.obj) in storages


def _nearest(sources: list[Source], storages: Collection[int]) -> list[Source]:
    """Where tensors of ``storages`` stand that the code does not name: in te_graph's own objects, and else in what the
    callable, the first of ``sources``, refers to, as far as the furthest of their first ones."""
    own = [one for one in own_tensors_of_modules(sources) if _has_tensor_of(one, storages)]
    missing = set(storages) - set(map(_storage_at, own))
    return [*own, *_nearest_below(sources[0].obj, missing)] if missing else own


def own_tensors_of_modules(sources: list[Source]) -> Iterator[Source]:
    """What te_graph keeps for the modules at ``sources``, wherever the code has found them."""
    for source in sources:
        if isinstance(source.obj, nn.Module) and source.again is None:
            members = source.attributes()
            keys = [key for key, value in members.obj.items() if isinstance(value, OwnObject)]
            for key in keys:
                yield from own_tensors(members.item(key, name_of(key, source.name)))


def _nearest_below(root: Any, storages: Collection[int]) -> list[Source]:
    found: list[Source] = []
    missing = set(storages)
    for source in walk(TensorReader(root)):
        if not missing and source.distance > max(one.distance for one in found):
            break
        if _has_tensor_of(source, storages):
            found.append(source)
            missing.discard(storage_key(source.obj))
    return found


def _check_all_are_found(externals: dict[int, External], found: list[Source]) -> None:
    known = set(map(_storage_at, found))
    for key, lost in externals.items():
        if key not in known:
            raise RuntimeError(
                f"{lost.op} uses a tensor of shape {list(lost.tensor.shape)} that is neither an argument nor a "
                "parameter, buffer, attribute or variable that the callable can be seen to hold, so a replay could not "
                "tell when it moves: pass it as an argument or register it as a buffer, or, where a library keeps it "
                f'and never makes it anew, let externals="keep" hold it; at {lost.site}'
            )


def _modules_below(top: Source) -> list[Source]:
    """The tree of modules from ``top`` on, parents first."""
    stack, seen, found = [top], set(), []
    while stack:
        source = stack.pop()
        if id(source.obj) not in seen:
            seen.add(id(source.obj))
            found.append(source)
            stack.extend(reversed(list(submodules(source))))
    return found


def _guard_absence(source: Source, callable_guard: CallableGuard, reader: CallableReader) -> None:
    """Guard that an object has no attribute that would come before what its class has, or that code asks for."""
    members = source.attributes()
    if isinstance(source.obj, types.FunctionType) and is_user_file(source.obj.__code__.co_filename):
        for absent in reader.missing_variables(source):
            callable_guard.enter(absent)
    if isinstance(source.obj, types.BuiltinFunctionType | type) or (is_value(source.obj) and members is None):
        return
    for name in reader.absent(source) if members is not None else ():
        callable_guard.enter(members.child(members.obj, name_of(name, source.name), _Kind.ABSENT, name))
    for name in reader.empty_slots(source):
        callable_guard.enter(source.child(source.obj, name_of(name, source.name), _Kind.NO_ATTRIBUTE, name))


def _guard_code(
    sources: list[Source], modules: list[Source], callable_guard: CallableGuard, reader: CallableReader
) -> None:
    """What classes have for the code to run, and the code of functions."""

    def guard_class(source: Source, name: str) -> None:
        callable_guard.expect_class(source, name, reader.members(source.obj))
        if members := list(reader.members_of_metaclass(source.obj)):
            callable_guard.expect_metaclass(source, name, members)

    for source in modules:
        guard_class(source, source.name or type(source.obj).__name__)
    for source in sources:
        obj = source.obj
        if source.again is not None:
            continue
        if isinstance(obj, type):
            if bases_of(type(obj)):
                above = source.child(type(obj), type(obj).__name__, _Kind.KNOWN)
                callable_guard.expect_class(above, above.name, reader.members(type(obj)))
            is_guarded = source.kind == _Kind.KNOWN and not isinstance(source.parent.obj, CONTAINERS)
            if (is_guarded and not reader.is_argument(obj)) or not reader.is_users(obj):
                continue  # what leads to a known one is guarded, unless that is a container
            guard_class(source.child(obj, source.name, _Kind.KNOWN), source.name)
        elif is_project_module(obj) or (
            not isinstance(obj, (nn.Module, Tensor, *_CODE)) and reader.is_users(type(obj))
        ):  # a module may get a class with properties
            guard_class(source, source.name or "self")
    callable_guard.expect_members_below(reader.members_below(sources))
    for function in reader.functions(sources):
        callable_guard.expect_code(function)
