"""docs/compatibility.md: every row says what happens, and names a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {"bit-equal", "eager", "refused", "rounding"}
COMPANIONS = (
    *("DistributedDataParallel", "FSDP1", "FSDP2", "DTensor", "torch.distributed.pipelining", "torch.compile"),
    *("activation checkpointing", "GradScaler", "functional_call", "vmap", "torch.func", "torch.jit", "torch.export"),
    *("deepcopy", "pickle", "torch.save", "Trainer", "accelerate, 1 and 2 processes", "PEFT LoRA", "Lightning"),
    *("timm", "diffusers", "AdamW", "scheduler"),
)


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row of each table: what is beside, the result, what to know, the test."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in rows if cells[0] != "beside" and not cells[0].startswith("---")]


TEXT = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = rows_of(TEXT)


def marks_of(path: Path) -> dict[str, list[str]]:
    """The decorators of each test of a file, as written."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {one.name: list(map(ast.unparse, one.decorator_list)) for one in functions}


def fault_of(cells: list[str]) -> str | None:
    """What is wrong with a row."""
    if len(cells) != 4:
        return f"{len(cells)} cells"
    beside, result, known, test = cells
    if result not in RESULTS:
        return f"the result {result}"
    if result in ("refused", "rounding") and not known:
        return "no sentence or reason"
    place, _, name = test.partition("::")
    if not (ROOT / place).is_file() or name not in marks_of(ROOT / place):
        return f"no test {test}"
    if ("pytest.mark.full" in marks_of(ROOT / place)[name]) != beside.endswith("†"):
        return "† and the mark of the test differ"
    return None


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0])
def test_a_row_says_what_happens_and_names_its_test(cells: list[str]) -> None:
    assert fault_of(cells) is None


def test_all_companions_have_a_row() -> None:
    named = " ".join(cells[0] for cells in ROWS)
    assert [name for name in COMPANIONS if name not in named] == []


def test_tests_of_companions_are_named() -> None:
    """One by one, or their file as a whole."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "tests" / "compat").glob("test_*.py"))
    each = [(path, name) for path in paths if f"`{path}`" not in TEXT for name in marks_of(ROOT / path)]
    tests = [f"{path}::{name}" for path, name in each if name.startswith("test_")]
    assert tests and [test for test in tests if test not in TEXT] == []


def test_versions_are_pinned() -> None:
    (extra,) = re.findall(r"^compat = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert all("==" in one for one in re.findall(r'"([^"]+)"', extra))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| a | bit-equal | |", "3 cells"),
        ("| a | fine | | tests/compat/test_vision.py::test_diffusers_unet |", "the result fine"),
        ("| a | refused | | tests/compat/test_vision.py::test_diffusers_unet |", "no sentence or reason"),
        ("| a | eager | | tests/compat/test_vision.py::test_none |", "no test tests/compat/test_vision.py::test_none"),
        ("| a | eager | | |", "no test "),
        ("| a † | eager | | tests/compat/test_vision.py::test_diffusers_unet |", "† and the mark of the test differ"),
    ],
)
def test_faults_are_seen(row: str, fault: str) -> None:
    (cells,) = rows_of(row)
    assert fault_of(cells) == fault
