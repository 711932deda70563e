"""Transformer layers that train in FP8, and in bf16: te_graph's, TransformerEngine's, torch's."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lib.timing import WARMUP_CALLS
from lib.variants import Variant
from torch import Tensor, nn

from cases.fp8.plain_layer import PlainLayer


@dataclass(frozen=True)
class Shape:
    """A layer and its input, [tokens, 1, hidden] in bf16.

    Attributes:
        is_llama: RMSNorm, SwiGLU, grouped queries, no biases; otherwise LayerNorm, GELU, biases.
    """

    tokens: int
    hidden: int
    width: int
    heads: int
    groups: int
    is_llama: bool = False

    @property
    def label(self) -> str:
        return f"{'Llama' if self.is_llama else 'GPT'} {self.hidden} x {self.width}, {self.tokens} tokens"

    @property
    def options(self) -> dict[str, Any]:
        """As te_graph and TransformerEngine take them."""
        kind = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False} if self.is_llama else {}
        return {
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_gqa_groups": self.groups,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "self_attn_mask_type": "causal",
            "params_dtype": torch.bfloat16,
            **kind,
        }


SHAPES = {
    "h2048-t512": Shape(512, 2048, 8192, 16, 16),
    "h2048-t2048": Shape(2048, 2048, 8192, 16, 16),
    "h512-t256": Shape(256, 512, 2048, 8, 8),
    "h4096-t2048": Shape(2048, 4096, 16384, 32, 32),
    "llama-8b-t2048": Shape(2048, 4096, 14336, 32, 8, is_llama=True),
}
SMALL = {name: Shape(64, 64, 96, 2, 1 if shape.is_llama else 2, shape.is_llama) for name, shape in SHAPES.items()}

# What TransformerEngine calls the parameters, where that is not what te_graph calls them.
ENGINE_NAMES = {
    "layernorm_qkv.linear.": "layernorm_qkv.",
    ".layer_norm.": ".layer_norm_",
    ".fc1.": ".fc1_",
    ".fc2.": ".fc2_",
}


class Problem:
    """What all variants train: a model of several layers with the same parameters of one seed, x [tokens, 1, hidden]
    and the gradient of its result [tokens, 1, hidden]."""

    def __init__(self, shape: Shape, layers: int, device: str, seed: int) -> None:
        import te_graph as tg

        torch.manual_seed(seed)
        self.shape, self.layers, self.device = shape, layers, device
        self.x = torch.randn(shape.tokens, 1, shape.hidden, device=device, dtype=torch.bfloat16)
        self.grad = torch.randn_like(self.x)
        self.layer = tg.TransformerLayer(**shape.options, device=device)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if parameter.dim() == 1:  # of norms, and biases: with other values than those they begin with
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def copies(self, **options: Any) -> list[nn.Module]:
        """The layers, of te_graph, with parameters of their own."""
        import te_graph as tg

        layers = [tg.TransformerLayer(**self.shape.options, **options, device=self.device) for _ in range(self.layers)]
        for layer in layers:
            layer.load_state_dict(self.layer.state_dict())
        return layers

    def plain(self, dtype: torch.dtype) -> list[PlainLayer]:
        return [PlainLayer(self.layer, dtype) for _ in range(self.layers)]


@dataclass(frozen=True)
class Trained:
    """A model in training.

    Attributes:
        step: forward and backward of a later micro-batch, whose gradients are added to those that are there; returns
            y and the gradient of x, [tokens, 1, hidden].
        parameters: [...], layer by layer, in the order of te_graph's.
        check: raises RuntimeError if a step was not what it is named for.
    """

    step: Callable[[], tuple[Tensor, Tensor]]
    parameters: list[Tensor]
    check: Callable[[], None] = lambda: None

    def gradients(self) -> list[Tensor]:
        """Those that steps add to [...], of each parameter."""
        return [p.grad if getattr(p, "main_grad", None) is None else p.main_grad for p in self.parameters]


def trained(
    problem: Problem,
    layers: list[nn.Module],
    call: Callable[..., Tensor] | None = None,
    region: Callable[[], Any] = contextlib.nullcontext,
) -> Trained:
    """Layers that are called one after another, each by ``call`` of it and its input, inside a region."""
    x = problem.x.to(next(layers[0].parameters()).dtype, copy=True).requires_grad_()
    grad = problem.grad.to(x.dtype)

    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        y = x
        with region():
            for layer in layers:
                y = layer(y) if call is None else call(layer, y)
        y.backward(grad)
        return y, x.grad

    return Trained(step, [p for layer in layers for p in layer.parameters()])


def plain(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Trained:
    return trained(problem, problem.plain(dtype))


def compiled(problem: Problem) -> Trained:
    layers = problem.plain(torch.bfloat16)
    for layer in layers:
        layer.compile()
    return trained(problem, layers)


def region_of(recipe: str | None) -> Callable[[], Any]:
    """The region that a recipe of te_graph asks for; None: none."""
    import te_graph as tg

    if recipe is None:
        return contextlib.nullcontext
    made = tg.DelayedScaling(amax_history_len=16) if recipe == "delayed" else tg.Float8CurrentScaling()
    return lambda: tg.fp8_autocast(recipe=made)


def te_graph_eager(recipe: str, problem: Problem) -> Trained:
    return trained(problem, problem.copies(), region=region_of(recipe))


def te_graph_graphed(recipe: str | None, problem: Problem, has_main_grads: bool = False) -> Trained:
    import te_graph as tg

    layers = problem.copies(fuse_wgrad_accumulation=has_main_grads)
    model = trained(problem, layers, region=region_of(recipe))
    for parameter in model.parameters if has_main_grads else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    with region_of(recipe)():
        sample = problem.x.clone().requires_grad_()
        tg.make_graphed_callables(tuple(layers), ((sample,),), chain=True, show_progress=False)

    def check() -> None:
        for info in (layer.te_graph.info() for layer in layers):
            if info["eager_calls"] or not info["backward_replays"]:
                raise RuntimeError(f"te_graph: expected replays, got {info}")

    return Trained(model.step, model.parameters, check)


def engine(how: str, problem: Problem) -> Trained:
    """TransformerEngine's layers: "eager", by its "graphs", or "captured" whole, forward and backward."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    layers = [
        te.TransformerLayer(**problem.shape.options, layer_number=number + 1, fuse_qkv_params=True)
        for number in range(problem.layers)
    ]
    parameters = [engine_parameter(layer, name) for layer in layers for name, _ in problem.layer.named_parameters()]
    with torch.no_grad():
        for parameter, value in zip(parameters, list(problem.layer.parameters()) * problem.layers, strict=True):
            parameter.copy_(value)
    made = recipes.DelayedScaling(amax_history_len=16)
    if how == "graphs":
        samples = tuple((problem.x.clone().requires_grad_(),) for _ in layers)
        te.make_graphed_callables(tuple(layers), samples, enabled=True, recipe=made, cache_quantized_params=True)
    have_run = set()

    def call(layer: nn.Module, x: Tensor) -> Tensor:  # [tokens, 1, hidden]
        y = layer(x, is_first_microbatch=layer not in have_run)
        have_run.add(layer)
        return y

    model = trained(problem, layers, call, lambda: te.fp8_autocast(fp8_recipe=made))
    return Trained(captured(model.step) if how == "captured" else model.step, parameters)


