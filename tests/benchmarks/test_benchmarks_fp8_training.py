"""bench_fp8_training.py with a small model, runs that are added to others, its targets, table and plot."""

import importlib
import json
import re
import sys
import sysconfig
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench_fp8_training")
corpora = importlib.import_module("cases.fp8.corpus")
training = importlib.import_module("cases.fp8.training")
targets = importlib.import_module("cases.fp8.training_targets")
table = importlib.import_module("cases.fp8.training_table")
plots = importlib.import_module("lib.plots")

RUNS = [f"{recipe}-{seed}-graphed" for recipe in ("bf16", "delayed", "current") for seed in (1, 2, 3)]
RUNS += [f"{recipe}-1-eager" for recipe in ("bf16", "delayed", "current")]


def test_runs_are_all_recipes_and_seeds_from_graphs_and_one_seed_eagerly():
    assert list(bench.runs_of(1)) == RUNS


def test_a_run_has_its_curve(tmp_path):
    options = ("--device", "cpu", "--commit", "abc", "--out", tmp_path, "--runs", "current-1-graphed")
    process = run_script("bench_fp8_training.py", *options)
    assert process.returncode == 0, process.stderr
    [row] = json.loads((tmp_path / "fp8_training.json").read_text())["rows"]
    assert (row["run"], row["equal_to_eager"]) == ("current-1-graphed", None)
    check_curve(row)


def check_curve(row: dict[str, Any]) -> None:
    assert [step for step, _ in row["validations"]] == [2, 4, 6, 7, 8]
    last = [loss for _, loss in row["validations"][-2:]]
    assert row["validation_loss"] == pytest.approx(sum(last) / 2, abs=1e-4)
    assert len(row["training_loss"]) == 4 and row["training_loss"][-1] < row["training_loss"][0] < 5.6


@pytest.mark.full
def test_runs_are_added_to_earlier_ones(tmp_path):
    file, records = tmp_path / "fp8_training.json", []
    for runs in (["delayed-1-graphed", "delayed-1-eager"], ["current-1-graphed"]):
        append = ("--append", file) if file.exists() else ()
        options = ("--device", "cpu", "--commit", "abc", "--out", tmp_path, *append, "--runs", *runs)
        process = run_script("bench_fp8_training.py", *options)
        assert process.returncode == 0, process.stderr
        records.append(json.loads(file.read_text()))
    first, second = records
    assert [row["run"] for row in first["rows"]] == ["delayed-1-graphed", "delayed-1-eager"]
    assert [row["equal_to_eager"] for row in first["rows"]] == [True, None]
    assert [row["run"] for row in second["rows"]] == ["delayed-1-graphed", "current-1-graphed", "delayed-1-eager"]
    assert second["rows"][::2] == first["rows"] and second["corpus"] == first["corpus"]
    assert len({row["losses_sha256"] for row in second["rows"]}) == 2
    runs = "delayed-1-graphed current-1-graphed delayed-1-eager"
    assert second["command"] == f"python benchmarks/bench_fp8_training.py --device cpu --runs {runs}"
    for row in second["rows"]:
        check_curve(row)
    assert second["corpus"].keys() == {"files", "bytes", "sha256"}
    assert (second["seeds"], second["recipes"]) == ([1, 2, 3], ["bf16", "delayed", "current"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"commit": "other"}, "same measurement, got commit other instead of abc"),
        ({"settings": "another model"}, "same measurement, got settings another model instead of"),
        ({"seeds": [4, 5, 6]}, r"got seeds \[4, 5, 6\] instead of \[1, 2, 3\]"),
    ],
)
def test_runs_are_not_added_to_those_of_another_measurement(record, tmp_path, capsys, change, words):
    file = tmp_path / "fp8_training.json"
    here = {"gpu": None, "torch": str(torch.__version__), "commit": "abc", "dirty": False}
    file.write_text(json.dumps({**record, **here, "settings": training.SMALL.label, **change}))
    with pytest.raises(SystemExit, match="2"):
        bench.BENCHMARK.parse_args(["--device", "cpu", "--commit", "abc", "--append", str(file)])
    assert re.search(words, capsys.readouterr().err)


