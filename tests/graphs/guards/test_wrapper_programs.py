"""Random programs of functions in wrappers of Python, torch and the user: what they hold is seen to change."""

from __future__ import annotations

import time

import pytest
from seeds import first_seed
from wrapper_programs import check

pytestmark = pytest.mark.usefixtures("repeatable")

_PROGRAMS, _LEAST, _MOST_SECONDS = 20, 3, 4


def test_random_changes_of_what_wrappers_hold_are_seen() -> None:
    first, started, count = first_seed("wrappers"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
