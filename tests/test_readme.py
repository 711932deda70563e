"""README.md: its example runs, what it names exists, its table is what was measured."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import te_graph as tg

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_example_runs_and_replays() -> None:
    code, _ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)  # the other: test_hugging_face.py
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(code, names)
    for layer in names["layers"]:
        info = layer.te_graph.info()
        assert info["forward_replays"] == info["backward_replays"] == 12
        assert info["eager_calls"] == {}


def test_every_path_exists() -> None:
    paths = set(re.findall(r"\]\(([\w/.]+)\)|\b((?:docs|benchmarks|examples|tests)/[\w/.]+\w)", TEXT))
    names = {a or b for a, b in paths}
    assert "docs/design.md" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"(?:^|also: |`)make ([a-z][a-z-]*)", TEXT, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert {"train", "test", "test-gpu"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_signature_is_the_one_of_the_code() -> None:
    (written,) = re.findall(r"`make_graphed_callables\((.*?)\)`", TEXT, re.DOTALL)
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
    used -= {"TE_GRAPH_ARCHS", "TE_GRAPH_TORCH", "TE_GRAPH_CUDA_VERSION"}
    listed = set(re.findall(r"^\| `(\w+)` ", TEXT, re.MULTILINE))
    assert used <= listed | {"TE_GRAPH_TORCH_VERSION"}, used - listed


def test_results_table_is_what_was_measured() -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], check=True)
