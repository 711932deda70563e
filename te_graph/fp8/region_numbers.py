"""Numbers of regions, by which C++ tells them apart."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from te_graph.common.fp8_calls import take_excuse
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.recipes import Recipe
from te_graph.fp8.scaling_scope import scaling_scopes


class RegionNumbers(OwnObject):
    """The numbers of a process's regions, and in which of these nothing has computed in FP8."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._lock = threading.RLock()  # of what number_of() changes
        self._unused: set[int] = set()

    def number_of(self, enabled: bool, calibrating: bool, recipe: Recipe, group: dist.ProcessGroup | None) -> int:
        """A number, not 0, that regions have in common in which modules compute alike."""
        key = (enabled, calibrating, recipe, None if group is None else group.group_name)
        with self._lock:
            return self._numbers.setdefault(key, len(self._numbers) + 1)

    def note_unused(self, number: int) -> bool:
        """Note that a region of ``number`` is left, if nothing has computed in FP8 yet and nothing excuses that.

        Returns:
            Whether it is the first one of these.
        """
        if number in self._unused or any(scope.members for scope in scaling_scopes.all()) or take_excuse():
            return False
        self._unused.add(number)
        return True


region_numbers = RegionNumbers()
