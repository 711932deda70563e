"""What te_graph keeps beside modules and their tensors, put back with these after a step that is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_keepers: list[Callable[[], AbstractContextManager[None]]] = []


def keep_by(keeper: Callable[[], AbstractContextManager[None]]) -> None:
    """Let ``state_kept`` enter what ``keeper`` returns, which puts back at its end what it finds at its beginning."""
    _keepers.append(keeper)


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """All such state is afterwards as before, also when an exception comes."""
    with contextlib.ExitStack() as stack:
        for keeper in _keepers:
            stack.enter_context(keeper())
        yield
