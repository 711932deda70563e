"""The multi-tensor operations that are measured, the ways to run them, and what proves them right."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.utils as utils
from lib.timing import WARMUP_CALLS
from lib.variants import Variant
from torch import Tensor, nn

from cases.multi_tensor.tensor_sets import TensorSet
from te_graph.testing import same_bits

OPS = {
    "norm": "norm",
    "clip_none": "clip, nothing to clip",
    "clip": "clip, clipping",
    "store": "accumulate into fp32, store",
    "add": "accumulate into fp32, add",
}
ACCUMULATES = ("store", "add")
UNLIMITED = 1e30
SHRINK = 0.5  # what a clip that clips multiplies by: exact in every dtype, so that each call finds something to clip
BLOCK = 2**27  # elements that are compared at once

Step = Callable[[], Any]


class Problem:
    """A list of gradients, the parameters that hold them, and gradients in fp32 of the same shapes.

    Args:
        tensor_set: Shapes and dtype.
        device: "cuda" or "cpu".
        seed: Of the gradients, which are normally distributed.

    Attributes:
        total: Norm of the gradients as drawn, [], computed in fp64 tensor by tensor.
        max_norm: What `shrunk` gave last.
    """

    def __init__(self, tensor_set: TensorSet, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.device, self.nbytes, self.elements = device, tensor_set.nbytes, tensor_set.elements
        factory = {"device": device, "dtype": tensor_set.dtype}
        self.gradients = [torch.randn(shape, **factory) for shape in tensor_set.shapes]
        # A parameter has the shape of its gradient, and no memory.
        self.parameters = [nn.Parameter(torch.zeros((), **factory).expand(shape)) for shape in tensor_set.shapes]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self._drawn = [gradient.clone() for gradient in self.gradients]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in self.gradients]
        self.total = torch.linalg.vector_norm(torch.stack(norms))
        self.max_norm = self.total.item()

    @functools.cached_property
    def high(self) -> list[Tensor]:
        return [torch.ones(gradient.shape, device=self.device) for gradient in self.gradients]

    def has_room_for_high(self) -> bool:
        """Whether gradients in fp32 fit, with a tenth of their size to spare."""
        return self.device == "cpu" or torch.cuda.mem_get_info()[0] > 1.1 * 4 * self.elements

    def shrunk(self) -> float:
        """Half of the norm that the gradients have, if each call of it was followed by a clip."""
        self.max_norm *= SHRINK
        return self.max_norm

    def restore(self) -> None:
        """Gradients as drawn; those in fp32 are ones."""
        torch._foreach_copy_(self.gradients, self._drawn)
        self.max_norm = self.total.item()
        for tensor in self.__dict__.get("high", ()):
            tensor.fill_(1)

    def verify(self, op: str, step: Step) -> None:
        """Run `step` once on restored tensors and compare all that it leaves with plain torch.

        Raises:
            RuntimeError: something differs.
        """
        self.restore()
        result = step()
        if op in ACCUMULATES:
            offset = 1 if op == "add" else 0
            self._require(f"{op}: bits of gradients in fp32", self.high, lambda grad: grad.float() + offset, same_bits)
            self._require(f"{op}: bits of sources", self.gradients, lambda grad: grad, same_bits)
            return
        of_norm = max(1e-5, 2 * torch.finfo(result.dtype).eps)
        if not math.isclose(result.item(), self.total.item(), rel_tol=of_norm):
            raise RuntimeError(f"{op}: expected the norm {self.total.item()}, got {result.item()}")
        if op != "clip":
            self._require(f"{op}: gradients to stay bitwise", self.gradients, lambda grad: grad, same_bits)
            return
        factor = self.max_norm / (self.total.item() + 1e-6)
        tolerance = of_norm + 2 * torch.finfo(self.gradients[0].dtype).eps

        def is_close(got: Tensor, want: Tensor) -> bool:  # both [n]
            return torch.allclose(got.float(), want, rtol=tolerance, atol=0)

        self._require(f"{op}: gradients times {factor}", self.gradients, lambda grad: grad.float() * factor, is_close)

    def _require(
        self,
        what: str,
        tensors: list[Tensor],
        expected: Callable[[Tensor], Tensor],
        is_equal: Callable[[Tensor, Tensor], bool],
    ) -> None:
        for got, drawn in zip(in_blocks(tensors), in_blocks(self._drawn), strict=True):
            if not is_equal(got, expected(drawn)):
                raise RuntimeError(f"expected {what}, got other values")


def in_blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """`tensors` [...] one behind the other, in vectors of up to about BLOCK elements."""
    pieces = itertools.chain.from_iterable(tensor.flatten().split(BLOCK) for tensor in tensors)
    block: list[Tensor] = []
    elements = 0
    for piece in pieces:
        if block and elements + piece.numel() > BLOCK:
            yield torch.cat(block)
            block, elements = [], 0
        block.append(piece)
        elements += piece.numel()
    if block:
        yield torch.cat(block)


def build_te_graph(problem: Problem, op: str) -> Step:
    import te_graph as tg

    gradients, parameters = problem.gradients, problem.parameters
    if op in ACCUMULATES:
        accumulate_ = torch.ops.te_graph.multi_tensor_accumulate_
        return functools.partial(accumulate_, problem.high, gradients, store=op == "store")
    return {
        "norm": lambda: tg.get_total_norm(gradients),
        "clip_none": lambda: tg.clip_grad_norm_(parameters, UNLIMITED),
        "clip": lambda: tg.clip_grad_norm_(parameters, problem.shrunk()),
    }[op]


def build_te_graph_plan(problem: Problem, op: str) -> Step:
    import te_graph as tg

    if op in ACCUMULATES:
        plan = tg.MultiTensorPlan(problem.high, problem.gradients)
        return functools.partial(plan.accumulate_, store=op == "store")
    plan = tg.MultiTensorPlan(problem.gradients)
    return {
        "norm": plan.norm,
        "clip_none": lambda: plan.clip_norm_(UNLIMITED),
        "clip": lambda: plan.clip_norm_(problem.shrunk()),
    }[op]


def build_torch_foreach(problem: Problem, op: str) -> Step:
    gradients, parameters = problem.gradients, problem.parameters
    if op == "store":
        return lambda: torch._foreach_copy_(problem.high, gradients)
    if op == "add":
        return lambda: torch._foreach_add_(problem.high, gradients)
    return {
        "norm": lambda: utils.get_total_norm(gradients, foreach=True),
        "clip_none": lambda: utils.clip_grad_norm_(parameters, UNLIMITED, foreach=True),
        "clip": lambda: utils.clip_grad_norm_(parameters, problem.shrunk(), foreach=True),
    }[op]


def build_torch_foreach_graph(problem: Problem, op: str) -> Step:
    """The same, captured. A graph keeps its numbers, so the norm that it clips by is a constant beside the one that it
    computes: it always shrinks by the same factor."""
    step = build_torch_foreach(problem, op)
    if op == "clip":
        total = utils.get_total_norm(problem.gradients, foreach=True).clone()
        max_norm = SHRINK * total.item()

        def step() -> Tensor:
            norm = utils.get_total_norm(problem.gradients, foreach=True)
            utils.clip_grads_with_norm_(problem.parameters, max_norm, total, foreach=True)
            return norm

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    def replay_clip() -> Tensor:
        problem.shrunk()  # what `verify` looks at
        return replay()

    return replay_clip if op == "clip" else replay


def build_transformer_engine(problem: Problem, op: str) -> Step | None:
    """Norm, and clip as Megatron does it, where the scale may be a tensor. Its scale also stores into fp32."""
    import transformer_engine.pytorch  # noqa: F401 (loads the libraries of the extension)
    import transformer_engine_torch as engine
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    gradients, flag = problem.gradients, torch.zeros(1, dtype=torch.int32, device=problem.device)
    scale_tensor = getattr(engine, "multi_tensor_scale_tensor", None)

    def norm() -> Tensor:
        return multi_tensor_applier(engine.multi_tensor_l2norm, flag, [gradients], False)[0]

    def clip(max_norm: float) -> Tensor:
        total = norm()
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        found = [parameter.grad for parameter in problem.parameters]
        multi_tensor_applier(scale_tensor, flag, [found, found], factor)
        return total

    def store() -> None:
        multi_tensor_applier(engine.multi_tensor_scale, flag, [gradients, problem.high], 1.0)

    if op in ("clip_none", "clip"):
        clips = {"clip_none": lambda: clip(UNLIMITED), "clip": lambda: clip(problem.shrunk())}
        return clips[op] if scale_tensor else None
    return {"norm": norm, "store": store}.get(op)


# What `build` returns runs one operation; None where the library has none.
VARIANTS = {
    "torch_foreach": Variant("torch foreach", build_torch_foreach),
    "torch_foreach_graph": Variant("torch foreach in a graph", build_torch_foreach_graph, needs_cuda=True),
    "transformer_engine": Variant(
        "TransformerEngine", build_transformer_engine, needs_cuda=True, package="transformer_engine"
    ),
    "te_graph": Variant("te_graph", build_te_graph),
    "te_graph_plan": Variant("te_graph with a plan", build_te_graph_plan),
}


def floor_seconds(op: str, elements: int, itemsize: int, bandwidth: dict[str, float]) -> float:
    """What the bytes that an operation must move take at the bandwidth measured: a norm reads all once; a clip that
    clips reads all, then reads and writes all; an accumulate reads and writes in fp32 what it does not overwrite."""
    if op in ("norm", "clip_none"):
        return elements * itemsize / bandwidth["read"]
    nbytes = {"clip": 3 * itemsize, "store": itemsize + 4, "add": itemsize + 8}[op]
    return elements * nbytes / bandwidth["copy"]
