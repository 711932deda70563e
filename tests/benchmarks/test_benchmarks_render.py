"""benchmarks/render.py: what the Markdown file holds afterwards is written out here."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
render = importlib.import_module("render")

README = "# Title\n\n<!-- results:graphed -->\nold\n<!-- /results -->\n\nThe end.\n"


@pytest.fixture
def record():
    """Results as bench_graphed.py writes them."""

    def row(variant: str, wall: float, host: float, peak: float, equal: bool | None) -> dict[str, object]:
        times = {"wall_us_per_layer": wall, "host_us_per_layer": host, "peak_mib": peak}
        return {"shape": "h512-t256", "variant": variant, **times, "equal_to_eager": equal}

    return {
        "benchmark": "graphed",
        "gpu": "NVIDIA H200",
        "cpu": "Some CPU",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": "580.1",
        "python": "3.12.1",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python benchmarks/bench_graphed.py",
        "shapes": {"h512-t256": "h 512, 256 tokens"},
        "variants": {"eager": "eager", "whole_graph": "one captured graph"},
        "rows": [row("eager", 723.4, 733.6, 1012.2, None), row("whole_graph", 1169.96, 3.14, 1199.7, True)],
        "failures": [],
    }


@pytest.fixture
def folder(record, tmp_path):
    """A folder with README.md and results/graphed.json, and a function that calls render.py's main() there."""
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "graphed.json").write_text(json.dumps(record))

    def call(*options: object) -> int:
        places = ["--files", str(tmp_path / "README.md"), "--results", str(tmp_path / "results")]
        try:
            return render.main([*places, *map(str, options)])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return types.SimpleNamespace(path=tmp_path, readme=tmp_path / "README.md", render=call)


def test_render_puts_the_table_between_the_markers_and_nothing_else_changes(folder, record):
    assert folder.render() == 0
    text = folder.readme.read_text()
    before, rest = text.split("<!-- results:graphed -->\n")
    table, after = rest.split("<!-- /results -->\n")
    assert (before, after) == ("# Title\n\n", "\nThe end.\n")
    assert "| | eager | one captured graph |\n|---|---|---|\n" in table
    assert "\n| h 512, 256 tokens | 723 / 734, 1012 MiB | 1170 / 3.1, 1200 MiB |\n" in table
    assert "All gradients equal eager ones bit for bit." in table
    assert "NVIDIA H200, torch 2.11.0, CUDA 13.0, driver 580.1, Python 3.12.1, commit 0123456789ab, 2026-01-02" in table
    assert "`python benchmarks/bench_graphed.py`" in table


def test_render_again_changes_nothing_and_check_tells_a_stale_file(folder, record, capsys):
    assert folder.render("--check") == 1
    assert folder.readme.read_text() == README and "is stale" in capsys.readouterr().err
    assert folder.render() == 0
    text = folder.readme.read_text()
    assert folder.render() == 0 and folder.render("--check") == 0
    assert folder.readme.read_text() == text
    record["rows"][1]["wall_us_per_layer"] += 1
    (folder.path / "results" / "graphed.json").write_text(json.dumps(record))
    assert folder.render("--check") == 1
    assert folder.readme.read_text() == text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (False, "Gradients differ from eager ones: one captured graph (h 512, 256 tokens)."),
        (None, "Gradients were not compared: one captured graph (h 512, 256 tokens)."),
    ],
)
def test_the_table_names_gradients_that_differ_or_were_not_compared(record, verdict, words):
    record["rows"][1]["equal_to_eager"] = verdict
    table = render.render(README, {"graphed": record})
    assert words in table and "bit for bit" not in table


def test_the_table_says_what_is_not_known(record):
    record |= {"gpu": None, "cpu": "Some CPU", "cuda": None, "driver": None, "dirty": True}
    record["rows"][0]["peak_mib"] = None
    table = render.render(README, {"graphed": record})
    assert "| 723 / 734 | 1170" in table
    assert "\nAll gradients equal eager ones bit for bit. CPU (Some CPU), recorder, torch 2.11.0, Python" in table
    assert "commit 0123456789ab with changes, " in table
    assert "unknown commit, " in render.render(README, {"graphed": record | {"commit": None, "dirty": None}})


def test_a_variant_that_failed_is_in_the_table_and_proves_nothing(record):
    del record["rows"][1]
    table = render.render(README, {"graphed": record})
    assert " | failed |" in table and "Gradients" not in table and "gradients equal" not in table


