"""Plots of results: SVGs that are the same wherever they are drawn, and bars of times on demand."""

import hashlib
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.results import WORLDS
from lib.units import size_name

MARKERS = {0: "o", 1: "s", 2: "^"}  # by the number of the series


def digest(record: dict[str, Any]) -> str:
    """What an SVG carries of the results that it shows, so that a stale one is found without drawing."""
    return f"results sha256 {hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()}"


def sweep_svg(record: dict[str, Any]) -> str:
    """Host time of a call against the number of parameters, as SVG: a panel for each direction, a line for each variant
    and length of the chain. The same results give the same text with the same matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import LogLocator

    def draw(figure: Any) -> None:
        directions = (("forward_us_per_call", "forward"), ("backward_us_per_call", "backward"))
        for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), directions, strict=True):
            for color, (variant, label) in enumerate(record["variants"].items()):
                for number, count in enumerate(record["callables"]):
                    points = _points(record, variant, count, key)
                    name = f"{label}, {count} callable{'s' if count > 1 else ''}"
                    axes.plot(*points, color=f"C{color}", marker=MARKERS[number % len(MARKERS)], label=name)
            axes.set(title=title, xlabel="parameters of a callable", xscale="log", yscale="log")
            axes.set_xticks(record["parameters"], [str(count) for count in record["parameters"]])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("host µs per call")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(record["variants"]))

    return _svg(record, (9, 4), draw)


def fp8_svg(record: dict[str, Any]) -> str:
    """Bandwidth of cast + transpose + amax as part of a copy's, as SVG: a panel for weights and models, one for
    activations, a bar for each variant. The same results give the same text with the same matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = {"weights": [("weight", "cast_transpose"), ("model", "weights")]}
    panels["activations, tokens x hidden size"] = [("activation", "cast_transpose")]
    rows = {(row["part"], row["case"], row["op"], row["variant"]): row["fraction_of_copy"] for row in record["rows"]}
    width = 0.8 / max(1, len(record["variants"]))

    def draw(figure: Any) -> None:
        for axes, (title, parts) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            places = [(part, case, op) for part, op in parts for case in record["cases"].get(part, {})]
            for number, (variant, label) in enumerate(record["variants"].items()):
                fractions = [rows.get((*place, variant)) or 0.0 for place in places]
                positions = [i + (number + 0.5) * width - 0.4 for i in range(len(places))]
                axes.bar(positions, [100 * fraction for fraction in fractions], width, label=label)
            names = [record["cases"][part][case].replace(", ", "\n") for part, case, _ in places]
            axes.set_xticks(range(len(places)), names, rotation=30, ha="right", rotation_mode="anchor")
            axes.set(title=title)
            axes.grid(axis="y", alpha=0.3)
        figure.axes[0].set_ylabel("% of the bandwidth of a copy")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return _svg(record, (10, 4.5), draw)


