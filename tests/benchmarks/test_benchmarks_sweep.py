"""bench_graphed_sweep.py on the recorder, its plot, and README's words about it."""

import importlib
import json
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
harness = importlib.import_module("lib.harness")
plots = importlib.import_module("lib.plots")
render = importlib.import_module("render")
sweep = importlib.import_module("bench_graphed_sweep")
workloads = importlib.import_module("cases.graphs.workloads")


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    return run_script("bench_graphed_sweep.py", "--device", "cpu", "--quick", "--callables", 1, 2, "--out", out), out


@pytest.fixture
def record(cpu_run):
    return json.loads((cpu_run[1] / "graphed_sweep.json").read_text())


@pytest.fixture
def in_process(monkeypatch):
    """Lets main() measure in this process."""
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *args: function(*args))


def measured(record: dict) -> dict:
    """`record` with rows of two variants and chains of 1 and 8, at 4 and 256 parameters."""
    rows = [
        {
            "variant": variant,
            "parameters": parameters,
            "callables": callables,
            "forward_us_per_call": slow * (2.0 + parameters / 100),
            "backward_us_per_call": slow * (5.0 + parameters / 10),
            "nodes_per_callable": 7.0,
            "capture_seconds": 0.1,
            "equal_to_eager": True,
        }
        for variant, slow in (("torch_graphed", 10), ("te_graph", 1))
        for callables in (1, 8)
        for parameters in (256, 4)
    ]
    labels = {"torch_graphed": "torch.cuda.make_graphed_callables", "te_graph": "te_graph"}
    points = {"parameters": [4, 256], "callables": [1, 8], "variants": labels, "not_measured": {}}
    return record | points | {"rows": rows, "gpu": "Some GPU"}


@pytest.mark.full
def test_a_run_on_the_cpu_has_a_row_for_each_point_and_ends_with_a_table(cpu_run, record):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    points = [(row["variant"], row["parameters"], row["callables"]) for row in record["rows"]]
    assert points == [("te_graph", parameters, callables) for parameters in (4, 16) for callables in (1, 2)]
    assert (record["benchmark"], record["parameters"], record["callables"]) == ("graphed_sweep", [4, 16], [1, 2])
    assert record["command"] == "python benchmarks/bench_graphed_sweep.py --device cpu --quick --callables 1 2"
    assert record["not_measured"] == {"torch.cuda.make_graphed_callables": "needs a GPU"}
    assert "not measured: torch.cuda.make_graphed_callables: needs a GPU" in process.stdout.splitlines()
    for row in record["rows"]:
        assert row["forward_us_per_call"] > 0 and row["backward_us_per_call"] > 0 and row["capture_seconds"] > 0
        assert row["equal_to_eager"] is True
        columns = [row["variant"], *(f"{row[key]}" for key in ("callables", "parameters"))]
        columns += [f"{row[key]:.1f}" for key in ("forward_us_per_call", "backward_us_per_call")]
        assert columns in [line.split()[:5] for line in process.stdout.splitlines()]
    assert [path.name for path in out.iterdir()] == ["graphed_sweep.json"]


@pytest.mark.full
def test_the_number_of_nodes_does_not_depend_on_that_of_parameters(record):
    assert len({row["nodes_per_callable"] for row in record["rows"]}) == 1


def test_a_callable_scales_its_input_by_the_sum_of_its_parameters(seed):
    workload = sweep.scale_workload(6, 64, "cpu", seed)
    layer = workload.layers[0]
    assert [len(list(layer.parameters())) for layer in workload.layers] == [6] * 64
    x = torch.randn(sweep.WIDTH)
    torch.testing.assert_close(layer(x), x * sum(layer.parameters()))
    y = x
    for layer in workload.layers:
        y = layer(y)
    assert ((y / x) > 0.01).all() and ((y / x) < 100).all()  # a long chain neither overflows nor vanishes


def test_gradients_that_differ_are_recorded_and_fail_the_run(in_process, monkeypatch, tmp_path, capsys):
    def build(workload):
        def step():
            workload.step()
            workload.leaves[-1].grad.add_(1e-3)

        return step

    monkeypatch.setitem(workloads.VARIANTS, "te_graph", workloads.Variant("te_graph", build))
    options = ["--device=cpu", "--quick", "--parameters=2", "--callables=1", f"--out={tmp_path}"]
    assert sweep.BENCHMARK.main(options) == 1
    (row,) = json.loads((tmp_path / "graphed_sweep.json").read_text())["rows"]
    assert row["equal_to_eager"] is False and row["nodes_per_callable"] is None
    assert "DIFFER" in capsys.readouterr().out


def test_points_that_fail_are_listed_and_the_others_are_kept(in_process, monkeypatch, tmp_path, capsys):
    measure_point = sweep.measure_point

    def fail_at_four(variant, parameters, *args):
        if parameters == 4:
            raise ValueError("no such thing")
        return measure_point(variant, parameters, *args)

    monkeypatch.setattr(sweep, "measure_point", fail_at_four)
    options = ["--device=cpu", "--quick", "--parameters", "2", "4", "--callables=1", f"--out={tmp_path}"]
    assert sweep.BENCHMARK.main(options) == 1
    record = json.loads((tmp_path / "graphed_sweep.json").read_text())
    assert [row["parameters"] for row in record["rows"]] == [2]
    assert [(failure["variant"], failure["parameters"]) for failure in record["failures"]] == [("te_graph", 4)]
    assert "error: te_graph 4: ValueError: no such thing" in capsys.readouterr().err


