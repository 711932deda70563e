"""bench_graphed.py on the recorder, against a clock advanced by hand, eager gradients and the example's block."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.deterministic

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
common = importlib.import_module("common")
bench = importlib.import_module("bench_graphed")
render = importlib.import_module("render")
sys.path.insert(0, str(BENCHMARKS.parent / "examples"))
gpt = importlib.import_module("gpt")

NUMBERS = ("wall_us_per_layer", "host_us_per_layer", "peak_mib", "setup_peak_mib", "repeats", "spread")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Device:
    """A device that works `device_time` per call, behind a queue that holds `depth` calls and blocks when full."""

    def __init__(self, host_time: float, device_time: float, depth: int) -> None:
        self.host_time, self.device_time, self.depth = host_time, device_time, depth
        self.now, self.ends = 100.0, []

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        if len(self.ends) >= self.depth:
            self.now = max(self.now, self.ends[-self.depth])
        self.now += self.host_time
        self.ends.append(max(self.now, self.ends[-1] if self.ends else 0.0) + self.device_time)

    def synchronize(self) -> None:
        self.now = max(self.now, self.ends[-1] if self.ends else 0.0)
        self.ends = []


def run_script(*options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, BENCHMARKS / "bench_graphed.py", *map(str, options)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    return run_script("--device", "cpu", "--quick", "--commit", "abc-dirty", "--out", out), out


@pytest.fixture
def record(cpu_run):
    return json.loads((cpu_run[1] / "graphed.json").read_text())


@pytest.fixture
def in_process(monkeypatch):
    """Lets main() measure in this process, for a moment, and undoes what the check of gradients sets."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(bench, "in_fresh_process", lambda function, *args: function(*args))
    monkeypatch.setattr(bench, "QUICK", common.Effort(repeats=2, seconds=0.0, bursts=1))
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def refused(capsys, *options: str) -> str:
    """The error line with which bench_graphed.py ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("host_time", "device_time"), [(2.0, 7.0), (7.0, 2.0)])
def test_wall_time_is_that_of_the_slower_side_and_host_time_leaves_out_the_device(monkeypatch, host_time, device_time):
    device = Device(host_time, device_time, depth=common.TIMED_CALLS_PER_BURST + 1)
    monkeypatch.setattr(common, "perf_counter", device.clock)
    effort = common.Effort(repeats=4, seconds=5000.0, bursts=3)
    wall = common.time_wall(device.step, device.synchronize, effort)
    assert len(wall) == 4
    assert all(7.0 <= value < 7.0 * 1.01 for value in wall)
    device.step()  # still at work when the host times begin
    host = common.time_host(device.step, device.synchronize, effort)
    assert host == [host_time] * (3 * common.TIMED_CALLS_PER_BURST)


def test_a_summary_holds_medians_over_all_processes_and_the_largest_peaks():
    samples = [
        {"wall": [8e-6, 16e-6], "host": [2e-6], "peak": 3 * 2**20, "setup_peak": 9 * 2**20},
        {"wall": [40e-6], "host": [4e-6, 400e-6], "peak": 5 * 2**20, "setup_peak": 7 * 2**20},
    ]
    assert common.summarize(samples, layers=8) == {
        "wall_us_per_layer": 2.0,
        "host_us_per_layer": 0.5,
        "peak_mib": 5.0,
        "setup_peak_mib": 9.0,
        "repeats": 3,
        "spread": 2.0,
    }


def test_bits_tell_zeros_apart_and_not_a_number_equals_itself():
    a = torch.tensor([0.0, torch.nan], dtype=torch.bfloat16)
    assert common.bits_equal(a, a.clone())
    assert not any(common.bits_equal(a, b) for b in (a.float(), a[:1], torch.copysign(a, torch.tensor(-1.0))))


def test_a_block_computes_what_the_block_of_the_example_computes():
    block = bench.Block(bench.Shape(hidden=24, heads=4, tokens=7))
    example = gpt.Block(hidden=24, heads=4, dropout=0.0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))
    example.load_state_dict(block.state_dict())
    x = torch.randn(1, 7, 24)
    torch.testing.assert_close(block(x), example(x))


def test_a_sharded_block_keeps_a_quarter_of_heads_and_projections():
    block = bench.Block(bench.SHAPES["h2048-tp4-t2048"], device="meta")
    sizes = {name: tuple(getattr(block, name).weight.shape) for name in ("qkv", "proj", "fc1", "fc2")}
    assert sizes == {"qkv": (1536, 2048), "proj": (2048, 512), "fc1": (2048, 2048), "fc2": (2048, 2048)}
    assert block.heads == 4 and len(list(block.parameters())) == 12
    half = bench.Block(bench.Shape(hidden=24, heads=4, tokens=7, shards=2))
    assert half(torch.randn(1, 7, 24)).shape == (1, 7, 24)


def test_every_step_adds_to_gradients_that_are_already_there(seed):
    workload = bench.Workload(bench.SHAPES["tiny"], "cpu", seed)
    buffers = [leaf.grad for leaf in workload.leaves]
    assert len(buffers) == 1 + 12 * bench.LAYERS and not any(grad.any() for grad in buffers)
    workload.step()
    once = [grad.clone() for grad in buffers]
    workload.step()
    assert all(leaf.grad is grad for leaf, grad in zip(workload.leaves, buffers, strict=True))
    assert all(torch.equal(grad, first + first) for grad, first in zip(buffers, once, strict=True))


def test_the_te_graph_variant_replays_and_never_runs_eagerly(seed):
    workload = bench.Workload(bench.SHAPES["tiny"], "cpu", seed)
    step = bench.VARIANTS["te_graph"].build(workload)
    step()
    for layer in workload.layers:
        info = layer.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (1, 1, {})


def test_eager_layers_are_not_measured_as_te_graph(monkeypatch, seed):
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    with pytest.raises(RuntimeError, match="expected graphs, got eager layers"):
        bench.VARIANTS["te_graph"].build(bench.Workload(bench.SHAPES["tiny"], "cpu", seed))


def test_a_run_on_the_cpu_leaves_json_of_the_documented_form_and_ends_with_a_table(cpu_run, record):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    assert [(row["shape"], row["variant"], row["equal_to_eager"]) for row in record["rows"]] == [
        ("tiny", "eager", None),
        ("tiny", "te_graph", True),
    ]
    for row, line in zip(record["rows"], process.stdout.splitlines()[-3:-1], strict=True):
        assert set(row) == {"shape", "variant", *NUMBERS, "equal_to_eager"}
        wall, host, peak, setup_peak, repeats, spread = (row[key] for key in NUMBERS)
        assert wall > 0 and host > 0 and spread >= 0 and repeats == bench.QUICK.repeats
        assert peak is None and setup_peak is None
        assert line.split()[:4] == ["tiny", row["variant"], f"{wall:.1f}", f"{host:.1f}"]
    assert (record["device"], record["gpu"], record["driver"]) == ("cpu", None, None)
    assert (record["torch"], record["cuda"]) == (torch.__version__, torch.version.cuda)
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (record["commit"], record["dirty"]) == ("abc", True)
    assert record["command"] == "python benchmarks/bench_graphed.py --device cpu --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
    assert (record["shapes"], record["failures"]) == ({"tiny": "h 32, 8 tokens"}, [])
    assert [path.name for path in out.iterdir()] == ["graphed.json"]


def test_gradients_that_differ_in_the_last_bit_are_recorded_and_fail_the_run(in_process, monkeypatch, tmp_path, capsys):
    def build(workload):
        def step():
            workload.step()
            if next(calls) == 2:  # as many as are compared
                workload.leaves[-1].grad.view(torch.int16)[-1] ^= 1

        calls = itertools.count(1)
        return step

    monkeypatch.setitem(bench.VARIANTS, "te_graph", bench.Variant("te_graph", build))
    assert bench.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "graphed.json").read_text())["rows"]
    assert [row["equal_to_eager"] for row in rows] == [None, False]
    assert "DIFFER" in capsys.readouterr().out


def test_a_variant_that_fails_is_listed_and_the_others_are_kept(in_process, monkeypatch, tmp_path, capsys):
    def build(workload):
        raise ValueError("no such thing")

    monkeypatch.setitem(bench.VARIANTS, "te_graph", bench.Variant("te_graph", build))
    assert bench.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "graphed.json").read_text())
    assert [row["variant"] for row in record["rows"]] == ["eager"]
    assert [failure["variant"] for failure in record["failures"]] == ["te_graph", "check"]
    assert "error: tiny te_graph: ValueError: no such thing" in capsys.readouterr().err


def test_rounds_alternate_the_order_and_their_samples_are_joined(in_process, monkeypatch, tmp_path):
    calls, measure = [], bench.measure

    def note(shape, variant, *args):
        calls.append(variant)
        return measure(shape, variant, *args)

    monkeypatch.setattr(bench, "measure", note)
    assert bench.main(["--device=cpu", "--quick", "--no-check", "--rounds=3", f"--out={tmp_path}"]) == 0
    assert calls == ["eager", "te_graph", "te_graph", "eager", "eager", "te_graph"]
    rows = json.loads((tmp_path / "graphed.json").read_text())["rows"]
    assert [(row["repeats"], row["equal_to_eager"]) for row in rows] == [(6, None), (6, None)]


def test_only_a_complete_run_replaces_the_kept_results(in_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    assert bench.main(["--device=cpu", "--quick", "--no-check", "--variants=eager"]) == 0
    assert "not written" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete = bench.parse_args(["--rounds=2", "--seed=1"])
    assert complete.out == tmp_path and complete.variants == ["eager", "torch_graphed", "te_graph", "whole_graph"]
    assert complete.shapes == ["h2048-t2048", "h2048-tp4-t2048", "h2048-tp4-t512", "h512-t256"]
    for part in (["--quick"], ["--shapes", "h512-t256"], ["--variants", "eager"], ["--no-check"]):
        assert bench.parse_args(part).out is None
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "expected a CUDA GPU, and torch finds none" in refused(capsys)
    assert "expected eager or te_graph with --device cpu" in refused(capsys, "--device=cpu", "--variants=whole_graph")
    assert "--rounds: expected at least 1, got 0" in refused(capsys, "--device=cpu", "--rounds=0")
    assert "'h1'" in refused(capsys, "--device=cpu", "--shapes", "h1")


def test_without_git_the_commit_is_what_the_user_says_or_unknown(monkeypatch, tmp_path):
    def state(commit: str | None = None) -> tuple[str | None, bool | None]:
        record = common.environment("cpu", commit)
        return record["commit"], record["dirty"]

    monkeypatch.delenv("TE_GRAPH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state() == (None, None)
    monkeypatch.setenv("TE_GRAPH_COMMIT", "1a2b")
    assert state() == ("1a2b", False) and state("3c4d-dirty") == ("3c4d", True)


def test_a_profile_lists_host_operations(capsys):
    assert bench.main(["--device=cpu", "--shapes=tiny", "--profile"]) == 0
    out = capsys.readouterr().out
    assert "Self CPU time total" in out
    assert 5 < out.index("aten::") < out.index("Self CPU time total")


def test_render_turns_what_a_run_leaves_into_a_table(cpu_run, record, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:graphed -->\n<!-- /results -->\n")
    options = ["--readme", str(readme), "--results", str(cpu_run[1])]
    assert render.main([*options, "--check"]) == 1
    assert render.main(options) == 0 and render.main([*options, "--check"]) == 0
    (line,) = [line for line in readme.read_text().splitlines() if line.startswith("| h 32, 8 tokens |")]
    numbers = [float(number) for number in re.findall(r"[\d.]+", line.partition(" tokens ")[2])]
    assert numbers == pytest.approx([row[key] for row in record["rows"] for key in NUMBERS[:2]], rel=5e-3, abs=0.06)


@pytest.mark.gpu
def test_all_variants_run_on_a_gpu_with_gradients_equal_to_eager_ones(tmp_path):
    process = run_script("--quick", "--shapes", "tiny", "--out", tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    record = json.loads((tmp_path / "graphed.json").read_text())
    assert [row["variant"] for row in record["rows"]] == list(bench.VARIANTS)
    assert [row["equal_to_eager"] for row in record["rows"]] == [None, True, True, True]
    assert all(0 < row["peak_mib"] <= row["setup_peak_mib"] for row in record["rows"])
    assert record["gpu"] == torch.cuda.get_device_name() and record["driver"]
