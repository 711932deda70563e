"""What a function is called with and refers to: places that a guard follows at every call."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import is_user_file
from te_graph.facts import Fact, is_plumbing
from te_graph.frame import Frame
from te_graph.names import Names, is_user_type
from te_graph.reader import Reader
from te_graph.values import value_of

_Kind = _C.StepKind
_MAX_PLACES = 100_000
_MAX_STRINGS = 1000


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
        self.is_at_a_loss = False

    def explore(self, frame: Frame, everything: bool = False) -> list[Fact]:
        """All places, near ones first: the function and its arguments, containers, closure variables, defaults, globals
        used, attributes, classes, modules, optimizers and their state, gradients.

        Attributes of the user's own classes that no code names which the function may run are left out, unless
        ``everything`` is wanted.
        """
        names = self._names
        while True:
            facts = _walk(frame, names, everything)
            if not everything:
                self.is_at_a_loss = facts[-1].kind == _Kind.NEVER and len(facts) > _MAX_PLACES
                if self.is_at_a_loss:
                    return facts
            known = [fact.obj for fact in facts if fact.same_as is None]
            functions = [obj for obj in known if isinstance(obj, types.FunctionType) and _is_users(obj)]
            more = names.with_code(functions, [type(obj) for obj in known if is_user_type(type(obj))])
            more = more.with_strings(string for obj in known for string in _strings_of(obj))
            if more == names:
                break
            names = more
        if not everything:  # which meets code, too, that the function does not run
            self._names = names
        return facts


def _is_users(function: types.FunctionType) -> bool:
    return is_user_file(function.__code__.co_filename)


def _strings_of(obj: Any) -> Iterator[str]:
    if type(obj) is str:
        yield obj
    elif isinstance(obj, list | tuple) and len(obj) <= _MAX_STRINGS:
        yield from (item for item in obj if type(item) is str)


def _walk(frame: Frame, names: Names, everything: bool) -> list[Fact]:
    reader = Reader(names, everything)
    facts: list[Fact] = []
    seen: dict[int, Fact] = {}
    waiting: list[Fact] = []  # dicts whose keys are objects
    queue = deque(_beginnings(frame))
    while queue or waiting:
        if not queue:
            by_object = {id(fact.obj): fact for fact in facts if _is_object(fact)}
            queue.extend(child for fact in waiting for child in _items_of_objects(fact, by_object))
            waiting = []
            continue
        fact = queue.popleft()
        facts.append(fact)
        if len(facts) >= _MAX_PLACES:
            facts.append(fact.never(f"{fact.name or 'the function'} refers to more than {_MAX_PLACES} places"))
            break
        if fact.is_end:
            continue
        fact.value = None if fact.is_given else value_of(fact.obj)
        if fact.value is not None:
            continue
        is_leaf = isinstance(fact.obj, Tensor) and fact.obj.is_leaf and fact.obj.requires_grad
        if is_leaf or not isinstance(fact.obj, Tensor):
            fact.same_as = seen.get(id(fact.obj))
            if fact.same_as is not None:
                continue
            seen[id(fact.obj)] = fact
        if isinstance(fact.obj, dict) and not all(value_of(key) is not None for key in fact.obj):
            waiting.append(fact)
        queue.extend(_settled(fact, child) for child in reader.contents(fact))
    return facts


def _beginnings(frame: Frame) -> Iterator[Fact]:
    root = Fact(frame, "", is_fleeting=True)
    yield root.child(frame[0], "", _Kind.POSITION, index=0)
    for index, name in ((1, "arguments"), (2, "keyword arguments")):
        given = root.child(frame[index], name, _Kind.POSITION, index=index)
        given.is_fleeting = given.is_given = True
        yield given


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
    for number, (key, value) in enumerate(fact.obj.items()):
        key_place = by_object.get(id(key))
        if key_place is not None:
            child = _settled(fact, fact.child(value, f"{fact.name}[{key_place.name or number}]", _Kind.ITEM_OF))
            child.key_place = key_place
            yield child
