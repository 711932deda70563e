"""What a function is called with and refers to: places that a guard follows at every call."""

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
from te_graph.graphs.guards.guarded_sources import Fact, is_plumbing
from te_graph.graphs.guards.object_reader import Reader, hooks_of_all
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.calls import Frame
from te_graph.graphs.tracing.code_watch import CodeWatch, functions_of, is_generated, too_many
from te_graph.graphs.tracing.names import GETTERS, Names

_Kind = _C.StepKind
_MAX_PLACES = 100_000
_MAX_STRINGS = 1000
_ADDRESSES = frozenset({"data_ptr", "storage_offset", "storage", "untyped_storage", "__cuda_array_interface__"})


def _is_object(fact: Fact) -> bool:
    """True for what can be the key of a dict in which something is to be found."""
    return not fact.is_end and fact.same_as is None and fact.value is None


class Explorer:
    """Finds the places that calls of one function can be seen to use; remembers which names its code says.

    Attributes:
        is_at_a_loss: the last call referred to more places than can be compared.
    """

    def __init__(self) -> None:
        self._names = Names()
        self._ran: dict[int, types.CodeType] = {}
        self._running: list[types.CodeType] = []  # the user's, of that
        self._seen_to_run: dict[types.FunctionType, None] = {}  # kept: guards would miss what is gone
        self._at_places: list[weakref.ref[types.FunctionType]] = []
        self.is_at_a_loss = False

    @property
    def asks_for_names(self) -> bool:
        """Whether code has strings for names of attributes, which it may put together at run time."""
        return self._names.asks_for_names

    def note(self, watch: CodeWatch) -> None:
        """Remember what a call was seen to run, by identity, and to ask for by name."""
        at_places = _live(self._at_places)
        functions = functions_of(watch, at_places)
        self._seen_to_run.update(dict.fromkeys(functions))
        new = {key: code for key, code in watch.codes.items() if key not in self._ran}
        self._ran.update(new)
        self._names = replace(self._names, ran=frozenset(self._ran)).with_strings(watch.names)
        known = {id(function.__code__) for function in [*at_places, *functions]}
        codes = [code for code in new.values() if is_user_file(code.co_filename)]
        self._running += [code for code in codes if id(code) in known or not is_generated(code)]

    @property
    def reads_addresses(self) -> bool:
        """The code asks where tensors lie, perhaps for a kernel that no dispatcher sees: all of them count as used."""
        return not self._names.said.isdisjoint(_ADDRESSES)

    def explore(self, frame: Frame, everything: bool = False) -> list[Fact]:
        """All places, near ones first: the function and its arguments, containers, closure variables, defaults, globals
        used, attributes, classes, modules, optimizers and their state, gradients.

        Attributes of the user's own classes that no code names which the function may run are left out, unless
        ``everything`` is wanted.
        """
        names = self._names
        elsewhere: list[types.FunctionType] = []
        while True:
            facts = _walk(frame, elsewhere, names, everything)
            if not everything:
                self.is_at_a_loss = facts[-1].kind == _Kind.NEVER and len(facts) > _MAX_PLACES
                if self.is_at_a_loss:
                    return facts
            known = [fact.obj for fact in facts if fact.same_as is None]
            functions = [obj for obj in known if isinstance(obj, types.FunctionType)]
            met = [function.__code__ for function in functions if is_user_file(function.__code__.co_filename)]
            classes = [obj if isinstance(obj, type) else type(obj) for obj in known]
            more = names.with_code([*self._running, *met], classes)
            more = more.with_strings(string for obj in known for string in _strings_of(obj))
            more = more.with_getters(obj for obj in known if isinstance(obj, GETTERS))
            more_elsewhere = [*elsewhere, *self._not_among(functions)]
            if more == names and len(more_elsewhere) == len(elsewhere):
                self._at_places = [*map(weakref.ref, functions)]
                break
            names, elsewhere = more, more_elsewhere
        if reason := too_many(elsewhere):
            facts.append(facts[0].never(reason))
        if not everything:  # which meets code, too, that the function does not run
            self._names = names
        return facts

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


def _walk(frame: Frame, elsewhere: list[types.FunctionType], names: Names, everything: bool) -> list[Fact]:
    reader = Reader(names, everything)
    facts: list[Fact] = []
    seen: dict[int, Fact] = {}
    valued: dict[int, Fact] = {}
    waiting: list[Fact] = []  # dicts whose keys are objects
    queue = deque(_beginnings(frame, elsewhere))
    while queue or waiting:
        if not queue:
            by_object = {id(fact.obj): fact for fact in facts if _is_object(fact)}
            queue.extend(child for fact in waiting for child in _items_of_objects(fact, by_object))
            waiting = []
            continue
        fact = queue.popleft()
        if type(fact.obj) in weakref.ProxyTypes:  # which says that it is of the class behind it
            facts.append(fact.parent.never(f"{fact.name} is a weak proxy, which cannot be compared: use weakref.ref"))
            continue
        facts.append(fact)
        if len(facts) >= _MAX_PLACES:
            facts.append(fact.never(f"{fact.name or 'the function'} refers to more than {_MAX_PLACES} places"))
            break
        if fact.is_end:
            continue
        fact.value = None if fact.is_given else value_of(fact.obj)
        if fact.value is not None:
            if id(fact.obj) not in valued:
                valued[id(fact.obj)] = fact
                queue.extend(_settled(fact, child) for child in reader.contents_of_value(fact))
            continue
        fact.same_as = seen.get(id(fact.obj))
        if fact.same_as is not None:
            continue
        seen[id(fact.obj)] = fact
        if isinstance(fact.obj, dict) and not all(value_of(key) is not None for key in fact.obj):
            waiting.append(fact)
        queue.extend(_settled(fact, child) for child in reader.contents(fact))
    return facts


def _beginnings(frame: Frame, elsewhere: list[types.FunctionType]) -> Iterator[Fact]:
    root = Fact(frame, "", is_fleeting=True)
    yield root.child(frame[0], "", _Kind.POSITION, index=0)
    for index, name in ((1, "arguments"), (2, "keyword arguments")):
        given = root.child(frame[index], name, _Kind.POSITION, index=index)
        given.is_fleeting = given.is_given = True
        yield given
    yield from hooks_of_all(root)
    yield from (root.child(function, f"function {function.__name__}", _Kind.KNOWN) for function in elsewhere)


def _settled(parent: Fact, child: Fact) -> Fact:
    """``child`` with what it takes over from ``parent``, an object further up."""
    is_far = isinstance(parent.obj, types.FunctionType) or not (
        is_plumbing(parent.obj) or isinstance(parent.obj, nn.Module | Tensor)
    )
    child.depth = parent.depth + is_far
    child.is_fleeting = parent.is_fleeting and is_plumbing(parent.obj)
    between = child.parent
    while between is not parent:
        between.is_fleeting = child.is_fleeting
        between = between.parent
    return child


def _items_of_objects(fact: Fact, by_object: dict[int, Fact]) -> Iterator[Fact]:
    """Where a key is found nowhere else, the dict leads to it, too."""
    if _C.keys_of(fact.obj) is None:
        return
    for number, (key, value) in enumerate(fact.obj.items()):
        if value_of(key) is not None:
            continue
        key_place = by_object.get(id(key))
        if key_place is None:
            key_place = _settled(fact, fact.child(key, f"key {number} of {fact.name}", _Kind.KNOWN))
            yield key_place
        child = _settled(fact, fact.child(value, f"{fact.name}[{key_place.name or number}]", _Kind.ITEM_OF))
        child.key_place = key_place
        yield child
