"""Random programs with collectives that ranks compile differently, or one of them not at all, beside eager execution.

All ranks run the same collectives; what lies between them differs: sizes of local work, results that a rank does not
use, breaks of the graph. Each collective reduces other numbers of one size, so two that meet in the wrong order give
wrong sums.

    PYTHONPATH=tests/helpers python tests/collectives/compiled_programs.py 200

So many programs on two ranks of gloo; PROGRAM_SEED=n, PROGRAM_BACKEND=
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import Rank, Ranks
from torch import Tensor

import te_graph as tg
from te_graph import tensor_parallel as regions

ROWS, COLUMNS = 12, 12  # rows: of what is reduced; 2, 3 and 4 ranks can share both


@dataclass(frozen=True)
class Step:
    """``kind`` names a function below; the others are its details, by rank where they are tuples."""

    kind: str
    factor: float
    is_used: tuple[bool, ...]
    has_break: tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    is_training: bool
    steps: tuple[Step, ...]
    rows: tuple[int, ...]  # of local work
    is_compiled: tuple[bool, ...]


def program(seed: int, world: int) -> Program:
    chance = random.Random(seed)
    is_training = chance.random() < 0.5
    kinds = FUNCTIONAL + ([] if is_training else WRITING)

    def of_ranks(probability: float) -> tuple[bool, ...]:
        return tuple(chance.random() < probability for _ in range(world))

    steps = []
    for number in range(chance.randrange(2, 7)):
        # A result that only some ranks use has a gradient on these alone: no order of any program is right then.
        is_used = (chance.random() < 0.7,) * world if is_training else of_ranks(0.7)
        has_break = of_ranks(0.15) if not is_training else (False,) * world
        steps.append(Step(chance.choice(kinds), 1.0 + number, is_used, has_break))
    rows = tuple(chance.choice([ROWS, ROWS, 50 * ROWS]) for _ in range(world))
    is_compiled = chance.choice([(True,) * world, tuple(rank != chance.randrange(world) for rank in range(world))])
    return Program(is_training, tuple(steps), rows, is_compiled)


def chained(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    """Reduces what local work has made so far."""
    return tg.all_reduce(h[:ROWS].contiguous(), group)


def apart(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    """Reduces what is there from the start: a compiler may do that at any time."""
    return tg.all_reduce(x.cos(), group)


def scattered(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    return tg.reduce_scatter(x.sin(), group).repeat(group.world_size, 1)


def gathered(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    return tg.all_gather(x[: ROWS // group.world_size].exp(), group)


def regions_by_columns(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    part = regions.scatter_to_tp(regions.copy_to_tp(x, group).cos(), group)
    return regions.reduce_from_tp(regions.gather_from_tp(part.tanh(), group), group)


def regions_by_rows(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    whole = regions.gather_from_sp(regions.scatter_to_sp(x.sin(), group).tanh(), group)
    return regions.reduce_scatter_to_sp(whole, group).repeat(group.world_size, 1)


def inplace(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    return tg.all_reduce_(x * 3, group)


def inplace_op(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    y = x * 5
    torch.ops.te_graph.all_reduce_(y, group.name)
    return y


def out(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    y = torch.empty_like(x)
    tg.all_reduce_out(y, x * 7, group)
    return y


def scattered_out(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    y = x.new_empty(ROWS // group.world_size, COLUMNS)
    tg.reduce_scatter_out(y, x.tanh(), group)
    return y.repeat(group.world_size, 1)


def gathered_out(h: Tensor, x: Tensor, group: tg.PeerGroup) -> Tensor:
    y = torch.empty_like(x)
    tg.all_gather_out(y, x[: ROWS // group.world_size] * 9, group)
    return y


FUNCTIONAL = [
    function.__name__ for function in (chained, apart, scattered, gathered, regions_by_columns, regions_by_rows)
]
WRITING = [inplace.__name__, inplace_op.__name__, out.__name__, scattered_out.__name__, gathered_out.__name__]
_OF_NAME: dict[str, Callable[[Tensor, Tensor, tg.PeerGroup], Tensor]] = {
    name: globals()[name] for name in FUNCTIONAL + WRITING
}


def function_of(program: Program, rank: int, group: tg.PeerGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What ``rank`` runs; of h [rows, COLUMNS], x [ROWS, COLUMNS], w [COLUMNS, COLUMNS]; returns [ROWS, COLUMNS]."""

    def run(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(ROWS, COLUMNS)
        for step in program.steps:
            h = torch.tanh(h @ w)
            y = _OF_NAME[step.kind](h, x * step.factor, group)
            if step.has_break[rank]:
                torch._dynamo.graph_break()
            if step.is_used[rank]:
                total = total + y * step.factor
        return total + h[:ROWS] * 0

    return run


def results(function: Callable[..., Tensor], program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """What comes out, and the gradients of the inputs, [...] each."""
    leaves = [one.clone().requires_grad_(program.is_training) for one in inputs]
    with torch.set_grad_enabled(program.is_training):
        y = function(*leaves)
        if program.is_training:
            (y * torch.arange(1.0, COLUMNS + 1)).sum().backward()
    return [y.detach(), *[torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]]


def scenario(rank: Rank, first: int, count: int, backend: str) -> None:
    """Each program compiled afresh, and once more with what the first time left on the disk."""
    with tg.PeerGroup(timeout=300.0) as group:  # a rank waits for the compiler of the other
        for seed in range(first, first + count):
            what = program(seed, rank.world)
            drawn = torch.Generator().manual_seed(seed)  # the same on all ranks, but for the rows
            x, w = torch.randn(ROWS, COLUMNS, generator=drawn), torch.randn(COLUMNS, COLUMNS, generator=drawn)
            h = torch.randn(50 * ROWS, COLUMNS, generator=drawn)[: what.rows[rank.rank]]
            function = function_of(what, rank.rank, group)
            inputs = [h, x + rank.rank, w]
            expected = results(function, what, inputs)
            for cache in ("fresh", "warm"):
                torch._dynamo.reset()
                call = torch.compile(function, backend=backend) if what.is_compiled[rank.rank] else function
                for got, one in zip(results(call, what, inputs), expected, strict=True):
                    # A compiler may fuse local work: the last bits differ, sums of other numbers do more.
                    slack = 1e-5 * (1 + float(one.abs().max()))
                    assert torch.allclose(got, one, rtol=0, atol=slack), f"seed {seed}, {cache} cache: {what}"
            group.check()


def main() -> None:
    seed = int(os.environ.get("PROGRAM_SEED", str(random.randrange(1 << 31))))
    print("seeds from", seed, flush=True)
    ranks = Ranks("cpu", 2, Path(tempfile.mkdtemp()))
    for one in range(seed, seed + int(sys.argv[1])):
        ranks.run(scenario, 0, one, 1, os.environ.get("PROGRAM_BACKEND", "inductor"))
    print("done", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
