"""What Python code reads that runs in a backward: functions of autograd, hooks on tensors, checkpoints.

The guard of a callable is looked at in each forward. Such code runs later in eager execution, where it sees what has
changed in between.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.common.raw_contents import items_of
from te_graph.graphs.guards.backward_watch import WITHIN, BackwardWatch
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.guarded_modules import guard_module, guard_number_of_hooks, guard_training
from te_graph.graphs.guards.guarded_objects import guard_keys, guard_source
from te_graph.graphs.guards.plain_values import is_bulk, is_value
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.readers.library_objects import is_array
from te_graph.graphs.guards.sources import HOOK_DICTS, MODULE_TABLES, Source, name_of, tells_tensors_apart
from te_graph.graphs.tracing.code_names import LOOKS_AT_ALL, PATTERN, strings_in
from te_graph.graphs.tracing.names import GETTERS, Names, fields_of, names_in_patterns, names_of_getter
from te_graph.graphs.tracing.subscripts import reads_unsaid_keys

_Kind = _C.StepKind
_CALL_OF_MODULES = id(nn.Module._call_impl.__code__)
_OWNERS = ("__globals__", *MODULE_TABLES)
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_WITHIN = WITHIN | {"__closure__", "__wrapped__"}
_ATTRIBUTES = (_Kind.ATTRIBUTE, _Kind.TYPE_ITEM, _Kind.INSTANCE_DICT)


def backward_guard(
    reader: CallableReader, sources: list[Source], watch: BackwardWatch, used: Collection[int]
) -> _C.CallableGuard | None:
    """The guard over what the code that ``watch`` has seen in a backward may read, of ``sources``, the callable first.
    No other guard is made of these: they know their steps in one.

    None where it reads nothing there: a replay then has nothing to look at.

    Args:
        used: identities of the storages that the capture uses.
    """
    ran = [code for _, code in watch.users_codes()]
    if not ran and _CALL_OF_MODULES not in watch.codes:
        return None
    names = watch.names.union(*map(strings_in, ran), *(code.co_freevars for code in ran))
    names.update(*(names_of_getter(source.obj) for source in sources if isinstance(source.obj, GETTERS)))
    if PATTERN in names:
        names.update(names_in_patterns(type(source.obj) for source in sources))
    if "asdict" in watch.field_readers:
        names.update(fields_of(type(source.obj) for source in sources))
    reads_all = _CALL_OF_MODULES in watch.codes or watch.looks_at_all or not LOOKS_AT_ALL.isdisjoint(names)
    reads_any_key = reads_all or any(map(reads_unsaid_keys, ran))
    reads = _Reads(frozenset(ran), None if reads_all else frozenset(names), watch.held, reads_any_key)
    root, *others = sources
    callable_guard = CallableGuard()
    root.step = callable_guard.guard.add_step(_Kind.KNOWN, -1, None, 0, None, "the callable")
    callable_guard.guard.expect_identity(root.step, root.obj)
    guard_found = functools.partial(
        guard_source,
        callable_guard=callable_guard,
        names=Names(frozenset(names)),
        tells_apart=tells_tensors_apart(Names(frozenset(names)), sources),
    )
    reads.follow(others)
    _guard_module(root, callable_guard, reads)
    looked_at: set[int] = set()
    for source in others:
        if source.again is None and isinstance(source.obj, types.FunctionType) and source.obj.__code__ in reads.ran:
            for absent in reader.missing_variables(source):
                callable_guard.enter(absent)
        if reads.may_read(source):
            if isinstance(source.obj, nn.Module) or (
                isinstance(source.obj, Tensor) and storage_key(source.obj) in used
            ):
                callable_guard.enter(source)
            else:
                guard_found(source)
        elif reads.holds(source):
            _guard_contents(source, callable_guard, reads, guard_found)
        else:
            continue
        if id(source.obj) not in looked_at:
            looked_at.add(id(source.obj))
            if source.obj is not root.obj:
                _guard_module(source, callable_guard, reads)
            _guard_lookups(source, callable_guard, reads, reader)
    return callable_guard.guard if callable_guard.guard.steps > 1 else None


def _guard_module(source: Source, callable_guard: CallableGuard, reads: _Reads) -> None:
    """Guard what the module at ``source``, if it is one that the code may get hold of, has apart from attributes."""
    module, is_callable = source.obj, source.parent is None
    if not isinstance(module, nn.Module):
        return
    if reads.names is None:
        guard_module(source, callable_guard, is_callable)
    elif id(module) in reads.reached or id(module) in reads.held:
        if "training" in reads.names:
            guard_training(source, callable_guard)
        # The callable may get hooks after the capture, which run around a replay.
        for key in HOOK_DICTS.keys() & reads.names if not is_callable else ():
            guard_number_of_hooks(source, callable_guard, key)


def _guard_lookups(source: Source, callable_guard: CallableGuard, reads: _Reads, reader: CallableReader) -> None:
    """Guard what lookups in the object at ``source`` and its class, or in the class there, have found or not."""
    obj, members = source.obj, source.attributes()
    if members is not None and not isinstance(obj, type):
        for name in filter(reads.says, reader.absent(source)):
            callable_guard.enter(members.child(members.obj, name_of(name, source.name), _Kind.ABSENT, name))
    if not reader.is_users(obj if isinstance(obj, type) else type(obj)):
        return
    lookups = (
        (callable_guard.expect_class, reader.members),
        (callable_guard.expect_metaclass, reader.members_of_metaclass),
    )
    for expect, members_of in lookups:
        data = [(name, member) for name, member in members_of(obj) if reads.says(name) and _is_data(member)]
        if data:
            expect(source, source.name or "self", data)


def _is_data(member: Any) -> bool:
    """True for values and containers that a class has, and where it has nothing; methods are not looked at."""
    return member is NotImplemented or is_value(member) or isinstance(member, list | dict | set)


def _guard_contents(
    source: Source, callable_guard: CallableGuard, reads: _Reads, guard_found: Callable[[Source], None]
) -> None:
    """Guard what the object at ``source`` holds by itself; another one may take its place. Objects in a container stand
    at sources of their own. ``guard_found`` guards all that is there."""
    obj = source.obj
    if isinstance(obj, dict) and is_bulk(obj) and not reads.reads_unsaid_keys:
        guard_keys(source, callable_guard)
        for key, value in items_of(obj):
            if reads.says_key(key):
                callable_guard.expect_value(source.child(value, f"{source.name}[{key!r}]", _Kind.ITEM, key))
    elif isinstance(obj, dict | list | tuple | set | deque) or is_array(obj):
        guard_found(source)


@dataclass(frozen=True)
class _Reads:
    """What code may read.

    Attributes:
        ran: that code.
        names: all that it says; None: it may read everything.
        held: identities of the objects that it gets hold of, under whatever names.
        reads_unsaid_keys: of a dictionary it may read items under keys that are not among ``names``.
        reached: identities of the objects that stand where it may read, which may stand elsewhere, too.
    """

    ran: frozenset[types.CodeType]
    names: frozenset[str] | None
    held: Collection[int]
    reads_unsaid_keys: bool
    reached: set[int] = field(default_factory=set)

    def follow(self, sources: Iterable[Source]) -> None:
        """Find which objects at ``sources`` the code reaches."""
        count = -1
        while count < len(self.reached):
            count = len(self.reached)
            self.reached.update(id(source.obj) for source in sources if self.may_read(source))

    def holds(self, source: Source) -> bool:
        """Whether the code gets hold of the object that stands at ``source``, where that was met first."""
        return source.again is None and source.kind != _Kind.CONTEXT_VAR and id(source.obj) in self.held

    def may_read(self, source: Source) -> bool:
        """Whether the code may read what stands at ``source``; variables of a thread or context are not its own."""
        above, key = source.parent, source.key
        if above is None or source.kind in (_Kind.KNOWN, _Kind.CONTEXT_VAR) or isinstance(above.obj, threading.local):
            return False
        if source.kind == _Kind.CELL and above.parent.key == "__closure__":
            return self.says(above.name)
        if key in _DEFAULTS:
            return self.names is None or above.obj.__code__ in self.ran
        is_named = source.kind in _ATTRIBUTES or above.kind == _Kind.INSTANCE_DICT
        if (is_named or above.key in _OWNERS) and key not in _WITHIN:
            return self.says(key)
        if id(above.obj) in self.held and (not isinstance(above.obj, dict) or self.says_key(key)):
            return True
        owner = above.parent if above.kind == _Kind.INSTANCE_DICT else above
        return id(owner.obj) in self.reached or self.may_read(owner)

    def says_key(self, key: Any) -> bool:
        """Whether the code may read what a dictionary holds under ``key``."""
        return self.reads_unsaid_keys or not isinstance(key, str) or self.says(key)

    def says(self, name: str) -> bool:
        return self.names is None or name in self.names
