"""Numbers of regions, by which C++ tells them apart."""

from __future__ import annotations

import itertools
import threading
import weakref

import torch.distributed as dist

from te_graph.common.fp8_calls import take_excuse
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.recipes import Recipe
from te_graph.fp8.scaling_scope import scaling_scopes

_Key = tuple[bool, bool, Recipe]


class RegionNumbers(OwnObject):
    """The numbers of a process's regions, and in which of these nothing has computed in FP8."""

    def __init__(self) -> None:
        self._without_group: dict[_Key, int] = {}
        # By the groups themselves, as scopes: one that is made after another was destroyed may have its name.
        self._of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, int]] = weakref.WeakKeyDictionary()
        self._next = itertools.count(1)
        self._lock = threading.RLock()  # of what number_of() changes
        self._unused: set[int] = set()

    def number_of(self, enabled: bool, calibrating: bool, recipe: Recipe, group: dist.ProcessGroup | None) -> int:
        """A number, not 0, that regions have in common in which modules compute alike."""
        key = (enabled, calibrating, recipe)
        with self._lock:
            numbers = self._without_group if group is None else self._of_groups.setdefault(group, {})
            if key not in numbers:
                numbers[key] = next(self._next)
            return numbers[key]

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