def test_only_a_complete_run_on_a_gpu_replaces_the_kept_results(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete = sweep.BENCHMARK.parse_args(["--seed=1"])
    assert (complete.out, complete.variants) == (tmp_path, ["torch_graphed", "te_graph"])
    assert (complete.parameters, complete.callables) == ([4, 16, 64, 256], [1, 8, 64])
    for part in (["--quick"], ["--parameters=4"], ["--callables=1"], ["--device=cpu"]):
        assert sweep.BENCHMARK.parse_args(part).out is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "expected a CUDA GPU, and torch finds none"),
        (["--device=cpu", "--parameters=3"], "--parameters: expected even numbers of at least 2, got 3"),
        (["--device=cpu", "--parameters=0"], "--parameters: expected even numbers of at least 2, got 0"),
        (["--device=cpu", "--callables=0"], "--callables: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capsys, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        sweep.BENCHMARK.main(options)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.full
def test_the_plot_has_a_line_for_each_variant_and_chain_and_is_drawn_alike_again(record):
    record = measured(record)
    svg = plots.sweep_svg(record)
    assert svg == plots.sweep_svg(record)
    assert "<dc:date>" not in svg and plots.digest(record) in svg
    for words in ("te_graph, 1 callable<", "te_graph, 8 callables<", "torch.cuda.make_graphed_callables, 8 callables<"):
        assert words in svg
    other = json.loads(json.dumps(record))
    other["rows"][0]["forward_us_per_call"] += 1
    assert plots.sweep_svg(other) != svg
    assert plots.is_current(svg, record) and not plots.is_current(svg, other)
    assert not plots.is_current(svg.replace("<path", "<path ", 1), record)


@pytest.mark.full
def test_a_plot_that_another_matplotlib_drew_is_current_if_it_shows_the_same_results(record, monkeypatch):
    record = measured(record)
    svg = plots.sweep_svg(record).replace("Matplotlib v", "Matplotlib v0.", 1).replace("<path", "<path ", 1)
    assert plots.is_current(svg, record) and not plots.is_current(svg, record | {"seed": -1})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.is_current(svg, record)


@pytest.fixture
def folder(record, tmp_path):
    """A folder with README.md and results, and a function that calls render.py's main() there."""
    (tmp_path / "README.md").write_text("<!-- results:graphed_sweep -->\nold\n<!-- /results -->\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "graphed_sweep.json").write_text(json.dumps(measured(record)))

    def call(*options: str) -> int:
        places = ["--files", str(tmp_path / "README.md"), "--results", str(tmp_path / "results")]
        try:
            return render.main([*places, *options])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return tmp_path, call


def test_render_draws_the_plot_and_shows_it_with_the_growth(folder):
    path, call = folder
    plot = path / "results" / "graphed_sweep.svg"
    assert call("--check") == 1 and not plot.exists()
    assert call() == 0 and call("--check") == 0
    text = (path / "README.md").read_text()
    assert "](benchmarks/results/graphed_sweep.svg)\n" in text
    assert "From 4 to 256 parameters, chain of 8: " in text
    assert "; te_graph 2.0 → 4.6 forward, 5.4 → 30.6 backward." in text
    assert "torch.cuda.make_graphed_callables 20.4 → 45.6 forward, 54.0 → 306 backward" in text
    assert "All gradients equal eager ones bit for bit. Some GPU, torch" in text


@pytest.mark.full
def test_check_tells_a_plot_that_is_stale_missing_or_edited(folder, record, capsys):
    path, call = folder
    assert call() == 0
    plot, results = path / "results" / "graphed_sweep.svg", path / "results" / "graphed_sweep.json"
    svg = plot.read_text()
    plot.write_text(svg.replace("<path", "<path ", 1))
    assert call("--check") == 1 and "graphed_sweep.svg is stale" in capsys.readouterr().err
    plot.unlink()
    assert call("--check") == 1 and not plot.exists()
    assert call() == 0 and plot.read_text() == svg
    changed = measured(record)
    changed["rows"][1]["capture_seconds"] += 1  # not a number of README's
    results.write_text(json.dumps(changed))
    assert call("--check") == 1 and plot.read_text() == svg


def test_a_missing_matplotlib_is_named_and_nothing_is_written(folder, monkeypatch, capsys):
    path, call = folder
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call() == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert "old" in (path / "README.md").read_text()


@pytest.mark.gpu
def test_the_sweep_runs_on_a_gpu_with_gradients_equal_to_eager_ones(tmp_path):
    process = run_script(
        "bench_graphed_sweep.py", "--quick", "--parameters", 4, 64, "--callables", 1, 8, "--out", tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads((tmp_path / "graphed_sweep.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["torch_graphed"] * 4 + ["te_graph"] * 4
    assert all(row["equal_to_eager"] and row["forward_us_per_call"] > 0 for row in rows)
    assert [row["nodes_per_callable"] for row in rows[:4]] == [None] * 4
    assert all(2 <= row["nodes_per_callable"] <= 20 for row in rows[4:])