def test_what_a_run_counts_is_told_in_ranges_over_the_shapes(record):
    def launches(outside: int) -> dict[str, object]:
        return {"graphs": 16, "outside_graphs": outside, "outside_by_operator": {}, "waits": 0}

    eager, whole = record["rows"]
    splits = [
        {
            "forward": 4.0,
            "backward": 9.0,
            "bare_forward": 2.0,
            "bare_backward": 2.5,
            "bare_engine": 7.0,
            "bare_wall": 160.0,
        },
        {
            "forward": 4.5,
            "backward": 9.0,
            "bare_forward": 2.0,
            "bare_backward": 3.0,
            "bare_engine": 7.5,
            "bare_wall": 170.0,
        },
    ]
    graphed = [
        eager | {"shape": shape, "variant": "te_graph", "equal_to_eager": True, "launches": launches(3)}
        for shape in ("h512-t256", "h32")
    ]
    for row, split in zip(graphed, splits, strict=True):
        row["split_us_per_layer"] = split
    record |= {
        "layers": 8,
        "shapes": {"h512-t256": "h 512, 256 tokens", "h32": "h 32"},
        "variants": {"eager": "eager", "te_graph_unchained": "te_graph, not chained", "te_graph": "te_graph"},
        "rows": [
            eager | {"launches": launches(300)},
            eager | {"shape": "h32", "launches": launches(290)},
            whole | {"variant": "te_graph_unchained", "equal_to_eager": False, "launches": launches(17)},
            *graphed,
        ],
        "not_measured": {"TransformerEngine": "transformer_engine is not installed"},
    }
    table = render.render(README, {"graphed": record})
    assert "| | eager | te_graph, not chained | te_graph |\n" in table and "1170 / 3.1" in table
    assert "Gradients differ from eager ones: te_graph, not chained (h 512, 256 tokens)." in table
    assert (
        "Launches outside graphs in a step of 8 layers: eager 290-300, te_graph, not chained 17, te_graph 3." in table
    )
    words = (
        "Host µs of te_graph: forward 4.0-4.5, backward 9.0; of these the bare launches of its graphs take 4.5-5.0, "
        "and autograd, for a `backward()` through one view, 7.0-7.5."
    )
    assert words in table
    assert "Not measured: TransformerEngine (transformer_engine is not installed). NVIDIA H200, torch" in table


def test_results_of_an_older_benchmark_have_a_table_without_what_it_did_not_count(record):
    table = render.render(README, {"graphed": record})
    assert not any(words in table for words in ("Launches", "Host µs of", "Not measured"))
    assert "1200 MiB |\n\nAll gradients equal eager ones bit for bit. NVIDIA H200" in table


def test_results_that_are_not_there_are_said_to_be_missing(record):
    for name, command in (("graphed_sweep", "graphed_sweep.py"), ("collectives_2", "collectives.py --world 2")):
        text = render.render(README + f"<!-- results:{name} -->\n<!-- /results -->\n", {"graphed": record})
        words = f"Not measured yet: `python benchmarks/bench_{command}`."
        assert text.endswith(f"<!-- results:{name} -->\n{words}\n<!-- /results -->\n")
    assert "1170 / 3.1" in text


def test_a_folder_without_results_is_refused(folder, capsys):
    (folder.path / "results" / "graphed.json").unlink()
    assert folder.render() == 2
    graphed = "graphed.json or graphed_transformer_engine.json or graphed_sweep.json"
    fp8 = "fp8.json or fp8_linear.json or fp8_layers.json or fp8_training.json"
    names = f"{graphed} or multi_tensor.json or flags.json or {fp8}"
    worlds = "collectives_2.json or collectives_4.json or collectives_8.json or flat.json or build.json"
    assert f"expected {names} or {worlds}, got none" in capsys.readouterr().err
    assert folder.readme.read_text() == README


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("README.md", "# Title\n", "expected a line <!-- results:NAME -->, got none"),
        ("README.md", "<!-- results:graphed -->\n", "expected <!-- /results --> after it"),
        ("README.md", "<!-- results:graphed -->\n<!-- results:a -->\n<!-- /results -->\n", "before results:a"),
        ("README.md", "<!-- results:a -->\n<!-- /results -->\n", "results:a: expected one of graphed, graphed_transf"),
        ("results/graphed.json", "{", "expected JSON"),
        ("results/graphed.json", "[]", "expected the results of graphed"),
        ("results/graphed.json", '{"benchmark": "graphed"}', "expected a value for 'rows'"),
        ("results/other.json", '{"benchmark": "other"}', "expected the results of graphed"),
    ],
)
def test_wrong_markers_and_results_are_refused_and_the_file_is_kept(folder, capsys, file, content, words):
    (folder.path / file).write_text(content)
    before = folder.readme.read_text()
    assert folder.render() == 2
    assert words in capsys.readouterr().err and folder.readme.read_text() == before


def test_a_plot_is_drawn_or_refused_without_matplotlib(folder, monkeypatch, capsys):
    plot = folder.path / "times.png"
    assert folder.render("--plot", plot) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert folder.render("--plot", folder.path / "times.txt") == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert folder.render("--plot", plot) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
