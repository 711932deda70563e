"""Layers of Hugging Face's Conv1D, whose weight is [in, out]: as linear layers with the transposed weight."""

from __future__ import annotations

import copy
import functools
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
RECIPES = [tg.Float8CurrentScaling(), tg.DelayedScaling(amax_history_len=4)]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, use_cache=False, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def convert(model: nn.Module) -> nn.Module:
    tg.convert_to_fp8(model, min_features=16, conv1d=True)
    return model


def pair(device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A linear layer and a Conv1D of the same values, converted."""
    linear, conv = nn.Linear(32, 64, device=device, dtype=dtype), Conv1D(64, 32).to(device, dtype)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    return convert(nn.Sequential(linear)), convert(nn.Sequential(conv))


def test_they_are_converted_in_place_when_asked_and_back() -> None:
    model = gpt2()
    report = tg.convert_to_fp8(model, min_features=16)
    assert report.converted == []
    assert report.skipped["transformer.h.0.attn.c_attn"] == "a Conv1D of transformers, which conv1d=True converts"
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
    before = [dict(vars(layer)) for layer in layers.values()]
    report = tg.convert_to_fp8(model, min_features=16, conv1d=True)
    assert report.converted == list(layers)
    assert report.skipped == {"lm_head": "its weight is that of transformer.wte, too"}
    assert all(isinstance(layer, Conv1D) for layer in layers.values())
    assert list(map(id, model.parameters())) == parameters
    assert list(model.state_dict()) == keys
    assert tg.convert_to_fp8(model, min_features=16, conv1d=True).converted == []
    tokens = torch.arange(16).view(2, 8)
    with tg.fp8_autocast(recipe=RECIPES[0]):
        model(tokens)
    assert tg.unconvert(model) == list(layers)
    assert [type(layer) for layer in layers.values()] == [Conv1D] * len(layers)
    assert [dict(vars(layer)) for layer in layers.values()] == before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_has_the_bits_of_linear_layers(device: str, recipe: Any, dtype: torch.dtype) -> None:
    linear, conv = pair(device, dtype)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (linear, conv)]
    for micro_batch in range(6):
        x = torch.randn(5, 7, 32, device=device, dtype=dtype)  # [a, b, in]
        inputs, results = [x.clone().requires_grad_() for _ in range(2)], []
        for model, own in zip((linear, conv), inputs, strict=True):
            with tg.fp8_autocast(recipe=recipe):
                y = model(own)
            y.square().sum().backward()
            results.append(y)
        assert same_bits(*results)
        assert same_bits(*(own.grad for own in inputs))
        assert same_bits(linear[0].weight.grad, conv[0].weight.grad.t())
        assert same_bits(linear[0].bias.grad, conv[0].bias.grad)
        if micro_batch % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert same_bits(linear[0].weight, conv[0].weight.t())
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        assert same_bits(linear(x), conv(x))


def test_gradients_add_up_where_they_are(device: str) -> None:
    """In the layout of the weight, with no copy that transposes them."""
    _, conv = pair(device)
    pointers = set()
    for _ in range(3):
        with tg.fp8_autocast(recipe=RECIPES[0]):
            y = conv(torch.randn(6, 32, device=device))
        assert type(y.grad_fn.next_functions[1][0]).__name__ == "AccumulateGrad"
        y.sum().backward()
        assert conv[0].weight.grad.is_contiguous()
        pointers.add(conv[0].weight.grad.data_ptr())
    assert len(pointers) == 1


@pytest.mark.parametrize("enabled", [False, True])
def test_what_is_no_tensor_is_refused_by_name(enabled: bool) -> None:
    conv = convert(nn.Sequential(Conv1D(64, 32)))
    message = "^ConvertedConv1D: expected x to be a tensor, got NoneType$"
    with tg.fp8_autocast(enabled=enabled), pytest.raises(TypeError, match=message):
        conv(None)


def test_outside_of_regions_they_are_what_they_were() -> None:
    layer = Conv1D(64, 32)
    x = torch.randn(4, 32)
    plain = layer(x)
    assert same_bits(plain, convert(nn.Sequential(layer))(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_takes_the_scales_of_the_first_call(device: str, use_reentrant: bool) -> None:
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        _, conv = pair(device)
        for _ in range(3):
            x = torch.randn(6, 32, device=device, requires_grad=True)
            with tg.fp8_autocast(recipe=RECIPES[1]):
                y = checkpoint(conv, x, use_reentrant=use_reentrant) if is_checkpointed else conv(x)
            y.square().sum().backward()
        gradients.append([parameter.grad for parameter in conv.parameters()])
    assert all(map(same_bits, *gradients))


def test_state_and_copies(device: str) -> None:
    _, conv = pair(device)
    x = torch.randn(6, 32, device=device)
    for _ in range(3):
        with tg.fp8_autocast(recipe=RECIPES[1]):
            conv(x).sum().backward()
    file = io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded[0]) is type(conv[0])
    assert same_bits(tg.fp8_state_dict(loaded)["0"][0], tg.fp8_state_dict(conv)["0"][0])
    _, resumed = pair(device)
    resumed.load_state_dict(conv.state_dict())
    tg.load_fp8_state_dict(resumed, tg.fp8_state_dict(conv))
    copied = copy.deepcopy(conv)
    results = []
    for model in (conv, resumed, copied):
        with tg.fp8_autocast(recipe=RECIPES[1]):
            results.append(model(2 * x))
    assert all(same_bits(results[0], result) for result in results[1:])


def step(model: nn.Module, tokens: Tensor, recipe: Any) -> Tensor:
    """The loss of tokens [n, length], whose gradients are added."""
    with tg.fp8_autocast(recipe=recipe):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphed_layers_of_gpt2_are_bit_equal(device: str, recipe: Any) -> None:
    """Weights change between replays, which see it."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = convert(gpt2().to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.arange(64, device=device).view(4, 16)
        if is_graphed:
            tg.graph_layers(model, functools.partial(step, model, tokens, recipe))
        found = []
        for length in (16, 16, 8, 16, 8):  # a second kind of arguments is captured on the way
            for _ in range(2):
                found.append(step(model, tokens[:, :length], recipe))
            optimizer.step()
            optimizer.zero_grad()
        if is_graphed:
            assert all(layer.te_graph.info()["forward_replays"] == 10 for layer in model.transformer.h)
        results.append([*found, *(parameter.detach() for parameter in model.parameters())])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graphed_function_of_forward_and_backward_is_bit_equal(device: str, recipe: Any) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, x = convert(nn.Sequential(Conv1D(32, 32), Conv1D(64, 32))).to(device), torch.zeros(6, 32, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def step(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with tg.fp8_autocast(recipe=recipe):
                loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        called, found = tg.graphed(step) if is_graphed else step, []
        for number in range(6):
            x.normal_()
            found += [called().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        if is_graphed:
            assert called.info()["forward_replays"] == 5
        results.append(found)
    assert all(map(same_bits, *results))


def test_transformers_is_not_imported_for_them() -> None:
    code = (
        "import sys, torch, te_graph as tg\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "assert tg.convert_to_fp8(model, min_features=16, conv1d=True).converted == ['0']\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
