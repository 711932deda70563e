"""Train a byte-level GPT whose layers and optimizer steps are replayed from graphs.

    python examples/train_gpt.py                    # graphs: CUDA graphs on a GPU, the recorder elsewhere
    python examples/train_gpt.py --no-graph         # the same training, eagerly
    python examples/train_gpt.py --compare          # both; fails unless all numbers are equal bit for bit
    python examples/train_gpt.py --dtype bfloat16 --fp8 delayed --plot a.png    # linear layers in FP8, beside bf16
    python examples/train_gpt.py --checkpoint a.pt --stop-after 50    # and later: --resume a.pt
    torchrun --nproc-per-node 2 examples/train_gpt.py --data-parallel --shard optimizer    # each rank its own batches

Exit status: 0 trained, 1 --compare found a difference or the loss or norm is no number, 2 bad input.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experiment import check_device, check_file, check_plot, make_parser, positive_float, positive_int, tell_differences
from text_data import Corpus, load_text, split_text
from torch import Tensor
from tqdm import tqdm
from trainer import Config, Trainer, load_checkpoint, save_checkpoint


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


def options_parser() -> argparse.ArgumentParser:
    parser = make_parser("Train a byte-level GPT on text, its layers and optimizer steps replayed from graphs.")
    add = parser.add_argument
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    add("--fp8", choices=("delayed", "current"), help="let linear layers multiply in FP8, by this scaling")
    add("--layers", type=positive_int, default=4, help="transformer blocks")
    add("--hidden", type=positive_int, default=128, help="width of the model")
    add("--heads", type=positive_int, default=4, help="attention heads; they divide --hidden")
    add("--seq-len", type=positive_int, default=128, help="bytes in a sequence")
    add("--batch-size", type=positive_int, default=8, help="sequences in a micro-batch")
    add("--micro-batches", type=positive_int, default=2, help="micro-batches in a step")
    add("--data-parallel", action="store_true", help="train on the ranks of torchrun together, each on its own batches")
    add("--shard", choices=("none", "optimizer"), default="none", help="what ranks share out with --data-parallel")
    add("--steps", type=positive_int, default=300, help="steps of the whole schedule")
    add("--lr", type=positive_float, default=1e-3, help="learning rate at its peak")
    add("--clip", type=max_norm, default=1.0, metavar="MAX_NORM", help="norm to clip gradients to; 0: off")
    add("--dropout", type=probability, default=0.0, help="dropout probability")
    add("--plot", type=Path, help="file for a plot of loss and speed (needs matplotlib)")
    add("--checkpoint", type=Path, help="file to save to when training ends")
    add("--save-every", type=positive_int, help="also save to --checkpoint each so many steps")
    add("--resume", type=Path, help="checkpoint to continue from, bit for bit")
    add("--stop-after", type=positive_int, help="end at this step, before --steps, to continue later")
    return parser


def parse_args(argv: Sequence[str] | None) -> Config:
    """Options as a Config; ends the process with status 2 where options are wrong or contradict each other."""
    parser = options_parser()
    config = Config(**vars(parser.parse_args(argv)))
    if config.hidden % config.heads:
        parser.error(f"--heads: expected a divisor of --hidden {config.hidden}, got {config.heads}")
    if config.stop_after is not None and config.stop_after > config.steps:
        parser.error(f"--stop-after: expected at most --steps {config.steps}, got {config.stop_after}")
    if config.save_every is not None and config.checkpoint is None:
        parser.error("--save-every: expected --checkpoint with it, got none")
    if config.compare and (config.checkpoint or config.resume):
        parser.error("--compare: expected neither --checkpoint nor --resume with it")
    if config.shard != "none" and not config.data_parallel:
        parser.error("--shard: expected --data-parallel with it")
    check_device(parser, config.device)
    check_file(parser, "--checkpoint", config.checkpoint)
    check_plot(parser, config.plot)
    return config


def load_inputs(config: Config) -> tuple[Corpus, dict[str, Any] | None]:
    """Read the text and the checkpoint, and see that te_graph is there if it is needed, before anything is trained.

    Raises:
        ValueError: text or checkpoint is missing or wrong, or te_graph is missing.
    """
    corpus = split_text(load_text(config.data), config.seq_len)
    resumed = load_checkpoint(config.resume, config.settings(corpus)) if config.resume else None
    try:
        if config.graph or config.compare or config.clip or config.fp8 or config.data_parallel:
            import te_graph  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--graph, --clip, --fp8: expected te_graph installed (or --no-graph --clip 0), got: {error}"
        ) from error
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
    name, is_first = "graph" if graph else "eager", config.rank == 0
    first = len(trainer.losses)
    speeds: list[float] = []
    # disable=None: a bar on a terminal only; the lines below reach a log file too.
    with tqdm(total=config.last_step, initial=first, desc=name, unit="step", disable=None if is_first else True) as bar:
        for step in range(first + 1, config.last_step + 1):
            start = time.perf_counter()
            loss = trainer.step()
            speeds.append(config.tokens_per_step / (time.perf_counter() - start))
            bar.update()
            norm = f", norm {trainer.norms[-1]:.3f}" if trainer.norms else ""
            progress = f"loss {loss:.3f}{norm}, {speeds[-1]:,.0f} tokens/s"
            bar.set_postfix_str(progress, refresh=False)
            if step % max(1, config.steps // 10) == 0 and is_first:
                bar.write(f"{name} step {step}/{config.steps}: {progress}")
            if config.save_every and step % config.save_every == 0:
                save(config, trainer)
    if config.checkpoint:
        save(config, trainer)
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


def save(config: Config, trainer: Trainer) -> None:
    """Save what all ranks have, by the first of them."""
    state = trainer.state_dict()
    if config.rank == 0:
        save_checkpoint(config.checkpoint, state)


def compared(result: TrainResult) -> dict[str, Any]:
    """What --compare wants to be equal bit for bit."""
    return {name: getattr(result, name) for name in ("losses", "norms", "state", "optimizer_state")}


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
    with ranks_joined(config):
        return run(config)


@contextlib.contextmanager
def ranks_joined(config: Config) -> Iterator[None]:
    """Within the process group that torchrun prepared, or one of this process alone; none without --data-parallel."""
    if not config.data_parallel or dist.is_initialized():
        yield
        return
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo", **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(config: Config) -> int:
    """Train as `config` says; returns the exit status."""
    try:
        corpus, resumed = load_inputs(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if config.compare:
            from te_graph.testing import deterministic

            with deterministic():
                results = {"eager": train(config, corpus, graph=False), "graph": train(config, corpus, graph=True)}
        else:
            is_beside = config.fp8 and config.plot and resumed is None
            name = f"FP8, {config.fp8}" if is_beside else "graph" if config.graph else "eager"
            results = {name: train(config, corpus, config.graph, resumed)}
            if is_beside:
                plain = dataclasses.replace(config, fp8=None, checkpoint=None)
                results[config.dtype] = train(plain, corpus, config.graph)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if config.rank == 0:
        print_results(results)
    if config.plot and config.rank == 0:
        save_plot(config.plot, results)
    if config.compare:
        graph, eager = (compared(results[name]) for name in ("graph", "eager"))
        if difference := tell_differences(graph, eager):
            print(f"error: graph and eager differ: {difference}", file=sys.stderr)
            return 1
        if config.rank == 0:
            print(
                "losses, gradient norms, final parameters and optimizer state are equal bit for bit "
                "(speeds are those of deterministic algorithms)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
