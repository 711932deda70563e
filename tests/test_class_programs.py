"""Random programs of what is done to modules, classes, hooks and copies: graphed ones go on like eager ones."""

from __future__ import annotations

import os
import time

import pytest
from class_programs import check

pytestmark = pytest.mark.usefixtures("repeatable")

_SECONDS = 8


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_random_programs_go_on_like_eager() -> None:
    first, started, count = int.from_bytes(os.urandom(4), "little"), time.monotonic(), 0
    while time.monotonic() - started < _SECONDS:
        check(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}")
    assert count > 10
