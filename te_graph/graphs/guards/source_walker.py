"""What a function is called with and refers to: sources that a guard follows at every call."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import is_user_file
from te_graph.graphs.guards.guarded_sources import GuardedSource, is_transparent
from te_graph.graphs.guards.object_reader import ObjectReader, hooks_of_all
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.calls import Call
from te_graph.graphs.tracing.code_watch import CodeWatch, functions_of, is_generated, too_many
from te_graph.graphs.tracing.names import GETTERS, Names

_Kind = _C.StepKind
_MAX_SOURCES = 100_000
_MAX_STRINGS = 1000
_ADDRESSES = frozenset({"data_ptr", "storage_offset", "storage", "untyped_storage", "__cuda_array_interface__"})


def _is_object(source: GuardedSource) -> bool:
    """True for what can be the key of a dict in which something is to be found."""
    return not source.is_end and source.same_as is None and source.value is None


class SourceWalker:
    """Finds the sources that calls of one function can be seen to use; remembers which names its code says.

    Attributes:
        has_too_many_sources: the last call referred to more sources than can be compared.
    """

    def __init__(self) -> None:
        self._names = Names()
        self._ran: dict[int, types.CodeType] = {}
        self._running: list[types.CodeType] = []  # the user's, of that
        self._seen_to_run: dict[types.FunctionType, None] = {}  # kept: guards would miss what is gone
        self._at_sources: list[weakref.ref[types.FunctionType]] = []
        self.has_too_many_sources = False

    @property
    def asks_for_names(self) -> bool:
        """Whether code has strings for names of attributes, which it may put together at run time."""
        return self._names.asks_for_names

    def note(self, watch: CodeWatch) -> None:
        """Remember what a call was seen to run, by identity, and to ask for by name."""
        at_sources = _live(self._at_sources)
        functions = functions_of(watch, at_sources)
        self._seen_to_run.update(dict.fromkeys(functions))
        new = {key: code for key, code in watch.codes.items() if key not in self._ran}
        self._ran.update(new)
        self._names = replace(self._names, ran=frozenset(self._ran)).with_strings(watch.names)
        known = {id(function.__code__) for function in [*at_sources, *functions]}
        codes = [code for code in new.values() if is_user_file(code.co_filename)]
        self._running += [code for code in codes if id(code) in known or not is_generated(code)]

    @property
    def reads_addresses(self) -> bool:
        """The code asks where tensors lie, perhaps for a kernel that no dispatcher sees: all of them count as used."""
        return not self._names.said.isdisjoint(_ADDRESSES)

    def explore(self, call: Call, everything: bool = False) -> list[GuardedSource]:
        """All sources, near ones first: the function and its arguments, containers, closure variables, defaults,
        globals used, attributes, classes, modules, optimizers and their state, gradients.

        Attributes of the user's own classes that no code names which the function may run are left out, unless
        ``everything`` is wanted.
        """
        names = self._names
        elsewhere: list[types.FunctionType] = []
        while True:
            sources = _walk(call, elsewhere, names, everything)
            if not everything:
                self.has_too_many_sources = sources[-1].kind == _Kind.NEVER and len(sources) > _MAX_SOURCES
                if self.has_too_many_sources:
                    return sources
            known = [source.obj for source in sources if source.same_as is None]
            functions = [obj for obj in known if isinstance(obj, types.FunctionType)]
            met = [function.__code__ for function in functions if is_user_file(function.__code__.co_filename)]
            classes = [obj if isinstance(obj, type) else type(obj) for obj in known]
            more = names.with_code([*self._running, *met], classes)
            more = more.with_strings(string for obj in known for string in _strings_of(obj))
            more = more.with_getters(obj for obj in known if isinstance(obj, GETTERS))
            more_elsewhere = [*elsewhere, *self._not_among(functions)]
            if more == names and len(more_elsewhere) == len(elsewhere):
                self._at_sources = [*map(weakref.ref, functions)]
                break
            names, elsewhere = more, more_elsewhere
        if reason := too_many(elsewhere):
            sources.append(sources[0].never(reason))
        if not everything:  # which meets code, too, that the function does not run
            self._names = names
        return sources

    def _not_among(self, functions: list[types.FunctionType]) -> list[types.FunctionType]:
        """Functions that were seen to run and are reached in ways that are not followed."""
        known = set(map(id, functions))
        return [function for function in self._seen_to_run if id(function) not in known]


def _live(functions: list[weakref.ref[types.FunctionType]]) -> list[types.FunctionType]:
    return [function for weak in functions if (function := weak()) is not None]


def _strings_of(obj: Any) -> Iterator[str]:
    if type(obj) is str:
        yield obj
    elif isinstance(obj, list | tuple) and len(obj) <= _MAX_STRINGS:
        yield from (item for item in obj if type(item) is str)
    elif type(obj) is dict and len(obj) <= _MAX_STRINGS:
        yield from (item for item in obj.values() if type(item) is str)


def _walk(call: Call, elsewhere: list[types.FunctionType], names: Names, everything: bool) -> list[GuardedSource]:
    reader = ObjectReader(names, everything)
    sources: list[GuardedSource] = []
    seen: dict[int, GuardedSource] = {}
    valued: dict[int, GuardedSource] = {}
    waiting: list[GuardedSource] = []  # dicts whose keys are objects
    queue = deque(_beginnings(call, elsewhere))
    while queue or waiting:
        if not queue:
            by_object = {id(source.obj): source for source in sources if _is_object(source)}
            queue.extend(child for source in waiting for child in _items_of_objects(source, by_object))
            waiting = []
            continue
        source = queue.popleft()
        if type(source.obj) in weakref.ProxyTypes:  # which says that it is of the class behind it
            sources.append(
                source.parent.never(f"{source.name} is a weak proxy, which cannot be compared: use weakref.ref")
            )
            continue
        sources.append(source)
        if len(sources) >= _MAX_SOURCES:
            sources.append(source.never(f"{source.name or 'the function'} refers to more than {_MAX_SOURCES} sources"))
            break
        if source.is_end:
            continue
        source.value = None if source.is_given else value_of(source.obj)
        if source.value is not None:
            if id(source.obj) not in valued:
                valued[id(source.obj)] = source
                queue.extend(_settled(source, child) for child in reader.contents_of_value(source))
            continue
        source.same_as = seen.get(id(source.obj))
        if source.same_as is not None:
            continue
        seen[id(source.obj)] = source
        if isinstance(source.obj, dict) and not all(value_of(key) is not None for key in source.obj):
            waiting.append(source)
        queue.extend(_settled(source, child) for child in reader.contents(source))
    return sources


def _beginnings(call: Call, elsewhere: list[types.FunctionType]) -> Iterator[GuardedSource]:
    root = GuardedSource(call, "", is_ephemeral=True)
    yield root.child(call[0], "", _Kind.POSITION, index=0)
    for index, name in ((1, "arguments"), (2, "keyword arguments")):
        given = root.child(call[index], name, _Kind.POSITION, index=index)
        given.is_ephemeral = given.is_given = True
        yield given
    yield from hooks_of_all(root)
    yield from (root.child(function, f"function {function.__name__}", _Kind.KNOWN) for function in elsewhere)


def _settled(parent: GuardedSource, child: GuardedSource) -> GuardedSource:
    """``child`` with what it takes over from ``parent``, an object further up."""
    is_far = isinstance(parent.obj, types.FunctionType) or not (
        is_transparent(parent.obj) or isinstance(parent.obj, nn.Module | Tensor)
    )
    child.depth = parent.depth + is_far
    child.is_ephemeral = parent.is_ephemeral and is_transparent(parent.obj)
    between = child.parent
    while between is not parent:
        between.is_ephemeral = child.is_ephemeral
        between = between.parent
    return child


def _items_of_objects(source: GuardedSource, by_object: dict[int, GuardedSource]) -> Iterator[GuardedSource]:
    """Where a key is found nowhere else, the dict leads to it, too."""
    if _C.keys_of(source.obj) is None:
        return
    for number, (key, value) in enumerate(source.obj.items()):
        if value_of(key) is not None:
            continue
        key_source = by_object.get(id(key))
        if key_source is None:
            key_source = _settled(source, source.child(key, f"key {number} of {source.name}", _Kind.KNOWN))
            yield key_source
        child = _settled(source, source.child(value, f"{source.name}[{key_source.name or number}]", _Kind.ITEM_OF))
        child.key_source = key_source
        yield child
