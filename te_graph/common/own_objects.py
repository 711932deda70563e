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


def name_of_itself(obj: Any) -> str | None:
    """The name in its module that stands for ``obj`` itself, by which it is pickled; None where there is none."""
    name = getattr(obj, "__qualname__", "")
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        if operator.attrgetter(name)(sys.modules[obj.__module__]) is obj:
            return name
    return None
