"""Checkpoints of TransformerEngine's layers load strictly into those of te_graph.

Keys and forms are those of its version 2.20.2: weights of attention with ``fuse_qkv_params=True`` and the interleaved
layout, which is its default then, or three of them; an extra state of bytes for each of its modules.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_recipes import BOTH_KINDS
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

HIDDEN, WIDTH, HEADS = 32, 48, 4
ATTENTION = "self_attention."
RMS = {"bias": False, "normalization": "RMSNorm"}
# Of each module: how it is made, and by TransformerEngine's name of each parameter what te_graph calls it.
LINEAR = {"weight": "weight", "bias": "bias"}
NORM = {"layer_norm_weight": "layer_norm.weight", "layer_norm_bias": "layer_norm.bias"}
LAYER_NORM_LINEAR = {**NORM, "weight": "linear.weight", "bias": "linear.bias"}
MLP = {**NORM, "fc1_weight": "fc1.weight", "fc1_bias": "fc1.bias", "fc2_weight": "fc2.weight", "fc2_bias": "fc2.bias"}


def inside(path: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{path}{theirs}": f"{path}{own}" for theirs, own in names.items()}


LAYER = {
    **inside(f"{ATTENTION}layernorm_qkv.", LAYER_NORM_LINEAR),
    **inside(f"{ATTENTION}proj.", LINEAR),
    **inside("layernorm_mlp.", MLP),
}
KINDS: dict[str, tuple[Callable[..., nn.Module], dict[str, str], list[str]]] = {
    "Linear": (lambda: tg.Linear(HIDDEN, WIDTH), LINEAR, [""]),
    "converted Linear": (lambda: converted(), LINEAR, [""]),
    "LayerNormLinear": (lambda: tg.LayerNormLinear(HIDDEN, WIDTH), LAYER_NORM_LINEAR, [""]),
    "LayerNormLinear, RMSNorm": (lambda: tg.LayerNormLinear(HIDDEN, WIDTH, **RMS), LAYER_NORM_LINEAR, [""]),
    "LayerNormMLP": (lambda: tg.LayerNormMLP(HIDDEN, WIDTH), MLP, [""]),
    "LayerNormMLP, swiglu": (lambda: tg.LayerNormMLP(HIDDEN, WIDTH, activation="swiglu", **RMS), MLP, [""]),
    "TransformerLayer": (
        lambda: a_layer(),
        LAYER,
        [f"{ATTENTION}layernorm_qkv.", f"{ATTENTION}core_attention.", f"{ATTENTION}proj.", "layernorm_mlp."],
    ),
}
STATES: dict[str, Any] = {
    "none": None,
    "empty": torch.empty(0, dtype=torch.uint8),
    "pickled": torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": [1.0]})), dtype=torch.uint8),
    "of version 0": io.BytesIO(b"bytes"),
}


def a_layer(**given: Any) -> tg.TransformerLayer:
    return tg.TransformerLayer(HIDDEN, WIDTH, HEADS, num_gqa_groups=2, hidden_dropout=0, attention_dropout=0, **given)


def converted() -> nn.Module:
    holder = nn.Sequential(nn.Linear(HIDDEN, WIDTH))
    tg.convert_to_fp8(holder, include=lambda name, module: True)
    return holder[0]


def checkpoint_of(layer: nn.Module, names: dict[str, str], modules: list[str], state: Any) -> dict[str, Any]:
    """As TransformerEngine would save it."""
    own = dict(layer.named_parameters())
    found: dict[str, Any] = {theirs: own.pop(name).detach() for theirs, name in names.items() if name in own}
    assert not own
    return found if state is None else {**found, **{f"{module}_extra_state": state for module in modules}}


def parameters(layer: nn.Module) -> list[Tensor]:
    return list(layer.parameters())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_load_strictly(kind: str, state: Any, assign: bool) -> None:
    make, names, modules = KINDS[kind]
    torch.manual_seed(1)
    layer, other = make(), make()
    checkpoint = checkpoint_of(layer, names, modules, state)
    keys = list(checkpoint)
    in_a_model = nn.Sequential(other)
    in_a_model.load_state_dict({f"0.{name}": value for name, value in checkpoint.items()}, assign=assign)
    assert all(map(same_bits, parameters(layer), parameters(other)))
    other = make()
    other.load_state_dict(checkpoint, assign=assign)
    assert all(map(same_bits, parameters(layer), parameters(other)))
    assert list(checkpoint) == keys


@pytest.mark.parametrize("recipe", BOTH_KINDS.values(), ids=BOTH_KINDS)
def test_a_layer_that_has_trained_goes_on_with_what_was_loaded(recipe: Any) -> None:
    """Bit for bit as with the same weights under its own names."""
    source, results = a_layer(), []
    for checkpoint in (
        checkpoint_of(source, *KINDS["TransformerLayer"][1:], STATES["pickled"]),
        dict(source.named_parameters()),
    ):
        torch.manual_seed(2)
        layer, x = a_layer(), torch.randn(5, 2, HIDDEN)
        with tg.fp8_autocast(recipe=recipe):
            layer(x).sum().backward()
        layer.load_state_dict(checkpoint)
        layer.zero_grad()
        with tg.fp8_autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        results.append([y, *(parameter.grad for parameter in layer.parameters())])
    assert all(map(same_bits, *results))


def split(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as without ``fuse_qkv_params``, where heads of queries, keys and values lie apart."""
    path, found = f"{ATTENTION}layernorm_qkv.", dict(checkpoint)
    for kind in ("weight", "bias"):
        by_groups = found.pop(path + kind).unflatten(0, (2, 4, HIDDEN // HEADS))  # two queries, a key, a value
        parts = {"query": by_groups[:, :2], "key": by_groups[:, 2], "value": by_groups[:, 3]}
        for name, part in parts.items():
            found[f"{path}{name}_{kind}"] = part.reshape(-1, *part.shape[3 if name == "query" else 2 :])
    return found


def test_weights_of_queries_keys_and_values_are_joined() -> None:
    layer, other = a_layer(), a_layer()
    checkpoint = split(checkpoint_of(layer, LAYER, KINDS["TransformerLayer"][2], STATES["empty"]))
    other.load_state_dict(checkpoint)
    assert all(map(same_bits, parameters(layer), parameters(other)))


def test_what_does_not_fit_is_named() -> None:
    checkpoint = checkpoint_of(a_layer(), LAYER, [], None)
    weight = f"{ATTENTION}layernorm_qkv.weight"
    with pytest.raises(RuntimeError, match=r"size mismatch for self_attention\.layernorm_qkv\.linear\.weight"):
        a_layer().load_state_dict({**checkpoint, weight: checkpoint[weight][:-1]})
    apart = split(checkpoint)
    apart.pop(f"{ATTENTION}layernorm_qkv.key_weight")
    with pytest.raises(RuntimeError, match="query_weight") as error:
        a_layer().load_state_dict(apart)
    assert "Missing key" in str(error.value) and "layernorm_qkv.linear.weight" in str(error.value)
    with pytest.raises(RuntimeError, match=r"Unexpected key.* \"fc3_weight\""):
        layer, names, _ = KINDS["LayerNormMLP"]
        layer().load_state_dict({**checkpoint_of(layer(), names, [], None), "fc3_weight": torch.zeros(1)})


def test_a_state_of_te_graph_is_still_taken() -> None:
    layer, other = (tg.Linear(HIDDEN, WIDTH) for _ in range(2))
    with tg.fp8_autocast(recipe=BOTH_KINDS["delayed"]):
        layer(torch.randn(5, HIDDEN)).sum().backward()
    layer.fp8.update_if_due()
    other.load_state_dict(layer.state_dict())
    assert same_bits(other.get_extra_state(), layer.get_extra_state())
