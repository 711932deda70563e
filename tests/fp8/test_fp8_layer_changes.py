"""Changes of te_graph's own layers behind a capture are seen: settings, hooks on their parts, other forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
RECIPE = tg.Float8CurrentScaling()
OPTIONS = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def setting(part: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda layer: setattr(layer.get_submodule(part), name, value)


def hook(part: str) -> Callable[[nn.Module], None]:
    def put(layer: nn.Module) -> None:
        layer.get_submodule(part).register_forward_hook(lambda module, args, result: result * 1.5)

    return put


def other_forward(part: str) -> Callable[[nn.Module], None]:
    def put(layer: nn.Module) -> None:
        module = layer.get_submodule(part)
        module.forward = lambda x, *args: type(module).forward(module, x, *args) * 1.5

    return put


def another_activation(layer: nn.Module) -> None:
    of_relu = vars(tg.LayerNormMLP(32, 32, activation="relu").activation)
    changed = vars(layer.get_submodule("layernorm_mlp.activation"))
    changed.update({name: of_relu[name] for name in ("name", "_op", "_function")})


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "mask type": setting("", "self_attn_mask_type", "no_mask"),
    "dropout": setting("", "hidden_dropout", 1.0),
    "eps": setting("layernorm_mlp.layer_norm", "eps", 3.0),
    "zero-centered": setting("self_attention.layernorm_qkv.layer_norm", "zero_centered_gamma", True),
    "activation": another_activation,
    **{f"hook on {part}": hook(part) for part in ("layernorm_mlp.fc1", "layernorm_mlp.activation")},
    **{f"forward of {part}": other_forward(part) for part in ("layernorm_mlp.fc2", "self_attention.proj")},
}


@pytest.mark.parametrize("with_fp8", [True, False], ids=["FP8", "off"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, with_fp8, device):
    layers = [tg.TransformerLayer(32, 48, 2, device=device, **OPTIONS) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    model, x = nn.Sequential(layers[0]), torch.randn(8, 2, 32, device=device)
    with tg.fp8_autocast(enabled=with_fp8, recipe=RECIPE):
        layers[1](x)
        model(x).sum().backward()
        tg.make_graphed_callables(model, (x,), on_mismatch="eager", show_progress=False)
        before = model(x).detach().clone()
        for layer in layers:
            CHANGES[change](layer)
        got, expected = model(x).detach(), layers[1](x).detach()
    assert model.te_graph.info()["forward_replays"] == 1
    assert not torch.equal(got, before) and same_bits(got, expected)


def test_return_bias_of_a_linear_layer_is_seen(device):
    model, x = nn.Sequential(tg.Linear(32, 32, device=device)), torch.randn(8, 32, device=device)
    tg.make_graphed_callables(model, (x,), show_progress=False)
    model[0].return_bias = True
    with pytest.raises(RuntimeError, match="return_bias"):
        model(x)


@pytest.mark.parametrize("with_fp8", [True, False], ids=["FP8", "off"])
def test_a_forward_of_the_users_is_called(with_fp8, device):
    """As adapters replace it (``fc1.forward = lora.forward``)."""
    layer, x = tg.LayerNormMLP(32, 32, device=device), torch.randn(8, 32, device=device)
    before, seen = layer.fc1.forward, []

    def forward(x: Tensor) -> Tensor:  # [n, 32] -> [n, 32]
        seen.append(x)
        return before(x)

    layer.fc1.forward = forward
    with tg.fp8_autocast(enabled=with_fp8, recipe=RECIPE):
        layer(x)
    assert len(seen) == 1


@pytest.mark.parametrize("tie", ["weights", "biases", "norm and bias"])
def test_parts_may_have_one_parameter(tie, device):
    layer, x = tg.LayerNormMLP(32, 32, device=device), torch.randn(8, 32, device=device, requires_grad=True)
    if tie == "weights":
        layer.fc2.weight = layer.fc1.weight
    else:
        layer.fc2.bias = layer.fc1.bias if tie == "biases" else layer.layer_norm.bias
    for _ in range(2):
        with tg.fp8_autocast(recipe=RECIPE):
            y = layer(x)
        y.square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters())


def test_parametrized_parts_compute_their_weight_once(device):
    layer, x, calls = tg.LayerNormMLP(32, 32, device=device), torch.randn(8, 32, device=device), []

    class Noted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:  # [...] -> [...]
            calls.append(weight)
            return weight

    torch.nn.utils.parametrize.register_parametrization(layer.fc1, "weight", Noted())
    calls.clear()
    layer(x)
    assert len(calls) == 1


def test_a_small_zero_centered_weight_of_16_bits_counts(device):
    layer = tg.LayerNormLinear(32, 32, zero_centered_gamma=True, device=device, dtype=torch.bfloat16)
    x = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    before = layer.layer_norm(x)
    with torch.no_grad():
        layer.layer_norm.weight.fill_(2.0**-9)
    assert not torch.equal(layer.layer_norm(x), before)
