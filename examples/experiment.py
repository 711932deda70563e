"""What the training scripts share: options and their checks, the outcome of a run, and the comparison of two."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one training.

    Attributes:
        losses: since step 1.
        state: what it leaves, final parameters among it, [...] each, on the CPU.
    """

    losses: list[float]
    state: dict[str, Tensor]


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have."""
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="text file; without it, the text of Python's pydoc_data.topics")
    add("--device", choices=("cpu", "cuda"), default=default_device, help="where to train")
    add("--seed", type=int, default=0, help="seed of all that is drawn")
    add("--graph", action=argparse.BooleanOptionalAction, default=True, help="replay from graphs what can be")
    add("--compare", action="store_true", help="train eagerly and with graphs; fail unless equal bit for bit")
    return parser


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End the program with status 2 where torch has no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a device of this machine, got cuda, which torch finds none of")


def check_file(parser: argparse.ArgumentParser, option: str, path: Path | None) -> None:
    """End the program with status 2 where `path`, if there is one, cannot be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        parser.error(f"{option}: expected a file name in an existing folder, got {path}")


def check_plot(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """The same of a plot, which matplotlib must be able to draw."""
    check_file(parser, "--plot", path)
    if path is not None and path.suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot: expected a name that ends in {', '.join(PLOT_SUFFIXES)}, got {path}")
    try:
        if path is not None:
            import matplotlib  # noqa: F401
    except ImportError as error:
        parser.error(f"--plot: expected matplotlib installed (pip install matplotlib), got: {error}")


def tell_differences(graph: Any, eager: Any) -> str:
    """Where two nests of numbers and tensors [...] first differ in bits, and how many more differ; empty if nowhere."""
    # Here, since eager training needs no te_graph.
    from te_graph.testing import find_differences

    first, *more = find_differences(graph, eager) or [""]
    return f"{first}; {len(more)} more differ" if more else first
