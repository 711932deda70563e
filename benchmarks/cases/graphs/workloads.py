"""What the benchmarks run: layers one after another, and the ways to graph them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from lib.timing import WARMUP_CALLS
from lib.units import MIB
from lib.variants import Variant
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A block of width `hidden` over one sequence of `tokens`; with `shards`, what one tensor-parallel rank holds.

    Attributes:
        package: whose layer it is, instead of `Block`.
    """

    hidden: int
    heads: int
    tokens: int
    shards: int = 1
    package: str | None = None

    @property
    def label(self) -> str:
        whose = "TransformerLayer of TransformerEngine, " if self.package else ""
        sharded = f" sharded {self.shards}-way" if self.shards > 1 else ""
        return f"{whose}h {self.hidden}{sharded}, {self.tokens} tokens"


class Block(nn.Module):
    """Pre-norm transformer layer of 12 parameters: x + attention(norm(x)), then x + mlp(norm(x)).

    A sharded one keeps its rank's heads and its part of the MLP, without the all-reduces.
    """

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.hidden // shape.shards
        self.heads = shape.heads // shape.shards
        self.norm1 = nn.LayerNorm(hidden, **factory)
        self.qkv = nn.Linear(hidden, 3 * inner, **factory)
        self.proj = nn.Linear(inner, hidden, **factory)
        self.norm2 = nn.LayerNorm(hidden, **factory)
        self.fc1 = nn.Linear(hidden, 4 * inner, **factory)
        self.fc2 = nn.Linear(4 * inner, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, hidden] -> [batch, tokens, hidden]
        # query, key, value: [batch, heads, tokens, hidden / heads]
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Workload:
    """Layers that feed one another, forward and backward; every leaf has a gradient, of zeros at first.

    Args:
        layers: Each maps a tensor to one of the same shape.
        x: [...], input of the first; a leaf that requires a gradient. The output gets a random gradient.

    Attributes:
        leaves: `x` and all parameters.
        graphs: What te_graph captured, in that order; empty if the layers are not graphed by it.
    """

    def __init__(self, layers: Sequence[nn.Module], x: Tensor) -> None:
        self.layers, self.x = tuple(layers), x
        self.grad_output = torch.randn_like(x, requires_grad=False)
        self.leaves = [x, *(parameter for layer in self.layers for parameter in layer.parameters())]
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)
        self.graphs: list[Any] = []
        self._y: Tensor | None = None

    def forward(self) -> None:
        """Layer by layer as Python calls them; the result waits for `backward`."""
        y = self.x
        for layer in self.layers:
            y = layer(y)
        self._y = y

    def backward(self) -> None:
        y, self._y = self._y, None
        y.backward(self.grad_output)

    def step(self) -> None:
        self.forward()
        self.backward()

    def gradients_of(self, step: Callable[[], None], count: int) -> list[Tensor]:
        """Copies, on the CPU, of the gradients that `count` steps add to zeros."""
        for leaf in self.leaves:
            leaf.grad.zero_()
        for _ in range(count):
            step()
        return [leaf.grad.cpu() for leaf in self.leaves]

    def replays(self) -> dict[str, Any]:
        """What te_graph reports about its graphs.

        Returns:
            nodes, graph_mib, capture_seconds: sums over the layers' `info()`.

        Raises:
            RuntimeError: a layer ran eagerly, so its times are not those of replays.
        """
        infos = [layer.te_graph.info() for layer in self.layers]
        eager = {info["name"]: info["eager_calls"] for info in infos if info["eager_calls"]}
        if eager:
            raise RuntimeError(f"te_graph: expected replays, got eager calls: {eager}")
        return {
            "nodes": sum(info["nodes"] for info in infos),
            "graph_mib": round(sum(info["bytes"] for info in infos) / MIB, 1),
            "capture_seconds": round(sum(info["capture_seconds"] for info in infos), 3),
        }


def block_workload(shape: Shape, layers: int, device: str, seed: int) -> Workload:
    """Blocks in bf16, drawn from `seed`; of the package that `shape` names, where it names one."""
    torch.manual_seed(seed)
    factory = {"device": device, "dtype": torch.bfloat16}
    blocks = [_engine_layer(shape, n, device) if shape.package else Block(shape, **factory) for n in range(layers)]
    return Workload(blocks, torch.randn(1, shape.tokens, shape.hidden, **factory, requires_grad=True))


def _engine_layer(shape: Shape, number: int, device: str) -> nn.Module:
    """A layer of TransformerEngine that computes what `Block` does: causal, pre-norm, [batch, tokens, hidden]."""
    from transformer_engine.pytorch import TransformerLayer

    return TransformerLayer(
        shape.hidden,
        4 * shape.hidden,
        shape.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=number + 1,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        params_dtype=torch.bfloat16,
        device=device,
    )


def own_samples(workload: Workload) -> tuple[tuple[Tensor], ...]:
    """A sample for each layer, which is its static input and must keep its value until that layer's backward."""
    return tuple((torch.randn_like(workload.x, requires_grad=True),) for _ in workload.layers)


def build_torch_graphed(workload: Workload) -> Callable[[], None]:
    torch.cuda.make_graphed_callables(workload.layers, own_samples(workload))
    return workload.step


def build_transformer_engine(workload: Workload) -> Callable[[], None]:
    from transformer_engine.pytorch import make_graphed_callables

    make_graphed_callables(workload.layers, own_samples(workload))
    return workload.step


@contextlib.contextmanager
def noted_captures() -> Iterator[list[Any]]:
    """Note every graph that te_graph captures inside, so that it can be launched without te_graph."""
    from te_graph.graphs.tracing.backends import CudaBackend, RecorderBackend

    graphs: list[Any] = []

    def noting(capture: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def noted(backend: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            with capture(backend, *args, **kwargs) as graph:
                yield graph
            graphs.append(graph)

        return noted

    with contextlib.ExitStack() as stack:
        for backend in (CudaBackend, RecorderBackend):
            stack.enter_context(mock.patch.object(backend, "capture", noting(backend.capture)))
        yield graphs


def build_te_graph(workload: Workload, chain: bool) -> Callable[[], None]:
    import te_graph

    count = 1 if chain else len(workload.layers)
    with noted_captures() as workload.graphs:
        te_graph.make_graphed_callables(workload.layers, ((workload.x,),) * count, chain=chain, show_progress=False)
    if any(layer.te_graph.info()["backend"] is None for layer in workload.layers):
        raise RuntimeError("te_graph: expected graphs, got eager layers; TE_GRAPH_DISABLE=1 asks for that")
    return workload.step


def build_whole_graph(workload: Workload) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            workload.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        workload.step()
    return graph.replay


VARIANTS = {
    "eager": Variant("eager", lambda workload: workload.step),
    "torch_graphed": Variant("torch.cuda.make_graphed_callables", build_torch_graphed, needs_cuda=True),
    "transformer_engine": Variant(
        "TransformerEngine", build_transformer_engine, needs_cuda=True, package="transformer_engine"
    ),
    "te_graph_unchained": Variant("te_graph, not chained", functools.partial(build_te_graph, chain=False)),
    "te_graph": Variant("te_graph", functools.partial(build_te_graph, chain=True)),
    "whole_graph": Variant("one captured graph", build_whole_graph, needs_cuda=True),
}
