"""Train a byte-level MLP whose matrix products are in FP8, with casts and scale updates inside the graph.

    python examples/fp8_mlp.py                      # graphs: CUDA graphs on a GPU, the recorder elsewhere
    python examples/fp8_mlp.py --no-graph           # the same training, eagerly
    python examples/fp8_mlp.py --compare            # both; fails unless all numbers are equal bit for bit
    python examples/fp8_mlp.py --plot loss.png      # the loss beside that of the same training in bf16

Exit status: 0 trained, 1 --compare found a difference or the loss is no number, 2 bad input.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from experiment import (
    TrainResult,
    check_device,
    check_plot,
    make_parser,
    positive_float,
    positive_int,
    tell_differences,
)
from fp8_linear import MECHANISMS, MULTIPLE, Fp8Layers, MicroBatches
from text_data import VOCABULARY, Corpus, draw_batches, load_text, split_text
from torch import Tensor, nn
from tqdm import tqdm

from te_graph.testing import deterministic


@dataclass(frozen=True)
class Config:
    """The options; `python examples/fp8_mlp.py --help` explains each."""

    data: Path | None
    device: str
    context: int
    embedding: int
    hidden: int
    batch_size: int
    microbatches: int
    steps: int
    lr: float
    history_length: int
    mechanism: str
    seed: int
    graph: bool
    compare: bool
    plot: Path | None


class ByteMLP(nn.Module):
    """Predicts a byte from those before it: their embeddings side by side, then three linear layers.

    Args:
        embedding: [256, width].
        layers: [batch, context * width] -> [batch, 256].
    """

    def __init__(self, embedding: nn.Embedding, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats.

        Args:
            tokens: [batch, context] int64, values below 256.
            targets: [batch] int64, the bytes that follow.

        Returns:
            Scalar fp32 loss.
        """
        logits = self.layers(self.embedding(tokens).flatten(1))  # [batch, 256]
        return F.cross_entropy(logits.float(), targets)


def build_model(config: Config, precision: str) -> ByteMLP:
    """Make a model in "fp8" or "bf16"; both begin with the same bf16 weights, which depend on `config.seed` alone."""
    torch.manual_seed(config.seed)
    sizes = (config.context * config.embedding, config.hidden, config.hidden, VOCABULARY)
    placed = {"device": config.device, "dtype": torch.bfloat16}
    embedding = nn.Embedding(VOCABULARY, config.embedding).to(**placed)
    linears = [nn.Linear(sizes[i], sizes[i + 1]).to(**placed) for i in range(len(sizes) - 1)]
    if precision == "fp8":
        return ByteMLP(embedding, Fp8Layers(linears, config.history_length, config.mechanism))
    first, second, last = linears
    return ByteMLP(embedding, nn.Sequential(first, nn.GELU(), second, nn.GELU(), last))


