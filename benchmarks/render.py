"""Write the tables and plots of benchmarks/results/*.json into README.md and docs/benchmarks.md, between markers.

    python benchmarks/render.py                   # render; nothing changes if all is as measured
    python benchmarks/render.py --check           # fail if a file is not what the results say
    python benchmarks/render.py --plot times.png  # also draw the times of graphed.json

What concerns results/NAME.json goes between <!-- results:NAME --> and <!-- /results -->, each on a line of its own;
plots of graphed_sweep.json, fp8.json and collectives_RANKS.json go beside these, drawn with matplotlib. Exit status: 0
rendered or up to date, 1 --check found a stale file, 2 bad input.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cases.collectives.table import collectives_table
from cases.collectives.targets import WORLDS
from cases.fp8.table import fp8_table
from lib.plots import PLOTS, is_current, save_times
from lib.remarks import show_number, show_range, show_times, tell_missed, tell_not_measured, tell_origin

ROOT = Path(__file__).resolve().parents[1]
START = re.compile(r"<!-- results:(\w+) -->")
END = "<!-- /results -->"
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
SWEEP = "graphed_sweep"
LEFT_OUT = ("te_graph_unchained",)  # of the table, which is to stay narrow
SHOWN = (  # rows of the table of multi-tensor ops: list and operation
    ("gpt3-1.3b-bf16", "norm"),
    ("gpt3-1.3b-bf16", "clip_none"),
    ("gpt3-1.3b-bf16", "clip"),
    ("gpt3-1.3b-bf16", "add"),
    ("gpt3-1.3b-fp32", "clip"),
    ("llama3-8b-bf16", "clip_none"),
    ("2000x1024", "clip_none"),
    ("20000x100", "clip_none"),
)


def graphed_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for graphed.json: one row per shape, one column per variant, and what else was counted."""
    rows = {(row["shape"], row["variant"]): row for row in record["rows"]}
    variants = {name: label for name, label in record["variants"].items() if name not in LEFT_OUT}
    lines = [
        "Transformer block in bf16, forward + backward with gradients present: wall µs / host µs per layer, peak MiB.",
        "",
        f"| | {' | '.join(variants.values())} |",
        f"|---|{'---|' * len(variants)}",
    ]
    for shape, label in record["shapes"].items():
        lines.append(f"| {label} | {' | '.join(_cell(rows.get((shape, variant))) for variant in variants)} |")
    remarks = [_gradients(record), _launches(record, variants), _split(record), tell_not_measured(record)]
    return [*lines, "", " ".join(filter(None, [*remarks, tell_origin(record)]))]


