"""The three functions of an optimizer in mixed precision, as loops over tensors and as te_graph's, and their sequence.

DeepSpeed's BF16 optimizer runs such loops, and reads the norm on the host to decide whether to clip. In a graph it
cannot: there the loop always multiplies.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cases.multi_tensor.variants import SHRINK, UNLIMITED, Problem, Step, in_blocks
from te_graph.testing import same_bits

FUNCTIONS = {
    "update_hp_grads": "update_hp_grads",
    "norm": "get_global_norm_of_tensors",
    "clip": "clip_tensors_by_global_norm",
    "all": "all three",
}

Parameters, Tensors = Sequence[nn.Parameter], Sequence[Tensor]


def loop_update(parameters: Parameters, high: Tensors) -> None:
    """Add each gradient [...] to that in fp32 [...] and zero it."""
    for parameter, destination in zip(parameters, high, strict=True):
        destination.add_(parameter.grad.to(destination.dtype))
        parameter.grad.zero_()


def loop_norm(tensors: Tensors) -> Tensor:
    """The 2-norm [] of all tensors [...], added up one by one."""
    total = torch.zeros_like(tensors[0].view(-1)[0])
    for tensor in tensors:
        total.add_(tensor.float().norm().square())
    return total.sqrt()


def loop_multiply(tensors: Tensors, factor: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def loop_clip(tensors: Tensors, max_norm: float, global_norm: Tensor) -> None:
    factor = max_norm / (global_norm + 1e-6)
    if factor < 1:  # waits for the device
        loop_multiply(tensors, factor)


def loop_clip_without_wait(tensors: Tensors, max_norm: float, global_norm: Tensor) -> None:
    loop_multiply(tensors, (max_norm / (global_norm + 1e-6)).clamp(max=1.0))


@dataclass(frozen=True)
class HpFunctions:
    """One way to write the three functions; ``clip`` takes tensors, maximum and norm."""

    update: Callable[[Parameters, Tensors], object]
    norm: Callable[[Tensors], Tensor]
    clip: Callable[[Tensors, float, Tensor], object]

    def all(self, parameters: Parameters, high: Tensors, max_norm: float) -> Tensor:
        self.update(parameters, high)
        norm = self.norm(high)
        self.clip(high, max_norm, norm)
        return norm


def loops(clip: Callable[[Tensors, float, Tensor], object]) -> HpFunctions:
    return HpFunctions(loop_update, loop_norm, clip)


def te_graph_functions() -> HpFunctions:
    import te_graph as tg

    def clip(tensors: Tensors, max_norm: float, norm: Tensor) -> None:
        tg.clip_tensors_by_global_norm(tensors, max_norm, global_norm=norm)

    return HpFunctions(tg.update_hp_grads, tg.get_global_norm_of_tensors, clip)


def graphed(function: Callable[..., object], *args: object) -> Step:
    """Calls of ``function(*args)`` through te_graph.graphed, beyond its eager call and its capture."""
    import te_graph as tg

    step = functools.partial(tg.graphed(function), *args)
    for _ in range(3):
        step()
    return step


@dataclass(frozen=True)
class HpVariant:
    """A way to run the three functions and their sequence."""

    label: str
    functions: Callable[[], HpFunctions]
    is_graphed: bool = False

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured; None if it can."""
        import te_graph as tg

        is_there = callable(getattr(tg, "graphed", None))  # without the function, a module has the name
        return "te_graph has no graphed" if self.is_graphed and not is_there else None

    def steps(self, problem: Problem) -> dict[str, Step]:
        """What runs each of FUNCTIONS on the gradients of `problem`, compared with plain torch.

        The clip on its own multiplies by SHRINK. The sequence finds nothing to clip, as in most steps of a training.

        Raises:
            RuntimeError: something differs.
        """
        functions, given = self.functions(), torch.tensor(1.0, device=problem.device)
        bind = graphed if self.is_graphed else functools.partial
        steps = {
            "update_hp_grads": bind(functions.update, problem.parameters, problem.high),
            "norm": bind(functions.norm, problem.high),
            "clip": bind(functions.clip, problem.high, SHRINK, given),
            "all": bind(functions.all, problem.parameters, problem.high, UNLIMITED),
        }
        for name, step in steps.items():
            problem.restore()
            _verify(problem, name, step)
        problem.restore()
        return steps


HP_VARIANTS = {
    "loops": HpVariant("loops over tensors", functools.partial(loops, loop_clip)),
    "loops_graphed": HpVariant("loops, graphed", functools.partial(loops, loop_clip_without_wait), is_graphed=True),
    "te_graph": HpVariant("te_graph", te_graph_functions),
    "te_graph_graphed": HpVariant("te_graph, graphed", te_graph_functions, is_graphed=True),
}


def _verify(problem: Problem, name: str, step: Step) -> None:
    """`problem` holds gradients as drawn, and ones in fp32."""
    is_update = name in ("update_hp_grads", "all")
    drawn = [gradient.clone() for gradient in problem.gradients]
    result = step()
    for high, low, before in zip(*map(in_blocks, (problem.high, problem.gradients, drawn)), strict=True):
        if name == "clip":
            is_right = torch.allclose(high, torch.full_like(high, SHRINK / (1 + 1e-6)), rtol=1e-6)
        else:
            is_right = same_bits(high, 1 + before.float() if is_update else torch.ones_like(high))
        left = torch.zeros_like(before) if is_update else before
        if not is_right or not same_bits(low, left):
            raise RuntimeError(f"{FUNCTIONS[name]}: expected the gradients of plain torch, got other values")
    if name in ("norm", "all"):
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in problem.high]
        expected = torch.linalg.vector_norm(torch.stack(norms)).item()
        if not math.isclose(result.item(), expected, rel_tol=1e-4):
            raise RuntimeError(f"{FUNCTIONS[name]}: expected {expected}, got {result.item()}")
