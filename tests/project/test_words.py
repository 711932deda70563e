"""Words that were given up for those of docs/glossary.md come back nowhere: not as names in code, and the coined ones
not in comments, messages and documents either."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("te_graph", "csrc", "tests", "benchmarks", "examples")
# fmt: off
NAMES = frozenset((
    "Agreement", "Course", "Explorer", "Fact", "Flight", "Handout", "Handouts", "Home", "Homes", "Line", "LineWire",
    "Mailbox", "Place", "Repetition", "Rescaling", "Scope", "SequenceEntry", "GraphedSequence", "Slab", "Steps",
    "SlotPool", "Surroundings", "Tiles", "Told", "Trouble", "Turn", "Way", "WordWire", "Work", "check_in_passing",
    "explorer", "fleeting", "full_kernel", "handout", "handouts", "homeless", "homes", "is_at_a_loss", "is_fleeting",
    "is_plumbing", "launch_lines", "launch_rescale", "launch_tiles", "launch_words", "lines_kernel",
    "lines_once_kernel", "mailbox", "plain_kernel", "rescale_kernel", "say_hello", "hear_hellos", "slab",
    "surroundings", "table_kernel", "tiles_kernel", "try_to_be_alone",
))
# fmt: on
COINED = re.compile(r"\b(slabs?|hellos?|fleeting|plumbing|surroundings|handouts?|given up|courses?)\b", re.IGNORECASE)
MAY_SAY_THEM = {"tests/project/test_words.py"}


def files(*suffixes: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return [path for path in found if str(path.relative_to(ROOT)) not in MAY_SAY_THEM]


def names_in_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def names_in_cpp(text: str) -> list[str]:
    """Identifiers outside of comments, strings and included paths."""
    return re.findall(r"\b[A-Za-z_]\w*", re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL))


def retired(names: Iterator[str] | list[str]) -> list[str]:
    return sorted(NAMES & {name.rstrip("_") for name in names} | NAMES & set(names))


def test_python_code_has_no_retired_name():
    paths = files(".py")
    assert len(paths) > 200
    found = {path.name: retired(list(names_in_python(path.read_text()))) for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def test_cpp_code_has_no_retired_name():
    paths = files(".h", ".cuh", ".cpp", ".cu")
    assert len(paths) > 100
    found = {path.name: retired(names_in_cpp(path.read_text())) for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def test_no_file_is_named_so():
    names = {name.lower() for name in NAMES}
    assert [path.name for path in files(".py", ".h", ".cuh", ".cpp", ".cu") if path.stem.lower() in names] == []


@pytest.mark.parametrize("folder", [*FOLDERS, "docs", "README.md"])
def test_no_text_has_a_coined_word(folder):
    place = ROOT / folder
    paths = (
        [place]
        if place.is_file()
        else [p for p in place.rglob("*") if p.suffix in {".py", ".h", ".cuh", ".cpp", ".cu", ".md"}]
    )
    texts = [path for path in paths if str(path.relative_to(ROOT)) not in MAY_SAY_THEM]
    found = {path.name: sorted({hit.group() for hit in COINED.finditer(path.read_text())}) for path in texts}
    assert texts and {name: words for name, words in found.items() if words} == {}


def test_what_is_looked_for_is_found():
    assert retired(list(names_in_python("def f(slab): return homes.x"))) == ["homes", "slab"]
    assert retired(names_in_cpp('struct Turn {}; // Way\nint slab_ = 0; const char* s = "Course";')) == ["Turn", "slab"]
    assert COINED.findall("of course the Slab was given up") == ["course", "Slab", "given up"]
