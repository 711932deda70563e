"""docs/adding.md: files and names in its tables exist, and calls go from one function to the next as it says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from launch_paths import body_of, is_called, is_launch

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "adding.md").read_text()
ROWS = re.findall(r"^\| (\S+/\S+) \| (.*) \|$", TEXT, re.MULTILINE)
TABLES = [re.findall(r"^\| (\S+/\S+) \| (.*) \|$", part, re.MULTILINE) for part in re.split(r"\n\n", TEXT)]
(PATH,) = re.findall(r"^\| file \| function \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
MOST_FILES = {"An op over lists of tensors": 8, "An FP8 format": 5}


@pytest.mark.parametrize(("file", "names"), ROWS, ids=lambda text: text.split("/")[-1][:40])
def test_every_name_is_in_its_file(file: str, names: str) -> None:
    text = (ROOT / file).read_text()
    quoted = re.findall(r"`([^`]+)`", names)
    assert quoted
    assert [name for name in quoted if name not in text] == []


@pytest.mark.parametrize("title", MOST_FILES)
def test_little_has_to_be_touched(title: str) -> None:
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    first = section.partition("|---|---|\n")[2].partition("\n\n")[0]
    assert 0 < len(first.splitlines()) <= MOST_FILES[title]


def test_a_launch_is_four_functions_away() -> None:
    steps = re.findall(r"^\| (\S+) \| `(\w+)` \|$", PATH, re.MULTILINE)
    assert 1 < len(steps) <= 4
    for one, following in itertools.pairwise(steps):
        assert is_called(body_of(*one), *following), f"{one[1]}: {following[1]}"
    assert is_launch(body_of(*steps[-1]))