def test_what_is_no_result_or_no_run_is_told(tmp_path, capsys):
    (tmp_path / "empty.json").write_text("{}")
    for options, words in (
        (["--append", str(tmp_path / "empty.json")], "--append: expected results of this benchmark"),
        (["--append", str(tmp_path / "missing.json")], "--append: expected results of this benchmark"),
        (["--runs", "bf16-9-graphed"], "--runs: expected bf16-1-graphed, "),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.BENCHMARK.parse_args(["--device", "cpu", *options])
        assert words in capsys.readouterr().err


def test_the_command_of_all_runs_names_none():
    options = bench.BENCHMARK.parse_args(["--device", "cpu", "--seed", "5"])
    names = list(bench.runs_of(5))
    assert bench.command_of(options, names[::-1]) == "python benchmarks/bench_fp8_training.py --device cpu --seed 5"


def test_the_model_and_the_data_are_as_large_as_they_are_said_to_be():
    settings = training.FULL
    model = training.GPT(settings, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) >= 100_000_000
    assert settings.steps == 1024 and settings.validated == 64 and settings.least_bytes == 10_000_000
    corpus = settings.corpus()
    assert corpus.size >= 10_000_000
    assert corpus.training.shape == (1024 * settings.sequences_of_step, settings.length + 1)
    assert corpus.validation.shape == (settings.held_out, settings.length + 1)
    assert settings.held_out % settings.sequences_of_step == 0


def test_no_byte_of_a_corpus_is_seen_twice(tmp_path, monkeypatch):
    texts = [f"{number:04d}".encode() * 25 for number in range(60)]
    for folder in ("", "package/", "site-packages/"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            content = b"elsewhere" * 10 if folder == "site-packages/" else text  # each file twice
            (tmp_path / folder / f"{number}.py").write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = corpora.read_corpus(20, 4, 100, least_bytes=3000)
    assert (corpus.files, corpus.size) == (30, 3000)
    windows = [bytes(window.tolist()) for part in (corpus.training, corpus.validation) for window in part]
    assert len(set(windows)) == 24 and set(windows) <= set(texts)
    assert corpora.read_corpus(20, 4, 100, least_bytes=3000).digest == corpus.digest
    with pytest.raises(ValueError, match=r"expected 6100 bytes of .py files, no two of them alike, in .*, got 6000"):
        corpora.read_corpus(57, 4, 100, least_bytes=0)


def test_seeds_are_of_weights_and_of_the_order_of_the_data():
    one, same, other = (training.Training(training.SMALL, "bf16", seed, "eager", "cpu") for seed in (1, 1, 2))
    assert all(map(torch.equal, one.training, same.training))
    assert not torch.equal(one.training[0], other.training[0])
    assert all(map(torch.equal, one.validation, other.validation))
    weights = [each.model.layers[0].layernorm_mlp.fc1.weight for each in (one, same, other)]
    assert torch.equal(*weights[:2]) and not torch.equal(*weights[1:])


def test_a_training_whose_layers_run_eagerly_is_not_taken_for_one_from_graphs(monkeypatch):
    made = training.Training(training.SMALL, "delayed", 1, "graphed", "cpu")
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    with pytest.raises((RuntimeError, AttributeError)):
        made.run()


def row(recipe: str, seed: int, mode: str, loss: float, equal: bool | None = None) -> dict[str, object]:
    points = [[64, 2 * loss], [128, loss]]
    names = {"run": f"{recipe}-{seed}-{mode}", "recipe": recipe, "seed": seed, "mode": mode}
    return {**names, "validation_loss": loss, "validations": points, "seconds": 20.0, "equal_to_eager": equal}


def rows_of(delayed: float, apart: float, equal: bool) -> list[dict[str, object]]:
    """Complete results: bf16 at 1.0, seeds so far apart."""
    found = []
    for recipe, loss in (("bf16", 1.0), ("delayed", delayed), ("current", 1.001)):
        found += [row(recipe, seed, "graphed", loss + (seed - 2) * apart / 2) for seed in (1, 2, 3)]
        found[-3]["equal_to_eager"] = equal
    return found + [row(recipe, 1, "eager", 1.0) for recipe in ("bf16", "delayed", "current")]


@pytest.mark.parametrize(
    ("delayed", "apart", "equal", "verdicts"),
    [
        (1.004, 0.001, True, [True, True, True]),
        (0.996, 0.001, True, [True, True, True]),
        (1.006, 0.001, True, [False, True, True]),
        (1.006, 0.007, True, [True, True, True]),
        (1.0, 0.0, False, [True, True, False]),
    ],
)
def test_losses_are_to_be_as_near_as_half_a_percent_or_as_seeds(delayed, apart, equal, verdicts):
    found = targets.targets_of(rows_of(delayed, apart, equal), ["bf16", "delayed", "current"], 3)
    assert [target["is_met"] for target in found] == verdicts
    assert found[0]["limit"] == max(0.5, round(100 * apart, 3))


def test_what_has_not_run_is_not_judged():
    rows = rows_of(1.0, 0.0, True)
    without_a_seed = [each for each in rows if each["run"] != "bf16-3-graphed"]
    found = targets.targets_of(without_a_seed, ["bf16", "delayed", "current"], 3)
    assert [target["is_met"] for target in found] == [None, None, True]
    assert targets.targets_of([], ["bf16", "delayed", "current"], 3)[-1]["is_met"] is None


@pytest.fixture
def record():
    rows = rows_of(1.002, 0.002, True)
    return {
        **{"benchmark": "fp8_training", "gpu": "NVIDIA H200", "cpu": "", "torch": "2.11.0", "cuda": "13.0"},
        **{"driver": "580", "python": "3.12", "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02T00"},
        "command": "python benchmarks/bench_fp8_training.py",
        "settings": training.FULL.label,
        "parameters": 102_000_000,
        "validated": 64,
        "recipes": ["bf16", "delayed", "current"],
        "seeds": [1, 2, 3],
        "corpus": {"files": 600, "bytes": 10_100_000, "sha256": "0123456789abcdef" * 4},
        "rows": rows,
        "not_measured": {},
        "targets": targets.targets_of(rows, ["bf16", "delayed", "current"], 3),
        "failures": [],
    }


def test_the_table_has_a_row_for_each_recipe(record):
    lines = table.fp8_training_table(record)
    assert "102 M parameters" in lines[2]
    assert lines[4] == "| | seed 1 | seed 2 | seed 3 | mean | beside bf16 | seconds, graphs / eager |"
    assert lines[6:9] == [
        "| bf16 | 0.9990 | 1.0000 | 1.0010 | 1.0000 |  | 20 / 20 |",
        "| delayed | 1.0010 | 1.0020 | 1.0030 | 1.0020 | +0.20% | 20 / 20 |",
        "| current | 1.0000 | 1.0010 | 1.0020 | 1.0010 | +0.10% | 20 / 20 |",
    ]
    assert lines[-1].startswith(
        "Seeds are 0.20% apart in bf16. All losses equal eager ones bit for bit: bf16-1-graphed"
    )
    assert "10.1 MB of 600 files, sha256 `0123456789abcdef`. NVIDIA H200" in lines[-1]


def test_the_table_of_a_part_leaves_out_what_has_not_run(record):
    record["rows"] = record["rows"][3:5]
    lines = table.fp8_training_table(record)
    assert lines[6:9] == [
        "| bf16 |  |  |  |  |  |  |",
        "| delayed | 1.0010 | 1.0020 |  |  |  | 20 |",
        "| current |  |  |  |  |  |  |",
    ]


def test_the_plot_shows_these_results(record):
    pytest.importorskip("matplotlib")
    svg = plots.fp8_training_svg(record)
    assert plots.digest(record) in svg and plots.is_current(svg, record)
    assert all(f">{recipe}<" in svg for recipe in record["recipes"])
    assert plots.fp8_training_svg({**record, "rows": []})
