"""Train a byte-level GPT whose layers and optimizer steps are replayed from graphs.

    python examples/train_gpt.py                    # graphs: CUDA graphs on a GPU, the recorder elsewhere
    python examples/train_gpt.py --no-graph         # the same training, eagerly
    python examples/train_gpt.py --compare          # both; fails unless all numbers are equal bit for bit
    python examples/train_gpt.py --checkpoint a.pt --stop-after 50    # and later: --resume a.pt

Exit status: 0 trained, 1 --compare found a difference or the loss or norm is no number, 2 bad input.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from text_data import Corpus, load_text, split_text
from torch import Tensor
from tqdm import tqdm
from trainer import Config, Trainer, load_checkpoint, save_checkpoint

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one training.

    Attributes:
        losses: since step 1.
        norms: of the gradients before clipping, since step 1; empty if nothing is clipped.
        tokens_per_s: speed of each step made now.
        state: final weights, [...] each, on the CPU.
        optimizer_state: final state of the optimizer, [...] each, on the CPU.
        validation_loss: of the final weights.
        update_info: of the optimizer side, if it is a graph.
    """

    losses: list[float]
    norms: list[float]
    tokens_per_s: list[float]
    state: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]
    validation_loss: float
    update_info: dict[str, Any] | None = None


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def max_norm(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected 0 or a positive number, got {text}")
    return value


def probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, got {text}")
    return value


def make_parser() -> argparse.ArgumentParser:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on text, its layers and optimizer steps replayed from graphs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="text file; without it, the text of Python's pydoc_data.topics")
    add("--device", choices=("cpu", "cuda"), default=default_device, help="where to train")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    add("--layers", type=positive_int, default=4, help="transformer blocks")
    add("--hidden", type=positive_int, default=128, help="width of the model")
    add("--heads", type=positive_int, default=4, help="attention heads; they divide --hidden")
    add("--seq-len", type=positive_int, default=128, help="bytes in a sequence")
    add("--batch-size", type=positive_int, default=8, help="sequences in a micro-batch")
    add("--micro-batches", type=positive_int, default=2, help="micro-batches in a step")
    add("--steps", type=positive_int, default=300, help="steps of the whole schedule")
    add("--lr", type=positive_float, default=1e-3, help="learning rate at its peak")
    add("--clip", type=max_norm, default=1.0, metavar="MAX_NORM", help="norm to clip gradients to; 0: off")
    add("--dropout", type=probability, default=0.0, help="dropout probability")
    add("--seed", type=int, default=0, help="seed of weights, data order and dropout")
    add("--graph", action=argparse.BooleanOptionalAction, default=True, help="replay layers and optimizer")
    add("--compare", action="store_true", help="train eagerly and with graphs; fail unless equal bit for bit")
    add("--plot", type=Path, help="file for a plot of loss and speed (needs matplotlib)")
    add("--checkpoint", type=Path, help="file to save to when training ends")
    add("--save-every", type=positive_int, help="also save to --checkpoint each so many steps")
    add("--resume", type=Path, help="checkpoint to continue from, bit for bit")
    add("--stop-after", type=positive_int, help="end at this step, before --steps, to continue later")
    return parser


def parse_args(argv: Sequence[str] | None) -> Config:
    """Options as a Config; ends the process with status 2 where options are wrong or contradict each other."""
    parser = make_parser()
    config = Config(**vars(parser.parse_args(argv)))
    if config.hidden % config.heads:
        parser.error(f"--heads: expected a divisor of --hidden {config.hidden}, got {config.heads}")
    if config.stop_after is not None and config.stop_after > config.steps:
        parser.error(f"--stop-after: expected at most --steps {config.steps}, got {config.stop_after}")
    if config.save_every is not None and config.checkpoint is None:
        parser.error("--save-every: expected --checkpoint with it, got none")
    if config.compare and (config.checkpoint or config.resume):
        parser.error("--compare: expected neither --checkpoint nor --resume with it")
    if config.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a device of this machine, got cuda, which torch finds none of")
    for option, path in (("--checkpoint", config.checkpoint), ("--plot", config.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"{option}: expected a file name in an existing folder, got {path}")
    if config.plot is not None and config.plot.suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot: expected a name that ends in {', '.join(PLOT_SUFFIXES)}, got {config.plot}")
    return config


def load_inputs(config: Config) -> tuple[Corpus, dict[str, Any] | None]:
    """Read the text and the checkpoint, and see that the optional packages are there, before anything is trained.

    Raises:
        ValueError: text or checkpoint is missing or wrong; a package that the options need is missing.
    """
    corpus = split_text(load_text(config.data), config.seq_len)
    resumed = load_checkpoint(config.resume, config.settings(corpus)) if config.resume else None
    try:
        if config.graph or config.compare or config.clip:
            import te_graph  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--graph, --clip: expected te_graph installed (or --no-graph --clip 0), got: {error}"
        ) from error
    try:
        if config.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot: expected matplotlib installed (pip install matplotlib), got: {error}") from error
    return corpus, resumed


