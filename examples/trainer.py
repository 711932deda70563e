"""One training as an object: options, state, steps, and the checkpoint file that continues it bit for bit."""

import contextlib
import math
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import build_model
from text_data import Corpus, all_batches, draw_batches
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

SIZES = ("layers", "hidden", "heads", "seq_len", "dropout")
SCHEDULE = ("batch_size", "micro_batches", "steps", "lr", "clip", "seed", "dtype", "fp8", "device", "data_parallel")
KEYS = frozenset({"settings", "losses", "norms", "model", "fp8", "optimizer", "scheduler", "rng"})
FP8_FEATURES = 16  # layers of fewer inputs or outputs stay as they are; so small ones gain nothing, and show it works


@dataclass(frozen=True)
class Config:
    """The options; `python examples/train_gpt.py --help` explains each."""

    data: Path | None
    device: str
    dtype: str
    fp8: str | None
    layers: int
    hidden: int
    heads: int
    seq_len: int
    batch_size: int
    micro_batches: int
    data_parallel: bool
    shard: str
    steps: int
    lr: float
    clip: float
    dropout: float
    seed: int
    graph: bool
    compare: bool
    plot: Path | None
    checkpoint: Path | None
    save_every: int | None
    resume: Path | None
    stop_after: int | None

    @property
    def last_step(self) -> int:
        return self.stop_after or self.steps

    @property
    def ranks(self) -> int:
        return dist.get_world_size() if self.data_parallel else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.data_parallel else 0

    @property
    def tokens_per_step(self) -> int:
        return self.ranks * self.micro_batches * self.batch_size * self.seq_len

    def settings(self, corpus: Corpus) -> dict[str, Any]:
        """What two runs must have in common for one to continue the other bit for bit."""
        options = {f"--{name.replace('_', '-')}": getattr(self, name) for name in SIZES + SCHEDULE}
        return options | {"SHA-256 of --data": corpus.digest}


