"""Calls of the FP8 ops, and of those on the state of a step, that show each argument."""

from __future__ import annotations

from typing import Any

import torch
from fp8_references import E4M3, E5M2
from fp8_tensors import numbers
from tensor_lists import copies
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import te_graph as tg

ops = torch.ops.te_graph
Arguments = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def extras(device: str) -> dict[str, Tensor]:
    return {"amax": torch.zeros(1, device=device), "counts": torch.zeros(3, dtype=torch.int64, device=device)}


def update_arguments(device: str) -> tuple[Tensor, ...]:
    mask = torch.tensor([True, False, True, True], device=device)
    return torch.rand(3, 4, device=device), *(torch.ones(4, device=device) for _ in range(2)), mask


def tensors_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def fp8_buffers(*shapes: tuple[int, int], device: str) -> list[Tensor]:
    return [torch.zeros(shape, device=device).to(E4M3) for shape in shapes]


class Calls(TorchDispatchMode):
    """Keeps the arguments of the calls that reach torch's dispatcher inside."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.arguments[str(func)] = args, kwargs or {}
        return func(*args, **(kwargs or {}))


def table_call(weights: tg.Fp8Weights) -> Arguments:
    """The call of the op on a table that casts ``weights``."""
    with Calls() as calls:
        weights.cast_(noop=torch.zeros(1, dtype=torch.int32, device=weights.scale.device))
    overload = ops.fp8_cast_weights_table_.default
    return overload, *calls.arguments[str(overload)]


def some_weights(device: str) -> list[Tensor]:
    return [numbers((6, 10), torch.bfloat16, device), numbers((20, 7), torch.float32, device)]


def gemm_samples(device: str) -> dict[str, Arguments]:
    """Calls of products of FP8 matrices, and of the directions of a linear layer: 6 tokens, 32 inputs, 16 outputs."""
    x, grad = numbers((2, 3, 32), torch.bfloat16, device), numbers((2, 3, 16), torch.float32, device)
    a, b, bias = x[0].to(E4M3), numbers((16, 32), torch.float32, device).to(E5M2), numbers((16,), torch.float32, device)
    weight, weight_t, x_t = fp8_buffers((16, 32), (32, 16), (32, 16), device=device)
    one, other = torch.tensor([0.5], device=device), torch.tensor([0.25], device=device)
    amax, formats = torch.zeros(1, device=device), (E5M2, torch.bfloat16, torch.float32)
    forward, backward = ops.fp8_linear_forward.default, ops.fp8_linear_backward.default
    all_of_backward = grad, weight_t, one, x_t, other
    return {
        "gemm": (ops.fp8_gemm.default, (a, b, one, other, torch.bfloat16), {}),
        "gemm with all": (ops.fp8_gemm.default, (a[:0], b, one[0], other, torch.float32), {"bias": bias}),
        "gemm into": (
            ops.fp8_gemm_out.default,
            (torch.ones(3, 16, device=device), a, b, one, other),
            {"bias": bias, "fast_accum": True, "accumulate": True},
        ),
        "linear": (forward, (x, weight, one, bias, other, amax, torch.bfloat16, True), {}),
        "linear, current scaling": (forward, (x[0, 0], weight, one, None, None, None, torch.float32, False), {}),
        "linear, backward": (backward, (*all_of_backward, one.clone(), amax.clone(), *formats, [True] * 3), {}),
        "linear, backward of the weight": (
            backward,
            (grad, None, None, x_t, other, None, None, *formats, [False, True, False]),
            {},
        ),
        "linear, backward of a weight of inputs first": (
            backward,
            (grad, None, None, x_t, other, None, None, *formats, [False, True, False]),
            {"grad_weight": torch.ones(32, 16, device=device), "accumulate_weight": True, "inputs_first": True},
        ),
        "linear, backward of the bias": (
            backward,
            (grad, None, None, None, None, None, None, *formats, [False, False, True]),
            {},
        ),
    }


def qkv_samples(device: str) -> dict[str, Arguments]:
    """Calls of what puts queries, keys and values side by side, of 4 heads in 2 groups."""
    query, key, value = (numbers((2, 3, heads, 8), torch.bfloat16, device) for heads in (4, 2, 2))
    turned = numbers((3, 2, 2, 8), torch.bfloat16, device).transpose(0, 1)
    return {
        "qkv": (ops.concat_qkv.default, (query, key, value), {}),
        "qkv, turned": (ops.concat_qkv.default, (query, turned, value), {}),
        "qkv of nothing": (ops.concat_qkv.default, (query[:0], key[:0], value[:0]), {}),
    }


def made_samples(device: str) -> dict[str, Arguments]:
    """Calls of ops that cast what they make: 6 rows of 16 columns, gated ones of 32."""
    x, grad, wide = (numbers(shape, torch.bfloat16, device) for shape in ((6, 16), (6, 16), (6, 32)))
    one, amax = torch.tensor([0.5], device=device), torch.zeros(1, device=device)
    weight, bias = torch.ones(16, device=device), torch.zeros(16, device=device)
    mean, rstd = torch.zeros(6, device=device), torch.ones(6, device=device)
    forward, backward = ops.fp8_activation_cast_transpose.default, ops.fp8_activation_backward_cast_transpose.default
    norm, norm_backward = ops.fp8_layer_norm_cast_transpose.default, ops.fp8_layer_norm_backward.default
    into = {f"accumulate_{name}": True for name in ("weight", "bias", "sums")}
    into |= {"grad_weight": weight.clone(), "grad_bias": bias.clone(), "column_sums": torch.ones_like(x[0])}
    return {
        "activation": (forward, (x, "gelu", E4M3), {}),
        "activation with all": (
            forward,
            (wide, "silu", E5M2),
            {"gated": True, "scale": one, "amax": amax, "with_transposed": False},
        ),
        "activation, backward": (backward, (grad, x, "gelu_tanh", E5M2), {}),
        "activation, backward with all": (
            backward,
            (grad, wide, "relu", E5M2),
            {
                "gated": True,
                "scale": one,
                "amax": amax.clone(),
                "with_transposed": False,
                "column_sums": torch.ones_like(wide[0]),
                "accumulate_sums": True,
            },
        ),
        "activation, backward without sums": (backward, (grad, x, "relu", E5M2), {"with_sums": False}),
        "layer norm": (norm, (x, None, weight, bias, 1e-5, E4M3), {}),
        "layer norm with all": (
            norm,
            (x, grad, weight.bfloat16(), None, 0.0, E5M2),
            {"rms_norm": True, "zero_centered": True, "scale": one, "amax": amax.clone(), "with_transposed": False},
        ),
        "layer norm, backward": (norm_backward, (grad, None, x, weight, mean, rstd), {}),
        "layer norm, backward with all": (
            norm_backward,
            (grad, grad.clone(), x, weight, None, rstd),
            {"zero_centered": True, "dtype": E5M2, "scale": one, "amax": amax.clone(), **into}
            | {"output_mask": [True, True, True]},
        ),
        "layer norm, backward with current scaling": (
            norm_backward,
            (grad, None, x, weight, mean, rstd),
            {"dtype": E5M2, "with_transposed": False, "output_mask": [False, False, True]},
        ),
    }


def samples(device: str, prepared: tg.Fp8Weights) -> dict[str, Arguments]:
    """The calls, one of them on the table of ``prepared``, which must live as long as they."""
    x, wide = some_weights(device)
    scale, flag = torch.tensor([3.0], device=device), torch.zeros(1, dtype=torch.int32, device=device)
    out, out_t = fp8_buffers((6, 10), (10, 6), device=device)
    given = {**extras(device), "scale_inv": torch.zeros((), device=device), "noop": flag}
    listed = fp8_buffers((6, 10), (20, 7), device=device), fp8_buffers((10, 6), (7, 20), device=device)
    vectors = tuple(torch.ones(2, device=device) for _ in range(3))
    counts = torch.zeros(2, 3, dtype=torch.int64, device=device)
    x8, history = wide.to(E5M2), torch.rand(4, 6, device=device)
    state = tg.StepState(device).block
    update, scalar = ops.amax_and_scale_update_inplace.default, ops.amax_and_scale_update_inplace.Scalar
    return {
        "cast": (ops.fp8_cast.default, (x, scale, E4M3), {}),
        "cast with all": (ops.fp8_cast.default, (wide.t(), scale[0], E5M2), extras(device)),
        "cast of nothing": (ops.fp8_cast.default, (x[:0], scale, E4M3), extras(device)),
        "cast into": (ops.fp8_cast_out.default, (out, x, scale), {}),
        "cast into with all": (ops.fp8_cast_out.default, (out.clone(), x, scale), given),
        "transpose": (ops.fp8_cast_transpose.default, (x, scale, E4M3), {}),
        "transpose with all": (ops.fp8_cast_transpose.default, (wide[:, 2:], scale, E5M2), extras(device)),
        "dbias": (ops.fp8_cast_transpose_dbias.default, (wide, scale, E4M3), extras(device)),
        "dbias of columns": (ops.fp8_cast_transpose_dbias.default, (x.t(), scale, E4M3), {}),
        "transpose into": (ops.fp8_cast_transpose_out.default, (out.clone(), out_t, x, scale), {}),
        "transpose into with all": (
            ops.fp8_cast_transpose_out.default,
            (out.clone(), out_t.clone(), x, scale),
            {**{name: value.clone() for name, value in given.items()}, "dbias": torch.zeros(10, device=device)},
        ),
        "dequantize": (ops.fp8_dequantize.default, (x8, scale, torch.bfloat16), {}),
        "dequantize columns": (ops.fp8_dequantize.default, (x8.t(), scale, torch.float32), {}),
        "dequantize into": (ops.fp8_dequantize_out.default, (torch.zeros_like(wide), x8, scale), {}),
        "weights": (ops.fp8_cast_weights_.default, (*listed, [x, wide], *vectors), {"counts": counts, "noop": flag}),
        "weights, rows": (ops.fp8_cast_weights_.default, (listed[0], [], [x, wide], *copies(vectors)), {}),
        "weights by vectors": (
            ops.fp8_cast_weights_.List,
            (*listed, [x, wide], *([t[:1], t[1:]] for t in copies(vectors))),
            {},
        ),
        "weights by vectors, without amaxes": (
            ops.fp8_cast_weights_.List,
            (*listed, [x, wide], [vectors[0].clone()], [vectors[1].clone()], []),
            {},
        ),
        "weights of a table": table_call(prepared),
        "update": (update, (*update_arguments(device), flag, 448.0), {}),
        "update with all": (
            update,
            (*update_arguments(device), flag, 448.0, 2.0, "most_recent"),
            {"skip_nonfinite": True},
        ),
        "update by a bool": (scalar, (*update_arguments(device), True, 448.0), {}),
        "current scale": (ops.fp8_current_scale.default, (x, E4M3), {}),
        "current scale with all": (ops.fp8_current_scale.default, (wide.t(), E5M2), {"eps": 0.1, "power_of_2": True}),
        "scale": (ops.fp8_scale.default, (history[0, 1::3], E4M3), {"margin": 1.0, "eps": 0.1, "power_of_2": True}),
        "scale, transposed": (ops.fp8_scale.default, (history.t(), E4M3), {}),
        **gemm_samples(device),
        **made_samples(device),
        **qkv_samples(device),
        "state, set": (ops.step_state_set_.default, (state, False, True), {}),
        "state, advance": (ops.step_state_advance_.default, (state.clone(),), {}),
    }
