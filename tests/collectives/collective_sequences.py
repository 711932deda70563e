"""Random sequences of collectives: any op, form, dtype, size and strides, on two groups, eagerly and from graphs.

    PYTHONPATH=tests/helpers python tests/collectives/collective_sequences.py --seeds 0:200  # two ranks on gloo
    PYTHONPATH=tests/helpers python tests/collectives/collective_sequences.py --seeds 0:200 --cuda

All ranks draw the same sequence and the numbers of all ranks; the reference is the sum in the order of the ranks (or
the concatenation), computed without communication. On a CPU graphs are those of the recorder, with poison.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from collective_ranks import open_group, reference_reduce
from ranks import Rank, Ranks
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

SUMMED = (torch.float32, torch.float16, torch.bfloat16)
ANY = (*SUMMED, torch.int8, torch.int64, torch.bool, torch.float64)
# Bytes: around what one launch takes, one-shot and two-shot, and parts of an operation that is larger than the buffer.
SIZES = (1, 2, 5, 16, 100, 1000, 4096, 16 << 10, 64 << 10, 100_000, 1 << 20, 3 << 20)
LARGE = (8 << 20, 64 << 20)
IN_POOL = tuple(size for size in SIZES if size <= 64 << 10)  # torch takes 2 MiB at once for such


@dataclass(frozen=True)
class Step:
    """One collective.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather".
        form: "", "_" (in place), "_out".
        reduction: "sum" or "max".
        shape: of what each rank gives.
        layout: of that, and of ``out``: "plain", "transposed", "gaps", "offset".
    """

    kind: str
    form: str
    reduction: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    layout: str
    group: int
    seed: int


def draw_step(rng: random.Random, world: int, sizes: tuple[int, ...]) -> Step:
    kind = rng.choice(("all_reduce", "all_reduce", "reduce_scatter", "all_gather"))
    dtype = rng.choice(ANY if kind == "all_gather" else SUMMED)
    numel = max(1, rng.choice(sizes) // dtype.itemsize)
    shape = [rng.choice((1, 2, 3, 7)) for _ in range(rng.randrange(0 if kind == "all_reduce" else 1, 4))]
    if shape:
        position = rng.randrange(len(shape))
        shape[position] = max(1, numel // max(1, torch.Size(shape).numel() // shape[position]))
    dim = rng.randrange(len(shape)) if shape else 0
    if kind == "reduce_scatter":
        shape[dim] = -(-shape[dim] // world) * world
    if shape and rng.random() < 0.05:
        shape[rng.randrange(len(shape))] = 0
    is_max = kind != "all_gather" and dtype is torch.float32 and rng.random() < 0.2
    return Step(
        kind=kind,
        form=rng.choice(("", "_", "_out") if kind == "all_reduce" else ("", "_out")),
        reduction="max" if is_max else "sum",
        dtype=dtype,
        shape=tuple(shape),
        dim=dim - len(shape) * (rng.random() < 0.3) if shape else 0,
        layout=rng.choice(("plain", "plain", "transposed", "gaps", "offset")),
        group=rng.randrange(2),
        seed=rng.randrange(2**31),
    )


def laid_out(values: Tensor, layout: str) -> Tensor:
    """A copy of ``values`` [...] that lies otherwise in memory."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "gaps" and values.dim() > 0:
        wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype, device=values.device)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset":
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape)
    return values.clone(memory_format=torch.contiguous_format)


def numbers(step: Step, rank: Rank, turn: int) -> Tensor:
    """What all ranks give, [world, *shape]."""
    generator = torch.Generator(rank.device).manual_seed(step.seed + turn)
    shape = (rank.world, *step.shape)
    x = torch.randn(shape, generator=generator, device=rank.device)
    x = x * 2.0 ** torch.randint(-5, 6, shape, generator=generator, device=rank.device)
    return x > 0 if step.dtype is torch.bool else x.to(step.dtype)


