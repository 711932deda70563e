"""What fused casts are measured on: norms and activations, and their derivatives, cast where they are made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lib.rotation import calls_for, slots_for
from torch import Tensor
from torch.nn import functional as F

from cases.fp8.parts import Case
from cases.fp8.plain_torch import draw_scales, require_copy, require_made, require_near

EPS = 1e-5


class FusedProblem:
    """What the casts of one shape are made of, in bf16.

    Attributes:
        x, residual, grad: [M, N] for each slot; wide: [M, 2 N], of a gate and what it is multiplied with.
        weight, bias: [N], of the norm. mean, rstd: [M] fp32 for each slot, of the rows of x.
        scale, amax: [1] for each slot.
        copied: for each slot what `copy` copies from and to, as many bytes as the operation moves by half.
    """

    kind, prepare = "fused", None

    def __init__(self, case: Case, device: str) -> None:
        (shape,) = case.shapes
        self.device, self.elements = device, case.elements
        self.slots = slots_for(3 * case.elements, device)

        def drawn(*sizes: int) -> list[Tensor]:
            return [torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(self.slots)]

        self.x, self.residual, self.grad = drawn(*shape), drawn(*shape), drawn(*shape)
        self.wide = drawn(shape[0], 2 * shape[1])
        self.weight, self.bias = 1 + 0.1 * torch.randn_like(self.x[0][0]), 0.1 * torch.randn_like(self.x[0][0])
        self.mean = [x.float().mean(1) for x in self.x]
        self.rstd = [(x.float().var(1, correction=0) + EPS).rsqrt() for x in self.x]
        self.scale = draw_scales(self.slots, device)
        self.amax = list(torch.zeros(self.slots, 1, device=device))

    def calls(self, op: str) -> int:
        return calls_for(self.slots)

    def clear(self) -> None:
        for amax in self.amax:
            amax.zero_()

    def verify(self, op: str, results: Sequence[Any]) -> None:
        for slot, found in enumerate(results):
            if "source" in found:  # a copy, which is timed beside casts
                require_copy(found["out"], found["source"])
                continue
            expected = MADE[op](self, slot)
            cast = {name: found[name] for name in ("out", "out_t", "scale_inv", "amax")}
            require_made(op, expected.pop("made"), self.scale[slot], cast)
            for name, wanted in expected.items():
                require_near(f"{op}: {name}", found[name], wanted)


def _plain(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    return {"made": problem.x[slot]}


def _plain_with_sums(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    return {"made": problem.x[slot], "column_sums": problem.x[slot].float().sum(0)}


def _normed(problem: FusedProblem, s: Tensor) -> Tensor:
    """The norm of s [M, N] bf16, in fp32."""
    return F.layer_norm(s.float(), s.shape[1:], problem.weight.float(), problem.bias.float(), EPS)


def _norm(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    return {"made": _normed(problem, problem.x[slot]).bfloat16()}


def _add_norm(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    total = problem.x[slot] + problem.residual[slot]
    return {"made": _normed(problem, total).bfloat16(), "sum": total}


def _gelu(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    return {"made": F.gelu(problem.x[slot], approximate="tanh")}


def _swiglu(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    gate, up = problem.wide[slot].chunk(2, dim=1)
    return {"made": F.silu(gate) * up}


def _gelu_backward(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    x = problem.x[slot].float().requires_grad_()
    with torch.enable_grad():
        (dx,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, problem.grad[slot].float())
    return {"made": dx.bfloat16(), "column_sums": dx.sum(0)}


def _norm_backward(problem: FusedProblem, slot: int) -> dict[str, Tensor]:
    leaves = [t.float().requires_grad_() for t in (problem.x[slot], problem.weight, problem.bias)]
    with torch.enable_grad():
        y = F.layer_norm(leaves[0], leaves[0].shape[1:], *leaves[1:], EPS)
        dx, of_weight, of_bias = torch.autograd.grad(y, leaves, problem.grad[slot].float())
    dx = dx.bfloat16() + problem.residual[slot]  # rounded where a norm by itself would write it
    sums = {"grad_weight": of_weight, "grad_bias": of_bias, "column_sums": dx.float().sum(0)}
    return {"made": dx, "grad_x": dx, **sums}


# What is cast, "made" [M, N] bf16, and what comes beside it, by the operations of `parts`.
MADE: dict[str, Callable[[FusedProblem, int], dict[str, Tensor]]] = {
    "plain": _plain,
    "norm": _norm,
    "add_norm": _add_norm,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "plain_sums": _plain_with_sums,
    "gelu_backward": _gelu_backward,
    "norm_backward": _norm_backward,
}
