"""Where the tensors live that a capture uses and does not own, and the guard that checks that they still do."""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import has_subclass, is_dense, storage_key
from te_graph.externals import External
from te_graph.pure_hooks import is_pure_hook
from te_graph.signature import is_constant

HOOK_DICTS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_MAX_DISTANCE = 6
_MAX_OBJECTS = 100_000
_OPAQUE = (str, bytes, int, float, complex, type, type(None), types.ModuleType, types.BuiltinFunctionType, torch.dtype)
_Kind = _C.StepKind


@dataclass(eq=False)
class Place:
    """An object and the step that leads to it from its parent's.

    Attributes:
        name: what messages call the object.
        distance: steps from the callable; submodules, parameters and buffers are as far as their module.
    """

    obj: Any
    name: str
    parent: Place | None = None
    kind: Any = None
    key: Any = None
    index: int = 0
    distance: int = 0
    step: int = -1  # its number in the guard, once it is there
    in_guard: bool = False

    def child(self, obj: Any, name: str, kind: Any, key: Any = None, index: int = 0, distance: int = 1) -> Place:
        return type(self)(obj, name, self, kind, key, index, self.distance + distance)

    def attributes(self) -> Place | None:
        """The instance dictionary, or None for objects without one."""
        members = getattr(self.obj, "__dict__", None)
        return self.child(members, self.name, _Kind.INSTANCE_DICT, distance=0) if isinstance(members, dict) else None

    def item(self, key: Any, name: str, distance: int = 1) -> Place:
        return self.child(self.obj[key], name, _Kind.ITEM, key, distance=distance)

    def top_module(self) -> Place | None:
        """The first module on the way here."""
        above = self.parent.top_module() if self.parent is not None else None
        return above or (self if isinstance(self.obj, nn.Module) else None)


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
        """Enter the steps to ``place`` into the guard."""
        if place.parent is None or place.in_guard:
            return place.step
        parent = self.enter(place.parent)
        # Containers may be rebuilt as long as they lead to the same objects.
        expected = None if isinstance(place.obj, dict | list | tuple) else place.obj
        place.step = self.guard.add_step(place.kind, parent, place.key, place.index, expected, place.name)
        place.in_guard = True
        return place.step

    def add_main_grad(self, parameter: int) -> int:
        """Enter the ``main_grad`` of tensor number ``parameter`` and return its number."""
        place = self.places[parameter]
        return self.add(place.attributes().item("main_grad", f"main_grad of {place.name}"))


def find_homes(
    root: Any, externals: dict[int, External], leaves: Iterable[Tensor] = (), may_capture_hooks: bool = False
) -> Homes:
    """Find where the external tensors of a capture are reached from, and build the guard over them.

    ``leaves``, [...] each, are looked for as well: what gets a gradient need not have been read, such as the weight of
    a layer that reads an FP8 copy of it.

    Searches the modules, attributes, containers, closure variables, globals, defaults and bound objects that ``root``
    refers to. Modules are guarded whole: their submodules, training flags and hooks belong to what was captured.

    Raises:
        RuntimeError: an external tensor cannot be reached from ``root``, so nobody could tell when it moves; or a
            module that is not the callable itself has hooks and ``may_capture_hooks`` is False.
    """
    homes = Homes()
    wanted = {*externals, *map(storage_key, leaves)}
    missing = set(wanted)
    found: list[Place] = []
    reach = _MAX_DISTANCE
    for place in walk(root):
        if place.distance > reach:
            break
        if isinstance(place.obj, Tensor) and is_dense(place.obj) and storage_key(place.obj) in wanted:
            found.append(place)
            missing.discard(storage_key(place.obj))
        if not missing:
            # What is as near may hold the same memory under another name.
            reach = min(reach, max((home.distance for home in found), default=0))
    if missing := missing & externals.keys():
        lost = externals[min(missing, key=list(externals).index)]
        raise RuntimeError(
            f"{lost.op} uses a tensor of shape {list(lost.tensor.shape)} that is neither an argument nor a parameter, "
            "buffer, attribute or variable that the callable can be seen to hold, so a replay could not tell when it "
            f"moves: pass it as an argument or register it as a buffer; at {lost.site}"
        )
    guarded: set[int] = set()
    tops = [Place(root, "")] if isinstance(root, nn.Module) else []
    for top in [*tops, *filter(None, (place.top_module() for place in found))]:
        if id(top.obj) not in guarded:
            guarded.add(id(top.obj))
            for place in _modules_below(top):
                _guard_module(place, homes, place.obj is root, may_capture_hooks)
    for place in found:
        homes.add(place)
    return homes


def plain_call_guard() -> _C.Guard:
    """A guard that passes while a call of a module does nothing but call the ``forward`` of its class."""
    guard = _C.Guard()
    members = guard.add_step(_Kind.INSTANCE_DICT, -1, None, 0, None, "attributes")
    for name in ("forward", "_call_impl", "_compiled_call_impl"):
        guard.add_step(_Kind.ABSENT, members, name, 0, None, name)
    for name, what in HOOK_DICTS.items():
        hooks = guard.add_step(_Kind.ITEM, members, name, 0, None, what)
        guard.add_step(_Kind.LENGTH, hooks, None, 0, None, f"number of {what}")
    return guard


