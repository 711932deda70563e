"""Linear layers that multiply in FP8, and in bf16: te_graph's, TransformerEngine's, torchao's, torch's."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lib.variants import Variant
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A layer and its input: [tokens, inputs] -> [tokens, outputs], bf16."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def label(self) -> str:
        return f"{self.tokens} x {self.inputs} -> {self.outputs}"


SHAPES = {
    "t512-h2048": Shape(512, 2048, 2048),
    "t512-h2048-up": Shape(512, 2048, 8192),
    "t512-h2048-down": Shape(512, 8192, 2048),
    "t2048-h2048": Shape(2048, 2048, 2048),
    "t2048-h4096-up": Shape(2048, 4096, 16384),
    "t256-h512": Shape(256, 512, 512),
}
SMALL = {name: Shape(24, 32, 48) for name in SHAPES}


class Problem:
    """What all variants compute: weight [out, in], bias [out], x [tokens, in], grad [tokens, out] of one seed."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        options = {"device": device, "dtype": torch.bfloat16}
        self.shape, self.device = shape, device
        self.weight = torch.randn(shape.outputs, shape.inputs, **options) * 0.02
        self.bias = torch.randn(shape.outputs, **options)
        self.x = torch.randn(shape.tokens, shape.inputs, **options, requires_grad=True)
        self.grad = torch.randn(shape.tokens, shape.outputs, **options)

    def take(self, layer: Any) -> Any:
        """``layer`` with the weight and the bias of the problem."""
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)
        return layer


@dataclass(frozen=True)
class Calls:
    """forward: x -> y [tokens, out]. region: of a forward. parameters: get gradients."""

    forward: Callable[[Tensor], Tensor]
    region: Callable[[], Any]
    parameters: list[Tensor]


def torch_linear(problem: Problem) -> Calls:
    layer = problem.take(
        nn.Linear(problem.shape.inputs, problem.shape.outputs, device=problem.device, dtype=torch.bfloat16)
    )
    return Calls(layer, contextlib.nullcontext, list(layer.parameters()))


def te_graph_linear(recipe: str, problem: Problem) -> Calls:
    import te_graph as tg

    layer = problem.take(
        tg.Linear(problem.shape.inputs, problem.shape.outputs, device=problem.device, dtype=torch.bfloat16)
    )
    made = tg.DelayedScaling(amax_history_len=16) if recipe == "delayed" else tg.Float8CurrentScaling()
    return Calls(layer, lambda: tg.fp8_autocast(recipe=made), list(layer.parameters()))


def engine_linear(recipe: str, problem: Problem) -> Calls:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    layer = problem.take(te.Linear(problem.shape.inputs, problem.shape.outputs, params_dtype=torch.bfloat16))
    made = recipes.DelayedScaling(amax_history_len=16) if recipe == "delayed" else recipes.Float8CurrentScaling()
    is_first = True

    def forward(x: Tensor) -> Tensor:
        nonlocal is_first
        y = layer(x, is_first_microbatch=is_first)
        is_first = False
        return y

    return Calls(forward, lambda: te.fp8_autocast(fp8_recipe=made), list(layer.parameters()))


def ao_linear(problem: Problem) -> Calls:
    from torchao.float8 import convert_to_float8_training

    layer = problem.take(
        nn.Linear(problem.shape.inputs, problem.shape.outputs, device=problem.device, dtype=torch.bfloat16)
    )
    model = convert_to_float8_training(nn.Sequential(layer))
    return Calls(model, contextlib.nullcontext, list(model.parameters()))


class Composed(torch.autograd.Function):
    """Casts of te_graph and products of ``torch._scaled_mm``: what the device needs at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        # x: [tokens, in], weight: [out, in], bias: [out]; parts: weight8, its transpose, its scale_inv, a scale
        import te_graph as tg

        weight8, weight8_t, weight_inv, scale = parts
        x8, x8_t, x_inv = tg.fp8_cast_transpose(x, scale)
        ctx.kept = x8_t, x_inv, weight8_t, weight_inv, scale
        scales = {"scale_a": x_inv, "scale_b": weight_inv}
        return torch._scaled_mm(x8, weight8.t(), **scales, bias=bias, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # [tokens, out]
        import te_graph as tg

        x8_t, x_inv, weight8_t, weight_inv, scale = ctx.kept
        g8, g8_t, g_inv, dbias = tg.fp8_cast_transpose_dbias(grad, scale, torch.float8_e5m2)
        dx = torch._scaled_mm(g8, weight8_t.t(), scale_a=g_inv, scale_b=weight_inv, out_dtype=grad.dtype)
        dw = torch._scaled_mm(g8_t, x8_t.t(), scale_a=g_inv, scale_b=x_inv, out_dtype=grad.dtype)
        return dx, dw, dbias, None


def composed_linear(problem: Problem) -> Calls:
    import te_graph as tg

    scale = torch.full((1,), 32.0, device=problem.device)
    parts = (*tg.fp8_cast_transpose(problem.weight, torch.full_like(scale, 1024.0)), scale)
    weight, bias = (nn.Parameter(each.clone()) for each in (problem.weight, problem.bias))
    return Calls(lambda x: Composed.apply(x, weight, bias, parts), contextlib.nullcontext, [weight, bias])


class AoVariant(Variant):
    """torchao, whose package has no ``pytorch`` to import."""

    def missing(self, device: str) -> str | None:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        return super().missing(device)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("torch bf16", torch_linear),
        Variant("te_graph delayed", functools.partial(te_graph_linear, "delayed")),
        Variant("te_graph current", functools.partial(te_graph_linear, "current")),
        Variant("casts + _scaled_mm", composed_linear, needs_cuda=True),
        Variant("TransformerEngine delayed", functools.partial(engine_linear, "delayed"), True, "transformer_engine"),
        Variant("TransformerEngine current", functools.partial(engine_linear, "current"), True, "transformer_engine"),
        AoVariant("torchao tensorwise", ao_linear, needs_cuda=True),
    )
}
