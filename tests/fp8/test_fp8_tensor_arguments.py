"""Layers that are called with something that is no tensor name themselves, the argument, and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg

WIDTH = 32
CURRENT = tg.Float8CurrentScaling()
LAYERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "te_graph.Linear": ("input", lambda: tg.Linear(WIDTH, WIDTH)),
    "te_graph.LayerNormLinear": ("input", lambda: tg.LayerNormLinear(WIDTH, WIDTH)),
    "te_graph.LayerNormMLP": ("input", lambda: tg.LayerNormMLP(WIDTH, 2 * WIDTH)),
    "te_graph.TransformerLayer": ("hidden_states", lambda: tg.TransformerLayer(WIDTH, 2 * WIDTH, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_no_tensor_is_refused_by_name(name: str, enabled: bool, is_known: bool, device: str) -> None:
    argument, make = LAYERS[name]
    layer = make().to(device)
    for given in (None, [1.0], "x"):
        with tg.fp8_autocast(enabled=enabled, recipe=CURRENT):
            if is_known:
                layer(torch.randn(16, 2, WIDTH, device=device))
            message = f"^{name}: expected {argument} to be a tensor, got {type(given).__name__}$"
            with pytest.raises(TypeError, match=message):
                layer(given)


def tensor(device: str) -> Tensor:
    return torch.randn(16, 2, WIDTH, device=device)


@pytest.mark.parametrize("enabled", [False, True])
def test_so_are_arguments_that_may_be_left_out(enabled: bool, device: str) -> None:
    mlp, layer = (make().to(device) for _, make in list(LAYERS.values())[2:])
    calls: dict[str, Callable[[], Any]] = {
        "te_graph.LayerNormMLP: expected residual": lambda: mlp(tensor(device), 3),
        "te_graph.TransformerLayer: expected attention_mask": lambda: layer(tensor(device), "mask", "arbitrary"),
        "te_graph.TransformerLayer: expected rotary_pos_emb": lambda: layer(tensor(device), rotary_pos_emb=[1.0]),
    }
    for message, call in calls.items():
        with (
            tg.fp8_autocast(enabled=enabled, recipe=CURRENT),
            pytest.raises(TypeError, match=f"^{message} to be a tensor or None, got "),
        ):
            call()


def test_errors_of_what_layers_hold_are_their_own(device: str) -> None:
    layer = tg.LayerNormLinear(WIDTH, WIDTH).to(device)
    layer.linear.register_forward_hook(lambda *_: raising())
    with tg.fp8_autocast(recipe=CURRENT), pytest.raises(AttributeError, match="of a hook"):
        layer(tensor(device))


def raising() -> None:
    raise AttributeError("of a hook")
