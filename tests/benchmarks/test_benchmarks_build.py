"""bench_build.py with a compiler that compiles nothing, and the table of its results."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench_build")
render = importlib.import_module("render")

CSRC = Path(__file__).resolve().parents[2] / "csrc"
README = "# Title\n\n<!-- results:build -->\nold\n<!-- /results -->\n\nThe end.\n"
COMPILER = """#!/usr/bin/env python3
import sys
from pathlib import Path
from typing import Any

given = sys.argv[1:]
if "-o" not in given:
    print("c++ (Fake) 1.2.3")
else:
    Path(given[given.index("-o") + 1]).touch()
    if "-c" in given:
        source = next(name for name in given if name.endswith(".cpp"))
        text = Path(source).read_text()
        included = [str(Path(source).parent / line.split('"')[1]) for line in text.splitlines() if '"../' in line]
        Path(given[given.index("-MF") + 1]).write_text(f"{given[given.index('-o') + 1]}: {source} {' '.join(included)}")
        with open(__file__ + ".log", "a") as log:
            log.write(source.partition("/sources/")[2] + chr(10))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls main() as on a machine whose cores are all this process's; returns the exit status and the record."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)

    def call(*options: object) -> tuple[int, dict[str, Any]]:
        status = bench.main([*map(str, options), "--kinds", "cpu", "--commit", "abc", "--out", str(tmp_path / "out")])
        return status, json.loads((tmp_path / "out" / "build.json").read_text())

    return call


def unit_of(source: Path) -> str:
    """Name of what is compiled with the source: its folder's."""
    return "_".join(source.relative_to(CSRC).parts[:-1]) or "library"


@pytest.mark.full
def test_a_run_compiles_everything_once_and_then_the_changed_file_alone(run, tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert len(bench.CHANGED) > 2
    changed = bench.CHANGED[1]
    monkeypatch.setattr(bench, "CHANGED", [changed])  # each takes a second process that imports torch
    status, record = run("--cores", 1)
    assert status == 0, record["failures"]
    compiled = (tmp_path / "c++.log").read_text().splitlines()
    alone = {str(path.relative_to(CSRC.parent)) for path in CSRC.rglob("*_cpu.cpp")}
    units = {f"build/units/{unit_of(path)}.cpp" for path in CSRC.rglob("*.cpp") if not path.stem.endswith("_cpu")}
    assert sorted(compiled[:-1]) == sorted(alone | units)
    assert compiled[-1] == f"build/units/{unit_of(CSRC.parent / changed)}.cpp"
    assert [(row["kind"], row["changed"]) for row in record["rows"]] == [("cpu", None), ("cpu", changed)]
    assert all(row["seconds"] > 0 for row in record["rows"])
    assert (record["cores"], record["compiler"], record["commit"]) == (1, "c++ (Fake) 1.2.3", "abc")
    assert record["command"] == "python benchmarks/bench_build.py --kinds cpu --cores 1"
    assert record["targets"] == record["failures"] == []


def test_a_build_that_fails_is_told_and_kept(run, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SOURCES", ("pyproject.toml",))
    status, record = run()
    assert status == 1 and record["rows"] == []
    assert "setup.py" in record["failures"][0] and "error: " in capsys.readouterr().err


@pytest.mark.parametrize("cores", [0, len(os.sched_getaffinity(0)) + 1])
def test_cores_that_are_not_there_are_refused(run, capsys, cores):
    with pytest.raises(SystemExit, match="2"):
        run("--cores", cores)
    assert re.search(f"--cores: expected 1 to .* got {cores}", capsys.readouterr().err)


def test_targets_are_those_of_builds_with_cuda_code():
    def row(kind: str, changed: str | None, seconds: float) -> dict[str, object]:
        return {"kind": kind, "changed": changed, "seconds": seconds}

    rows = [row("cuda", None, 480.0), row("cuda", "a/ops.cpp", 12.0), row("cuda", "b/ops.cpp", 40.1)]
    assert [(t["got"], t["is_met"]) for t in bench.targets_of(rows)] == [(480.0, True), (40.1, False)]
    assert bench.targets_of([row("cpu", None, 1000.0)]) == []


def test_the_table_has_a_row_for_each_kind_and_names_the_machine():
    record = {
        "benchmark": "build",
        "gpu": None,
        "cpu": "Some CPU",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": None,
        "python": "3.12.1",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python benchmarks/bench_build.py",
        "cores": 2,
        "compiler": "c++ 12.2.0",
        "arch": "9.0",
        "kinds": bench.KINDS,
        "rows": [
            {"kind": "cuda", "changed": None, "seconds": 421.4},
            {"kind": "cuda", "changed": "csrc/fp8/cast_ops.cpp", "seconds": 41.25},
            {"kind": "cpu", "changed": None, "seconds": 250.0},
        ],
    }
    record["targets"] = bench.targets_of(record["rows"])
    table = render.render(README, {"build": record})
    assert "\n| | everything | `csrc/fp8/cast_ops.cpp` |\n|---|---|---|\n" in table
    assert "\n| with CUDA code | 421 | 41.2 |\n| CPU ops only | 250 | failed |\n" in table
    assert (
        "Targets missed: one file, s 41.25 (at most 40). Without ccache. Some CPU, c++ 12.2.0, torch 2.11.0, " in table
    )
    assert "(9.0), on 2 cores" in table and "`python benchmarks/bench_build.py`" in table
