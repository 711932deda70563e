"""Train a byte-level MLP whose layers are split over ranks, their collectives replayed from graphs with the layers.

    torchrun --nproc-per-node 2 examples/tp_mlp.py             # one rank on each GPU, or processes on the CPU
    torchrun --nproc-per-node 2 examples/tp_mlp.py --compare   # graphs beside eager, and beside one process
    python examples/tp_mlp.py                                  # one rank

Exit status: 0 trained, 1 --compare found a difference or the loss is no number, 2 bad input.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experiment import TrainResult, make_parser, positive_float, positive_int, tell_differences
from text_data import VOCABULARY, Corpus, draw_batches, load_text, split_text
from torch import Tensor, nn
from tqdm import tqdm

import te_graph as tg
from te_graph.tensor_parallel import copy_to_tp, reduce_from_tp
from te_graph.testing import deterministic

TIMEOUT = 300  # seconds that a rank waits for the others; torchrun ends them at once when one has failed
TOLERANCE = 1e-4  # relative: sums over ranks are taken in another order than those of one process


@dataclass(frozen=True)
class Config:
    """The options; `python examples/tp_mlp.py --help` explains each."""

    data: Path | None
    device: str
    context: int
    embedding: int
    hidden: int
    blocks: int
    batch_size: int
    steps: int
    lr: float
    seed: int
    graph: bool
    compare: bool


class Block(nn.Module):
    """norm(x + down(gelu(up(x)))): `up` split by columns, `down` by rows, so that a block needs one sum over ranks.

    Args:
        width: of x.
        hidden: between the two layers, of all ranks together.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
        self.group: tg.PeerGroup | None = None

    def split(self, group: tg.PeerGroup) -> None:
        """Keep this rank's share of the weights, which are the same on all ranks."""
        self.group = group
        for name, dim in self.split_dims().items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.chunk(group.world_size, dim)[group.rank].clone()

    def split_dims(self) -> dict[str, int]:
        """The dimension along which each parameter is split; those that all ranks have whole are left out."""
        return {"up.weight": 0, "up.bias": 0, "down.weight": 1} if self.group else {}

    def forward(self, x: Tensor) -> Tensor:  # [batch, width] -> [batch, width]
        inner = F.gelu(self.up(x if self.group is None else copy_to_tp(x, self.group)))  # [batch, hidden / ranks]
        outer = F.linear(inner, self.down.weight)  # [batch, width], this rank's share of a sum
        if self.group is not None:
            outer = reduce_from_tp(outer, self.group)
        return self.norm(x + outer + self.down.bias)


class ByteMLP(nn.Module):
    """Predicts a byte from those before it: their embeddings side by side, then blocks."""

    def __init__(self, context: int, embedding: int, hidden: int, blocks: int) -> None:
        super().__init__()
        width = context * embedding
        self.embedding = nn.Embedding(VOCABULARY, embedding)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context] int64 -> [batch, 256]
        x = self.embedding(tokens).flatten(1)  # [batch, width]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def whole_state(self) -> dict[str, Tensor]:
        """Copies of the parameters on the CPU, [...] each, joined where they are split. All ranks call it together."""
        state = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for number, block in enumerate(self.blocks):
            for name, dim in block.split_dims().items():
                key = f"blocks.{number}.{name}"
                state[key] = tg.all_gather(state[key], block.group, dim)
        return {name: tensor.cpu().clone() for name, tensor in state.items()}


def build_model(config: Config, group: tg.PeerGroup | None) -> ByteMLP:
    """The model of `config.seed`: this rank's share of it, or with no group all of it."""
    torch.manual_seed(config.seed)
    model = ByteMLP(config.context, config.embedding, config.hidden, config.blocks).to(config.device)
    for block in model.blocks if group else ():
        block.split(group)
    return model


