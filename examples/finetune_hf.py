"""Train a Llama, GPT-2 or Qwen of Hugging Face whose layers are replayed from graphs, by a plain loop or by `Trainer`.

    python examples/finetune_hf.py                           # a Llama; CUDA graphs on a GPU, the recorder elsewhere
    python examples/finetune_hf.py --model gpt2 --trainer hf # a GPT-2, by the Trainer of transformers
    python examples/finetune_hf.py --compare                 # eagerly, too; fails unless equal bit for bit
    python examples/finetune_hf.py --trainer hf --output a --save-every 20    # later: --resume a/checkpoint-20

The models are made from a configuration, with bytes for tokens: nothing is downloaded.

Exit status: 0 trained, 1 --compare found a difference or the loss is no number, 2 bad input.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experiment import TrainResult, check_device, make_parser, positive_float, positive_int, tell_differences
from hf_models import MODELS, Sequences, build_model, make_config
from text_data import Corpus, load_text, split_text
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainingArguments

import te_graph as tg
from te_graph.testing import deterministic

MAX_NORM = 1.0  # of the gradients, as TrainingArguments has it


@dataclass(frozen=True)
class Config:
    """The options; `python examples/finetune_hf.py --help` explains each."""

    data: Path | None
    device: str
    model: str
    trainer: str
    layers: int
    hidden: int
    heads: int
    seq_len: int
    batch_size: int
    micro_batches: int
    steps: int
    lr: float
    bf16: bool
    seed: int
    graph: bool
    compare: bool
    output: Path | None
    save_every: int | None
    resume: Path | None


def options_parser() -> argparse.ArgumentParser:
    parser = make_parser("Train a Llama, GPT-2 or Qwen of Hugging Face on text, its layers replayed from graphs.")
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama", help="what is trained, from random weights")
    add("--trainer", choices=("loop", "hf"), default="loop", help="what trains: a loop, or the Trainer of transformers")
    add("--layers", type=positive_int, default=4, help="transformer layers")
    add("--hidden", type=positive_int, default=64, help="width of the model")
    add("--heads", type=positive_int, default=4, help="attention heads; twice as many divide --hidden")
    add("--seq-len", type=positive_int, default=64, help="bytes in a sequence")
    add("--batch-size", type=positive_int, default=4, help="sequences in a micro-batch")
    add("--micro-batches", type=positive_int, default=2, help="micro-batches whose gradients a step accumulates")
    add("--steps", type=positive_int, default=40, help="optimizer steps")
    add("--lr", type=positive_float, default=3e-3, help="learning rate; Trainer lets it fall to 0")
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast to bfloat16")
    add("--output", type=Path, help="folder where --trainer hf leaves checkpoints")
    add("--save-every", type=positive_int, help="leave a checkpoint in --output each so many steps")
    add("--resume", type=Path, help="checkpoint that --trainer hf continues from, bit for bit")
    return parser


def parse_args(argv: Sequence[str] | None) -> Config:
    """Options as a Config; ends the process with status 2 where options are wrong or contradict each other."""
    parser = options_parser()
    config = Config(**vars(parser.parse_args(argv)))
    if config.hidden % (2 * config.heads):
        parser.error(f"--heads: expected twice of it to divide --hidden {config.hidden}, got {config.heads}")
    if (config.save_every is None) is not (config.output is None):
        parser.error("--save-every, --output: expected both or neither, got one")
    if config.trainer != "hf" and (config.output or config.resume):
        parser.error("--output, --resume: expected --trainer hf with them, got loop")
    if config.compare and config.output:
        parser.error("--compare: expected no --output with it")
    if config.resume and not (config.resume / "trainer_state.json").is_file():
        parser.error(f"--resume: expected a checkpoint of Trainer, got {config.resume}")
    check_device(parser, config.device)
    return config


def make_model(config: Config) -> nn.Module:
    sizes = {name: getattr(config, name) for name in ("layers", "hidden", "heads", "seq_len")}
    return build_model(make_config(config.model, **sizes), config.seed)


def train_by_loop(config: Config, corpus: Corpus, graph: bool) -> TrainResult:
    """The plain loop: autocast, accumulation, clipping, AdamW."""
    model = make_model(config).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr)
    batches = draw_batches(config, corpus)
    if graph:
        with autocast(config):
            print(tg.graph_layers(model, next(draw_batches(config, corpus))))
    losses = []
    for _ in tqdm(range(config.steps), unit="step", disable=None):
        loss = torch.zeros((), device=config.device)
        for _ in range(config.micro_batches):
            with autocast(config):
                micro_loss = model(**next(batches)).loss / config.micro_batches
            micro_loss.backward()
            loss += micro_loss.detach()
        tg.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainResult(losses, left_by(model, optimizer))


def autocast(config: Config) -> torch.autocast:
    return torch.autocast(config.device, torch.bfloat16, enabled=config.bf16)


def draw_batches(config: Config, corpus: Corpus) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in an order that depends on the seed alone: [batch, seq] int64 each, on the device."""
    generator = torch.Generator().manual_seed(config.seed)
    data = Sequences(corpus.training, config.seq_len)
    loader = DataLoader(data, config.batch_size, shuffle=True, drop_last=True, generator=generator)
    while True:
        for batch in loader:
            yield {name: tensor.to(config.device) for name, tensor in batch.items()}


