"""Implementations of collectives: te_graph, a process group, torch's symmetric memory, vLLM; and expected results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from lib import variants
from lib.rank_processes import OPERATION_TIMEOUT, Rank
from torch import Tensor

import te_graph as tg
from cases.collectives.vllm_all_reduce import VllmAllReduce
from te_graph.testing import same_bits

OPS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}
DTYPE = torch.bfloat16
EPSILON = 2.0**-8  # of one rounding to DTYPE


@dataclass(frozen=True)
class Call:
    """A collective that is ready to run.

    Attributes:
        x: What it reads, [n].
        run: Carries it out on the current stream.
        result: What it writes, [n], [n / world] or [n * world]; may be x itself.
        captured: Called on all ranks once `run` has been captured, before the graph is replayed.
    """

    x: Tensor
    run: Callable[[], object]
    result: Tensor
    captured: Callable[[], object] = lambda: None


class Setting:
    """What the calls of one rank share.

    Args:
        rank: This one.
        nbytes: of the largest tensor.
    """

    def __init__(self, rank: Rank, nbytes: int) -> None:
        self.rank = rank
        self.nbytes = nbytes
        self.group = tg.PeerGroup(timeout=OPERATION_TIMEOUT)

    @cached_property
    def symmetric(self) -> Tensor:
        """[nbytes / 2] memory that torch's own kernels can reach on all ranks; all ranks come here together."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(self.nbytes // DTYPE.itemsize, dtype=DTYPE, device=self.rank.device)
        symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name)
        return buffer

    @cached_property
    def vllm(self) -> VllmAllReduce:
        """All ranks come here together."""
        return VllmAllReduce(self.rank, self.nbytes)

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=DTYPE, device=self.rank.device)


def counts(op: str, nbytes: int, world: int) -> tuple[int, int]:
    """Elements of input and result of each rank, where the larger of the two has `nbytes`, or as many as ranks can
    share."""
    share = nbytes // DTYPE.itemsize // world
    sizes = {"all_reduce": (world, world), "reduce_scatter": (world, 1), "all_gather": (1, world)}
    return sizes[op][0] * share, sizes[op][1] * share


def _te_graph(setting: Setting, op: str, nbytes: int) -> Call:
    x, out = map(setting.empty, counts(op, nbytes, setting.rank.world))
    function = {
        "all_reduce": tg.all_reduce_out,
        "reduce_scatter": tg.reduce_scatter_out,
        "all_gather": tg.all_gather_out,
    }[op]
    return Call(x, lambda: function(out, x, setting.group), out)


def _process_group(setting: Setting, op: str, nbytes: int) -> Call:
    x, out = map(setting.empty, counts(op, nbytes, setting.rank.world))
    if op == "all_reduce":
        return Call(x, lambda: dist.all_reduce(x), x)
    function = dist.reduce_scatter_tensor if op == "reduce_scatter" else dist.all_gather_into_tensor
    return Call(x, lambda: function(out, x), out)


def _one_shot(setting: Setting, op: str, nbytes: int) -> Call:
    numel, _ = counts(op, nbytes, setting.rank.world)
    x, out, name = setting.symmetric[:numel], setting.empty(numel), dist.group.WORLD.group_name
    return Call(x, lambda: torch.ops.symm_mem.one_shot_all_reduce_out(x, "sum", name, out), out)


def _two_shot(setting: Setting, op: str, nbytes: int) -> Call:
    numel, _ = counts(op, nbytes, setting.rank.world)
    x, name = setting.symmetric[:numel], dist.group.WORLD.group_name
    return Call(x, lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name), x)


def _vllm(setting: Setting, op: str, nbytes: int) -> Call:
    numel, _ = counts(op, nbytes, setting.rank.world)
    vllm, out = setting.vllm, setting.empty(numel)
    x = vllm.x.view(DTYPE)[:numel]
    return Call(x, lambda: vllm.reduce(out, x), out, vllm.map_captured)


