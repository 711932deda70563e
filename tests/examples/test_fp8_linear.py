"""examples/fp8_linear.py: its matrix products and layers, against products in float64 of what the FP8 bytes stand for.

Bounds on the noise of FP8 are those of reference layers: 18 dB for results, 17 dB for gradients of weights.
"""

from __future__ import annotations

import pytest
import torch
from fp8_references import E4M3, E5M2, FP8_MAX, reference_amax, reference_cast, reference_dequantize
from fp8_runs import SIZES, an_input, everything, fp8_linear, new_layers
from fp8_tensors import a_scale, assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


def quantized(rows: int, columns: int, dtype: torch.dtype, device: str, rng: object) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in FP8 [rows, columns], its scale_inv [1], and what they stand for in float64."""
    cast = reference_cast(torch.randn(rows, columns), a_scale(rng, "cpu", dtype), dtype)
    wide = reference_dequantize(cast.out, cast.scale_inv, torch.float32).double()
    return cast.out.to(device), cast.scale_inv.to(device), wide


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


def signal_to_noise(got: Tensor, expected: Tensor) -> float:
    """In dB, of tensors [...] of one shape."""
    return float(-20 * torch.log10(torch.tensor(relative_error(got, expected.cpu().double()))))


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", [(16, 16, 16), (32, 48, 64), (16, 256, 128)])
def test_a_product_is_that_of_what_the_bytes_stand_for(shape, fast, a_dtype, b_dtype, device, rng):
    """A16."""
    rows, columns, inner = shape
    a, a_scale_inv, a_wide = quantized(rows, inner, a_dtype, device, rng)
    b, b_scale_inv, b_wide = quantized(columns, inner, b_dtype, device, rng)
    bias = torch.randn(columns).to(device, torch.bfloat16)
    expected = a_wide @ b_wide.t()
    got = fp8_linear.gemm(a, a_scale_inv, b, b_scale_inv, torch.bfloat16, use_fast_accum=fast)
    assert (got.dtype, got.shape, got.device.type) == (torch.bfloat16, (rows, columns), device)
    assert relative_error(got, expected) < 1e-2
    got = fp8_linear.gemm(a, a_scale_inv, b, b_scale_inv, torch.bfloat16, bias=bias, use_fast_accum=fast)
    assert relative_error(got, expected + bias.cpu().double()) < 1e-2


def settled(layers: nn.Module, x: Tensor, times: int = 3) -> Tensor:
    """The result of the last of several micro-batches: scales have the amaxes of those before it by then."""
    call = fp8_linear.MicroBatches(layers, layers)
    for _ in range(times):
        layers.zero_grad()
        result = call(x, is_first=True)
        result.backward(torch.ones_like(result) / len(x))
    return result


def test_layers_compute_what_bf16_layers_do_but_for_the_noise_of_fp8(device, seed):
    layers, x = new_layers(seed, device), an_input(device)
    result = settled(layers, x)
    wide = [p.detach().double().requires_grad_() for p in layers.parameters()]
    y = x.detach().double().requires_grad_()
    hidden = y
    for number in range(3):
        hidden = F.linear(F.gelu(hidden) if number else hidden, wide[2 * number], wide[2 * number + 1])
    hidden.backward(torch.full_like(hidden, 1 / len(x)))
    assert signal_to_noise(result.detach(), hidden.detach()) > 18
    for got, expected in zip(layers.parameters(), wide, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert signal_to_noise(got.grad, expected.grad) > 17


def test_a_micro_batch_leaves_the_amaxes_of_its_casts_in_the_histories(device, seed):
    layers, x = new_layers(seed, device, history_length=3), an_input(device)
    seen: dict[str, list[Tensor]] = {"x": [], "grad": []}

    def see(layer: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        seen["x"].append(args[0].detach())
        result.register_hook(lambda grad: seen["grad"].insert(0, grad.detach()))

    for layer in layers.layers:
        layer.register_forward_hook(see)
    settled(layers, x, times=1)
    weights = [layer.weight for layer in layers.layers]
    forward = [t for pair in zip(seen["x"], weights, strict=True) for t in pair]
    for scaling, tensors, dtype in (
        (layers.forward_scaling, forward, E4M3),
        (layers.backward_scaling, seen["grad"], E5M2),
    ):
        amaxes = torch.cat([reference_amax(tensor) for tensor in tensors])
        assert_same_bits(scaling.history, torch.stack([torch.zeros_like(amaxes), torch.zeros_like(amaxes), amaxes]))
        assert_same_bits(scaling.scale, torch.tensor(FP8_MAX[dtype]) / amaxes)
        assert_same_bits(scaling.scale_inv, (1 / scaling.scale.cpu().double()).float())


def test_scales_of_weights_stay_in_later_micro_batches_and_all_others_move(device, seed):
    layers = new_layers(seed, device)
    call = fp8_linear.MicroBatches(layers, layers)
    call(an_input(device), is_first=True).sum().backward()
    before = everything(layers)
    call(an_input(device, 4.0), is_first=False).sum().backward()
    after = everything(layers)
    for name in ("scale", "scale_inv"):
        key = f"forward_scaling.{name}"
        same = before[key] == after[key]
        assert same[1::2].all() and not same[0::2].any()
    assert torch.equal(before["forward_scaling.history"][:, 1::2], after["forward_scaling.history"][:, 1::2])


def test_sizes_that_16_does_not_divide_are_refused(device):
    linears = [nn.Linear(*sizes, device=device, dtype=torch.bfloat16) for sizes in ((32, 40), (40, SIZES[-1]))]
    with pytest.raises(ValueError, match=r"expected sizes that 16 divides, got weight \[40, 32\]"):
        fp8_linear.Fp8Layers(linears)
