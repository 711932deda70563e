"""Write the tables of benchmarks/results/*.json into README.md, between markers.

    python benchmarks/render.py                   # render; nothing changes if all is as measured
    python benchmarks/render.py --check           # fail if README.md is not what the results say
    python benchmarks/render.py --plot times.png  # also draw the times (needs matplotlib)

The table of graphed.json goes between <!-- results:graphed --> and <!-- /results -->, each on a line of its own.
Exit status: 0 rendered or up to date, 1 --check found a stale file, 2 bad input.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START = re.compile(r"<!-- results:(\w+) -->")
END = "<!-- /results -->"
PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def graphed_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for graphed.json: one row per shape, one column per variant."""
    rows = {(row["shape"], row["variant"]): row for row in record["rows"]}
    shapes, variants = record["shapes"], record["variants"]
    lines = [
        "Transformer block in bf16, forward + backward with gradients present: wall µs / host µs per layer, peak MiB.",
        "",
        f"| | {' | '.join(variants.values())} |",
        f"|---|{'---|' * len(variants)}",
    ]
    for shape, label in shapes.items():
        lines.append(f"| {label} | {' | '.join(_cell(rows.get((shape, variant))) for variant in variants)} |")
    return [*lines, "", f"{_gradients(record)} {_origin(record)}".strip()]


RENDERERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {"graphed": graphed_table}


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "failed"
    peak = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
    return f"{_number(row['wall_us_per_layer'])} / {_number(row['host_us_per_layer'])}{peak}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _gradients(record: dict[str, Any]) -> str:
    """What the comparison of gradients found; what was not compared is named too."""

    def names_of(verdict: bool | None) -> str:
        rows = [row for row in record["rows"] if row["variant"] != "eager" and row["equal_to_eager"] is verdict]
        return ", ".join(f"{record['variants'][row['variant']]} ({record['shapes'][row['shape']]})" for row in rows)

    parts = [f"Gradients differ from eager ones: {names_of(False)}."] if names_of(False) else []
    if names_of(None):
        parts.append(f"Gradients were not compared: {names_of(None)}.")
    if names_of(True) and not parts:
        parts.append("All gradients equal eager ones bit for bit.")
    return " ".join(parts)


def _origin(record: dict[str, Any]) -> str:
    where = record["gpu"] or f"CPU ({record['cpu']}), recorder"
    versions = [f"torch {record['torch']}"]
    versions += [f"{name} {record[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if record[key]]
    versions.append(f"Python {record['python']}")
    commit = f"commit {record['commit'][:12]}" if record["commit"] else "unknown commit"
    changes = " with changes" if record["dirty"] else ""
    return f"{where}, {', '.join(versions)}, {commit}{changes}, {record['date'][:10]}: `{record['command']}`."


def render(text: str, records: dict[str, dict[str, Any]]) -> str:
    """`text` with what lies between each pair of markers replaced by its table.

    Args:
        text: Markdown with at least one pair of markers.
        records: Results by name, as the markers name them.

    Raises:
        ValueError: there is no marker, one is not closed, or names results that are not there.
    """
    lines, name = [], None
    for line in text.splitlines():
        start = START.fullmatch(line)
        if start and name is None:
            name = start[1]
            if name not in records:
                raise ValueError(f"marker results:{name}: expected one of {', '.join(records) or 'no results'}")
            lines += [line, *RENDERERS[name](records[name])]
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


def save_plot(path: Path, record: dict[str, Any]) -> None:
    """Draw wall and host time of every shape and variant of graphed.json as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(record["variants"])
    keys = (("wall_us_per_layer", "wall time"), ("host_us_per_layer", "host time"))
    for axes, (key, title) in zip(figure.subplots(1, 2), keys, strict=True):
        for number, (variant, label) in enumerate(record["variants"].items()):
            times = {row["shape"]: row[key] for row in record["rows"] if row["variant"] == variant}
            positions = [i + (number + 0.5) * width - 0.4 for i in range(len(record["shapes"]))]
            bars = axes.bar(positions, [times.get(shape, 0.0) for shape in record["shapes"]], width, label=label)
            axes.bar_label(bars, fmt=_number, fontsize=6)
        axes.set(title=title, ylabel="µs per layer, forward + backward")
        names = [label.replace(", ", "\n") for label in record["shapes"].values()]
        axes.set_xticks(range(len(names)), names, fontsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(record["variants"]))
    figure.suptitle(f"{record['gpu'] or 'CPU'}, torch {record['torch']}")
    figure.savefig(path, dpi=150)


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Results that can be rendered, by name.

    Raises:
        ValueError: a file is no JSON object of a benchmark that is known here.
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
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Render or check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write benchmark results into a Markdown file, between markers.")
    add = parser.add_argument
    add("--readme", type=Path, default=ROOT / "README.md", help="file with the markers")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of JSON files")
    add("--check", action="store_true", help="change nothing; fail if the file is stale")
    add("--plot", type=Path, help="file for a plot of graphed.json (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.plot and options.plot.suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot: expected a name that ends in {', '.join(PLOT_SUFFIXES)}, got {options.plot}")
    try:
        records = load_results(options.results)
        text = options.readme.read_text(encoding="utf-8")
        rendered = render(text, records)
        if options.plot:
            save_plot(options.plot, records["graphed"])
    except ImportError as error:
        parser.error(f"--plot: expected matplotlib installed (pip install matplotlib), got: {error}")
    except KeyError as error:
        parser.error(f"results: expected a value for {error}, got none")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if rendered == text:
        print(f"{options.readme} is up to date")
    elif options.check:
        print(f"error: {options.readme} is stale: run python benchmarks/render.py", file=sys.stderr)
        return 1
    else:
        options.readme.write_text(rendered, encoding="utf-8")
        print(f"{options.readme} rendered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
