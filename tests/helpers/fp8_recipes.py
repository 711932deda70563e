"""Recipes that tests of FP8 layers share."""

from __future__ import annotations

import pytest

import te_graph as tg

# Of delayed scaling, that differ in all that an update of scales goes by.
RECIPES = {
    "max": tg.DelayedScaling(amax_history_len=3),
    "most recent": tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=2),
    "one": tg.DelayedScaling(amax_history_len=1, fp8_format=tg.Format.E4M3),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
BOTH_KINDS = {
    "delayed": tg.DelayedScaling(amax_history_len=3),
    "newest": tg.DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent", margin=1),
    "current": tg.Float8CurrentScaling(),
}
both_kinds = pytest.mark.parametrize("recipe", BOTH_KINDS.values(), ids=BOTH_KINDS)
