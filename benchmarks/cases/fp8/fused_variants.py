"""Fused casts by te_graph, and copies of as many bytes as they move."""

from collections.abc import Callable

import torch
from lib.rotation import Call
from torch import Tensor

from cases.fp8.fused_problem import EPS, FusedProblem
from cases.fp8.parts import BYTES
from cases.fp8.plain_torch import E4M3
from cases.fp8.problems import Found

NAMES = ("out", "out_t", "scale_inv")


def te_graph_fused(problem: FusedProblem, op: str) -> Call:
    import te_graph as tg

    ops, norm = torch.ops.te_graph, (problem.weight, problem.bias, EPS)

    def scaling(i: int) -> dict[str, Tensor]:
        return {"scale": problem.scale[i], "amax": problem.amax[i]}

    def named(i: int, results: tuple[Tensor, ...], *more: str) -> Found:
        return {**dict(zip((*NAMES, *more), results, strict=True)), "amax": problem.amax[i]}

    def plain(i: int) -> Found:
        return named(i, tg.fp8_cast_transpose(problem.x[i], problem.scale[i], E4M3, amax=problem.amax[i]))

    def plain_sums(i: int) -> Found:
        results = tg.fp8_cast_transpose_dbias(problem.x[i], problem.scale[i], E4M3, amax=problem.amax[i])
        return named(i, results, "column_sums")

    def norm_cast(i: int) -> Found:
        results = ops.fp8_layer_norm_cast_transpose(problem.x[i], None, *norm, E4M3, **scaling(i))
        return named(i, results[:3])

    def add_norm(i: int) -> Found:
        results = ops.fp8_layer_norm_cast_transpose(problem.x[i], problem.residual[i], *norm, E4M3, **scaling(i))
        return named(i, results[:4], "sum")

    def gelu(i: int) -> Found:
        return named(i, ops.fp8_activation_cast_transpose(problem.x[i], "gelu_tanh", E4M3, **scaling(i)))

    def swiglu(i: int) -> Found:
        return named(i, ops.fp8_activation_cast_transpose(problem.wide[i], "silu", E4M3, gated=True, **scaling(i)))

    def gelu_backward(i: int) -> Found:
        operands = problem.grad[i], problem.x[i]
        results = ops.fp8_activation_backward_cast_transpose(*operands, "gelu_tanh", E4M3, **scaling(i))
        return named(i, results, "column_sums")

    def norm_backward(i: int) -> Found:
        operands = problem.grad[i], problem.residual[i], problem.x[i], problem.weight, problem.mean[i], problem.rstd[i]
        given = {"dtype": E4M3, "output_mask": [True, True, True], **scaling(i)}
        grad_x, *results = ops.fp8_layer_norm_backward(*operands, **given)
        return {"grad_x": grad_x, **named(i, tuple(results), "grad_weight", "grad_bias", "column_sums")}

    calls: dict[str, Callable[[int], Found]] = {
        "plain": plain,
        "norm": norm_cast,
        "add_norm": add_norm,
        "gelu": gelu,
        "swiglu": swiglu,
        "plain_sums": plain_sums,
        "gelu_backward": gelu_backward,
        "norm_backward": norm_backward,
    }
    return calls[op]


def copy_of_bytes(problem: FusedProblem, op: str) -> Call:
    """A copy that reads half of the bytes that the operation moves, and writes as many."""
    size = BYTES[op] * problem.elements // 2
    sources = [torch.randint(256, (size,), dtype=torch.uint8, device=problem.device) for _ in range(problem.slots)]
    found = [{"source": source, "out": torch.zeros_like(source)} for source in sources]

    def copy(i: int) -> Found:
        found[i]["out"].copy_(sources[i])
        return found[i]

    return copy
