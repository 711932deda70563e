"""Objects of te_graph's own among those of the user."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class OwnObject:
    """An object of te_graph's own that user code leads to, as a hook: captures compare which one it is, and no more.
    What it holds they neither keep nor put back."""

    def captured_tensors(self) -> Sequence[Tensor]:
        """[...] each: those that graphs use, where they are for good."""
        return ()


class ClosedObject(OwnObject):
    """One that users hold: it takes no attributes of theirs, which no guard would compare, and stays out of copies."""

    _is_closed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_closed and name not in vars(self):
            raise AttributeError(
                f"{type(self).__name__}: expected no attributes of the user's, got {name!r}, which captured code could "
                "read and no guard would compare: put it on the callable itself, or on an object of your own"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of what holds this has none."""

    def __reduce__(self) -> Any:
        return type(None), ()


def name_of_itself(obj: Any) -> str | None:
    """The name in its module that stands for ``obj`` itself, by which it is pickled; None where there is none."""
    name = getattr(obj, "__qualname__", "")
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        if operator.attrgetter(name)(sys.modules[obj.__module__]) is obj:
            return name
    return None
