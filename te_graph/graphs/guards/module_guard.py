"""The guard of one callable: over the tensors that its capture uses, and over all else that its code can read."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import has_subclass, is_dense, is_own_file, is_user_file, storage_key
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.code_reader import Reader
from te_graph.graphs.guards.library_objects import is_array, is_iterator
from te_graph.graphs.guards.lookups import missing
from te_graph.graphs.guards.parametrizations import cache_place, is_parametrized
from te_graph.graphs.guards.plain_values import MOST_MEMBERS, is_bulk, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph, is_pure_hook
from te_graph.graphs.guards.sources import HOOK_DICTS, Place, name_of, submodules, walk
from te_graph.graphs.guards.user_classes import bases_of, is_opaque
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.externals import External

_Kind = _C.StepKind
_GUARDED_ELSEWHERE = (nn.Module, weakref.ref, ComputedInGraph)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


@dataclass
class Homes:
    """The guard of one callable, with the external tensors in the order of the guard's numbering.

    Attributes:
        guard: checks, from the callable, everything that was found.
        tensors: the guard's tensors [...], each the very object that the callable reaches.
        names: what messages call them, such as ``weight of layers.3.fc1``.
    """

    guard: _C.Guard = field(default_factory=lambda: _C.Guard())
    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    _steps: dict[tuple, int] = field(default_factory=dict)
    _classes: dict[tuple, int] = field(default_factory=dict)
    _below: set[tuple[int, str]] = field(default_factory=set)

    def index_of(self, tensor: Tensor) -> int:
        """Number of ``tensor`` [...], by identity; -1 when it has no home."""
        return next((i for i, known in enumerate(self.tensors) if known is tensor), -1)

    def add(self, place: Place) -> int:
        """Enter the tensor at ``place`` into the guard and return its number."""
        tensor = place.obj
        if has_subclass([type(tensor)]) or not is_dense(tensor):
            kind = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise TypeError(f"{place.name}: expected a dense torch.Tensor, got {kind}")
        if tensor.grad_fn is not None:
            raise RuntimeError(
                f"{place.name} was computed outside the callable ({tensor.grad_fn.name()}) and requires a gradient: "
                "pass it as an argument"
            )
        self.tensors.append(tensor)
        self.names.append(place.name)
        self.places.append(place)
        return self.guard.add_tensor(self.enter(place), tensor)

    def enter(self, place: Place) -> int:
        """Enter the steps to ``place`` into the guard, and that it is this very object which stands there.

        Containers may be rebuilt as long as they lead to the same objects.
        """
        if place.parent is not None and not place.in_guard:
            step = self._step_to(place)
            if not (isinstance(place.obj, dict | list | tuple | set) or is_array(place.obj) or place.obj is None):
                self.guard.expect_identity(step, place.obj)
        return place.step

    def expect_value(self, place: Place) -> None:
        """Let the guard compare what stands at ``place`` by value, or by identity where it has none."""
        value = value_of(place.obj)
        if value is None:
            self.guard.expect_identity(self._step_to(place), place.obj)
        else:
            self.guard.expect_value(self._step_to(place), value)

    def expect_contents(self, place: Place, contents: _C.Value) -> None:
        """Let the guard compare what the object at ``place`` holds."""
        self.guard.expect_value(self._step_to(place.child(place.obj, place.name, _Kind.CONTENTS)), contents)

    def expect_type(self, place: Place) -> None:
        """Let the guard compare the type of what stands at ``place``."""
        self.guard.expect_type(self._step_to(place), type(place.obj))

    def expect_again(self, place: Place) -> None:
        """Let the guard find at ``place`` the object of the place where it was met first."""
        if not isinstance(place.obj, dict | list | tuple | set):
            self.enter(place)
        elif place.again.in_guard:
            self.guard.expect_same(self._step_to(place), place.again.step)

    def expect_class(self, place: Place, name: str, members: Iterable[tuple[str, Any]]) -> None:
        """Let the guard find ``members`` in the class of what stands at ``place``, or in the class that stands there.

        Another class may take its place if it has them, too, and takes it everywhere.
        """
        kind = plain_class(place.obj if isinstance(place.obj, type) else type(place.obj))
        step = self._step_to(place.child(kind, f"class of {name}", _Kind.CLASS))
        first = self._classes.setdefault((kind, place.parent is None), step)
        if first != step:
            self.guard.expect_same(step, first)
            return
        for key, member in members:
            self._expect_member(step, kind, key, member)

    def expect_members_below(self, members: Iterable[tuple[type, str, Any]]) -> None:
        """Let the guard find ``members``, as (class, name, member), in classes below those of objects."""
        for kind, key, member in members:
            base = Place(kind, kind.__name__, kind=_Kind.KNOWN)
            self._step_to(base)
            step = self._step_to(base.child(kind, f"class {kind.__name__}", _Kind.CLASS))
            if (step, key) not in self._below:
                self._below.add((step, key))
                self._expect_member(step, kind, key, member)

    def _expect_member(self, step: int, kind: type, key: str, member: Any) -> None:
        at = self.guard.add_step(_Kind.MEMBER, step, key, 0, None, f"{key} of class {kind.__name__}")
        if is_value(member):
            self.guard.expect_value(at, value_of(member))
        elif not isinstance(member, dict | list | set | Tensor):
            self.guard.expect_identity(at, member)

    def expect_code(self, function: types.FunctionType) -> None:
        """Let the guard see that ``function`` gets other code."""
        name = f"code of {function.__name__}"
        self.guard.add_step(_Kind.CODE, -1, weakref.ref(function), 0, function.__code__, name)

    def _step_to(self, place: Place) -> int:
        is_known = place.kind == _Kind.KNOWN  # is where it is, whatever it was found through
        parent = -1 if is_known else self.enter(place.parent)
        index = place.index if place.key_place is None else self._step_to(place.key_place)
        step = place.kind, parent, place.key, id(place.obj) if is_known else index
        if step not in self._steps:
            expected = place.obj if is_known else None
            self._steps[step] = self.guard.add_step(place.kind, parent, place.key, index, expected, place.name)
        place.step, place.in_guard = self._steps[step], True
        return place.step

    def add_main_grad(self, parameter: int) -> int:
        """Enter the ``main_grad`` of tensor number ``parameter`` and return its number."""
        place = self.places[parameter]
        return self.add(place.attributes().item("main_grad", f"main_grad of {place.name}"))


def find_homes(
    reader: Reader,
    places: list[Place],
    externals: dict[int, External],
    leaves: Iterable[Tensor] = (),
    called: Collection[int] = (),
    may_capture_hooks: bool = False,
) -> Homes:
    """Find where the external tensors of a capture are reached from, and build the guard over them.

    ``places`` are those that the code of the callable can get to, as ``reader`` found them: what is there is guarded,
    modules whole (submodules, flags, hooks, tables), values by value, tensors that are used wherever they stand. A used
    tensor that is not among them is looked for in everything that the callable refers to. ``leaves``, [...] each, are
    looked for as well: what gets a gradient need not have been read, such as the weight of a layer that reads an FP8
    copy of it. ``called``: identities of the modules that were called, so that their hooks ran.

    Raises:
        RuntimeError: an external tensor cannot be reached, so nobody could tell when it moves; or a module that is
            called has hooks and ``may_capture_hooks`` is False.
    """
    homes = Homes()
    root = places[0].obj
    wanted = {*externals, *map(storage_key, leaves)}
    found = [place for place in places if _has_tensor_of(place, wanted)]
    if missing := wanted - {storage_key(place.obj) for place in found}:
        found += _nearest(root, missing)
        _check_all_are_found(externals, found)
    guarded: set[int] = set()
    modules: list[Place] = []
    tops = [place for place in places if isinstance(place.obj, nn.Module) and place.again is None]
    for top in [*tops, *filter(None, (place.top_module() for place in found))]:
        for place in _modules_below(top):
            if id(place.obj) not in guarded:
                guarded.add(id(place.obj))
                guard_module(place, homes, place.obj is root)
                if id(place.obj) in called:
                    _guard_hooks(place, homes, may_capture_hooks)
                modules.append(place)
    if any(is_parametrized(place.obj) for place in modules):
        homes.expect_value(cache_place(places[0]))
    for place in found:
        homes.add(place)
    for place in modules:
        _guard_tables(place, homes, reader.goes_through_tables(place.obj))
    used = {id(place) for place in found}
    for place in places:
        if id(place) not in used and place.parent is not None:
            guard_place(place, homes)
        if place.again is None:
            _guard_absence(place, homes, reader)
    _guard_code(places, modules, homes, reader)
    return homes


def _has_tensor_of(place: Place, storages: set[int]) -> bool:
    return isinstance(place.obj, Tensor) and is_dense(place.obj) and storage_key(place.obj) in storages


def _nearest(root: Any, storages: set[int]) -> list[Place]:
    """Where tensors of ``storages`` stand that the code does not name, as far as the furthest of their first places."""
    found: list[Place] = []
    missing = set(storages)
    for place in walk(root):
        if not missing and place.distance > max(home.distance for home in found):
            break
        if _has_tensor_of(place, storages):
            found.append(place)
            missing.discard(storage_key(place.obj))
    return found


def _check_all_are_found(externals: dict[int, External], found: list[Place]) -> None:
    known = {storage_key(place.obj) for place in found}
    for key, lost in externals.items():
        if key not in known:
            raise RuntimeError(
                f"{lost.op} uses a tensor of shape {list(lost.tensor.shape)} that is neither an argument nor a "
                "parameter, buffer, attribute or variable that the callable can be seen to hold, so a replay could not "
                f"tell when it moves: pass it as an argument or register it as a buffer; at {lost.site}"
            )


def _modules_below(top: Place) -> list[Place]:
    """The tree of modules from ``top`` on, parents first."""
    stack, seen, found = [top], set(), []
    while stack:
        place = stack.pop()
        if id(place.obj) not in seen:
            seen.add(id(place.obj))
            found.append(place)
            stack.extend(reversed(list(submodules(place))))
    return found


def guard_module(place: Place, homes: Homes, is_callable: bool) -> None:
    """Guard the training flag of a module, which submodules it has, and, but for the callable itself, its forward."""
    members = place.attributes()
    name = place.name or type(place.obj).__name__
    if "training" in members.obj:  # what torch.compile made has that of its original
        homes.enter(members.item("training", f"training flag of {name}"))
    table = members.item("_modules", f"number of submodules of {name}")
    homes.enter(table.child(table.obj, table.name, _Kind.LENGTH, index=len(table.obj)))
    for child in submodules(place):
        homes.enter(child)
    if is_callable:
        return  # its forward is what replays
    if "forward" in members.obj:
        homes.enter(members.item("forward", f"forward of {name}"))
    else:
        homes.enter(members.child(members.obj, f"forward of {name}", _Kind.ABSENT, "forward"))


def check_hooks(module: nn.Module, name: str) -> None:
    """Raise RuntimeError, calling ``module`` ``name``, if it has hooks that a replay would not run."""
    for key, what in HOOK_DICTS.items():
        if not all(map(is_pure_hook, vars(module)[key].values())):
            raise RuntimeError(
                f"{name} has {what}, which a replay would not run: remove them before the capture (hooks on the "
                'graphed module itself do run), or freeze what they compute into the graph with hooks="captured"'
            )


def _guard_hooks(place: Place, homes: Homes, may_capture_hooks: bool) -> None:
    members = place.attributes()
    name = place.name or type(place.obj).__name__
    for key, what in HOOK_DICTS.items():
        hooks = members.item(key, f"{what} of {name}")
        if not may_capture_hooks:
            check_hooks(place.obj, name)
        homes.enter(hooks.child(hooks.obj, hooks.name, _Kind.LENGTH, index=len(hooks.obj)))
        for hook in hooks.obj:
            homes.enter(hooks.item(hook, hooks.name))


def _guard_tables(place: Place, homes: Homes, in_order: bool) -> None:
    """Which parameters, buffers and submodules there are, and which of them are None."""
    members = place.attributes()
    name = place.name or type(place.obj).__name__
    for key, what in (("_modules", "submodules"), ("_parameters", "parameters"), ("_buffers", "buffers")):
        table = members.item(key, f"{what} of {name}")
        for entry in [entry for entry, value in table.obj.items() if value is None]:
            homes.expect_value(table.item(entry, name_of(entry, place.name)))
        kind, entries = (_Kind.KEYS, tuple(table.obj)) if in_order else (_Kind.LENGTH, None)
        what = "order of " if in_order else "number of "
        homes.enter(table.child(table.obj, what + table.name, kind, entries, index=len(table.obj)))


def guard_place(place: Place, homes: Homes) -> None:
    """Guard what stands at a place that leads to no tensor that is used."""
    obj = place.obj
    if isinstance(obj, Tensor):
        homes.expect_type(place)
    elif is_value(obj):
        homes.expect_value(place)
    elif place.again is not None:
        homes.expect_again(place)
    elif isinstance(obj, list | tuple | dict | set):
        _guard_container(place, homes)
    elif is_array(obj):
        _guard_array(place, homes)
    elif isinstance(obj, deque):
        homes.enter(place.child(obj, f"length of {place.name}", _Kind.LENGTH, index=len(obj)))
    elif is_iterator(obj):
        raise RuntimeError(
            f"{place.name} is a {type(obj).__name__}, which the callable may advance, and a replay would not: use a "
            "list, or list the attribute in ignore_attributes= to freeze it"
        )
    elif not (isinstance(obj, _GUARDED_ELSEWHERE) or place.kind == _Kind.KNOWN or _is_library(place)):
        homes.enter(place)


def _guard_array(place: Place, homes: Homes) -> None:
    value = value_of(place.obj)
    if value is None:
        raise RuntimeError(
            f"{place.name} is a {type(place.obj).__name__} that is too large to be compared at each call, or holds "
            "objects: make it a tensor, or list the attribute in ignore_attributes= to freeze it"
        )
    homes.expect_contents(place, value)


def _is_library(place: Place) -> bool:
    """True for functions, classes and libraries that code refers to by global names and that the user did not write."""
    obj = place.obj
    if place.parent.key != "__globals__":
        return False
    if isinstance(obj, types.FunctionType):
        return not is_own_file(obj.__code__.co_filename)
    return obj not in bases_of(obj) if isinstance(obj, type) else isinstance(obj, _CODE) or is_opaque(type(obj))


def _guard_absence(place: Place, homes: Homes, reader: Reader) -> None:
    """Guard that an object has no attribute that would come before what its class has, or that code asks for."""
    members = place.attributes()
    if isinstance(place.obj, types.FunctionType) and is_user_file(place.obj.__code__.co_filename):
        for absent in missing(place):
            homes.enter(absent)
    if isinstance(place.obj, (*_CODE, Tensor)) or (is_value(place.obj) and members is None):
        return
    for name in reader.absent(place) if members is not None else ():
        homes.enter(members.child(members.obj, name_of(name, place.name), _Kind.ABSENT, name))
    for name in reader.empty_slots(place):
        homes.enter(place.child(place.obj, name_of(name, place.name), _Kind.NO_ATTRIBUTE, name))


def _guard_code(places: list[Place], modules: list[Place], homes: Homes, reader: Reader) -> None:
    """What classes have for the code to run, and the code of functions."""
    for place in modules:
        homes.expect_class(place, place.name or type(place.obj).__name__, reader.members(place.obj))
    for place in places:
        obj = place.obj
        if place.again is not None or place.kind == _Kind.KNOWN:
            continue
        if isinstance(obj, type) and reader.has_code(obj):
            homes.expect_class(place.child(obj, place.name, _Kind.KNOWN), place.name, reader.members(obj))
        elif not isinstance(obj, (nn.Module, Tensor, *_CODE)) and reader.has_code(type(obj)):
            homes.expect_class(place, place.name or "self", reader.members(obj))
    homes.expect_members_below(reader.members_below())
    for function in reader.functions(places):
        homes.expect_code(function)


def _guard_container(place: Place, homes: Homes) -> None:
    """Its members stand at places of their own; here it is about how many there are, and about values in bulk."""
    obj, name = place.obj, place.name
    if isinstance(obj, set):
        if len(obj) <= MOST_MEMBERS and (contents := value_of(obj)) is not None:
            homes.expect_contents(place, contents)
        else:
            homes.enter(place.child(obj, f"length of {name}", _Kind.LENGTH, index=len(obj)))
    elif is_bulk(obj) and len(obj) <= MOST_MEMBERS:
        homes.expect_value(place.child(obj, name, _Kind.CONTENTS))
    elif isinstance(obj, list | tuple):
        homes.enter(place.child(obj, f"length of {name}", _Kind.LENGTH, index=len(obj)))
    elif isinstance(obj, dict) and not any(isinstance(value, Tensor) for value in obj.values()):
        # One that holds tensors may be a cache, which grows whenever other code runs.
        is_few = len(obj) <= MOST_MEMBERS and all(map(is_value, obj))
        kind, key = (_Kind.KEYS, tuple(obj)) if is_few else (_Kind.LENGTH, None)
        homes.enter(place.child(obj, f"keys of {name}", kind, key, index=len(obj)))