def engine_parameter(layer: nn.Module, name: str) -> Tensor:
    """The parameter [...] of TransformerEngine's layer that te_graph calls ``name``."""
    for ours, theirs in ENGINE_NAMES.items():
        name = name.replace(ours, theirs)
    return layer.get_parameter(name)


def captured(step: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Replays of one CUDA graph of a step, with the same results each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


graphed_with_main_grads = functools.partial(te_graph_graphed, "delayed", has_main_grads=True)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("te_graph delayed, graphed", functools.partial(te_graph_graphed, "delayed")),
        Variant("te_graph delayed, graphed, fp32 main_grad", graphed_with_main_grads),
        Variant("te_graph current, graphed", functools.partial(te_graph_graphed, "current")),
        Variant("te_graph delayed", functools.partial(te_graph_eager, "delayed")),
        Variant("te_graph bf16, graphed", functools.partial(te_graph_graphed, None)),
        Variant("torch bf16", plain),
        Variant("torch bf16, compiled", compiled, needs_cuda=True),
        Variant("TransformerEngine", functools.partial(engine, "eager"), True, "transformer_engine"),
        Variant("TransformerEngine, its graphs", functools.partial(engine, "graphs"), True, "transformer_engine"),
        Variant("TransformerEngine, captured whole", functools.partial(engine, "captured"), True, "transformer_engine"),
    )
}
COMPILED, COMPILED_SHAPES = "torch bf16, compiled", ("h2048-t512", "llama-8b-t2048")