def train(config: Config, corpus: Corpus, graph: bool, resumed: dict[str, Any] | None = None) -> TrainResult:
    """Train to `config.last_step`, saving checkpoints on the way.

    Args:
        config: The options.
        corpus: The text.
        graph: Replay layers and optimizer side from graphs instead of running them eagerly.
        resumed: Checkpoint to continue from; None starts anew from `config.seed`.
    """
    trainer = Trainer(config, corpus)
    if resumed is not None:
        trainer.load_state_dict(resumed)
    if graph:
        trainer.graph()
    name = "graph" if graph else "eager"
    first = len(trainer.losses)
    speeds: list[float] = []
    # disable=None: a bar on a terminal only; the lines below reach a log file too.
    with tqdm(total=config.last_step, initial=first, desc=name, unit="step", disable=None) as bar:
        for step in range(first + 1, config.last_step + 1):
            start = time.perf_counter()
            loss = trainer.step()
            speeds.append(config.tokens_per_step / (time.perf_counter() - start))
            bar.update()
            norm = f", norm {trainer.norms[-1]:.3f}" if trainer.norms else ""
            progress = f"loss {loss:.3f}{norm}, {speeds[-1]:,.0f} tokens/s"
            bar.set_postfix_str(progress, refresh=False)
            if step % max(1, config.steps // 10) == 0:
                bar.write(f"{name} step {step}/{config.steps}: {progress}")
            if config.save_every and step % config.save_every == 0:
                save_checkpoint(config.checkpoint, trainer.state_dict())
    if config.checkpoint:
        save_checkpoint(config.checkpoint, trainer.state_dict())
    state = {key: value.detach().cpu().clone() for key, value in trainer.model.state_dict().items()}
    return TrainResult(
        losses=trainer.losses,
        norms=trainer.norms,
        tokens_per_s=speeds,
        state=state,
        optimizer_state=trainer.optimizer_state(),
        validation_loss=trainer.validation_loss(),
        update_info=trainer.update_info(),
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Make eager execution itself repeat bit for bit, and undo that afterwards."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


def find_differences(eager: TrainResult, graph: TrainResult) -> list[str]:
    """Where two trainings are not equal bit for bit, in words; empty where they are."""
    differences = []
    for what, ours, theirs in (
        ("loss", eager.losses, graph.losses),
        ("gradient norm", eager.norms, graph.norms),
    ):
        # The notation of hex() is exact and tells -0.0 from 0.0.
        steps = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.hex() != b.hex()]
        if steps:
            i = steps[0]
            differences.append(f"{what} of step {i + 1} is {ours[i]!r} in eager, {theirs[i]!r} in graph")
    for what, mine, others in (
        ("parameters", eager.state, graph.state),
        ("tensors of the optimizer", eager.optimizer_state, graph.optimizer_state),
    ):
        names = [name for name in mine if not bits_equal(mine[name], others[name])]
        if names:
            differences.append(f"{len(names)} of {len(mine)} {what}, the first of them {names[0]}")
    return differences


def bits_equal(a: Tensor, b: Tensor) -> bool:  # a, b: any shape, on the CPU
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    pair = [tensor.flatten().clone(memory_format=torch.contiguous_format) for tensor in (a, b)]  # whatever its strides
    return torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8))


def print_results(results: dict[str, TrainResult]) -> None:
    columns = ("first loss", "last loss", "validation", "last norm", "tokens/s")
    print(f"\n{'run':<8}{'steps':>8}{''.join(f'{column:>12}' for column in columns)}")
    for name, result in results.items():
        # The median leaves out the first step, which allocates, and what else the machine did meanwhile.
        speed = f"{statistics.median(result.tokens_per_s):,.0f}" if result.tokens_per_s else "-"
        losses = f"{result.losses[0]:>12.4f}{result.losses[-1]:>12.4f}{result.validation_loss:>12.4f}"
        norm = f"{result.norms[-1]:.4f}" if result.norms else "-"
        print(f"{name:<8}{len(result.losses):>8}{losses}{norm:>12}{speed:>12}")
    for name, result in results.items():
        if (info := result.update_info) is not None:
            eager = sum(info["eager_calls"].values())
            print(f"{name}: optimizer side: {info['forward_replays']} replays, {eager} eager calls")


def save_plot(path: Path, results: dict[str, TrainResult]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, speed_axes = figure.subplots(1, 2)
    for name, result in results.items():
        steps = range(1, len(result.losses) + 1)
        loss_axes.plot(steps, result.losses, label=name)
        # A resumed run has no speeds for the steps made before it.
        speed_axes.plot(steps[len(steps) - len(result.tokens_per_s) :], result.tokens_per_s, label=name)
    loss_axes.set(xlabel="step", ylabel="loss [nats per byte]")
    speed_axes.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    loss_axes.legend()
    figure.savefig(path)
    print(f"plot: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    config = parse_args(argv)
    try:
        corpus, resumed = load_inputs(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if config.compare:
            with deterministic():
                results = {"eager": train(config, corpus, graph=False), "graph": train(config, corpus, graph=True)}
        else:
            results = {"graph" if config.graph else "eager": train(config, corpus, config.graph, resumed)}
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_results(results)
    if config.plot:
        save_plot(config.plot, results)
    if config.compare:
        differences = find_differences(results["eager"], results["graph"])
        if differences:
            print(f"error: graph and eager differ: {'; '.join(differences)}", file=sys.stderr)
            return 1
        print(
            "losses, gradient norms, final parameters and optimizer state are equal bit for bit "
            "(speeds are those of deterministic algorithms)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