@dataclass(frozen=True)
class Variant(variants.Variant):
    """An implementation of collectives. `build` makes a call of an op, whose larger tensor has so many bytes.

    Attributes:
        ops: Those it has.
        worlds: Numbers of ranks that it knows; None: any.
        is_exact: Whether its sums have to be the bits of the reference.
    """

    build: Callable[[Setting, str, int], Call]
    ops: tuple[str, ...] = tuple(OPS)
    worlds: tuple[int, ...] | None = None
    is_exact: bool = False

    def missing(self, device: str, world: int | None = None) -> str | None:
        """Why it cannot be measured here, by so many ranks if a number is given; None if it can."""
        if self.worlds is not None and world is not None and world not in self.worlds:
            return f"needs {', '.join(map(str, self.worlds))} ranks, got {world}"
        return super().missing(device)


_ALL_REDUCE = ("all_reduce",)
VARIANTS = {
    "te_graph": Variant("te_graph", _te_graph, is_exact=True),
    "nccl": Variant("NCCL", _process_group),
    "one_shot": Variant("torch symmetric memory, one-shot", _one_shot, needs_cuda=True, ops=_ALL_REDUCE),
    "two_shot": Variant("torch symmetric memory, two-shot", _two_shot, needs_cuda=True, ops=_ALL_REDUCE),
    "vllm": Variant("vLLM", _vllm, needs_cuda=True, package="vllm", ops=_ALL_REDUCE, worlds=(2, 4, 6, 8)),
}


def label_of(variant: str, device: str) -> str:
    """What a variant is called where it was measured: a process group on a CPU is not one of NCCL."""
    return "gloo" if (variant, device) == ("nccl", "cpu") else VARIANTS[variant].label


class Reference:
    """Numbers of all ranks, which every rank can draw for itself, and what an op makes of them.

    Attributes:
        x: what this rank has, [n].
        result: of this rank; sums are taken in fp32 in the order of the ranks and rounded once.
        tolerance: of sums whose order and roundings are others, like `result`; None where nothing is summed.
    """

    def __init__(self, rank: Rank, op: str, nbytes: int, seed: int) -> None:
        numel, _ = counts(op, nbytes, rank.world)
        self.op = op
        generator = torch.Generator(rank.device)

        def numbers_of(number: int) -> Tensor:
            generator.manual_seed(seed + number)
            return torch.randn(numel, generator=generator, dtype=DTYPE, device=rank.device)

        self.x = numbers_of(rank.rank)
        self.tolerance: Tensor | None = None
        if op == "all_gather":
            self.result = torch.cat([numbers_of(number) for number in range(rank.world)])
            return
        part = slice(None)
        if op == "reduce_scatter":
            share = numel // rank.world
            part = slice(share * rank.rank, share * (rank.rank + 1))
        total = numbers_of(0)[part].float()
        sizes = total.abs()
        for number in range(1, rank.world):
            x = numbers_of(number)[part].float()
            total += x
            sizes += x.abs()
        self.result = total.to(DTYPE)
        self.tolerance = sizes.mul_(rank.world * EPSILON)

    def verify(self, call: Call, step: Callable[[], object], is_exact: bool) -> None:
        """Run `step`, which carries out `call` once, on these numbers.

        Raises:
            RuntimeError: the result is another one.
        """
        if call.result is not call.x:
            call.result.fill_(float("nan"))
        call.x.copy_(self.x)
        step()
        if is_exact or self.tolerance is None:
            wrong = self.result.numel() - int((self.result.view(torch.int16) == call.result.view(torch.int16)).sum())
            is_right, expected = same_bits(self.result, call.result), "the bits of the reference"
        else:
            # Written so that NaN is wrong.
            errors = (call.result.float() - self.result.float()).abs_()
            wrong = int((~(errors <= self.tolerance)).sum())
            is_right, expected = wrong == 0, "about the numbers of the reference"
        if not is_right:
            raise RuntimeError(f"{self.op}: expected {expected}, got others in {wrong} of {self.result.numel()} places")
