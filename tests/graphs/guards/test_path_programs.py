"""Random programs of paths through containers, parts of which are replaced: what is at their ends is seen."""

from __future__ import annotations

import time

import pytest
from path_programs import check
from seeds import first_seed

pytestmark = pytest.mark.usefixtures("repeatable")

_LEAST, _PROGRAMS, _MOST_SECONDS = 3, 10, 4


def test_what_is_replaced_on_the_way_to_what_is_read_is_seen() -> None:
    first, started, count = first_seed("paths"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
