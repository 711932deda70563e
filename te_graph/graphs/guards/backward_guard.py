"""What Python code reads that runs in a backward: functions of autograd, hooks on tensors, checkpoints.

The guard of a callable is looked at in each forward. Such code runs later in eager execution, where it sees what has
changed in between.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.guarded_modules import guard_module
from te_graph.graphs.guards.guarded_objects import guard_source
from te_graph.graphs.guards.readers.callable_reader import CallableReader
from te_graph.graphs.guards.sources import MODULE_TABLES, Source, name_of, tells_tensors_apart
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.names import LOOKS_AT_ALL, Names, strings_in

_Kind = _C.StepKind
_CALL_OF_MODULES = id(nn.Module._call_impl.__code__)
_OWNERS = ("__globals__", *MODULE_TABLES)
_DEFAULTS = ("__defaults__", "__kwdefaults__")
# Attributes by which Python's library gets to what an object holds.
_WITHIN = (
    *("__self__", "__func__", "func", "args", "keywords", "__closure__", "__wrapped__"),
    *("data", "maps", "_value_"),
)


def backward_guard(
    reader: CallableReader, sources: list[Source], watch: CodeWatch, used: Collection[int]
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
    reads_all = _CALL_OF_MODULES in watch.codes or not LOOKS_AT_ALL.isdisjoint(names)
    reads = _Reads(frozenset(ran), None if reads_all else frozenset(names))
    tells_apart = tells_tensors_apart(Names(frozenset(names)), sources)
    root, *others = sources
    callable_guard = CallableGuard()
    root.step = callable_guard.guard.add_step(_Kind.KNOWN, -1, None, 0, None, "the callable")
    callable_guard.guard.expect_identity(root.step, root.obj)
    if reads_all and isinstance(root.obj, nn.Module):
        guard_module(root, callable_guard, is_callable=True)
    looked_at: set[int] = set()
    for source in others:
        if not reads.may_read(source):
            continue
        if isinstance(source.obj, nn.Module) or (isinstance(source.obj, Tensor) and storage_key(source.obj) in used):
            callable_guard.enter(source)
            if reads_all and isinstance(source.obj, nn.Module) and source.again is None:
                guard_module(source, callable_guard, is_callable=False)
        else:
            guard_source(source, callable_guard, Names(frozenset(names)).puts_items, tells_apart)
        if id(source.obj) not in looked_at and (members := source.attributes()) is not None:
            looked_at.add(id(source.obj))
            for name in filter(reads.says, reader.absent(source)):
                callable_guard.enter(members.child(members.obj, name_of(name, source.name), _Kind.ABSENT, name))
    return callable_guard.guard if callable_guard.guard.steps > 1 else None


@dataclass(frozen=True)
class _Reads:
    """What code may read.

    Attributes:
        ran: that code.
        names: all that it says; None: it may read everything.
    """

    ran: frozenset[types.CodeType]
    names: frozenset[str] | None

    def may_read(self, source: Source) -> bool:
        """Whether the code may read what stands at ``source``; variables of a thread or context are not its own."""
        above, key = source.parent, source.key
        if above is None or source.kind in (_Kind.KNOWN, _Kind.CONTEXT_VAR) or isinstance(above.obj, threading.local):
            return False
        if source.kind == _Kind.CELL and above.parent.key == "__closure__":
            return self.says(above.name)
        if key in _DEFAULTS:
            return self.names is None or above.obj.__code__ in self.ran
        is_named = (
            source.kind in (_Kind.ATTRIBUTE, _Kind.TYPE_ITEM, _Kind.INSTANCE_DICT) or above.kind == _Kind.INSTANCE_DICT
        )
        if (is_named or above.key in _OWNERS) and key not in _WITHIN:
            return self.says(key)
        return self.may_read(above.parent if above.kind == _Kind.INSTANCE_DICT else above)

    def says(self, name: str) -> bool:
        return self.names is None or name in self.names
