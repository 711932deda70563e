"""bench_graphed.py on the recorder: times of a clock advanced by hand, eager gradients."""

import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import re
import sys

import pytest
import torch
import torch.utils.deterministic
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
environment = importlib.import_module("lib.environment")
training_step = importlib.import_module("lib.training_step")
timing = importlib.import_module("lib.timing")
harness = importlib.import_module("lib.harness")
workloads = importlib.import_module("cases.graphs.workloads")
bench = importlib.import_module("bench_graphed")
render = importlib.import_module("render")

NUMBERS = ("wall_us_per_layer", "host_us_per_layer", "peak_mib", "setup_peak_mib", "repeats", "spread")
PARTS = ("launches", "split_us_per_layer", "replays")
pytestmark = pytest.mark.usefixtures("one_thread")


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

    def advance(self, host_time: float) -> None:
        self.now += host_time

    def synchronize(self) -> None:
        self.now = max(self.now, self.ends[-1] if self.ends else 0.0)
        self.ends = []


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    return run_script("bench_graphed.py", "--device", "cpu", "--quick", "--commit", "abc-dirty", "--out", out), out


@pytest.fixture
def record(cpu_run):
    return json.loads((cpu_run[1] / "graphed.json").read_text())


@pytest.fixture
def in_process(monkeypatch):
    """Lets main() measure in this process, for a moment."""
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *args: function(*args))
    monkeypatch.setattr(bench, "QUICK", timing.Sampling(repeats=2, seconds=0.0, bursts=1))


