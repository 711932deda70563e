"""The guard of one callable: over the tensors that its capture uses, and over all else that its code can read."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import has_subclass, is_strided, is_user_file, storage_key
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.parametrizations import cache_source, is_parametrized
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, is_bulk, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph, is_pure_hook
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.readers.library_objects import is_array, is_iterator
from te_graph.graphs.guards.readers.lookups import absent_globals, absent_names
from te_graph.graphs.guards.readers.user_classes import bases_of
from te_graph.graphs.guards.recording_hooks import REMOVAL_OF_RECORDING, is_recording_hook
from te_graph.graphs.guards.sources import HOOK_DICTS, Source, TensorReader, items_of, name_of, submodules, walk
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.externals import External

_Kind = _C.StepKind
_GUARDED_ELSEWHERE = (nn.Module, weakref.ref, ComputedInGraph)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


@dataclass
class CallableGuard:
    """The guard of one callable, with the external tensors in the order of the guard's numbering.

    Attributes:
        guard: checks, from the callable, everything that was found.
        tensors: the guard's tensors [...], each the very object that the callable reaches.
        names: what messages call them, such as ``weight of layers.3.fc1``.
    """

    guard: _C.CallableGuard = field(default_factory=lambda: _C.CallableGuard())
    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)  # of the tensors, by their steps
    _steps: dict[tuple, int] = field(default_factory=dict)
    _classes: dict[tuple, int] = field(default_factory=dict)
    _members: set[tuple[int, str]] = field(default_factory=set)

    def index_of(self, tensor: Tensor) -> int:
        """Number of ``tensor`` [...], by identity; -1 when it has no source."""
        return next((i for i, known in enumerate(self.tensors) if known is tensor), -1)

    def add(self, source: Source) -> int:
        """Enter the tensor at ``source`` into the guard and return its number."""
        tensor = source.obj
        if has_subclass([type(tensor)]) or not is_strided(tensor):
            kind = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise TypeError(f"{source.name}: expected a dense torch.Tensor, got {kind}")
        if tensor.grad_fn is not None:
            raise RuntimeError(
                f"{source.name} was computed outside the callable ({tensor.grad_fn.name()}) and requires a gradient: "
                "pass it as an argument"
            )
        step = self.enter(source)
        if step not in self._numbers:  # two sources may be one way to it
            self.tensors.append(tensor)
            self.names.append(source.name)
            self.sources.append(source)
            self._numbers[step] = self.guard.add_tensor(step, tensor)
        return self._numbers[step]

    def enter(self, source: Source) -> int:
        """Enter the steps to ``source`` into the guard, and that it is this very object which stands there.

        Containers may be rebuilt as long as they lead to the same objects.
        """
        if source.parent is not None and not source.in_guard:
            step = self._step_to(source)
            if not (isinstance(source.obj, dict | list | tuple | set) or is_array(source.obj) or source.obj is None):
                self.guard.expect_identity(step, source.obj)
        return source.step

    def expect_value(self, source: Source) -> None:
        """Let the guard compare what stands at ``source`` by value, or by identity where it has none."""
        value = value_of(source.obj)
        if value is None:
            self.guard.expect_identity(self._step_to(source), source.obj)
        else:
            self.guard.expect_value(self._step_to(source), value)

    def expect_contents(self, source: Source, contents: _C.Value) -> None:
        """Let the guard compare what the object at ``source`` holds."""
        self.guard.expect_value(self._step_to(source.child(source.obj, source.name, _Kind.CONTENTS)), contents)

    def expect_type(self, source: Source) -> None:
        """Let the guard compare the type of what stands at ``source``."""
        self.guard.expect_type(self._step_to(source), type(source.obj))

    def expect_again(self, source: Source) -> None:
        """Let the guard find at ``source`` the object of the source where it was met first."""
        if not isinstance(source.obj, dict | list | tuple | set):
            self.enter(source)
        elif source.again.in_guard:
            self.guard.expect_same(self._step_to(source), source.again.step)

    def expect_class(self, source: Source, name: str, members: Iterable[tuple[str, Any]]) -> None:
        """Let the guard find ``members`` in the class of the object at ``source``, or in the class that is there.

        Another class may take its place if it has them, too, and takes it everywhere.
        """
        kind = plain_class(source.obj if isinstance(source.obj, type) else type(source.obj))
        step = self._step_to(source.child(kind, f"class of {name}", _Kind.CLASS))
        first = self._classes.setdefault((kind, source.parent is None), step)
        if first != step:
            self.guard.expect_same(step, first)
        for key, member in members:
            self._expect_member(first, kind, key, member)

    def expect_members_below(self, members: Iterable[tuple[type, str, Any]]) -> None:
        """Let the guard find ``members``, as (class, name, member), in classes below those of objects."""
        for kind, key, member in members:
            step = self._step_to(self._known(kind).child(kind, f"class {kind.__name__}", _Kind.CLASS))
            self._expect_member(step, kind, key, member)

    def _known(self, kind: type) -> Source:
        known = Source(kind, kind.__name__, kind=_Kind.KNOWN)
        self._step_to(known)
        return known

    def _expect_member(self, step: int, kind: type, key: str, member: Any) -> None:
        if (step, key) in self._members:
            return
        self._members.add((step, key))
        first = -1
        if isinstance(member, dict | list | set | Tensor):  # compared where it is, which another class may come to hide
            owner = next(base for base in kind.__mro__ if key in vars(base))
            first = self._step_to(self._known(owner).child(member, f"{owner.__name__}.{key}", _Kind.TYPE_ITEM, key))
        at = self.guard.add_step(_Kind.MEMBER, step, key, 0, None, f"{key} of class {kind.__name__}")
        if first >= 0:
            self.guard.expect_same(at, first)
        elif is_value(member):
            self.guard.expect_value(at, value_of(member))
        else:
            self.guard.expect_identity(at, member)

    def expect_code(self, function: types.FunctionType) -> None:
        """Let the guard see that ``function`` gets other code."""
        name = f"code of {function.__name__}"
        self.guard.add_step(_Kind.CODE, -1, weakref.ref(function), 0, function.__code__, name)

    def _step_to(self, source: Source) -> int:
        is_known = source.kind == _Kind.KNOWN  # is where it is, whatever it was found through
        parent = -1 if is_known else self.enter(source.parent)
        index = source.index if source.key_source is None else self._step_to(source.key_source)
        step = source.kind, parent, source.key, id(source.obj) if is_known else index
        if step not in self._steps:
            self._steps[step] = self.guard.add_step(source.kind, parent, source.key, index, None, source.name)
            if is_known:
                self.guard.expect_identity(self._steps[step], source.obj)
        source.step, source.in_guard = self._steps[step], True
        return source.step

    def add_main_grad(self, parameter: int) -> int:
        """Enter the ``main_grad`` of tensor number ``parameter`` and return its number."""
        source = self.sources[parameter]
        return self.add(source.attributes().item("main_grad", f"main_grad of {source.name}"))


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
        found += _nearest(root, missing)
        _check_all_are_found(externals, found)
    guarded: set[int] = set()
    modules: list[Source] = []
    tops = [source for source in sources if isinstance(source.obj, nn.Module) and source.again is None]
    for top in [*tops, *filter(None, (source.top_module() for source in found))]:
        for source in _modules_below(top):
            if id(source.obj) not in guarded:
                guarded.add(id(source.obj))
                guard_module(source, callable_guard, source.obj is root)
                if id(source.obj) in called:
                    _guard_hooks(source, callable_guard, may_capture_hooks)
                modules.append(source)
    if any(is_parametrized(source.obj) for source in modules):
        callable_guard.expect_value(cache_source(sources[0]))
    for source in found:
        callable_guard.add(source)
    for source in modules:
        _guard_tables(source, callable_guard, reader.goes_through_tables(source.obj))
    used = {id(source) for source in found}
    sources = reader.compared(sources)
    tells_apart = reader.tells_tensors_apart(sources)
    for source in sources:
        if id(source) not in used and source.parent is not None:
            guard_source(source, callable_guard, tells_apart)
        if source.again is None:
            _guard_absence(source, callable_guard, reader)
    _guard_code(sources, modules, callable_guard, reader)
    for count in reader.counts(sources):
        callable_guard.enter(count)
    return callable_guard


def unnamed(sources: list[Source], storages: Iterable[int]) -> set[int]:
    """Those of ``storages`` of which no tensor stands at ``sources``, the callable first, or in what that refers to."""
    wanted = set(storages)
    missing = wanted - {_storage_at(source) for source in sources if _has_tensor_of(source, wanted)}
    return missing - set(map(_storage_at, _nearest(sources[0].obj, missing))) if missing else missing


def _storage_at(source: Source) -> int:
    return storage_key(source.obj)


def _has_tensor_of(source: Source, storages: Collection[int]) -> bool:
    return isinstance(source.obj, Tensor) and is_strided(source.obj) and storage_key(source.obj) in storages


def _nearest(root: Any, storages: Collection[int]) -> list[Source]:
    """Where tensors of ``storages`` stand that the code does not name, as far as the furthest of their first ones."""
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


def guard_module(source: Source, callable_guard: CallableGuard, is_callable: bool) -> None:
    """Guard the training flag of a module, which submodules it has, and, but for the callable itself, its forward."""
    members = source.attributes()
    name = source.name or type(source.obj).__name__
    if "training" in members.obj:  # what torch.compile made has that of its original
        callable_guard.enter(members.item("training", f"training flag of {name}"))
    table = members.item("_modules", f"number of submodules of {name}")
    callable_guard.enter(table.child(table.obj, table.name, _Kind.LENGTH, index=len(table.obj)))
    for child in submodules(source):
        callable_guard.enter(child)
    if is_callable:
        return  # its forward is what replays
    if "forward" in members.obj:
        callable_guard.enter(members.item("forward", f"forward of {name}"))
    else:
        callable_guard.enter(members.child(members.obj, f"forward of {name}", _Kind.ABSENT, "forward"))


def check_hooks(module: nn.Module, name: str, may_capture: bool) -> None:
    """Raise RuntimeError, calling ``module`` ``name``, if it has hooks that a replay would not run, and that
    ``may_capture`` does not let freeze, or whose work would be lost then."""
    for key, what in HOOK_DICTS.items():
        hooks = [hook for hook in vars(module)[key].values() if not is_pure_hook(hook)]
        if (recording := next(filter(is_recording_hook, hooks), None)) is not None:
            raise RuntimeError(
                f"{name} has {what} that do something only while a context variable is set, as "
                f"{recording.__qualname__} does, and a replay would never do it: remove them before the capture. "
                f"{REMOVAL_OF_RECORDING}"
            )
        if hooks and not may_capture:
            raise RuntimeError(
                f"{name} has {what}, which a replay would not run: remove them before the capture (hooks on the "
                'graphed module itself do run), or freeze what they compute into the graph with hooks="captured"'
            )


def _guard_hooks(source: Source, callable_guard: CallableGuard, may_capture_hooks: bool) -> None:
    members = source.attributes()
    name = source.name or type(source.obj).__name__
    check_hooks(source.obj, name, may_capture_hooks)
    for key, what in HOOK_DICTS.items():
        hooks = members.item(key, f"{what} of {name}")
        callable_guard.enter(hooks.child(hooks.obj, hooks.name, _Kind.LENGTH, index=len(hooks.obj)))
        for hook in hooks.obj:
            callable_guard.enter(hooks.item(hook, hooks.name))


def _guard_tables(source: Source, callable_guard: CallableGuard, in_order: bool) -> None:
    """Which parameters, buffers and submodules there are, and which of them are None."""
    members = source.attributes()
    name = source.name or type(source.obj).__name__
    for key, what in (("_modules", "submodules"), ("_parameters", "parameters"), ("_buffers", "buffers")):
        table = members.item(key, f"{what} of {name}")
        for entry in [entry for entry, value in table.obj.items() if value is None]:
            callable_guard.expect_value(table.item(entry, name_of(entry, source.name)))
        kind, entries = (_Kind.KEYS, tuple(table.obj)) if in_order else (_Kind.LENGTH, None)
        what = "order of " if in_order else "number of "
        callable_guard.enter(table.child(table.obj, what + table.name, kind, entries, index=len(table.obj)))


def guard_source(source: Source, callable_guard: CallableGuard, tells_apart: bool) -> None:
    """Guard what stands at a source that leads to no tensor that is used. ``tells_apart``: the code can tell which
    tensor is there."""
    obj = source.obj
    if isinstance(obj, Tensor) and tells_apart:
        callable_guard.enter(source)
    elif isinstance(obj, Tensor):
        callable_guard.expect_type(source)
    elif is_value(obj):
        if source.kind != _Kind.KNOWN:  # a known one stays what it is
            callable_guard.expect_value(source)
    elif source.again is not None:
        callable_guard.expect_again(source)
    elif isinstance(obj, list | tuple | dict | set):
        _guard_container(source, callable_guard)
    elif is_array(obj):
        _guard_array(source, callable_guard)
    elif isinstance(obj, deque):
        callable_guard.enter(source.child(obj, f"length of {source.name}", _Kind.LENGTH, index=len(obj)))
    elif is_iterator(obj):
        raise RuntimeError(
            f"{source.name} is a {type(obj).__name__}, which the callable may advance, and a replay would not: use a "
            "list, or list the attribute in ignore_attributes= to freeze it"
        )
    elif not (isinstance(obj, _GUARDED_ELSEWHERE) or source.kind == _Kind.KNOWN):
        callable_guard.enter(source)


def _guard_array(source: Source, callable_guard: CallableGuard) -> None:
    value = value_of(source.obj)
    if value is None:
        raise RuntimeError(
            f"{source.name} is a {type(source.obj).__name__} that is too large to be compared at each call, or holds "
            "objects: make it a tensor, or list the attribute in ignore_attributes= to freeze it"
        )
    callable_guard.expect_contents(source, value)


def _guard_absence(source: Source, callable_guard: CallableGuard, reader: CallableReader) -> None:
    """Guard that an object has no attribute that would come before what its class has, or that code asks for."""
    members = source.attributes()
    if isinstance(source.obj, types.FunctionType) and is_user_file(source.obj.__code__.co_filename):
        for absent in itertools.chain(absent_names(source), absent_globals(source), reader.absent_globals(source)):
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
    for source in modules:
        callable_guard.expect_class(source, source.name or type(source.obj).__name__, reader.members(source.obj))
    for source in sources:
        obj = source.obj
        if source.again is not None:
            continue
        if isinstance(obj, type):
            if bases_of(type(obj)):
                above = source.child(type(obj), type(obj).__name__, _Kind.KNOWN)
                callable_guard.expect_class(above, above.name, reader.members(type(obj)))
            if source.kind == _Kind.KNOWN or not reader.is_users(obj):
                continue  # what leads to a known one is guarded
            callable_guard.expect_class(source.child(obj, source.name, _Kind.KNOWN), source.name, reader.members(obj))
        elif not isinstance(obj, (nn.Module, Tensor, *_CODE)) and reader.is_users(type(obj)):
            callable_guard.expect_class(source, source.name or "self", reader.members(obj))
    callable_guard.expect_members_below(reader.members_below(sources))
    for function in reader.functions(sources):
        callable_guard.expect_code(function)


def _guard_container(source: Source, callable_guard: CallableGuard) -> None:
    """Its members stand at sources of their own; here it is about how many there are, and about values in bulk."""
    obj, name = source.obj, source.name
    if isinstance(obj, set):
        if len(obj) <= MAX_MEMBERS and (contents := value_of(obj)) is not None:
            callable_guard.expect_contents(source, contents)
        else:
            callable_guard.enter(source.child(obj, f"length of {name}", _Kind.LENGTH, index=len(obj)))
    elif is_bulk(obj) and len(obj) <= MAX_MEMBERS:
        callable_guard.expect_value(source.child(obj, name, _Kind.CONTENTS))
    elif isinstance(obj, list | tuple):
        callable_guard.enter(source.child(obj, f"length of {name}", _Kind.LENGTH, index=len(obj)))
    elif isinstance(obj, dict) and (source.kind == _Kind.INSTANCE_DICT or not _holds_tensors(obj)):
        is_few = len(obj) <= MAX_MEMBERS and all(map(is_value, dict.keys(obj)))
        kind, key = (_Kind.KEYS, tuple(key for key, _ in items_of(obj))) if is_few else (_Kind.LENGTH, None)
        callable_guard.enter(source.child(obj, f"keys of {name}", kind, key, index=len(obj)))


def _holds_tensors(dictionary: dict) -> bool:
    """True for what may be a cache, which grows whenever other code runs."""
    return any(issubclass(kind, Tensor) for kind in set(map(type, dict.values(dictionary))))
