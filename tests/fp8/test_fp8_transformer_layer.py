"""TransformerLayer: outside of regions a layer of plain PyTorch; inside, fused and by its modules, the same bits."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from fp8_tensors import normal_numbers
from tensor_lists import all_same_bits, same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
HIDDEN, WIDTH, HEADS, SEQ, BATCH = 64, 96, 4, 12, 2
SHAPE = (SEQ, BATCH, HIDDEN)  # of "bshd", 12 in a batch of sequences of 2
RECIPES = {"current": tg.Float8CurrentScaling(), "delayed": tg.DelayedScaling(amax_history_len=4)}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": {"num_gqa_groups": 2, "bias": False, "normalization": "RMSNorm", "activation": "swiglu"},
    "BERT": {"self_attn_mask_type": "no_mask", "attn_input_format": "bshd", "activation": "gelu_erf"},
    "wide heads": {"kv_channels": 32, "num_gqa_groups": 1, "zero_centered_gamma": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def a_layer(kind: str, device: str, dtype: torch.dtype = torch.bfloat16, **given: Any) -> tg.TransformerLayer:
    options = {**NO_DROPOUT, **KINDS[kind], **given}
    layer = tg.TransformerLayer(HIDDEN, WIDTH, HEADS, params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return layer


def reference(layer: tg.TransformerLayer, x: Tensor, mask: Tensor | None, angles: Tensor | None) -> Tensor:
    """The layer for x [seq, batch, hidden], written out: attention by softmax, heads one by one."""
    attention, mlp = layer.self_attention, layer.layernorm_mlp

    def normed(norm: nn.Module, h: Tensor) -> Tensor:
        gain = norm.weight + 1 if norm.zero_centered_gamma else norm.weight
        if norm.normalization == "RMSNorm":
            return h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt() * gain
        centered = h - h.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt() * gain + norm.bias

    def turned(head: Tensor) -> Tensor:  # [seq, batch, dim]
        if angles is None:
            return head
        dim, half = angles.shape[-1], angles.shape[-1] // 2
        first, second, rest = head[..., :half], head[..., half:dim], head[..., dim:]
        cos, sin = (f(angles[: len(head), 0, :, :half].to(head.dtype)) for f in (torch.cos, torch.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    linear = attention.layernorm_qkv.linear
    qkv = F.linear(normed(attention.layernorm_qkv.layer_norm, x), linear.weight, linear.bias)
    size, per_group = attention.head_dim, attention.heads_per_group
    results = []
    for group in qkv.split((per_group + 2) * size, dim=-1):
        *queries, key, value = group.split(size, dim=-1)
        for query in queries:
            scores = torch.einsum("sbd,tbd->bst", turned(query), turned(key)) / size**0.5
            if mask is not None:
                scores = scores.masked_fill(mask[:, 0], -torch.inf)
            results.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), value))
    h = x + F.linear(torch.cat(results, dim=-1), attention.proj.weight, attention.proj.bias)
    wide = F.linear(normed(mlp.layer_norm, h), mlp.fc1.weight, mlp.fc1.bias)
    if mlp.activation.name == "swiglu":
        gate, up = wide.chunk(2, dim=-1)
        wide = F.silu(gate) * up
    else:
        wide = F.gelu(wide, approximate="none" if mlp.activation.name == "gelu_erf" else "tanh")
    return h + F.linear(wide, mlp.fc2.weight, mlp.fc2.bias)


def causal(length: int, device: str) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


@kinds
@pytest.mark.parametrize("rotary", [0, 8, 16], ids=["", "part turned", "turned"])
@pytest.mark.parametrize("masked", [False, True])
def test_outside_of_regions_it_is_the_layer_written_out(kind, rotary, masked, device):
    layer = a_layer(kind, device, torch.float64)
    is_batch_first = layer.self_attention.attn_input_format == "bshd"
    x = normal_numbers(*SHAPE, device=device, dtype=torch.float64)
    x = (x.transpose(0, 1).contiguous() if is_batch_first else x).requires_grad_()
    angles = tg.RotaryPositionEmbedding(rotary)(SEQ, device=device) if rotary else None
    mask_type = layer.self_attn_mask_type
    mask = causal(SEQ, device) if mask_type == "causal" else None
    given: dict[str, Any] = {"rotary_pos_emb": angles}
    if masked:
        mask = torch.rand(BATCH, 1, SEQ, SEQ, device=device) < 0.4
        mask[..., 0] = False
        given |= {"attention_mask": mask, "self_attn_mask_type": "arbitrary"}
    y = layer(x, **given)
    rows = x.transpose(0, 1) if is_batch_first else x
    expected = reference(layer, rows, mask, angles)
    expected = expected.transpose(0, 1) if is_batch_first else expected
    # torch's attention and norms compute in fp64, too; angles are of fp32 on both sides.
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    leaves = [x, *layer.parameters()]
    grad = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def by_modules(layer: tg.TransformerLayer) -> tg.TransformerLayer:
    """A copy that runs its modules one after the other, as it does where one of them has a hook."""
    other = copy.deepcopy(layer)
    for module in (other.layernorm_mlp, other.layernorm_mlp.fc2, other.self_attention.layernorm_qkv.linear):
        module.register_forward_hook(lambda module, args, result: None)
    return other


def steps(layer: nn.Module, batches: list[list[Tensor]], recipe: Any) -> list[Tensor]:
    """Results and gradients of micro-batches, and weights behind each step."""
    found = []
    for microbatches in batches:
        for x in microbatches:
            leaf = x.clone().requires_grad_()
            with tg.fp8_autocast(recipe=recipe):
                y = layer(leaf)
            (y * y.detach()).sum().backward()
            found += [y.detach().clone(), leaf.grad]
        found += [parameter.grad.clone() for parameter in layer.parameters()]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 1e-3 * parameter.grad
        layer.zero_grad(set_to_none=True)
        found += [parameter.detach().clone() for parameter in layer.parameters()]
    return found


@kinds
@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_has_the_bits_of_its_modules_in_their_order(kind, recipe, dtype, device):
    """Under delayed scaling with the same scales, of products; norms and activations are fused where they are one
    layer."""
    fused = a_layer(kind, device, dtype)
    batches = [[normal_numbers(*SHAPE, device=device, dtype=dtype) for _ in range(2)] for _ in range(3)]
    others = copy.deepcopy(fused)
    others.self_attention.register_forward_hook(lambda module, args, result: None)
    # Each state at once: weights of both are in one scope, and cast together.
    (found, state), (expected, expected_state) = (
        (steps(layer, batches, recipe), tg.fp8_state_dict(layer)) for layer in (fused, others)
    )
    assert all_same_bits(found, expected)
    assert all(same_bits(one, expected_state[name]) for name, one in state.items())


@kinds
@recipes
def test_products_of_unfused_modules_are_near(kind, recipe, device):
    """Those whose input is rounded before the cast, with norms of torch: other bits, near ones."""
    fused = a_layer(kind, device, torch.float32)
    others, x = by_modules(fused), normal_numbers(*SHAPE, device=device, dtype=torch.float32)
    with tg.fp8_autocast(recipe=recipe):
        y, expected = fused(x), others(x)
    assert (y - expected).norm() < 0.05 * expected.norm()


@kinds
@recipes
@pytest.mark.parametrize(
    "microbatches", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_graphed_trainings_have_the_bits_of_eager_ones(kind, recipe, microbatches, device):
    eager = a_layer(kind, device)
    graphed = copy.deepcopy(eager)
    with tg.fp8_autocast(recipe=recipe):
        for layer in (eager, graphed):
            layer(normal_numbers(*SHAPE, device=device) * 0).sum().backward()
            layer.zero_grad(set_to_none=True)
        tg.make_graphed_callables(graphed, (normal_numbers(*SHAPE, device=device).requires_grad_(),))
    batches = [[normal_numbers(*SHAPE, device=device) for _ in range(microbatches)] for _ in range(3)]
    assert all_same_bits(steps(eager, batches, recipe), steps(graphed, batches, recipe))
    assert graphed.te_graph.info()["forward_replays"] == 3 * microbatches


def test_dropout_drops_in_training_alone(device):
    layer = a_layer("GPT", device, torch.float32, hidden_dropout=0.5, attention_dropout=0.1)
    plain = a_layer("GPT", device, torch.float32)
    plain.load_state_dict(layer.state_dict())
    x = normal_numbers(*SHAPE, device=device, dtype=torch.float32)
    for recipe in (None, RECIPES["current"]):
        with tg.fp8_autocast(enabled=recipe is not None, recipe=recipe):
            torch.manual_seed(1)
            first = layer(x)
            torch.manual_seed(1)
            assert same_bits(layer(x), first)
            assert not torch.equal(layer(x), first)
            assert same_bits(layer.eval()(x), plain(x))
            layer.train()


def test_the_layer_is_captured_with_dropout(device):
    layer = a_layer("GPT", device, torch.float32, hidden_dropout=0.5)
    twin, x = copy.deepcopy(layer), normal_numbers(*SHAPE, device=device, dtype=torch.float32)
    recipe = RECIPES["current"]
    with tg.fp8_autocast(recipe=recipe):
        for one in (layer, twin):
            one(x).sum().backward()
        tg.make_graphed_callables(layer, (x.clone().requires_grad_(),))
        results = []
        for one in (layer, twin):
            torch.manual_seed(3)
            results.append([one(x.clone().requires_grad_()).detach().clone() for _ in range(3)])
    assert all_same_bits(*results)
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size that the 5 heads divide, or kv_channels, got 64"),
        ({"num_gqa_groups": 3}, "num_gqa_groups that divides the 4 heads"),
        ({"attn_input_format": "thd"}, "attn_input_format 'sbhd' or 'bshd', got 'thd'"),
        ({"self_attn_mask_type": "padding"}, "self_attn_mask_type to be one of"),
        ({"activation": "tanh"}, "activation to be one of"),
        ({"normalization": "BatchNorm"}, "normalization to be"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_named(given, words):
    arguments = {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, **given}
    with pytest.raises(ValueError, match=words):
        tg.TransformerLayer(**arguments)


def test_masks_that_do_not_fit_are_named(device):
    layer, x = a_layer("GPT", device), normal_numbers(*SHAPE, device=device)
    for given, words in (
        ({"attention_mask": causal(SEQ, device)}, "got one with 'causal'"),
        ({"self_attn_mask_type": "arbitrary"}, "got none with 'arbitrary'"),
        ({"self_attn_mask_type": "diagonal"}, "got 'diagonal'"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x, **given)
    with pytest.raises(TypeError, match=r"attention_mask of torch.bool, .*got torch.float32"):
        layer(x, causal(SEQ, device).float(), self_attn_mask_type="arbitrary")


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (SEQ, 1, 1, 18), (SEQ, BATCH, 1, 8), (SEQ, 8), (SEQ, 1, 1, 7)], ids=str
)
def test_angles_that_do_not_fit_are_named(shape, device):
    with pytest.raises(ValueError, match=rf"rotary_pos_emb of shape \[at least {SEQ}, 1, 1, .*16\], got"):
        a_layer("GPT", device)(normal_numbers(*SHAPE, device=device), rotary_pos_emb=torch.zeros(shape, device=device))


def test_other_modules_in_the_place_of_its_own_are_called(device):
    layer, x = a_layer("GPT", device), normal_numbers(*SHAPE, device=device)
    layer.layernorm_mlp = Experts()
    with tg.fp8_autocast(recipe=RECIPES["current"]):
        h = x + layer.self_attention(x)
        assert same_bits(layer(x), h + h)


class Experts(nn.Module):
    """In the place of the MLP."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # [seq, batch, HIDDEN] each
        return x + residual, x + residual


def test_angles_are_those_of_the_formula(device):
    for dim, base, offset in itertools.product((2, 8, 64), (10000.0, 500000.0), (0, 5)):
        angles = tg.RotaryPositionEmbedding(dim, base)(7, offset, device)
        exact = torch.tensor(
            [[(position + offset) * base ** (-2 * (i % (dim // 2)) / dim) for i in range(dim)] for position in range(7)]
        )
        assert angles.shape == (7, 1, 1, dim)
        torch.testing.assert_close(angles[:, 0, 0].cpu(), exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="even dim, got 7"):
        tg.RotaryPositionEmbedding(7)