class Trainer:
    """Model, optimizer and data position of one training."""

    def __init__(self, config: Config, corpus: Corpus, precision: str, graph: bool) -> None:
        self.config = config
        self.model = build_model(config, precision)
        # On a GPU the optimizer takes one launch; such a step goes unseen by the weights' version counters.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, fused=config.device == "cuda")
        self.data = corpus.training.to(config.device)  # [bytes] uint8
        self.data_generator = torch.Generator().manual_seed(config.seed)
        self._call = self._call_bf16
        if precision == "fp8":
            sample = {"dtype": torch.int64, "device": config.device}
            tokens = torch.zeros(config.batch_size, config.context, **sample)
            targets = torch.zeros(config.batch_size, **sample)
            self._call = MicroBatches(self.model, self.model.layers, (tokens, targets) if graph else None)

    def _call_bf16(self, tokens: Tensor, targets: Tensor, is_first: bool) -> Tensor:
        return self.model(tokens, targets)

    def step(self) -> float:
        """One optimizer step over all micro-batches; returns its loss.

        Raises:
            FloatingPointError: the loss is infinite or no number.
        """
        config = self.config
        loss = torch.zeros((), device=config.device)
        batches = draw_batches(self.data, config.microbatches, config.batch_size, config.context, self.data_generator)
        for number, (tokens, following) in enumerate(batches):
            targets = following[:, -1].contiguous()  # [batch]
            micro_loss = self._call(tokens, targets, is_first=number == 0) / config.microbatches
            micro_loss.backward()
            loss += micro_loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not math.isfinite(value := loss.item()):
            raise FloatingPointError(f"the loss is {value}; try a lower --lr")
        return value

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of all that a training leaves, [...] each, by name."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{key} of {name}": value for key, value in self.optimizer.state[parameter].items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def train(config: Config, corpus: Corpus, precision: str, graph: bool) -> TrainResult:
    """Train from `config.seed` on, in "fp8" or "bf16"; with `graph`, which is for FP8, replayed from graphs."""
    trainer = Trainer(config, corpus, precision, graph)
    name = run_name(precision, graph)
    losses: list[float] = []
    # disable=None: a bar on a terminal only; the lines below reach a log file too.
    with tqdm(total=config.steps, desc=name, unit="step", disable=None) as bar:
        for step in range(1, config.steps + 1):
            losses.append(trainer.step())
            bar.update()
            if step % max(1, config.steps // 10) == 0:
                bar.write(f"{name} step {step}/{config.steps}: loss {losses[-1]:.3f}")
    return TrainResult(losses, trainer.state())


def run_name(precision: str, graph: bool) -> str:
    return f"{precision} {'graph' if graph else 'eager'}"


def save_plot(path: Path, results: dict[str, TrainResult]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        axes.plot(range(1, len(result.losses) + 1), result.losses, label=name, alpha=0.7)
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.legend()
    figure.savefig(path)
    print(f"plot: {path}")


def size(text: str) -> int:
    value = positive_int(text)
    if value % MULTIPLE:
        raise argparse.ArgumentTypeError(f"expected a multiple of {MULTIPLE}, got {text}")
    return value


def options_parser() -> argparse.ArgumentParser:
    parser = make_parser("Train a byte-level MLP on text in FP8, casts and scale updates replayed from graphs.")
    add = parser.add_argument
    add("--context", type=positive_int, default=8, help="bytes that the next one is predicted from")
    add("--embedding", type=size, default=32, help="width of a byte's embedding")
    add("--hidden", type=size, default=256, help="width of the model")
    add("--batch-size", type=size, default=256, help="predictions in a micro-batch")
    add("--microbatches", type=positive_int, default=4, help="micro-batches in a step")
    add("--steps", type=positive_int, default=300, help="optimizer steps")
    add("--lr", type=positive_float, default=1e-3, help="learning rate")
    add("--history-length", type=positive_int, default=16, help="micro-batches that a scale looks back on")
    add("--mechanism", choices=MECHANISMS, default="flag", help="how graphs learn of first micro-batches")
    add("--plot", type=Path, help="file for a plot of the loss beside that of bf16 (needs matplotlib)")
    return parser


def parse_args(argv: Sequence[str] | None) -> Config:
    """Options as a Config; ends the process with status 2 where options are wrong."""
    parser = options_parser()
    config = Config(**vars(parser.parse_args(argv)))
    check_device(parser, config.device)
    if config.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        parser.error("--device: expected a GPU that multiplies in FP8, of compute capability 8.9 or more")
    check_plot(parser, config.plot)
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    config = parse_args(argv)
    runs = [{"precision": "fp8", "graph": graph} for graph in ([False, True] if config.compare else [config.graph])]
    if config.plot:
        runs.append({"precision": "bf16", "graph": False})
    try:
        corpus = split_text(load_text(config.data), config.context)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = {}
    try:
        with deterministic() if config.compare else nullcontext():
            for run in runs:
                results[run_name(**run)] = train(config, corpus, **run)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{'run':<12}{'steps':>8}{'first loss':>12}{'last loss':>12}")
    for name, result in results.items():
        print(f"{name:<12}{len(result.losses):>8}{result.losses[0]:>12.4f}{result.losses[-1]:>12.4f}")
    if config.plot:
        save_plot(config.plot, results)
    if config.compare:
        graph, eager = (vars(results[name]) for name in ("fp8 graph", "fp8 eager"))
        if difference := tell_differences(graph, eager):
            print(f"error: graph and eager differ: {difference}", file=sys.stderr)
            return 1
        print("losses, parameters, FP8 copies, scales, histories and optimizer state are equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
