"""bench_multi_tensor.py on small lists, the proof of its numbers, and README's table of them.

Bytes, times and targets are written out here by hand.
"""

import importlib
import json
import math
import re
import sys
import time

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
harness = importlib.import_module("lib.harness")
timing = importlib.import_module("lib.timing")
tensor_sets = importlib.import_module("cases.multi_tensor.tensor_sets")
variants = importlib.import_module("cases.multi_tensor.variants")
targets = importlib.import_module("cases.multi_tensor.targets")
hp_sequence = importlib.import_module("cases.multi_tensor.hp_sequence")
bench = importlib.import_module("bench_multi_tensor")
render = importlib.import_module("render")
table = importlib.import_module("cases.multi_tensor.table")

SAMPLING = timing.Sampling(repeats=2, seconds=0.0)
CPU_VARIANTS = ["torch_foreach", "te_graph", "te_graph_plan"]


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    options = ("--device", "cpu", "--lists", "gpt3-1.3b-bf16", "2000x1024", "--commit", "abc-dirty", "--out", out)
    return run_script("bench_multi_tensor.py", *options), out


@pytest.fixture
def record(cpu_run):
    return json.loads((cpu_run[1] / "multi_tensor.json").read_text())


@pytest.fixture
def in_process(monkeypatch):
    """Lets main() measure in this process."""
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *args: function(*args))


@pytest.fixture
def problem(seed):
    return variants.Problem(tensor_sets.SMALL_LISTS["2000x1024"], "cpu", seed)


def test_the_lists_are_those_of_the_models():
    facts = {name: (len(found.shapes), found.elements) for name, found in tensor_sets.LISTS.items()}
    assert facts == {
        "gpt3-1.3b-bf16": (292, 1_315_819_520),
        "gpt3-1.3b-fp32": (292, 1_315_819_520),
        "llama3-8b-bf16": (291, 8_030_261_248),
        "2000x1024": (2000, 2_048_000),
        "20000x100": (20000, 2_000_000),
        "one-4gb": (1, 2**30),
    }
    assert tensor_sets.LISTS["gpt3-1.3b-fp32"].nbytes == 2 * tensor_sets.LISTS["gpt3-1.3b-bf16"].nbytes
    assert tensor_sets.LISTS["one-4gb"].nbytes == 2**32
    assert list(tensor_sets.SMALL_LISTS) == list(tensor_sets.LISTS)
    assert all(found.nbytes < 2**21 for found in tensor_sets.SMALL_LISTS.values())


@pytest.mark.full
def test_a_run_on_the_cpu_has_a_row_for_each_list_operation_and_variant(cpu_run, record):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    found = [(row["list"], row["op"], row["variant"]) for row in record["rows"]]
    lists = ["gpt3-1.3b-bf16", "2000x1024"]
    assert found == [(name, op, variant) for name in lists for op in bench.OPS for variant in CPU_VARIANTS]
    for row in (*record["rows"], *record["hp_rows"]):
        assert row["device_us"] > 0 and row["host_us"] > 0 and row["launches"] is None
        assert row["equal_to_eager"] is True
    assert {(row["list"], row["op"]) for row in record["hp_rows"]} == {(n, op) for n in lists for op in bench.FUNCTIONS}
    assert record["elements"] == {name: tensor_sets.SMALL_LISTS[name].elements for name in lists}
    assert record["tensors"]["2000x1024"] == 50 and all(walk > 0 for walk in record["walk_us"].values())
    assert set(record["bandwidth_tb_per_s"]) == {"copy", "read"} and record["targets"] == []
    assert record["not_measured"]["torch foreach in a graph"] == "needs a GPU"
    assert (record["benchmark"], record["gpu"], record["commit"]) == ("multi_tensor", None, "abc")
    command = "python benchmarks/bench_multi_tensor.py --device cpu --lists gpt3-1.3b-bf16 2000x1024"
    assert record["command"] == command and record["failures"] == []
    assert [path.name for path in out.iterdir()] == ["multi_tensor.json"]
    assert process.stdout.count("te_graph_plan") == 10


