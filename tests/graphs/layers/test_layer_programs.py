"""Random little models train by ``graph_layers`` as they do eagerly; more of them: layer_programs.py."""

from __future__ import annotations

import pytest
from layer_programs import run


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [4, 9, 25, 26, 32, 41])
def test_random_models_train_alike(seed: int) -> None:
    assert "graphed: " in run(seed)
