"""What FP8 transformer layers are to reach, and what a run has reached."""

from collections.abc import Sequence
from typing import Any

from lib.targets import at_most

OURS, MAIN_GRADS = "te_graph delayed, graphed", "te_graph delayed, graphed, fp32 main_grad"
# Shape, variant, and device us of forward + backward.
TIMES = (
    ("h2048-t512", OURS, 340.0),
    ("h2048-t512", MAIN_GRADS, 390.0),
    ("h2048-t2048", OURS, 1050.0),
    ("h512-t256", OURS, 130.0),
    ("h4096-t2048", OURS, 2500.0),
)
KERNELS = 35


def targets_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets beside the rows of bench_fp8_layers.py, as `lib.targets` lists them; those of other shapes than a run
    has measured are left out."""
    found = {(row["shape"], row["variant"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    times = [
        at_most(f"{shape}, {variant}, device us", limit, [found.get((shape, variant), {}).get("device_us")])
        for shape, variant, limit in TIMES
        if shape in shapes
    ]
    kernels = [found.get((shape, OURS), {}).get("kernels") for shape in shapes]
    return [*times, at_most(f"{OURS}, kernels of a layer", KERNELS, kernels)]
