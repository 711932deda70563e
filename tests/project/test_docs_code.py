"""Programs in the documents are programs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{file.relative_to(ROOT)}:{number}")
    for file in FILES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_python_parse(block: str) -> None:
    assert ast.parse(block).body