class GraphedTrainer(Trainer):
    """A Trainer that captures the layers of its model by its first step. By then it has moved the model to its device,
    wrapped it (autocast, DistributedDataParallel) and read the checkpoint that it continues from."""

    layers: Any = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        step = partial(super().training_step, model, *args, **kwargs)
        if self.layers is None:
            model.train()
            self.layers = tg.graph_layers(model, step)
            print(self.layers)
        return step()


def train_by_trainer(config: Config, corpus: Corpus, graph: bool) -> TrainResult:
    """The Trainer of transformers, with its own schedule, clipping and accumulation, from a checkpoint or anew."""
    with ExitStack() as stack:
        arguments = TrainingArguments(
            output_dir=str(config.output or stack.enter_context(tempfile.TemporaryDirectory())),
            use_cpu=config.device == "cpu",
            bf16=config.bf16,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=config.micro_batches,
            max_grad_norm=MAX_NORM,
            learning_rate=config.lr,
            max_steps=config.steps,
            seed=config.seed,
            save_strategy="steps" if config.save_every else "no",
            save_steps=config.save_every or config.steps,
            logging_steps=1,
            report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
        )
        # Of several GPUs this process uses one: for more, start it by torchrun, not DataParallel, which copies layers.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        kind = GraphedTrainer if graph else Trainer
        trainer = kind(make_model(config), arguments, train_dataset=Sequences(corpus.training, config.seq_len))
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(config.resume) if config.resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return TrainResult(losses, left_by(trainer.model, trainer.optimizer))


def left_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies on the CPU of the parameters and of what the optimizer keeps of each, [...] each."""
    state = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        state |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def train(config: Config, corpus: Corpus, graph: bool) -> TrainResult:
    """Train eagerly or with graphs, and say how it went.

    Raises:
        FloatingPointError: a loss is infinite or no number.
    """
    name, start = "graph" if graph else "eager", time.perf_counter()
    by = train_by_trainer if config.trainer == "hf" else train_by_loop
    result = by(config, corpus, graph)
    for step, loss in enumerate(result.losses, start=1):
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step} is {loss}; try a lower --lr")
    seconds = time.perf_counter() - start
    first, last = result.losses[0], result.losses[-1]
    print(f"{name}: {len(result.losses)} steps, loss {first:.4f} -> {last:.4f}, {seconds:.1f} s")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    config = parse_args(argv)
    try:
        corpus = split_text(load_text(config.data), config.seq_len)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if not config.compare:
            train(config, corpus, config.graph)
            return 0
        with deterministic():
            eager, graph = (train(config, corpus, graph) for graph in (False, True))
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if difference := tell_differences((graph.losses, graph.state), (eager.losses, eager.state)):
        print(f"error: graph and eager differ: {difference}", file=sys.stderr)
        return 1
    print("losses, final parameters and optimizer state are equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