def walk(root: Any) -> Iterator[Place]:
    """Everything that ``root`` refers to, near things first; objects once, tensors under each of their names."""
    seen: set[int] = set()
    queue = deque([Place(root, "")])
    while queue and len(seen) < _MAX_OBJECTS:
        place = queue.popleft()
        if not isinstance(place.obj, Tensor):
            if id(place.obj) in seen:
                continue
            seen.add(id(place.obj))
        yield place
        if isinstance(place.obj, Tensor) or place.distance > _MAX_DISTANCE:
            continue
        inner = list(_module_contents(place) if isinstance(place.obj, nn.Module) else contents(place))
        queue.extendleft(reversed([child for child in inner if child.distance == place.distance]))
        queue.extend(child for child in inner if child.distance > place.distance)


def _module_contents(place: Place) -> Iterator[Place]:
    members = place.attributes()
    for key, value in list(members.obj.items()):
        if key == "_modules":
            yield from submodules(place)
        elif key in ("_parameters", "_buffers"):
            table = members.item(key, name_of(key, place.name), distance=0)
            names = [name for name, tensor in value.items() if tensor is not None]
            yield from (table.item(name, name_of(name, place.name), distance=0) for name in names)
        elif key not in HOOK_DICTS and key != "te_graph":
            yield members.item(key, name_of(key, place.name))


def submodules(place: Place) -> Iterator[Place]:
    table = place.attributes().item("_modules", name_of("_modules", place.name), distance=0)
    for name, module in table.obj.items():
        if module is not None:
            yield table.item(name, f"{place.name}.{name}".lstrip("."), distance=0)


def _modules_below(top: Place) -> Iterator[Place]:
    """The tree of modules from ``top`` on, parents first."""
    stack, seen = [top], set()
    while stack:
        place = stack.pop()
        if id(place.obj) not in seen:
            seen.add(id(place.obj))
            yield place
            stack.extend(reversed(list(submodules(place))))


def _guard_module(place: Place, homes: Homes, is_callable: bool, may_capture_hooks: bool) -> None:
    members = place.attributes()
    name = place.name or type(place.obj).__name__
    homes.enter(members.item("training", f"training flag of {name}"))
    table = members.item("_modules", f"number of submodules of {name}")
    homes.enter(table.child(table.obj, table.name, _Kind.LENGTH, index=len(table.obj)))
    for child in submodules(place):
        homes.enter(child)
    if is_callable:
        return  # its own hooks run around the replay, and its forward is what replays
    if "forward" in members.obj:
        homes.enter(members.item("forward", f"forward of {name}"))
    else:
        homes.enter(members.child(members.obj, f"forward of {name}", _Kind.ABSENT, "forward"))
    for key, what in HOOK_DICTS.items():
        hooks = members.item(key, f"{what} of {name}")
        if not (may_capture_hooks or all(map(is_pure_hook, hooks.obj.values()))):
            raise RuntimeError(
                f"{name} has {what}, which a replay would not run: remove them before the capture (hooks on the "
                'graphed module itself do run), or freeze what they compute into the graph with hooks="captured"'
            )
        homes.enter(hooks.child(hooks.obj, hooks.name, _Kind.LENGTH, index=len(hooks.obj)))
        for hook in hooks.obj:
            homes.enter(hooks.item(hook, hooks.name))


def name_of(name: str, owner: str) -> str:
    return f"{name} of {owner}" if owner else name


def contents(place: Place) -> Iterator[Place]:
    """What an object that is no module refers to."""
    obj, name = place.obj, place.name
    if isinstance(obj, _OPAQUE):
        return
    if isinstance(obj, dict):
        for key, value in obj.items():
            if is_constant(key):
                yield place.child(value, f"{name}[{key!r}]", _Kind.ITEM, key)
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield place.child(value, f"{name}[{index}]", _Kind.POSITION, index=index)
    elif isinstance(obj, types.FunctionType):
        yield from _function_contents(place)
    elif isinstance(obj, types.MethodType):
        yield place.child(obj.__self__, name, _Kind.ATTRIBUTE, "__self__")
        yield place.child(obj.__func__, name, _Kind.ATTRIBUTE, "__func__")
    elif isinstance(obj, functools.partial):
        for key in ("func", "args", "keywords"):
            yield place.child(getattr(obj, key), f"{name} {key}".lstrip(), _Kind.ATTRIBUTE, key)
    elif (members := place.attributes()) is not None:
        for key in list(members.obj):
            yield members.item(key, f"{name}.{key}".lstrip("."))
        if place.parent is None:  # a callable object: what its method refers to
            kind = place.child(type(obj), name, _Kind.ATTRIBUTE, "__class__")
            method = type(obj).__call__
            if isinstance(method, types.FunctionType):
                yield kind.child(method, name, _Kind.ATTRIBUTE, "__call__")


def _function_contents(place: Place) -> Iterator[Place]:
    function = place.obj
    if function.__closure__:
        cells = place.child(function.__closure__, place.name, _Kind.ATTRIBUTE, "__closure__")
        for index, (variable, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__, strict=True)):
            where = cells.child(cell, variable, _Kind.POSITION, index=index)
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield where.child(value, f"closure variable {variable}", _Kind.CELL)
    for key in ("__defaults__", "__kwdefaults__"):
        if getattr(function, key):
            yield place.child(getattr(function, key), f"default of {function.__name__}", _Kind.ATTRIBUTE, key)
    scope = place.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
    for variable in _names_used(function.__code__):
        if variable in function.__globals__:
            yield scope.item(variable, f"global variable {variable}")


def _names_used(code: types.CodeType) -> set[str]:
    """Names that a function and the functions written inside it look up as globals."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names.union(*(_names_used(constant) for constant in inner))
