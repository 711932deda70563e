"""A GPT of te_graph's transformer layers in training: bf16, or FP8 by one of the recipes, eagerly or from graphs."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from lib.timing import synchronizer
from torch import Tensor, nn
from torch.nn import functional as F

from cases.fp8.corpus import Corpus, read_corpus
from cases.fp8.layers import region_of

VOCABULARY = 256  # a token is a byte
RECIPES = {"bf16": None, "delayed": "delayed", "current": "current"}
MODES = ("graphed", "eager")


@dataclass(frozen=True)
class Settings:
    """Of a training.

    Attributes:
        layers, hidden, heads: of the model.
        length: tokens of a sequence.
        sequences: of a micro-batch; micro_batches: of a step.
        steps: of which the last ``validated`` are each followed by a validation, earlier ones where ``validated``
            divides their number.
        held_out: sequences of a validation, a multiple of those of a step.
        least_bytes: of files that are read.
        lr: its peak, behind an eighth of the steps.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    sequences: int
    micro_batches: int
    steps: int
    validated: int
    held_out: int
    least_bytes: int
    lr: float

    @property
    def sequences_of_step(self) -> int:
        return self.sequences * self.micro_batches

    @property
    def label(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.steps} steps of {self.micro_batches} micro-batches of "
            f"{self.sequences} x {self.length} bytes"
        )

    def corpus(self) -> Corpus:
        return read_corpus(self.steps * self.sequences_of_step, self.held_out, self.length + 1, self.least_bytes)


FULL = Settings(
    layers=8,
    hidden=1024,
    heads=16,
    length=512,
    sequences=9,
    micro_batches=2,
    steps=1024,
    validated=64,
    held_out=72,
    least_bytes=10_000_000,
    lr=3e-4,
)
SMALL = Settings(
    layers=2,
    hidden=64,
    heads=4,
    length=32,
    sequences=2,
    micro_batches=2,
    steps=8,
    validated=2,
    held_out=4,
    least_bytes=0,
    lr=3e-3,
)


class GPT(nn.Module):
    """Embeddings, transformer layers, norm, head; parameters in fp32, activations in bf16.

    Args:
        settings: Of the training.
        device: Of the parameters.
    """

    def __init__(self, settings: Settings, device: str) -> None:
        import te_graph as tg

        super().__init__()
        hidden = settings.hidden
        self.bytes = nn.Embedding(VOCABULARY, hidden, device=device)
        self.positions = nn.Embedding(settings.length, hidden, device=device)
        self.layers = nn.ModuleList(
            tg.TransformerLayer(
                hidden,
                4 * hidden,
                settings.heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                device=device,
            )
            for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(hidden, device=device)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, device=device)
        # 2 * layers results are added up: so their sum is as large whatever their number.
        std_of_added = 0.02 / math.sqrt(2 * settings.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_added = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=std_of_added if is_added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean cross-entropy of each next byte of windows [sequences, length + 1] int64; a scalar, fp32."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        x = (self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]).bfloat16()  # [sequences, length, hidden]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def train(settings: Settings, recipe: str, seed: int, mode: str, device: str) -> dict[str, Any]:
    """One training, for a process of its own; what a row of results holds of it.

    Args:
        settings: Of the training.
        recipe: One of `RECIPES`.
        seed: Of the weights and of the order of the data.
        mode: One of `MODES`.
        device: "cuda" or "cpu".

    Raises:
        RuntimeError: layers that were captured were not replayed.
    """
    from te_graph.testing import deterministic

    with deterministic():
        return Training(settings, recipe, seed, mode, device).run()


class Training:
    """The same, with what it consists of."""

    def __init__(self, settings: Settings, recipe: str, seed: int, mode: str, device: str) -> None:
        torch.manual_seed(seed)
        self.settings, self.mode, self.device = settings, mode, device
        self.region = region_of(RECIPES[recipe])
        self.corpus = settings.corpus()
        self.model = GPT(settings, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        order = torch.randperm(len(self.corpus.training), generator=torch.Generator().manual_seed(seed))
        self.training = self.corpus.training[order].to(device).split(settings.sequences)  # of micro-batches
        self.validation = self.corpus.validation.to(device).split(settings.sequences_of_step)

    def run(self) -> dict[str, Any]:
        settings, synchronize = self.settings, synchronizer(self.device)
        replays = self._graph() if self.mode == "graphed" else None
        losses, validations = [], {}
        synchronize()
        start = perf_counter()
        for number in range(1, settings.steps + 1):
            losses.append(self._step(number))
            if number % settings.validated == 0 or number > settings.steps - settings.validated:
                validations[number] = self._validate()
        synchronize()
        seconds = perf_counter() - start
        if replays is not None and not replays():
            raise RuntimeError("te_graph: expected replays of all layers, got calls that ran eagerly")
        found = torch.stack([*losses, *validations.values()]).cpu()  # [steps + validations] fp32
        curve, last = found[: settings.steps], found[-settings.validated :]
        return {
            "validation_loss": last.double().mean().item(),
            "training_loss": [round(part.mean().item(), 4) for part in curve.split(settings.validated)],
            "validations": [
                [step, round(loss.item(), 4)] for step, loss in zip(validations, found[settings.steps :], strict=True)
            ],
            "losses_sha256": hashlib.sha256(found.numpy().tobytes()).hexdigest(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": round(seconds, 2),
            "corpus": {"files": self.corpus.files, "bytes": self.corpus.size, "sha256": self.corpus.digest},
        }

    def _loss(self, windows: Tensor) -> Tensor:
        """Of windows [sequences, length + 1] uint8."""
        with self.region(), torch.autocast(self.device, torch.bfloat16):
            return self.model(windows.long())

    def _step(self, number: int) -> Tensor:
        """The mean loss, [] fp32, of the micro-batches of a step, counted from 1."""
        import te_graph as tg

        count = self.settings.micro_batches
        losses = []
        for windows in self.training[(number - 1) * count : number * count]:
            loss = self._loss(windows) / count
            loss.backward()
            losses.append(loss.detach())
        tg.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self._part_of_lr(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()

    def _part_of_lr(self, number: int) -> float:
        """A rise, and half a wave down to a tenth."""
        steps = self.settings.steps
        rise = steps // 8
        if number <= rise:
            return number / rise
        return 0.55 + 0.45 * math.cos(math.pi * (number - rise) / (steps - rise))

    @torch.no_grad()
    def _validate(self) -> Tensor:
        """The mean loss, [] fp32, of what is held out."""
        return torch.stack([self._loss(windows) for windows in self.validation]).mean()

    def _graph(self) -> Callable[[], bool]:
        """Capture the layers; tells later whether all their trainings were replays."""
        import te_graph as tg

        tg.graph_layers(
            self.model,
            lambda: self._loss(self.training[0]).backward(),
            layers=tg.TransformerLayer,
            show_progress=False,
        )
        expected = self.settings.steps * self.settings.micro_batches
        return lambda: all(layer.te_graph.info()["backward_replays"] == expected for layer in self.model.layers)