def refused(capsys, *options: str) -> str:
    """The error line with which bench_graphed.py ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("host_time", "device_time"), [(2.0, 7.0), (7.0, 2.0)])
def test_wall_time_is_that_of_the_slower_side_and_host_time_leaves_out_the_device(monkeypatch, host_time, device_time):
    device = Device(host_time, device_time, depth=timing.TIMED_CALLS_PER_BURST + 1)
    monkeypatch.setattr(timing, "perf_counter", device.clock)
    sampling = timing.Sampling(repeats=4, seconds=5000.0, bursts=3)
    wall = timing.time_wall(device.step, device.synchronize, sampling)
    assert len(wall) == 4
    assert all(7.0 <= value < 7.0 * 1.01 for value in wall)
    device.step()  # still at work when the host times begin
    parts = (device.step, lambda: device.advance(0.5))
    host, other = timing.time_host(parts, device.synchronize, bursts=3)
    assert host == [host_time] * (3 * timing.TIMED_CALLS_PER_BURST)
    assert other == [0.5] * (3 * timing.TIMED_CALLS_PER_BURST)


def test_a_summary_holds_medians_over_all_processes_and_the_largest_peaks():
    samples = [
        {"wall": [8e-6, 16e-6], "host": [2e-6], "peak": 3 * 2**20, "setup_peak": 9 * 2**20},
        {"wall": [40e-6], "host": [4e-6, 400e-6], "peak": 5 * 2**20, "setup_peak": 7 * 2**20},
    ]
    assert training_step.summarize(samples, layers=8) == {
        "wall_us_per_layer": 2.0,
        "host_us_per_layer": 0.5,
        "peak_mib": 5.0,
        "setup_peak_mib": 9.0,
        "repeats": 3,
        "spread": 2.0,
    }


def test_times_are_kept_when_what_comes_after_them_fails(in_process, monkeypatch, tmp_path, capsys):
    def fail(*args):
        raise RuntimeError("no split")

    monkeypatch.setattr(bench, "split_host_time", fail)
    options = ["--device=cpu", "--quick", "--no-check", "--variants=te_graph", f"--out={tmp_path}"]
    assert bench.main(options) == 1
    (row,) = json.loads((tmp_path / "graphed.json").read_text())["rows"]
    assert row["wall_us_per_layer"] > 0 and row["replays"] and row["split_us_per_layer"] is None
    assert "error: tiny te_graph: RuntimeError: no split" in capsys.readouterr().err


def test_a_run_on_the_cpu_leaves_json_of_the_documented_form_and_ends_with_a_table(cpu_run, record):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    assert [(row["shape"], row["variant"], row["equal_to_eager"]) for row in record["rows"]] == [
        ("tiny", "eager", None),
        ("tiny", "te_graph_unchained", True),
        ("tiny", "te_graph", True),
    ]
    lines = [line for line in process.stdout.splitlines() if line.startswith("tiny  ")]
    for row, line in zip(record["rows"], lines, strict=True):
        assert set(row) == {"shape", "variant", *NUMBERS, *PARTS, "equal_to_eager"}
        wall, host, peak, setup_peak, repeats, spread = (row[key] for key in NUMBERS)
        assert wall > 0 and host > 0 and spread >= 0 and repeats == bench.QUICK.repeats
        assert peak is None and setup_peak is None
        assert row["launches"] is None
        assert line.split()[:4] == ["tiny", row["variant"], f"{wall:.1f}", f"{host:.1f}"]
    assert (record["device"], record["gpu"], record["driver"]) == ("cpu", None, None)
    assert (record["torch"], record["cuda"]) == (torch.__version__, torch.version.cuda)
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (record["commit"], record["dirty"]) == ("abc", True)
    assert record["command"] == "python benchmarks/bench_graphed.py --device cpu --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
    assert (record["shapes"], record["failures"]) == ({"tiny": "h 32, 8 tokens"}, [])
    assert [path.name for path in out.iterdir()] == ["graphed.json"]


def test_the_host_time_of_te_graph_is_split_and_what_its_graphs_take_is_told(cpu_run, record):
    eager, *graphed = record["rows"]
    assert eager["split_us_per_layer"] is None and eager["replays"] is None
    for row in graphed:
        split, replays = row["split_us_per_layer"], row["replays"]
        assert list(split) == ["forward", "backward", "bare_forward", "bare_backward", "bare_engine", "bare_wall"]
        assert all(value > 0 for value in split.values())
        assert set(replays) == {"nodes", "graph_mib", "capture_seconds"} and all(
            value > 0 for value in replays.values()
        )
        assert f"forward {split['forward']:.1f} backward {split['backward']:.1f}" in cpu_run[0].stdout
        assert f"graph_mib {replays['graph_mib']}" in cpu_run[0].stdout


def test_what_cannot_be_measured_is_in_the_record_and_in_the_printed_table(cpu_run, record):
    missing = {"torch.cuda.make_graphed_callables": "needs a GPU", "one captured graph": "needs a GPU"}
    assert missing.items() <= record["not_measured"].items() and len(record["not_measured"]) == 3
    for label, reason in record["not_measured"].items():
        assert f"not measured: {label}: {reason}" in cpu_run[0].stdout.splitlines()


def test_gradients_that_differ_in_the_last_bit_are_recorded_and_fail_the_run(in_process, monkeypatch, tmp_path, capsys):
    def build(workload):
        def step():
            workload.step()
            if next(calls) == 2:  # as many as are compared
                workload.leaves[-1].grad.view(torch.int16)[-1] ^= 1

        calls = itertools.count(1)
        return step

    monkeypatch.setitem(bench.VARIANTS, "te_graph", workloads.Variant("te_graph", build))
    assert bench.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "graphed.json").read_text())["rows"]
    assert [row["equal_to_eager"] for row in rows] == [None, True, False]
    assert "DIFFER" in capsys.readouterr().out


def test_a_variant_that_fails_is_listed_and_the_others_are_kept(in_process, monkeypatch, tmp_path, capsys):
    def build(workload):
        raise ValueError("no such thing")

    monkeypatch.setitem(bench.VARIANTS, "te_graph", workloads.Variant("te_graph", build))
    assert bench.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "graphed.json").read_text())
    assert [row["variant"] for row in record["rows"]] == ["eager", "te_graph_unchained"]
    assert [failure["variant"] for failure in record["failures"]] == ["te_graph", "check"]
    assert "error: tiny te_graph: ValueError: no such thing" in capsys.readouterr().err


def test_rounds_alternate_the_order_and_their_samples_are_joined(in_process, monkeypatch, tmp_path):
    calls, measure = [], bench.measure

    def note(shape, variant, *args):
        calls.append(variant)
        return measure(shape, variant, *args)

    monkeypatch.setattr(bench, "measure", note)
    options = ["--device=cpu", "--quick", "--no-check", "--rounds=3", "--variants", "eager", "te_graph"]
    assert bench.main([*options, f"--out={tmp_path}"]) == 0
    assert calls == ["eager", "te_graph", "te_graph", "eager", "eager", "te_graph"]
    rows = json.loads((tmp_path / "graphed.json").read_text())["rows"]
    assert [(row["repeats"], row["equal_to_eager"]) for row in rows] == [(6, None), (6, None)]


def test_only_a_complete_run_replaces_the_kept_results(in_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert bench.main(["--device=cpu", "--quick", "--no-check", "--variants=eager"]) == 0
    assert "not written" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete = bench.BENCHMARK.parse_args(["--rounds=2", "--seed=1"])
    assert complete.out == tmp_path
    assert complete.shapes == ["h2048-t2048", "h2048-tp4-t2048", "h2048-tp4-t512", "h512-t256"]
    for part in (["--quick"], ["--shapes", "h512-t256"], ["--variants", "eager"], ["--no-check"]):
        assert bench.BENCHMARK.parse_args(part).out is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_installed", [True, False])
def test_transformer_engine_is_measured_where_it_is_installed_and_named_where_not(monkeypatch, capsys, is_installed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if is_installed else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2 of {name}")
    options = bench.BENCHMARK.parse_args([])
    others = ["eager", "torch_graphed", "te_graph_unchained", "te_graph", "whole_graph"]
    assert [name for name in options.variants if name != "transformer_engine"] == others
    assert ("transformer_engine" in options.variants) is is_installed
    assert not any(name.startswith("te-") for name in options.shapes)
    label = bench.VARIANTS["transformer_engine"].label
    if is_installed:
        assert options.not_measured == {} and label == "TransformerEngine 1.2 of transformer_engine"
    else:
        assert options.not_measured == {"TransformerEngine": "transformer_engine is not installed"}
        words = "got transformer_engine: transformer_engine is not installed"
        assert words in refused(capsys, "--variants", "transformer_engine")


PACKAGE = "--package=transformer_engine"


def test_layers_of_a_package_are_measured_apart_from_the_blocks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    options = bench.BENCHMARK.parse_args([PACKAGE])
    assert (options.results, options.out) == ("graphed_transformer_engine", tmp_path)
    assert options.shapes == ["te-h2048-t2048", "te-h2048-t512", "te-h512-t256"]
    assert options.variants == ["eager", "transformer_engine", "te_graph", "whole_graph"]
    part = bench.BENCHMARK.parse_args([PACKAGE, "--variants", "torch_graphed"])
    assert (part.variants, part.out) == (["torch_graphed"], None)
    words = "--shapes: expected blocks, as there is no --package, got te-h512-t256"
    assert words in refused(capsys, "--shapes", "te-h512-t256")
    assert "expected layers of transformer_engine, got h512-t256" in refused(capsys, PACKAGE, "--shapes", "h512-t256")
    words = "--package: expected what can be measured here, got transformer_engine: needs a GPU"
    assert words in refused(capsys, PACKAGE, "--device=cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "got transformer_engine: transformer_engine is not installed" in refused(capsys, PACKAGE)


def test_wrong_options_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "expected a CUDA GPU, and torch finds none" in refused(capsys)
    words = "expected what can be measured here, got whole_graph: needs a GPU"
    assert words in refused(capsys, "--device=cpu", "--variants=whole_graph")
    assert "--rounds: expected at least 1, got 0" in refused(capsys, "--device=cpu", "--rounds=0")
    assert "'h1'" in refused(capsys, "--device=cpu", "--shapes", "h1")


def test_without_git_the_commit_is_what_the_user_says_or_unknown(monkeypatch, tmp_path):
    def state(commit: str | None = None) -> tuple[str | None, bool | None]:
        record = environment.environment("cpu", commit)
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
    options = ["--files", str(readme), "--results", str(cpu_run[1])]
    assert render.main([*options, "--check"]) == 1
    assert render.main(options) == 0 and render.main([*options, "--check"]) == 0
    (line,) = [line for line in readme.read_text().splitlines() if line.startswith("| h 32, 8 tokens |")]
    numbers = [float(number) for number in re.findall(r"[\d.]+", line.partition(" tokens ")[2])]
    assert numbers == pytest.approx([row[key] for row in record["rows"] for key in NUMBERS[:2]], rel=5e-3, abs=0.06)
    assert "Not measured: torch.cuda.make_graphed_callables (needs a GPU)" in readme.read_text()


@pytest.mark.gpu
def test_all_variants_run_on_a_gpu_with_gradients_equal_to_eager_ones(tmp_path):
    process = run_script("bench_graphed.py", "--quick", "--shapes", "tiny", "--out", tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    record = json.loads((tmp_path / "graphed.json").read_text())
    rows = {row["variant"]: row for row in record["rows"]}
    missing = {name for name, variant in bench.VARIANTS.items() if variant.missing("cuda")}
    assert list(rows) == [name for name in bench.VARIANTS if name not in missing]
    assert len(record["not_measured"]) == len(missing) <= 1
    assert [row["equal_to_eager"] for row in rows.values()] == [None, *[True] * (len(rows) - 1)]
    assert all(0 < row["peak_mib"] <= row["setup_peak_mib"] for row in rows.values())
    assert record["gpu"] == torch.cuda.get_device_name() and record["driver"]
    launches = {name: row["launches"] for name, row in rows.items()}
    assert launches["eager"]["graphs"] == 0 and launches["eager"]["outside_graphs"] > 40 * bench.LAYERS
    assert (launches["whole_graph"]["graphs"], launches["whole_graph"]["outside_graphs"]) == (1, 0)
    assert launches["torch_graphed"]["graphs"] == launches["te_graph_unchained"]["graphs"] == 2 * bench.LAYERS
    # Forwards go one by one; backwards of neighbours go as one launch.
    assert bench.LAYERS < launches["te_graph"]["graphs"] < 2 * bench.LAYERS
    for name in ("torch_graphed", "te_graph_unchained", "te_graph"):
        assert sum(launches[name]["outside_by_operator"].values()) == launches[name]["outside_graphs"]
    # x in, the output's gradient in, the gradient of x out and accumulated: none of it belongs to a layer.
    assert launches["te_graph"]["outside_graphs"] <= 4 and launches["te_graph"]["waits"] == 0
    assert launches["torch_graphed"]["outside_graphs"] > 12 * bench.LAYERS
