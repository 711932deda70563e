"""README.md and docs: the example runs, what they name exists, tables are what was measured."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import te_graph as tg

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_example_runs_and_replays() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(code, names)
    for layer in names["layers"]:
        info = layer.te_graph.info()
        assert info["forward_replays"] == info["backward_replays"] == 12
        assert info["eager_calls"] == {}


def test_example_is_that_of_the_quickstart_which_runs_from_anywhere(tmp_path) -> None:
    script = ROOT / "examples" / "quickstart.py"
    lines = (line.strip() for line in script.read_text().splitlines())
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    # The script prints besides, and keeps the norm.
    of_script = [line.removeprefix("norm = ") for line in lines]
    assert [line for line in map(str.strip, code.splitlines()) if line not in of_script] == []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    replayed = re.findall(r"^layer (\d): 12 forwards and 12 backwards replayed$", process.stdout, re.MULTILINE)
    assert replayed == ["0", "1", "2", "3"]


def test_it_is_read_in_two_minutes() -> None:
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_path_exists(document) -> None:
    text = document.read_text()
    links = {link for link in re.findall(r"\]\(([^)#\s]*)[^)\s]*\)", text) if link and "://" not in link}
    assert [link for link in links if not (document.parent / link).exists()] == []
    named = set(re.findall(r"\b((?:docs|benchmarks|examples|tests|csrc|te_graph)/[\w/.]+\w)", text))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_test_file_exists(document) -> None:
    named = set(re.findall(r"\b(?:(?:host|torch|device)/)?\w+\.(?:py|cpp|cu)\b", document.read_text()))
    tests = {name for name in named if name.startswith(("test_", "host/", "torch/", "device/"))}
    assert [name for name in tests if not [*ROOT.glob(f"tests/**/{name}")]] == []


def test_every_document_is_reached_from_readme() -> None:
    reached = [ROOT / "README.md"]
    for document in reached:
        links = re.findall(r"\]\(([\w/.]+\.md)", document.read_text())
        reached += {(document.parent / link).resolve() for link in links} - {*reached}
    assert set(reached) == set(DOCUMENTS)


def test_every_public_name_is_listed() -> None:
    names = set(re.findall(r"\b\w+\b", TEXT + (ROOT / "docs" / "interfaces.md").read_text()))
    unnamed = set(tg.__all__) - names
    assert {name for name in unnamed if name.removesuffix("_out") not in names} == set()


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"(?:^|also: |`)make ([a-z][a-z-]*)", TEXT, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert {"train", "test", "test-gpu"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_signature_is_the_one_of_the_code() -> None:
    interfaces = (ROOT / "docs" / "interfaces.md").read_text()
    (written,) = re.findall(r"`make_graphed_callables\((.*?)\)`", interfaces, re.DOTALL)
    parameters = inspect.signature(tg.make_graphed_callables).parameters
    names = [re.split("=", part.strip())[0] for part in written.split(",")]
    assert [name for name in names if name != "*"] == list(parameters)
    for part in written.split(","):
        name, _, default = part.strip().partition("=")
        if default:
            assert repr(parameters[name].default) == default.replace('"', "'")


def test_every_environment_variable_is_listed() -> None:
    sources = [*ROOT.glob("te_graph/**/*.py"), ROOT / "setup.py"]
    used = {name for path in sources for name in re.findall(r"TE_GRAPH_[A-Z]+\b", path.read_text())}
    listed = set(re.findall(r"^\| `(\w+)` ", TEXT, re.MULTILINE))
    assert used <= listed, used - listed


def test_results_table_is_what_was_measured() -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], check=True)
