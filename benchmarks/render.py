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

from cases.build.table import build_table
from cases.collectives.table import collectives_table
from cases.flat.table import flat_table
from cases.fp8.layer_table import fp8_layers_table
from cases.fp8.linear_table import fp8_linear_table
from cases.fp8.table import fp8_table
from cases.fp8.training_table import fp8_training_table
from cases.graphs.table import flags_table, graphed_table, sweep_plot
from cases.multi_tensor.table import multi_tensor_table
from lib.plots import PLOTS, is_current, save_times
from lib.results import RESULTS, ROOT, WORLDS

START = re.compile(r"<!-- results:(\w+) -->")
END = "<!-- /results -->"
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


RENDERERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "graphed": graphed_table,
    "graphed_transformer_engine": graphed_table,
    "graphed_sweep": sweep_plot,
    "multi_tensor": multi_tensor_table,
    "flags": flags_table,
    "fp8": fp8_table,
    "fp8_linear": fp8_linear_table,
    "fp8_layers": fp8_layers_table,
    "fp8_training": fp8_training_table,
    **{f"collectives_{world}": collectives_table for world in WORLDS},
    "flat": flat_table,
    "build": build_table,
}


def _command(name: str) -> str:
    """What measures the results of this name."""
    option = ""
    if name.startswith("collectives_"):
        name, _, world = name.partition("_")
        option = f" --world {world}"
    elif name == "graphed_transformer_engine":
        name, option = "graphed", " --package transformer_engine"
    return f"python benchmarks/bench_{name}.py{option}"


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
    add("--results", type=Path, default=RESULTS, help="folder of JSON files")
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
