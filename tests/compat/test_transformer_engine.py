"""TransformerEngine's own modules in bf16: bit-equal to their eager selves over steps and micro-batches, on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, gradients_of, run, train

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

PACKAGE = "transformer_engine"
pytestmark = [pytest.mark.gpu, pytest.mark.needs(PACKAGE), pytest.mark.usefixtures("repeatable")]
# When tests are collected, before any of them uses the GPU: it brings libraries that do not load after torch's own.
# Where it is there and cannot be imported, the error is one of this file.
te: Any = importlib.import_module(f"{PACKAGE}.pytorch") if importlib.util.find_spec(PACKAGE) else None

WIDTH, TOKENS, BATCH = 256, 64, 2
STEPS, MICRO_BATCHES = 3, 2
OF_LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}


def options() -> dict[str, Any]:
    return {"params_dtype": torch.bfloat16, "device": "cuda"}


def linear() -> nn.Module:
    return te.Linear(WIDTH, WIDTH, **options())


def linear_without_bias() -> nn.Module:
    return te.Linear(WIDTH, WIDTH, bias=False, **options())


def mlp() -> nn.Module:
    return te.LayerNormMLP(WIDTH, 4 * WIDTH, **options())


def swiglu() -> nn.Module:
    return te.LayerNormMLP(WIDTH, 2 * WIDTH, normalization="RMSNorm", activation="swiglu", bias=False, **options())


def layer(**given: Any) -> nn.Module:
    return te.TransformerLayer(WIDTH, 4 * WIDTH, 4, **OF_LAYER, **given, **options())


def grouped_layer() -> nn.Module:
    return layer(num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False)


MODULES = [linear, linear_without_bias, mlp, swiglu, layer, grouped_layer]


def batch(tokens: int = TOKENS) -> Tensor:  # [tokens, BATCH, WIDTH]
    return torch.randn(tokens, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def batches() -> list[list[tuple]]:
    return [[(batch(),) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)]


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_a_module_is_bit_equal_over_steps_and_micro_batches(make: Callable[[], nn.Module]) -> None:
    module = make()
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(),))
    steps = batches()
    assert_bitwise_equal(train(module, steps), train(twin, steps))
    info = module.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == STEPS * MICRO_BATCHES and not info["eager_calls"]


def test_a_chain_of_layers_is_bit_equal() -> None:
    layers = nn.Sequential(*(layer(layer_number=number) for number in (1, 2, 3)))
    twin = eager_copy(layers)
    tg.make_graphed_callables(tuple(layers), ((batch(),),), chain=True)
    steps = batches()
    assert_bitwise_equal(train(layers, steps), train(twin, steps))
    assert all(one.te_graph.info()["forward_replays"] == STEPS * MICRO_BATCHES for one in layers)


def test_gradients_are_added_into_main_grad() -> None:
    module = layer()
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(),), grad_dtype=torch.float32)
    expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in twin.named_parameters()}
    for _ in range(MICRO_BATCHES):
        x = batch()
        assert_bitwise_equal(run(module, x), run(twin, x))
        for name, parameter in twin.named_parameters():
            expected[name] += parameter.grad
            parameter.grad = None
    assert_bitwise_equal({name: p.main_grad for name, p in module.named_parameters()}, expected)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_gradients_that_its_kernels_add_into_main_grad_are_refused_by_name(kind: str) -> None:
    module = getattr(te, kind)(WIDTH, WIDTH, fuse_wgrad_accumulation=True, **options())
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=f"{kind}: fuse_wgrad_accumulation"):
        tg.make_graphed_callables(module, (batch(),))


def test_other_shapes_and_evaluation_in_between_change_nothing() -> None:
    """They fill the caches that its modules share."""
    module = layer()
    twin, other = eager_copy(module), layer()
    tg.make_graphed_callables(module, (batch(),))
    for tokens in (TOKENS, TOKENS // 2, TOKENS):
        run(other, batch(tokens))
        with torch.no_grad():
            other.eval()(batch(tokens))
        other.train()
        x = batch()
        assert_bitwise_equal(run(module, x), run(twin, x))
    parameters = [list(one.parameters()) for one in (module, twin)]
    assert_bitwise_equal(*map(gradients_of, parameters))
    assert not module.te_graph.info()["eager_calls"]


def test_a_weight_that_moves_is_noticed_whoever_reads_it() -> None:
    """No dispatcher sees what the kernels are given."""
    module = linear()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    tg.make_graphed_callables(module, (batch(),))
    run(module, batch())
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="weight moved to other memory"):
        module(batch())


def test_fp8_is_refused_and_bf16_goes_on() -> None:
    with (
        te.autocast(enabled=True),
        pytest.raises(RuntimeError, match=r"Linear: TransformerEngine's FP8 autocast .*te_graph.Linear"),
    ):
        tg.make_graphed_callables(linear(), (batch(),))
    module = linear()
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(),))
    with te.autocast(enabled=True), pytest.raises(RuntimeError, match=r"Linear: TransformerEngine's FP8 autocast"):
        module(batch())
    x = batch()
    assert_bitwise_equal(run(module, x), run(twin, x))
