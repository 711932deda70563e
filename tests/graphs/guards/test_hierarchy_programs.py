"""Random programs of classes, objects and variables that a forward reads: what is changed there is seen by a replay."""

from __future__ import annotations

import time

import pytest
from hierarchy_programs import check
from seeds import first_seed

pytestmark = pytest.mark.usefixtures("repeatable")

_PROGRAMS, _LEAST, _MOST_SECONDS = 20, 3, 8


def test_random_changes_of_classes_and_objects_are_seen() -> None:
    first, started, count = first_seed("hierarchies"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
