"""Recipes of delayed scaling that differ in all that an update of scales goes by."""

from __future__ import annotations

import pytest

import te_graph as tg

RECIPES = {
    "max": tg.DelayedScaling(amax_history_len=3),
    "most recent": tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=2),
    "one": tg.DelayedScaling(amax_history_len=1, fp8_format=tg.Format.E4M3),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
