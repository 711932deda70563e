"""Random programs of Python state, wherever it is held and however it is read: what is changed there is seen."""

from __future__ import annotations

import time

import pytest
from placed_programs import check
from seeds import first_seed

pytestmark = pytest.mark.usefixtures("repeatable")

_PROGRAMS, _LEAST, _MOST_SECONDS = 10, 3, 4


def test_random_changes_of_what_is_held_anywhere_are_seen() -> None:
    first, started, count = first_seed("places"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