def fp8_training_svg(record: dict[str, Any]) -> str:
    """Validation loss against steps, as SVG: a line for each training from graphs, a color for each recipe; beside it
    how much the mean of the seeds is above that of bf16. The same results give the same text with the same matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    curves: dict[str, list[list[list[float]]]] = {recipe: [] for recipe in record["recipes"]}
    for row in record["rows"]:
        if row["mode"] == "graphed":
            curves[row["recipe"]].append(row["validations"])

    def mean_of(recipe: str) -> list[float]:
        return [statistics.mean(loss for _, loss in points) for points in zip(*curves[recipe], strict=True)]

    def draw(figure: Any) -> None:
        losses, differences = figure.subplots(1, 2)
        for color, (recipe, found) in enumerate(curves.items()):
            for number, points in enumerate(found):
                label = recipe if number == 0 else None
                losses.plot(*zip(*points, strict=True), color=f"C{color}", linewidth=0.8, label=label)
            if found and curves["bf16"] and recipe != "bf16":
                means = zip(mean_of(recipe), mean_of("bf16"), strict=True)
                steps = [step for step, _ in found[0]]
                differences.plot(steps, [100 * (one / other - 1) for one, other in means], color=f"C{color}")
        losses.set(title="validation loss", xlabel="step", ylabel="nats per byte", yscale="log")
        losses.yaxis.set_major_formatter("{x:g}")
        losses.yaxis.set_minor_formatter("{x:g}")
        differences.set(title="mean of the seeds beside bf16", xlabel="step", ylabel="%")
        differences.axhline(0, color="C0", linewidth=0.8)
        for axes in (losses, differences):
            axes.grid(alpha=0.3, which="both")
        figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=len(curves))

    return _svg(record, (9, 4), draw)


def collectives_svg(record: dict[str, Any]) -> str:
    """Median time of a collective against its bytes, as SVG: a panel for each op, a line for each variant and mode. The
    same results give the same text with the same matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    styles = dict(zip(record["modes"], ("-", ":"), strict=True))
    scale = "log" if record["rows"] else "linear"  # matplotlib has no logarithms of nothing

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(record["ops"]), sharey=True, squeeze=False)[0]
        for axes, (op, title) in zip(panels, record["ops"].items(), strict=True):
            for color, (variant, label) in enumerate(record["variants"].items()):
                for mode, name in record["modes"].items():
                    rows = [r for r in record["rows"] if (r["op"], r["variant"], r["mode"]) == (op, variant, mode)]
                    points = [row["bytes"] for row in rows], [row["p50_us"] for row in rows]
                    style = {"color": f"C{color}", "linestyle": styles[mode], "label": f"{label}, {name}"}
                    axes.plot(*points, marker=MARKERS[color % len(MARKERS)], markersize=3, **style)
            axes.set(title=title, xscale=scale, yscale=scale)
            axes.set_xticks(record["sizes"], list(map(size_name, record["sizes"])), rotation=45, ha="right")
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("µs per call, slowest rank")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(record["variants"]))

    return _svg(record, (11, 4.5), draw)


# What is drawn beside results/NAME.json, by NAME.
PLOTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "graphed_sweep": sweep_svg,
    "fp8": fp8_svg,
    "fp8_training": fp8_training_svg,
    **{f"collectives_{world}": collectives_svg for world in WORLDS},
}


def _svg(record: dict[str, Any], size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """What `draw` draws into a figure of `size` inches, with the digest of `record`."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "te_graph", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Description": digest(record)})
    # matplotlib leaves blanks at the ends of some lines.
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def is_current(svg: str, record: dict[str, Any]) -> bool:
    """Whether `svg` is what PLOTS draws. Without the matplotlib that drew it: whether it shows these results."""
    if digest(record) not in svg:
        return False
    try:
        import matplotlib
    except ImportError:
        return True
    return f"Matplotlib v{matplotlib.__version__}," not in svg or svg == PLOTS[record["benchmark"]](record)


def _points(record: dict[str, Any], variant: str, callables: int, key: str) -> tuple[list[int], list[float]]:
    rows = [row for row in record["rows"] if (row["variant"], row["callables"]) == (variant, callables)]
    rows.sort(key=lambda row: row["parameters"])
    return [row["parameters"] for row in rows], [row[key] for row in rows]


def save_times(path: Path, record: dict[str, Any]) -> None:
    """Draw wall and host time of every shape and variant of graphed.json as bars.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(record["variants"])
    keys = (("wall_us_per_layer", "wall time"), ("host_us_per_layer", "host time"))
    for axes, (key, title) in zip(figure.subplots(1, 2), keys, strict=True):
        for number, (variant, label) in enumerate(record["variants"].items()):
            times = {row["shape"]: row[key] for row in record["rows"] if row["variant"] == variant}
            positions = [i + (number + 0.5) * width - 0.4 for i in range(len(record["shapes"]))]
            bars = axes.bar(positions, [times.get(shape, 0.0) for shape in record["shapes"]], width, label=label)
            axes.bar_label(bars, fmt="{:.0f}", fontsize=6)
        axes.set(title=title, ylabel="µs per layer, forward + backward")
        names = [label.replace(", ", "\n") for label in record["shapes"].values()]
        axes.set_xticks(range(len(names)), names, fontsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{record['gpu'] or 'CPU'}, torch {record['torch']}")
    figure.savefig(path, dpi=150)
