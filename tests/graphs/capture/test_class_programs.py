"""Random programs of what is done to modules, classes, hooks and copies: graphed ones go on like eager ones."""

from __future__ import annotations

import time

import pytest
from class_programs import check
from seeds import first_seed

pytestmark = pytest.mark.usefixtures("repeatable")

_PROGRAMS, _LEAST, _MOST_SECONDS = 25, 3, 5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_random_programs_go_on_like_eager() -> None:
    first, started, count = first_seed("classes"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
