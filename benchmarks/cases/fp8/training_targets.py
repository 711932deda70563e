"""What trainings in FP8 are to reach, and what a run has reached."""

import statistics
from collections.abc import Sequence
from typing import Any

from lib.targets import at_most

BASELINE = "bf16"
PERCENT = 0.5


def losses_of(rows: Sequence[dict[str, Any]], recipe: str) -> list[float]:
    """Validation losses of a recipe, one for each seed, from graphs."""
    return [row["validation_loss"] for row in rows if (row["recipe"], row["mode"]) == (recipe, "graphed")]


def spread_of(losses: Sequence[float]) -> float:
    """In percent of their mean how far they are apart."""
    return 100 * (max(losses) - min(losses)) / statistics.mean(losses)


def difference_of(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """In percent how much the mean of losses is above that of the baseline."""
    return 100 * (statistics.mean(losses) / statistics.mean(baseline) - 1)


def targets_of(rows: Sequence[dict[str, Any]], recipes: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """The targets beside the rows of bench_fp8_training.py, as `lib.targets` lists them."""
    baseline = losses_of(rows, BASELINE)
    limit = max(PERCENT, spread_of(baseline)) if len(baseline) == seeds else PERCENT
    found = []
    for recipe in recipes:
        if recipe != BASELINE:
            losses = losses_of(rows, recipe)
            is_there = len(losses) == len(baseline) == seeds
            what = f"{recipe} scaling, validation loss beside {BASELINE}, %"
            found.append(at_most(what, round(limit, 3), [abs(difference_of(losses, baseline)) if is_there else None]))
    verdicts = [row["equal_to_eager"] for row in rows if row["equal_to_eager"] is not None]
    is_there = len(verdicts) == len(recipes)
    return [*found, at_most("trainings from graphs that differ from eager ones", 0, [verdicts.count(False)] * is_there)]