@pytest.mark.full
def test_the_floor_of_an_operation_is_its_bytes_at_the_bandwidth_measured(record):
    rates = {"read": 2e12, "copy": 1e12}
    floors = {op: variants.floor_seconds(op, 10**12, 2, rates) for op in bench.OPS}
    assert floors == {"norm": 1.0, "clip_none": 1.0, "clip": 6.0, "store": 6.0, "add": 10.0}
    assert variants.floor_seconds("add", 10**12, 4, rates) == 12.0
    assert bench.fraction_of(2e-6, {"device_us": 8.0}) == {"floor_us": 2.0, "fraction_of_floor": 0.25}
    assert bench.fraction_of(None, {"device_us": 8.0}) == {"floor_us": None, "fraction_of_floor": None}
    for row in record["rows"]:
        assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["device_us"], abs=2e-3)


def halved(problem: object) -> torch.Tensor:
    """A clip that halves the gradients by hand."""
    norm = problem.total.float().clone()
    problem.shrunk()
    for gradient in problem.gradients:
        gradient.mul_(0.5)
    return norm


def test_wrong_values_are_told_apart_from_right_ones(problem):
    def shift(tensors: list[torch.Tensor]) -> None:
        tensors[-1].view(-1)[-1] += 0.1

    high, norm, added = problem.high, problem.total.float(), [g.float() + 1 for g in problem.gradients]
    right = {
        "norm": lambda: norm,
        "clip_none": lambda: norm,
        "clip": lambda: halved(problem),
        "store": lambda: torch._foreach_copy_(high, problem.gradients),
        "add": lambda: torch._foreach_copy_(high, added),
    }
    wrong = {
        "norm": lambda: norm * 1.01,
        "clip_none": lambda: (shift(problem.gradients), norm)[1],
        "clip": lambda: (halved(problem), shift(problem.gradients), norm)[2],
        "store": lambda: (right["store"](), shift(high)),
        "add": lambda: (right["add"](), shift(high)),
    }
    for op, step in right.items():
        problem.verify(op, step)
        with pytest.raises(RuntimeError, match="expected"):
            problem.verify(op, wrong[op])
    with pytest.raises(RuntimeError, match="expected clip: gradients times"):
        problem.verify("clip", lambda: (problem.shrunk(), norm)[1])
    with pytest.raises(RuntimeError, match="expected add: bits of sources"):
        problem.verify("add", lambda: (right["add"](), shift(problem.gradients)))


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_a_clip_that_clips_finds_something_to_clip_in_every_call(problem, variant):
    step = variants.VARIANTS[variant].build(problem, "clip")
    for _ in range(20):
        before = problem.gradients[3].clone()
        step()
        torch.testing.assert_close(problem.gradients[3], before / 2, rtol=0.02, atol=1e-6)
    problem.restore()
    assert problem.max_norm == problem.total.item()


def test_blocks_hold_all_elements_in_order(monkeypatch):
    monkeypatch.setattr(variants, "BLOCK", 10)
    tensors = [torch.randn(size) for size in (3, 25, 0, 4, 4, 4, 1)]
    blocks = list(variants.in_blocks(tensors))
    assert torch.equal(torch.cat(blocks), torch.cat(tensors))
    assert all(0 < block.numel() <= 10 for block in blocks)


def test_loops_and_functions_of_te_graph_do_the_same_and_wrong_ones_are_told(problem, monkeypatch):
    for variant in hp_sequence.HP_VARIANTS.values():
        if not variant.missing:
            assert list(variant.steps(problem)) == list(hp_sequence.FUNCTIONS)

    def lost(parameters: object, high: object) -> None:
        """Forgets to zero."""
        torch._foreach_add_(high, [parameter.grad for parameter in parameters])

    wrong = hp_sequence.HpFunctions(lost, hp_sequence.loop_norm, hp_sequence.loop_clip)
    with pytest.raises(RuntimeError, match="update_hp_grads: expected the gradients of plain torch"):
        hp_sequence.HpVariant("wrong", lambda: wrong).steps(problem)


def test_a_wrong_variant_fails_the_run_and_the_others_are_kept(in_process, monkeypatch, tmp_path, capsys):
    def build(problem, op):
        if op == "add":
            raise ValueError("no such thing")
        return (lambda: torch.tensor(3.0)) if op == "norm" else None

    monkeypatch.setitem(bench.VARIANTS, "te_graph", variants.Variant("te_graph", build))
    options = ["--device=cpu", "--quick", "--lists=20000x100", "--variants", "torch_foreach", "te_graph"]
    assert bench.BENCHMARK.main([*options, f"--out={tmp_path}"]) == 1
    record = json.loads((tmp_path / "multi_tensor.json").read_text())
    assert [row["op"] for row in record["rows"] if row["variant"] == "torch_foreach"] == list(bench.OPS)
    assert not [row for row in record["rows"] if row["variant"] == "te_graph"]
    assert [failure["op"] for failure in record["failures"]] == ["norm", "add"]
    err = capsys.readouterr().err
    assert "error: 20000x100 norm te_graph: RuntimeError: norm: expected the norm" in err
    assert "error: 20000x100 add te_graph: ValueError: no such thing" in err


