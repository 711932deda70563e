"""The walk over all that the code of a callable or function can get to; which names that code says is learned on it."""

from __future__ import annotations

import itertools
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.guards.sources import MAX_OBJECTS, Source, walk
from te_graph.graphs.tracing.code_watch import CodeWatch, functions_of, too_many
from te_graph.graphs.tracing.names import GETTERS, TELLERS, Names, looks_at_all

_MAX_SOURCES = MAX_OBJECTS
_MAX_STRINGS = 1000


class SourceWalker:
    """Finds the sources that one callable or function can be seen to use; remembers which names its code says.

    A reader says what an object leads to: ``CallableReader``, ``FunctionReader``.

    Attributes:
        names: that the code says, as far as is known.
        has_too_many_sources: the last walk met more than can be compared.
        seconds: that it took.
        obstacle: why a guard cannot compare all that the last walk has met; empty if it can.
    """

    def __init__(self, names: Names | None = None) -> None:
        self.names = self._observed = names or Names()  # the latter without what code says
        self._ran: dict[int, types.CodeType] = {}  # by identity
        self._running: dict[types.CodeType, None] = {}  # the user's, of that
        self._seen_to_run: dict[types.FunctionType, None] = {}
        self._at_sources: list[weakref.ref[types.FunctionType]] = []
        self.has_too_many_sources = False
        self.seconds = 0.0
        self.obstacle = ""

    @property
    def functions(self) -> list[types.FunctionType]:
        """That were seen to run. One without an owner cannot run, and would be missed: the guard keeps them."""
        return list(self._seen_to_run)

    @property
    def known(self) -> tuple[Names, int]:
        """What the next walk goes by: equal while nothing new was noted."""
        return self._observed, len(self._seen_to_run)

    def note(self, watch: CodeWatch, beside: Iterable[CodeWatch] = ()) -> None:
        """Remember what ``watch`` has seen to run, by identity, and to be asked for by name. The watches ``beside`` saw
        other parts of the same call."""
        is_first = not self._ran
        at_sources = [function for weak in self._at_sources if (function := weak()) is not None]
        self._seen_to_run.update(dict.fromkeys(functions_of(watch, at_sources, beside)))
        self._ran.update(watch.codes)
        self._running.update((code, None) for _, code in watch.users_codes())
        is_all_seen = watch.sees_all and (is_first or self._observed.is_all_seen)
        observed = replace(
            self._observed.with_heard(watch.names),
            ran=frozenset(self._ran),
            is_all_seen=is_all_seen,
        )
        observed = replace(observed, asked=observed.asked | watch.missing)
        observed = observed.with_all_attributes(watch.looks_at_all).with_fields(watch.field_readers)
        observed = observed.with_extensions(watch.calls_extensions).with_looked_up(watch.looked_up)
        observed = observed.with_read_whole(watch.read_whole)
        if observed != self._observed:
            # Once all is seen that runs, what other code has said is forgotten.
            forgets = is_all_seen and not self._observed.is_all_seen
            said, asked = (frozenset(), frozenset()) if forgets else (self.names.said, self.names.asked)
            self._observed = observed
            self.names = replace(observed, said=observed.said | said, asked=observed.asked | asked)

    def explore(self, reader_of: Callable[..., Any], learns: bool = True) -> list[Source]:
        """All sources, near ones first.

        Args:
            reader_of: makes a reader that goes by certain names, and by functions that were seen to run and are reached
                in ways that it does not follow.
            learns: the names found stay known. A reader that takes all attributes meets code that does not run.
        """
        names, elsewhere, start = self.names, [], time.perf_counter()
        while True:
            sources = list(itertools.islice(walk(reader_of(names, elsewhere)), _MAX_SOURCES))
            has_too_many = len(sources) == _MAX_SOURCES
            known = [source.obj for source in sources if source.again is None]
            functions = [obj for obj in known if isinstance(obj, types.FunctionType)]
            kinds = [obj if isinstance(obj, type) else type(obj) for obj in known]
            codes = (function.__code__ for function in functions if names.may_run(function.__code__))
            more = names.with_code([*self._running, *codes], kinds)
            more = more.with_strings(string for obj in known for string in _strings_of(obj))
            more = more.with_getters(obj for obj in known if isinstance(obj, GETTERS))
            more = more.with_all_attributes(any(looks_at_all(obj) for obj in known))
            more = more.with_tellers(not TELLERS.isdisjoint(map(id, known)))
            met = set(map(id, functions))
            missing = [function for function in self._seen_to_run if id(function) not in met]
            if has_too_many or (more == names and not missing):
                break
            # By more names a path may lead to what had none: walks that begin with these names find the same sources.
            names, elsewhere = more, [*elsewhere, *missing] if more == names else []
        self._at_sources = [*map(weakref.ref, functions)]
        self.seconds = time.perf_counter() - start
        self.obstacle = too_many(elsewhere)
        if has_too_many:
            self.obstacle = f"{sources[-1].name or 'the function'} refers to more than {_MAX_SOURCES} sources"
        if self.obstacle:
            sources.append(sources[0].never(self.obstacle))
        if learns:
            self.names, self.has_too_many_sources = names, has_too_many
        return sources


def _strings_of(obj: Any) -> Iterator[str]:
    if type(obj) is str:
        yield obj
    elif isinstance(obj, list | tuple) and count_of(obj) <= _MAX_STRINGS:
        yield from (item for item in members_of(obj) if type(item) is str)
    elif type(obj) is dict and len(obj) <= _MAX_STRINGS:
        yield from (item for item in obj.values() if type(item) is str)
