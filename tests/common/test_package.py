"""The package: what it shows of itself, and the versions that it tells."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import te_graph as tg
from te_graph import _build

ROOT = Path(__file__).resolve().parents[2]
(VERSION,) = re.findall(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_only_public_names_are_shown() -> None:
    assert dir(tg) == sorted(tg.__all__)
    assert all(hasattr(tg, name) for name in tg.__all__)


def no_metadata(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_checkout_that_is_not_installed_tells_the_version_of_its_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", no_metadata)
    assert tg.build_info()["te_graph"] == VERSION


def test_without_a_project_it_is_said_not_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", no_metadata)
    monkeypatch.setattr(_build, "__file__", str(tmp_path / "te_graph" / "_build.py"))
    assert tg.build_info()["te_graph"] == "not installed"


def test_it_prints_what_was_built() -> None:
    command = [sys.executable, "-m", "te_graph"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"te_graph: {VERSION}\ntorch_built: ")