def test_only_a_complete_run_replaces_the_kept_results(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete = bench.BENCHMARK.parse_args(["--seed=1"])
    assert complete.out == tmp_path and complete.lists == list(tensor_sets.LISTS)
    assert "torch_foreach_graph" in complete.variants and complete.small is False
    for part in (["--quick"], ["--small"], ["--lists", "2000x1024"], ["--variants", "te_graph"], ["--device=cpu"]):
        assert bench.BENCHMARK.parse_args(part).out is None


def test_host_time_is_that_of_one_call(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def step() -> None:
        now[0] += 0.25

    assert timing.time_calls(step, "cpu", SAMPLING) == 0.25
    assert timing.time_device(step, 0.25, "cpu", SAMPLING) == 0.25


def reached(record: dict, factor: float = 1.0) -> dict:
    """`record` with a row for everything that targets are about; `factor` 1 meets all of them, just."""

    def row(name: str, op: str, variant: str, device_us: float, host_us: float) -> dict:
        return {
            "list": name,
            "op": op,
            "variant": variant,
            "device_us": device_us,
            "host_us": host_us,
            "floor_us": 90.0,
            "fraction_of_floor": 0.9 / factor,
            "launches": {"graphs": 0, "outside_graphs": 2, "outside_by_operator": {}, "waits": 0},
            "equal_to_eager": True,
        }

    rows = []
    for name in tensor_sets.LISTS:
        for op in bench.OPS:
            rows.append(row(name, op, "torch_foreach", 600.0, 500.0))
            for variant in ("te_graph", "te_graph_plan"):
                device_us = 40.0 * factor if name == "2000x1024" else 100.0 * factor
                rows.append(row(name, op, variant, device_us, (60.0 if variant == "te_graph_plan" else 150.0) * factor))
    labels = {name: found.label for name, found in tensor_sets.LISTS.items()}
    record = record | {"rows": rows, "lists": labels, "walk_us": {"2000x1024": 100.0}, "not_measured": {}}
    return record | {"targets": targets.achieved(record)}


@pytest.mark.full
def test_targets_are_judged_by_the_worst_of_their_rows(record):
    assert [target["is_met"] for target in reached(record)["targets"]] == [True] * 8
    assert [target["is_met"] for target in reached(record, 1.01)["targets"]] == [False] * 8
    one = reached(record)
    one["rows"][-1]["fraction_of_floor"] = 0.5  # one-4gb, add, te_graph_plan
    missed = [target for target in targets.achieved(one) if not target["is_met"]]
    assert [(target["what"], target["got"]) for target in missed] == [("accumulate, part of copy bandwidth", 0.5)]
    del one["rows"][-1]
    assert [t["got"] for t in targets.achieved(one) if t["is_met"] is None] == [None]
    empty = targets.achieved(one | {"rows": [], "walk_us": {}})
    assert [target["is_met"] for target in empty] == [None] * 8


README = "# Title\n\n<!-- results:multi_tensor -->\nold\n<!-- /results -->\n\nThe end.\n"


@pytest.mark.full
def test_the_table_has_the_rows_shown_and_tells_what_else_was_found(record):
    record = reached(record, 1.01) | {"gpu": "Some GPU", "bandwidth_tb_per_s": {"copy": 4.27, "read": 4.36}}
    hp = {"list": "gpt3-1.3b-bf16", "op": "all", "device_us": 900.4, "host_us": 52.04, "launches": None}
    record["hp_rows"] = [hp | {"variant": "loops", "device_us": 5000.0}, hp | {"variant": "te_graph"}]
    text = render.render(README, {"multi_tensor": record})
    assert text.startswith("# Title\n\n<!-- results:multi_tensor -->\nNorm, clip and accumulate")
    assert text.endswith("<!-- /results -->\n\nThe end.\n")
    assert "| | torch foreach | te_graph | te_graph with a plan | bytes |\n|---|---|---|---|---|\n" in text
    assert "\n| GPT-3 1.3B, bf16: norm | 600 / 500 | 101 / 152 | 101 / 60.6 | 90.0 |\n" in text
    assert len(re.findall(r"^\| \w", text, re.MULTILINE)) == len(table.SHOWN)
    assert "Bytes: what must move, at this run's 4.36 (read) and 4.27 TB/s (copy)." in text
    assert "Launches in these rows: torch foreach 2, te_graph 2, te_graph with a plan 2." in text
    assert "in a row, GPT-3 1.3B, bf16: loops over tensors 5000 / 52.0, te_graph 900 / 52.0." in text
    assert "Targets missed: norm, part of read-only bandwidth 0.891 (at least 0.9); clip" in text
    assert f"Some GPU, torch {torch.__version__}" in text


@pytest.mark.full
def test_a_failed_cell_is_told_and_one_without_an_operation_is_empty(record):
    record = reached(record)
    record["rows"] = [row for row in record["rows"] if (row["op"], row["variant"]) != ("add", "te_graph")]
    text = render.render(README, {"multi_tensor": record})
    assert "| 600 / 500 |  | 100 / 60.0 | 90.0 |" in text
    for failure in ({"op": "add", "variant": "te_graph"}, {"op": "add", "variant": "all"}, {}):
        record["failures"] = [{"list": "gpt3-1.3b-bf16", **failure, "error": "x"}]
        assert "| 600 / 500 | failed | 100 / 60.0 | 90.0 |" in render.render(README, {"multi_tensor": record})
    record["failures"] = [{"list": "gpt3-1.3b-bf16", "op": "norm", "variant": "te_graph", "error": "x"}]
    assert "failed" not in render.render(README, {"multi_tensor": record})


@pytest.mark.full
def test_render_turns_what_a_run_leaves_into_a_table_and_check_tells_a_stale_one(cpu_run, record, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    options = ["--files", str(readme), "--results", str(cpu_run[1])]
    assert render.main([*options, "--check"]) == 1
    assert render.main(options) == 0 and render.main([*options, "--check"]) == 0
    (line,) = [line for line in readme.read_text().splitlines() if line.startswith("| 50 x 1024, bf16: clip, nothing")]
    found = [float(number) for number in re.findall(r"[\d.]+", line.partition("clip |")[2])]
    rows = [row for row in record["rows"] if (row["list"], row["op"]) == ("2000x1024", "clip_none")]
    expected = [row[key] for row in rows for key in ("device_us", "host_us")]
    assert found[:-1] == pytest.approx(expected, rel=5e-3, abs=0.06)
    assert math.isclose(found[-1], rows[0]["floor_us"], rel_tol=5e-3, abs_tol=0.06)


@pytest.mark.full
def test_without_results_and_without_a_block_nothing_is_stale(record, tmp_path):
    (tmp_path / "graphed.json").write_text((BENCHMARKS / "results" / "graphed.json").read_text())
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:graphed -->\n<!-- /results -->\n")
    options = ["--files", str(readme), "--results", str(tmp_path)]
    assert render.main(options) == 0 and render.main([*options, "--check"]) == 0
    assert "multi_tensor" not in readme.read_text()


@pytest.mark.gpu
def test_all_variants_run_on_a_gpu_and_their_launches_are_counted(tmp_path):
    process = run_script("bench_multi_tensor.py", "--small", "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    record = json.loads((tmp_path / "multi_tensor.json").read_text())
    assert record["failures"] == [] and len(record["rows"]) >= 6 * 5 * 4
    for row in record["rows"]:
        assert row["launches"]["graphs"] + row["launches"]["outside_graphs"] >= 1
        if row["variant"].startswith("te_graph"):
            assert row["launches"]["waits"] == 0


@pytest.mark.gpu
def test_device_time_leaves_out_the_host(tmp_path):
    """Small kernels behind a slow host: the device takes far less than the calls, also where others use it, too."""
    x = torch.zeros(8, device="cuda")

    def step() -> None:
        for _ in range(20):
            x.add_(1)
            end = time.perf_counter() + 50e-6
            while time.perf_counter() < end:
                pass

    step()
    sampling = timing.Sampling(repeats=5, seconds=0.01)
    host = timing.time_calls(step, "cuda", sampling)
    assert host > 20 * 50e-6
    assert 0 < min(timing.time_device(step, host, "cuda", sampling) for _ in range(3)) < host / 2
