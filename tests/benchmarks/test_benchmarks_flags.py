"""bench_flags.py on the recorder, the proof of its numbers, and README's table of them."""

import importlib
import json
import re
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
harness = importlib.import_module("lib.harness")
bench = importlib.import_module("bench_flags")
render = importlib.import_module("render")

README = "# Title\n\n<!-- results:flags -->\nold\n<!-- /results -->\n\nThe end.\n"


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    options = ("--device", "cpu", "--nodes", 1, 3, "--commit", "abc-dirty", "--out", out)
    return run_script("bench_flags.py", *options), out


@pytest.fixture
def record(cpu_run):
    return json.loads((cpu_run[1] / "flags.json").read_text())


@pytest.mark.full
def test_a_run_on_the_cpu_has_a_row_for_each_variant_and_number_of_nodes(cpu_run, record):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    found = [(row["nodes"], row["variant"]) for row in record["rows"]]
    assert found == [(nodes, variant) for nodes in (1, 3) for variant in ("unchanged", "step_state", "kernel_node")]
    for row in record["rows"]:
        assert row["launch_sync_us"] > 0 and row["host_us"] > 0 and row["equal_to_eager"] is True
    assert record["not_measured"] == {"conditional IF node": "needs a GPU"}
    assert (record["benchmark"], record["gpu"], record["commit"]) == ("flags", None, "abc")
    assert record["command"] == "python benchmarks/bench_flags.py --device cpu --nodes 1 3"
    assert record["failures"] == [] and [path.name for path in out.iterdir()] == ["flags.json"]
    assert process.stdout.count("KernelNode.set_ on each node") == 2


@pytest.mark.parametrize("stuck", [True, False])
def test_a_step_whose_flag_is_stuck_is_told_from_those_that_switch_it(stuck, seed):
    problem = bench.Problem(2, "cpu", seed)
    for _, step in bench.steps_of(problem, "cpu"):
        problem.verify(step)
        with pytest.raises(RuntimeError, match="expected scale_inv of weights"):
            problem.verify(lambda _, step=step: step(stuck))


def test_a_step_is_timed_with_another_flag_each_time():
    flags = []
    call = bench.alternating(flags.append)
    for _ in range(4):
        call()
    assert flags == [True, False, True, False]


def test_a_wrong_variant_fails_the_run_and_other_numbers_of_nodes_are_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *args: function(*args))
    steps_of = bench.steps_of

    def steps(problem, device):
        yield from steps_of(problem, device)
        if problem._scale.shape[0] == 2:
            yield "kernel_node", lambda flag: None

    monkeypatch.setattr(bench, "steps_of", steps)
    assert bench.BENCHMARK.main(["--device=cpu", "--nodes", "1", "2", f"--out={tmp_path}"]) == 1
    record = json.loads((tmp_path / "flags.json").read_text())
    assert {row["nodes"] for row in record["rows"]} == {1}
    assert "error: 2: RuntimeError: expected scale_inv of weights written, got otherwise" in capsys.readouterr().err


def test_only_a_complete_run_replaces_the_kept_results_and_bad_numbers_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete = bench.BENCHMARK.parse_args([])
    assert complete.out == tmp_path and complete.nodes == [1, 10, 100]
    for part in (["--quick"], ["--nodes", "10"], ["--device=cpu"]):
        assert bench.BENCHMARK.parse_args(part).out is None
    with pytest.raises(SystemExit):
        bench.BENCHMARK.parse_args(["--nodes", "0"])
    assert "--nodes: expected positive numbers, got [0]" in capsys.readouterr().err


def test_without_a_compiler_the_conditional_node_is_not_measured_and_the_record_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.shutil, "which", lambda name, path=None: None)
    assert bench.BENCHMARK.parse_args([]).not_measured == {"conditional IF node": "nvcc was not found"}


@pytest.mark.full
def test_the_table_has_a_row_for_each_variant_and_tells_what_failed(record):
    for number, row in enumerate(record["rows"]):
        row |= {"launch_sync_us": 100.4 + number, "host_us": 4.04}
    del record["rows"][-1]
    text = render.render(README, {"flags": record | {"gpu": "Some GPU"}})
    assert text.startswith("# Title\n\n<!-- results:flags -->\nA flag switched before each launch")
    assert text.endswith("<!-- /results -->\n\nThe end.\n")
    assert "| | 1 update | 3 updates |\n|---|---|---|\n| nothing switched | 100 / 4.0 | 103 / 4.0 |\n" in text
    assert "\n| KernelNode.set_ on each node | 102 / 4.0 | failed |\n" in text
    assert len(re.findall(r"^\| \w", text, re.MULTILINE)) == 3
    assert "Not measured: conditional IF node (needs a GPU). Some GPU, torch" in text


@pytest.mark.gpu
def test_all_variants_run_on_a_gpu(tmp_path):
    process = run_script("bench_flags.py", "--quick", "--nodes", 1, 20, "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    record = json.loads((tmp_path / "flags.json").read_text())
    assert record["failures"] == [] and len(record["rows"]) == 2 * len(record["variants"])
    assert set(bench.VARIANTS) <= set(record["variants"])