def train(config: Config, corpus: Corpus, group: tg.PeerGroup | None, graph: bool) -> TrainResult:
    """Train from `config.seed` on.

    Args:
        config: The options.
        corpus: The text.
        group: Ranks over which blocks are split; all of them see the same batches. None: the whole model, here.
        graph: Replay blocks from graphs.

    Raises:
        FloatingPointError: the loss is infinite or no number.
    """
    name = "one process" if group is None else "graph" if graph else "eager"
    model = build_model(config, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    if graph:
        shape = (config.batch_size, config.context * config.embedding)
        sample = torch.zeros(shape, device=config.device, requires_grad=True)
        tg.make_graphed_callables(tuple(model.blocks), tuple((sample,) for _ in model.blocks))
    data = corpus.training.to(config.device)  # [bytes] uint8
    batches = draw_batches(data, config.steps, config.batch_size, config.context, torch.Generator().manual_seed(0))
    losses: list[float] = []
    is_quiet = group is not None and group.rank > 0
    # disable=None: a bar on a terminal only; the lines below reach a log file too.
    with tqdm(batches, name, config.steps, unit="step", disable=is_quiet or None) as bar:
        for step, (tokens, following) in enumerate(bar, 1):
            loss = F.cross_entropy(model(tokens), following[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"the loss of step {step} is {losses[-1]}; try a lower --lr")
            if step % max(1, config.steps // 10) == 0 and not is_quiet:
                bar.write(f"{name} step {step}/{config.steps}: loss {losses[-1]:.3f}")
    return TrainResult(losses, model.whole_state())


def find_deviations(ranks: TrainResult, whole: TrainResult) -> list[str]:
    """Where a training over ranks is further than TOLERANCE from that of one process, in words; empty where nowhere."""
    deviations = []
    for i, (a, b) in enumerate(zip(ranks.losses, whole.losses, strict=True), 1):
        if not abs(a - b) <= TOLERANCE * abs(b):
            deviations.append(f"loss of step {i} is {a!r} on ranks, {b!r} in one process")
            break
    for name, tensor in whole.state.items():
        # Of the largest element: small ones come of sums in which large ones cancel.
        error = (ranks.state[name] - tensor).abs().max() / tensor.abs().max()
        if not error <= TOLERANCE:
            deviations.append(f"{name} is off by {error:.1e} of its largest element")
    return deviations


def run(config: Config, corpus: Corpus, group: tg.PeerGroup) -> int:
    """Train as `config` says, on all ranks of the group together; returns the exit status, the same on all.

    Raises:
        FloatingPointError: a loss is infinite or no number, which other ranks need not have seen.
    """
    if not config.compare:
        results = {"graph" if config.graph else "eager": train(config, corpus, group, config.graph)}
    else:
        with deterministic():
            results = {name: train(config, corpus, group, name == "graph") for name in ("eager", "graph")}
            if group.rank == 0:
                results["one process"] = train(config, corpus, None, False)
    if group.rank == 0:
        print(f"\n{'run':<12}{'ranks':>6}{'steps':>8}{'first loss':>12}{'last loss':>12}")
        for name, result in results.items():
            ranks = 1 if name == "one process" else group.world_size
            losses = f"{result.losses[0]:>12.4f}{result.losses[-1]:>12.4f}"
            print(f"{name:<12}{ranks:>6}{len(result.losses):>8}{losses}")
    return compare(results, group) if config.compare else 0


def compare(results: dict[str, TrainResult], group: tg.PeerGroup) -> int:
    """Tell what --compare finds; returns the exit status, the same on all ranks."""
    troubles = {"graph and eager differ": tell_differences(vars(results["graph"]), vars(results["eager"]))}
    if group.rank == 0:
        deviations = find_deviations(results["graph"], results["one process"])
        troubles["ranks and one process differ"] = "; ".join(deviations)
    for what, found in troubles.items():
        if found:
            print(f"error: rank {group.rank}: {what}: {found}", file=sys.stderr)
    is_bad = torch.tensor([float(any(troubles.values()))], device=group.device)
    if tg.all_reduce(is_bad, group, "max").item():
        return 1
    if group.rank == 0:
        print(
            "losses and parameters of graph and eager are equal bit for bit on all ranks, and those of one process "
            f"within {TOLERANCE:g}"
        )
    return 0


def options_parser() -> argparse.ArgumentParser:
    parser = make_parser("Train a byte-level MLP on text, its layers split over the ranks of torchrun.")
    add = parser.add_argument
    add("--context", type=positive_int, default=8, help="bytes that the next one is predicted from")
    add("--embedding", type=positive_int, default=32, help="width of a byte's embedding")
    add("--hidden", type=positive_int, default=1024, help="width inside a block; the number of ranks divides it")
    add("--blocks", type=positive_int, default=3, help="blocks")
    add("--batch-size", type=positive_int, default=256, help="predictions in a step")
    add("--steps", type=positive_int, default=100, help="optimizer steps")
    add("--lr", type=positive_float, default=0.05, help="learning rate")
    return parser


def parse_args(argv: Sequence[str] | None) -> Config:
    """Options as a Config; ends the process with status 2 where options are wrong."""
    parser = options_parser()
    config = Config(**vars(parser.parse_args(argv)))
    ranks, local_rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if config.hidden % ranks:
        parser.error(f"--hidden: expected a multiple of the number of ranks {ranks}, got {config.hidden}")
    if config.device == "cuda" and torch.cuda.device_count() <= local_rank:
        parser.error(f"--device: expected a GPU for each rank, got {torch.cuda.device_count()} for rank {local_rank}")
    return config


def start_ranks(device: str) -> None:
    """Join the process group that torchrun prepared, or make one of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT), **alone)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    config = parse_args(argv)
    try:
        corpus = split_text(load_text(config.data), config.context)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start_ranks(config.device)
    try:
        # An error aborts the group, so that the other ranks do not wait for this one.
        with tg.PeerGroup(timeout=TIMEOUT) as group:
            status = run(config, corpus, group)
    except FloatingPointError as error:
        print(f"error: rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