def sweep_plot(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for graphed_sweep.json: the plot, and the growth that it shows."""
    few, many = min(record["parameters"]), max(record["parameters"])
    rows = {(row["variant"], row["callables"], row["parameters"]): row for row in record["rows"]}
    chain = record["callables"][len(record["callables"]) // 2]
    growths = []
    for variant, label in record["variants"].items():
        ends = [rows.get((variant, chain, number)) for number in (few, many)]
        if few < many and None not in ends:
            times = (
                f"{' → '.join(show_number(row[f'{part}_us_per_call']) for row in ends)} {part}"
                for part in ("forward", "backward")
            )
            growths.append(f"{label} {', '.join(times)}")
    growth = f"From {few} to {many} parameters, chain of {chain}: {'; '.join(growths)}." if growths else ""
    return [
        f"![Host time of a call against its number of parameters](benchmarks/results/{SWEEP}.svg)",
        "",
        "Host µs per call of a callable with few kernels, against its number of parameters, gradients present.",
        " ".join(filter(None, [growth, _gradients(record), tell_not_measured(record), tell_origin(record)])),
    ]


def multi_tensor_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for multi_tensor.json: a row for each pair of SHOWN, a column for each variant."""
    lines = [
        "Norm, clip and accumulate over lists of gradients: device µs / host µs of a call.",
        "",
        f"| | {' | '.join(record['variants'].values())} | bytes |",
        f"|---|{'---|' * (len(record['variants']) + 1)}",
        *(_multi_tensor_row(record, name, op) for name, op in SHOWN if name in record["lists"]),
    ]
    remarks = [
        _bandwidth(record),
        _counted(record),
        _hp_functions(record),
        tell_missed(record),
        tell_not_measured(record),
    ]
    return [*lines, "", " ".join(filter(None, [*remarks, tell_origin(record)]))]


def flags_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for flags.json: one row per way to switch a flag, one column per number of nodes."""
    rows = {(row["variant"], row["nodes"]): row for row in record["rows"]}

    def cell(variant: str, nodes: int) -> str:
        row = rows.get((variant, nodes))
        return f"{show_number(row['launch_sync_us'])} / {show_number(row['host_us'])}" if row else "failed"

    lines = [
        "A flag switched before each launch of a graph of so many updates of scales: launch + sync µs / host µs.",
        "",
        f"| | {' | '.join(map(_updates, record['nodes']))} |",
        f"|---|{'---|' * len(record['nodes'])}",
    ]
    for variant, label in record["variants"].items():
        lines.append(f"| {label} | {' | '.join(cell(variant, nodes) for nodes in record['nodes'])} |")
    return [*lines, "", " ".join(filter(None, [tell_not_measured(record), tell_origin(record)]))]


RENDERERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "graphed": graphed_table,
    SWEEP: sweep_plot,
    "multi_tensor": multi_tensor_table,
    "flags": flags_table,
    "fp8": fp8_table,
    **{f"collectives_{world}": collectives_table for world in WORLDS},
}


def _command(name: str) -> str:
    """What measures the results of this name."""
    name, _, world = name.partition("_") if name.startswith("collectives_") else (name, "", "")
    return f"python benchmarks/bench_{name}.py" + (f" --world {world}" if world else "")


def _updates(nodes: int) -> str:
    return f"{nodes} update" + ("" if nodes == 1 else "s")


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "failed"
    peak = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
    return f"{show_number(row['wall_us_per_layer'])} / {show_number(row['host_us_per_layer'])}{peak}"


def _gradients(record: dict[str, Any]) -> str:
    """What the comparison of gradients found; what was not compared is named too."""

    def names_of(verdict: bool | None) -> str:
        rows = [row for row in record["rows"] if row["variant"] != "eager" and row["equal_to_eager"] is verdict]
        return ", ".join(f"{record['variants'][row['variant']]} ({_case(record, row)})" for row in rows)

    parts = [f"Gradients differ from eager ones: {names_of(False)}."] if names_of(False) else []
    if names_of(None):
        parts.append(f"Gradients were not compared: {names_of(None)}.")
    if names_of(True) and not parts:
        parts.append("All gradients equal eager ones bit for bit.")
    return " ".join(parts)


def _case(record: dict[str, Any], row: dict[str, Any]) -> str:
    if "shape" in row:
        return record["shapes"][row["shape"]]
    return f"{row['parameters']} parameters, chain of {row['callables']}"


def _launches(record: dict[str, Any], variants: dict[str, str]) -> str:
    """How much is launched outside graphs, over all shapes; empty where nothing was counted."""
    counts = []
    for variant, label in variants.items():
        launches = [row["launches"] for row in record["rows"] if row["variant"] == variant and row.get("launches")]
        if launches:
            counts.append(f"{label} {show_range([found['outside_graphs'] for found in launches], '{:.0f}'.format)}")
    if not counts:
        return ""
    return f"Launches outside graphs in a step of {record['layers']} layers: {', '.join(counts)}."


def _split(record: dict[str, Any]) -> str:
    """Whose te_graph's host time is, over all shapes; empty where it was not split."""
    key = "split_us_per_layer"
    splits = [row[key] for row in record["rows"] if row["variant"] == "te_graph" and row.get(key)]
    if not splits:
        return ""
    forward, backward = (show_range([split[part] for split in splits], show_number) for part in ("forward", "backward"))
    bare = show_range([split["bare_forward"] + split["bare_backward"] for split in splits], show_number)
    engine = show_range([split["bare_engine"] for split in splits], show_number)
    return (
        f"Host µs of te_graph: forward {forward}, backward {backward}; of these the bare launches of its graphs take "
        f"{bare}, and autograd, for a `backward()` through one view, {engine}."
    )


def _multi_tensor_row(record: dict[str, Any], name: str, op: str) -> str:
    """A cell is empty where the library has no such operation."""
    rows = {row["variant"]: row for row in record["rows"] if (row["list"], row["op"]) == (name, op)}
    failures = [failure for failure in record["failures"] if failure["list"] == name]
    failed = {failure.get("variant", "all") for failure in failures if failure.get("op", op) == op}

    def cell(variant: str) -> str:
        if variant in rows:
            return show_times(rows[variant])
        return "failed" if failed & {variant, "all"} else ""

    floor = next((show_number(row["floor_us"]) for row in rows.values() if row["floor_us"] is not None), "")
    cells = [f"{record['lists'][name]}: {record['ops'][op]}", *map(cell, record["variants"]), floor]
    return f"| {' | '.join(cells)} |"


def _bandwidth(record: dict[str, Any]) -> str:
    """What the column of bytes is; empty where no bandwidth was measured."""
    rates = record["bandwidth_tb_per_s"]
    if not rates:
        return ""
    return f"Bytes: what must move, at this run's {rates['read']:.2f} (read) and {rates['copy']:.2f} TB/s (copy)."


def _counted(record: dict[str, Any]) -> str:
    """Launches of a call over the rows shown; empty where nothing was counted."""
    counts = []
    for variant, label in record["variants"].items():
        rows = [row for row in record["rows"] if row["variant"] == variant and (row["list"], row["op"]) in SHOWN]
        launches = [row["launches"]["outside_graphs"] + row["launches"]["graphs"] for row in rows if row["launches"]]
        if launches:
            counts.append(f"{label} {show_range(launches, '{:.0f}'.format)}")
    return f"Launches in these rows: {', '.join(counts)}." if counts else ""


def _hp_functions(record: dict[str, Any]) -> str:
    """Times of the three functions of mixed precision in a row, on each list where they were measured."""
    parts = []
    for name, label in record["lists"].items():
        rows = {row["variant"]: row for row in record["hp_rows"] if (row["list"], row["op"]) == (name, "all")}
        times = [f"{title} {show_times(rows[key])}" for key, title in record["hp_variants"].items() if key in rows]
        if times:
            parts.append(f"{label}: {', '.join(times)}")
    names = "`update_hp_grads`, `get_global_norm_of_tensors`, `clip_tensors_by_global_norm` in a row"
    return f"{names}, {'; '.join(parts)}." if parts else ""


def render(text: str, records: dict[str, dict[str, Any]]) -> str:
    """`text` with what lies between each pair of markers replaced by what the results say.

    Args:
        text: Markdown with at least one pair of markers.
        records: Results by name, as the markers name them; the text says so where some are missing.

    Raises:
        ValueError: there is no marker, one is not closed, or names results that no benchmark leaves.
    """
    lines, name = [], None
    for line in text.splitlines():
        start = START.fullmatch(line)
        if start and name is None:
            name = start[1]
            if name not in RENDERERS:
                raise ValueError(f"marker results:{name}: expected one of {', '.join(RENDERERS)}")
            missing = [f"Not measured yet: `{_command(name)}`."]
            lines += [line, *(RENDERERS[name](records[name]) if name in records else missing)]
        elif start:
            raise ValueError(f"marker results:{name}: expected {END} before results:{start[1]}")
        if line == END:
            name = None
        if name is None:
            lines.append(line)
    if name is not None:
        raise ValueError(f"marker results:{name}: expected {END} after it, got the end of the file")
    if not any(START.fullmatch(line) for line in lines):
        raise ValueError("expected a line <!-- results:NAME -->, got none")
    return "\n".join(lines) + "\n"


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Results that can be rendered, by name.

    Raises:
        ValueError: a file is no JSON object of a benchmark that is known here, or there is no file.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON, got: {error}") from error
        if path.stem not in RENDERERS or not isinstance(record, dict) or record.get("benchmark") != path.stem:
            raise ValueError(f"{path}: expected the results of {' or '.join(RENDERERS)}, named like the benchmark")
        records[path.stem] = record
    if not records:
        raise ValueError(f"{folder}: expected {' or '.join(f'{name}.json' for name in RENDERERS)}, got none")
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Render or check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write benchmark results into a Markdown file, between markers.")
    add = parser.add_argument
    add("--files", type=Path, nargs="+", default=DOCUMENTS, help="Markdown files with the markers")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of JSON files")
    add("--check", action="store_true", help="change nothing; fail if a file is stale")
    add("--plot", type=Path, help="file for a plot of graphed.json")
    options = parser.parse_args(argv)
    if options.plot and options.plot.suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot: expected a name that ends in {', '.join(PLOT_SUFFIXES)}, got {options.plot}")
    try:
        records = load_results(options.results)
        stale = _stale_files(options.files, options.results, records, options.check)
        if options.plot:
            save_times(options.plot, records["graphed"])
    except ImportError as error:
        parser.error(f"plots: expected matplotlib installed (pip install matplotlib), got: {error}")
    except KeyError as error:
        parser.error(f"results: expected a value for {error}, got none")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if stale and options.check:
        print(f"error: {', '.join(map(str, stale))} is stale: run python benchmarks/render.py", file=sys.stderr)
        return 1
    for path, content in stale.items():
        path.write_text(content, encoding="utf-8")
    print(f"rendered: {', '.join(map(str, stale))}" if stale else f"{', '.join(map(str, options.files))}: up to date")
    return 0


def _stale_files(
    documents: Sequence[Path], results: Path, records: dict[str, dict[str, Any]], is_check: bool
) -> dict[Path, str]:
    """The files that are not what the results say, and what they should hold."""
    stale = {}
    for document in documents:
        text = document.read_text(encoding="utf-8")
        # Plots are found from where the document is.
        up = "../" if document.parent == ROOT / "docs" else ""
        rendered = render(text, records).replace("](benchmarks/", f"]({up}benchmarks/")
        if rendered != text:
            stale[document] = rendered
    for name in filter(records.__contains__, PLOTS):
        plot, record = results / f"{name}.svg", records[name]
        if not (plot.exists() and is_current(plot.read_text(encoding="utf-8"), record)):
            # A check has no use for the content, and is to run without matplotlib.
            stale[plot] = "" if is_check else PLOTS[name](record)
    return stale


if __name__ == "__main__":
    sys.exit(main())