def update(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor | None:
    """The optimizer side of a step: clip the gradients, update the parameters, zero the gradients in place.

    A function of its own, so that what it reaches is what it uses: of a method, every attribute that the class's code
    names would be part of what `te_graph.graphed` compares between calls, the growing list of losses included.

    Args:
        optimizer: Its parameters have gradients, which keep their memory.
        max_norm: What the 2-norm of all gradients together is clipped to; 0 clips nothing.

    Returns:
        That norm before clipping, [] fp32; None if nothing is clipped.
    """
    norm = None
    if max_norm:
        import te_graph as tg

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = tg.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    # Gradients made anew would lie elsewhere, and a graph reads the addresses that it was captured with.
    optimizer.zero_grad(set_to_none=False)
    return norm


def update_flat(flat: Any, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor | None:
    """The same over flat parameters, whose gradients are dropped afterwards.

    Args:
        flat: A te_graph.FlatParameters.
        optimizer: Made by it.
        max_norm: As of `update`.

    Returns:
        As of `update`.
    """
    import te_graph as tg

    norm = tg.clip_grad_norm_(flat, max_norm) if max_norm else None
    optimizer.step()
    return norm


class Trainer:
    """Model, optimizer, schedule, losses, norms and data position of one training: what a checkpoint holds."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        sizes = {name: getattr(config, name) for name in SIZES}
        self.model = build_model(config.seed, config.device, getattr(torch, config.dtype), **sizes)
        if config.fp8:
            import te_graph as tg

            tg.convert_to_fp8(self.model, min_features=FP8_FEATURES)
        # A number would be frozen into the graph; of a tensor it has the address.
        lr = torch.tensor(config.lr, device=config.device)
        options = {"lr": lr, "fused": True, "capturable": config.device == "cuda"}
        self.flat: Any = None
        if config.data_parallel:
            import te_graph as tg

            self.flat = tg.FlatParameters(self.model, shard=config.shard)
            self.optimizer = self.flat.optimizer(torch.optim.AdamW, **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        warmup = max(1, config.steps // 10)
        rise = LinearLR(self.optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        fall = CosineAnnealingLR(self.optimizer, T_max=max(1, config.steps - warmup), eta_min=config.lr / 10)
        self.scheduler = SequentialLR(self.optimizer, [rise, fall], milestones=[warmup])
        self.data = corpus.training.to(config.device)  # [bytes] uint8
        self.data_generator = torch.Generator().manual_seed(config.seed)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._update = update if self.flat is None else update_flat
        if self.flat is None:
            # As `update` leaves them, so that the first step, of a resumed run as well, adds to zeros like all others.
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def graph(self) -> None:
        """Let training replay graphs from here on: forward and backward of every layer, captured here, and the
        optimizer side of a step, which captures itself in the second step."""
        import te_graph as tg

        config, layers = self.config, tuple(self.model.layers)
        shape = (config.batch_size, config.seq_len, config.hidden)
        dtype = getattr(torch, config.dtype)
        sample = torch.zeros(shape, dtype=dtype, device=config.device, requires_grad=True)
        with self._region():
            tg.make_graphed_callables(layers, tuple((sample,) for _ in layers))
        self._update = tg.graphed(self._update)

    def _region(self) -> Any:
        """Around forwards: what lets the converted layers multiply in FP8."""
        if not self.config.fp8:
            return contextlib.nullcontext()
        import te_graph as tg

        return tg.fp8_autocast(
            recipe=tg.DelayedScaling(amax_history_len=16) if self.config.fp8 == "delayed" else tg.Float8CurrentScaling()
        )

    def step(self) -> float:
        """One optimizer step over all micro-batches; returns and keeps its loss, and keeps its gradient norm.

        Of what all ranks draw together each takes its own; the loss is the mean of all.

        Raises:
            FloatingPointError: the loss or the gradient norm is infinite or no number.
        """
        config = self.config
        loss = torch.zeros((), device=config.device)
        drawn = config.ranks * config.micro_batches
        micro_batches = draw_batches(self.data, drawn, config.batch_size, config.seq_len, self.data_generator)
        own = list(micro_batches)[config.rank :: config.ranks]
        for number, (tokens, targets) in enumerate(own, 1):
            with self._region():
                micro_loss = self.model(tokens, targets) / config.micro_batches
            with self._no_sync(number < len(own)):
                micro_loss.backward()
            loss += micro_loss.detach()
        norm = self._finish_step(loss)
        self.scheduler.step()  # writes into the tensor that is the learning rate
        # Reading the loss waits for the device, once a step: this is what makes the speed of a single step measurable.
        self.losses.append(loss.item())
        if norm is not None:
            self.norms.append(norm.item())
        for name, values in (("loss", self.losses), ("gradient norm", self.norms)):
            if values and not math.isfinite(values[-1]):
                raise FloatingPointError(f"the {name} of step {len(values)} is {values[-1]}; try a lower --lr")
        return self.losses[-1]

    def _no_sync(self, adds: bool) -> Any:
        """Around a backward: the last one of a step reduces the gradients, the others add to them."""
        return self.flat.no_sync() if self.flat is not None and adds else contextlib.nullcontext()

    def _finish_step(self, loss: Tensor) -> Tensor | None:
        """The optimizer side. `loss`, [], becomes the mean of all ranks; returns the gradient norm, [], or None."""
        if self.flat is None:
            return self._update(self.optimizer, self.config.clip)
        norm = self._update(self.flat, self.optimizer, self.config.clip)
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        loss /= self.config.ranks
        return norm

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss per byte of the held-out text."""
        self.model.eval()
        data = self.corpus.validation.to(self.config.device)  # [bytes] uint8
        total, count = 0.0, 0
        for tokens, targets in all_batches(data, self.config.batch_size, self.config.seq_len):
            with self._region():
                total += self.model(tokens, targets).item() * len(tokens)
            count += len(tokens)
        self.model.train()
        return total / count

    def update_info(self) -> dict[str, Any] | None:
        """How often the optimizer side was captured, replayed and run eagerly; None where it is no graph."""
        return None if self._update in (update, update_flat) else self._update.info()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copies on the CPU of the optimizer's tensors, [...] each, under names made of the parameters' names."""
        named = self.model.named_parameters()
        tensors = {f"{key} of {name}": value for name, p in named for key, value in self.optimizer.state[p].items()}
        tensors["lr"] = self.optimizer.param_groups[0]["lr"]
        return {name: value.cpu().clone() for name, value in tensors.items()}

    def fp8_state(self) -> dict[str, Tensor]:
        """The scales of the FP8 layers, [3, n] each, by their names; nothing without."""
        if not self.config.fp8:
            return {}
        import te_graph as tg

        return tg.fp8_state_dict(self.model)

    def state_dict(self) -> dict[str, Any]:
        rng = {"cpu": torch.get_rng_state(), "data": self.data_generator.get_state()}
        if self.config.device == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        return {
            "settings": self.config.settings(self.corpus),
            "losses": self.losses,
            "norms": self.norms,
            "model": self.model.state_dict(),
            "fp8": self.fp8_state(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": rng,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.config.fp8:
            import te_graph as tg

            tg.load_fp8_state_dict(self.model, state["fp8"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # load_state_dict moves what belongs to parameters only
            group["lr"] = group["lr"].to(self.config.device)
        self.scheduler.load_state_dict(state["scheduler"])
        self.losses, self.norms = list(state["losses"]), list(state["norms"])
        self.data_generator.set_state(state["rng"]["data"])
        torch.set_rng_state(state["rng"]["cpu"])
        if self.config.device == "cuda":
            torch.cuda.set_rng_state(state["rng"]["cuda"])


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (the keys of `KEYS`) to `path`; whatever goes wrong, `path` holds the old file or the new one.

    Args:
        path: File to write or replace; its folder exists.
        state: Tensors and plain Python values, as `torch.load(weights_only=True)` reads them.
    """
    # In the same folder, since os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, tensors on the CPU.

    Args:
        path: File to read.
        settings: What the checkpoint has to agree with: option name to value.

    Raises:
        ValueError: there is no such file, it is damaged or no checkpoint of this example, or its settings differ.
    """
    if not path.is_file():
        raise ValueError(f"--resume: expected a checkpoint, got {path}, which is not a file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"--resume: {path} is cut short or is no checkpoint ({reason})") from error
    missing = KEYS - state.keys() if isinstance(state, dict) else KEYS
    if missing:
        raise ValueError(f"--resume: {path} is no checkpoint of this example: it lacks {', '.join(sorted(missing))}")
    saved = state["settings"]
    differing = [name for name in settings if saved.get(name) != settings[name]]
    if differing:
        listed = "; ".join(f"{name} is {saved.get(name)} there, {settings[name]} here" for name in differing)
        raise ValueError(f"--resume: {path} is of another configuration: {listed}")
    return state