def expected_of(step: Step, rank: Rank, all_ranks: Tensor) -> Tensor:
    if step.kind == "all_gather":
        return torch.cat(list(all_ranks), step.dim)
    total = all_ranks.amax(0) if step.reduction == "max" else reference_reduce(all_ranks)
    return total if step.kind == "all_reduce" else total.chunk(rank.world, step.dim)[rank.rank]


class Collective:
    """A step on tensors of its own, which may be run many times."""

    def __init__(self, step: Step, rank: Rank, groups: list[tg.PeerGroup]) -> None:
        self.step, self.rank, self.group = step, rank, groups[step.group]
        all_ranks = numbers(step, rank, 0)
        self.x = laid_out(all_ranks[rank.rank], step.layout)
        self.out = laid_out(expected_of(step, rank, all_ranks), step.layout) if step.form == "_out" else None
        self.result: Tensor | None = None

    def fill(self, turn: int) -> None:
        self.expected = expected_of(self.step, self.rank, all_ranks := numbers(self.step, self.rank, turn))
        self.x.copy_(all_ranks[self.rank.rank])
        if self.out is not None:
            self.out.zero_()

    def run(self) -> None:
        step = self.step
        place = {} if step.kind == "all_reduce" else {"dim": step.dim}
        how = {} if step.kind == "all_gather" else {"reduction": step.reduction}
        function = getattr(tg, step.kind + step.form)
        given = (self.out, self.x) if step.form == "_out" else (self.x,)
        result = function(*given, self.group, **place, **how)
        self.result = self.out if step.form == "_out" else result

    def check(self) -> None:
        assert self.result.shape == self.expected.shape, self.step
        assert same_bits(self.result, self.expected), self.step


def captured(rank: Rank, parts: list[Collective], pool: Any) -> Callable[[], None]:
    """A graph of ``parts``; returns what replays it."""
    if rank.device == "cpu":
        recorder = tg.Recorder(poison=True)
        with recorder.capture():
            for part in parts:
                part.run()
        return recorder.replay
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for part in parts:
            part.run()
    return graph.replay


def run_sequence(rank: Rank, seed: int, length: int = 12, large: bool = False) -> None:
    """Draw and run one sequence."""
    rng = random.Random(seed)
    is_gpu = rank.device != "cpu"
    sizes = SIZES + (LARGE if large else ())
    streams = [torch.cuda.Stream() for _ in range(2)] if is_gpu else []
    with open_group(rank, buffer_bytes=1 << 20) as first, open_group(rank, buffer_bytes=64 << 20) as second:
        groups, graphs = [first, second], []
        for number in range(length):
            way = rng.choice(("eager", "eager", "capture", "replay"))
            if way == "replay" and graphs:
                chosen, again = rng.choice(graphs), rng.randrange(1, 4)
                for turn in range(again):
                    replay, parts = chosen
                    for part in parts:
                        part.fill(number * 10 + turn)
                    replay()
                    for part in parts:
                        part.check()
                continue
            has_pool = is_gpu and way == "capture" and rng.random() < 0.3
            count, chosen_from = rng.randrange(1, 4), IN_POOL if has_pool else sizes
            parts = [Collective(draw_step(rng, rank.world, chosen_from), rank, groups) for _ in range(count)]
            for part in parts:
                part.fill(number)
            if way == "capture":
                pool = second.mem_pool().id if has_pool else None
                graphs.append((captured(rank, parts, pool), parts))
                for part in parts:  # a recorder has run them
                    part.fill(number)
                graphs[-1][0]()
            elif streams and rng.random() < 0.5:
                stream = rng.choice(streams)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for part in parts:
                        part.run()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                for part in parts:
                    part.run()
            for part in parts:
                part.check()
        for group in groups:
            group.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--world", type=int, default=2)
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    with TemporaryDirectory() as folder:
        ranks = Ranks("cuda" if arguments.cuda else "cpu", arguments.world, Path(folder))
        for seed in range(first, end):
            ranks.run(run_sequence, seed, seed, 12, arguments.cuda)
        ranks.close()
    print(f"{end - first} sequences of seeds {arguments.seeds}: all values are right")


if __name__ == "__main__":
    main()
