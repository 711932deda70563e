"""The guard of one callable: over the tensors that its capture uses, and over all else that its code can read."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import has_subclass, is_strided
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.readers.library_objects import is_array
from te_graph.graphs.guards.sources import Source, is_own_tensor
from te_graph.graphs.guards.values import value_of

_Kind = _C.StepKind


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
        if is_own_tensor(source):
            self.enter(source.parent)  # in whose place a module may come to have another one
        step = self.enter(source)
        if step not in self._numbers:  # two sources may be one way to it
            self._add(source)
        return self._numbers[step]

    def _add(self, source: Source, is_used: bool = True) -> None:
        self.tensors.append(source.obj)
        self.names.append(source.name)
        self.sources.append(source)
        self._numbers[source.step] = self.guard.add_tensor(source.step, source.obj, is_used=is_used)

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
        """Let the guard compare what stands at ``source`` by value, or by identity where it has none.

        Raises:
            RuntimeError: it is what a container holds, which may change, and has no value.
        """
        value = value_of(source.obj)
        if value is None:
            if source.kind == _Kind.CONTENTS:
                raise RuntimeError(f"{source.name} cannot be compared at each call: list it in ignore_attributes=")
            self.guard.expect_identity(self._step_to(source), source.obj)
        elif value.is_mutable and source.kind != _Kind.CONTENTS:  # looked at also where nothing has taken its place
            self.expect_contents(source, value)
        else:
            self.guard.expect_value(self._step_to(source), value)

    def expect_contents(self, source: Source, contents: _C.Value) -> None:
        """Let the guard compare what the object at ``source`` holds."""
        self.guard.expect_value(self._step_to(source.child(source.obj, source.name, _Kind.CONTENTS)), contents)

    def expect_type(self, source: Source) -> None:
        """Let the guard compare the type of what stands at ``source``."""
        self.guard.expect_type(self._step_to(source), type(source.obj))

    def expect_form(self, source: Source) -> None:
        """Let the guard compare what the tensor at ``source`` is like: type, shape, strides, dtype, device, and whether
        it requires a gradient; not where it lies."""
        tensor = source.obj
        self.expect_type(source)
        if not has_subclass([type(tensor)]) and is_strided(tensor) and source.step not in self._numbers:
            self._add(source, is_used=False)

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

    def expect_metaclass(self, source: Source, name: str, members: Iterable[tuple[str, Any]]) -> None:
        """Let the guard find ``members`` in the metaclass of that class."""
        kind = plain_class(source.obj if isinstance(source.obj, type) else type(source.obj))
        at = source.child(kind, f"class of {name}", _Kind.CLASS)
        self.expect_class(at.child(type(kind), f"metaclass of {name}", _Kind.TYPE), f"class of {name}", members)

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
        elif is_value(member) and (value := value_of(member)) is not None:
            self.guard.expect_value(at, value)
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
