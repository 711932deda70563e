"""The models of random FP8 programs (fp8_mixed_programs.py): blocks of several kinds, and what trains and captures
them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import te_graph as tg

WIDTH = 32
RECIPES = (
    tg.DelayedScaling(amax_history_len=3),
    tg.Float8CurrentScaling(),
    tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
)


class Block(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH].

    Args:
        traits: words of what is special about it, and of the checkpoints around its layers, outermost first: recompute,
            or reentrant.
    """

    def __init__(self, traits: str) -> None:
        super().__init__()
        self.traits = traits.split()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias="no_bias" not in self.traits)
        self.down = Conv1D(WIDTH, WIDTH) if "conv" in self.traits else nn.Linear(WIDTH, WIDTH)
        if "conv" in self.traits:
            nn.init.normal_(self.down.weight, std=0.2)
        if "tied" in self.traits:
            self.down.weight = self.up.weight
        if "frozen" in self.traits or "lora" in self.traits:
            self.up.weight.requires_grad_(False)
        if "lora" in self.traits:
            self.first, self.second = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
            nn.init.zeros_(self.second.weight)
        if "mlp" in self.traits:
            self.mlp = tg.LayerNormMLP(WIDTH, 48, activation="swiglu", normalization="RMSNorm", bias=False)
        if "residual" in self.traits:
            self.fused = tg.LayerNormLinear(WIDTH, WIDTH)
        if "layer" in self.traits:
            self.layer = tg.TransformerLayer(WIDTH, 48, 2, hidden_dropout=0.0, attention_dropout=0.0)
            self.layer.layernorm_mlp.fc1.weight.requires_grad_("frozen" not in self.traits)

    def inner(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        y = self.up(x)
        if "lora" in self.traits:
            y = y + self.second(self.first(x))
        if "twice" in self.traits:
            y = y + 0.5 * self.up(torch.tanh(y))
        if "unrecorded" in self.traits:
            with torch.no_grad():
                again = self.up(x)
            y = y + 0.1 * again
        y = self.down(F.gelu(y))
        if "mlp" in self.traits:
            y = y + self.mlp(y)
        if "residual" in self.traits:
            given, total = self.fused(y, x)
            y = given + 0.5 * total
        if "layer" in self.traits:
            y = self.layer(y[:, None])[:, 0]
        if "outside" in self.traits:
            with tg.fp8_autocast(enabled=False):
                y = y + 0.1 * self.down(y)
        return y

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        call = self.inner
        for word in reversed(self.traits):
            if word in ("recompute", "reentrant"):
                call = functools.partial(checkpoint, call, use_reentrant=word == "reentrant")
        return x + call(self.norm(x))


def converted(blocks: Sequence[str], seed: int, device: str, dtype: torch.dtype) -> nn.Sequential:
    """A model of blocks with these traits, whose layers compute in FP8."""
    torch.manual_seed(seed)
    model = nn.Sequential(*map(Block, blocks)).to(device, dtype)
    tg.convert_to_fp8(model, include="*")  # tied and small ones, too
    return model


@dataclass(frozen=True)
class Spec:
    """A model and its training.

    Attributes:
        blocks: traits of each.
        mode: what is captured: the whole model as a "callable", its "blocks" apart or as a "chain", its "layers" by
            graph_layers, or a "function" that trains.
        style: of that function, words: its region is "around" it; it "accumulates", "steps", "evaluates".
        recipe: the number of the first one.
        optimizer: its name.
        rows: of the samples of captures.
        options: of the captures of modules.
    """

    blocks: tuple[str, ...]
    mode: str
    style: str
    recipe: int
    optimizer: str
    rows: int
    is_bf16: bool
    is_autocast: bool
    options: tuple[tuple[str, Any], ...]

    def has(self, *traits: str) -> bool:
        """Whether a block has one of them."""
        return any(trait in block.split() for block in self.blocks for trait in traits)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bf16 else torch.float32


class Trained:
    """A model with what trains it.

    Args:
        is_whole: one region is around the whole program, and the model enters none of its own.
    """

    def __init__(self, spec: Spec, seed: int, is_whole: bool, device: str) -> None:
        self.spec, self.is_whole, self.device = spec, is_whole, device
        self.model = converted(spec.blocks, seed, device, spec.dtype)
        self.optimizer = self._new_optimizer()
        self.recipe = spec.recipe
        self.graphs: list[Any] = []  # what was captured and can be reset
        self.is_captured = False
        self.hook: Any = None
        self.saved: Any = None
        self.inputs: dict[int, Tensor] = {}  # [n, WIDTH] by n
        region: Any = functools.partial(tg.fp8_autocast, recipe=RECIPES[spec.recipe])
        if is_whole or "around" in spec.style:
            region = contextlib.nullcontext
        self.function: Any = _training(self.model, self.optimizer, spec.style, region, self.autocast)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters, name = self.model.parameters(), self.spec.optimizer
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=0.3)
        if name == "fused":
            return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=self.device == "cuda")
        return torch.optim.AdamW(parameters, lr=0.01, foreach=name == "foreach")

    @property
    def autocast(self) -> Callable[[], Any]:
        """Makes what is inside of regions."""
        if not self.spec.is_autocast:
            return contextlib.nullcontext
        return functools.partial(torch.autocast, self.device, torch.bfloat16)

    def region_of(self, offset: int) -> tg.fp8_autocast:
        """A region of the recipe that comes ``offset`` places after the present one."""
        return tg.fp8_autocast(recipe=RECIPES[(self.recipe + offset) % len(RECIPES)])

    def region(self) -> Any:
        """What the model trains in."""
        return contextlib.nullcontext() if self.is_whole else self.region_of(0)

    def loss(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> []
        with self.region(), self.autocast():
            return self.model(x).float().square().mean()

    def parameter(self, number: int) -> nn.Parameter:
        """One of the parameters [...]."""
        parameters = list(self.model.parameters())
        return parameters[number % len(parameters)]

    def call_function(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:  # [n, WIDTH] -> [] each
        """The losses and the evaluations of a "function". It reads its argument in place, so that lies where it lay."""
        given = self.inputs.setdefault(len(x), torch.empty_like(x)).copy_(x)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # what is captured adds to it
        with self.region() if "around" in self.spec.style else contextlib.nullcontext():
            return self.function(given)

    def capture(self, is_graphed: bool) -> None:
        """As the mode says; else only enter the region, since leaving it updates scales."""
        options = {"show_progress": False, **dict(self.spec.options)}
        x = torch.ones(self.spec.rows, WIDTH, device=self.device, dtype=self.spec.dtype)
        if self.spec.mode in ("callable", "blocks", "chain"):
            callables = (self.model,) if self.spec.mode == "callable" else tuple(self.model)
            is_chain = self.spec.mode == "chain"
            count = 1 if is_chain else len(callables)
            samples = tuple((x.clone().requires_grad_(position > 0),) for position in range(count))
            with self.region(), self.autocast():
                if is_graphed:
                    graphed = tg.make_graphed_callables(callables, samples, chain=is_chain, **options)
                    self.graphs = [one.te_graph for one in graphed]
        elif is_graphed and self.spec.mode == "layers":  # what its step updates is put back
            self.graphs = [tg.graph_layers(self.model, lambda: self.loss(x).backward(), layers=Block, **options)]
        elif is_graphed:
            self.function = tg.graphed(self.function)
            self.graphs = [self.function]

    def reset(self) -> None:
        """Free what was captured. A function captures itself again."""
        for graphs in self.graphs:
            graphs.reset()
        if self.spec.mode != "function":
            self.is_captured, self.graphs = False, []

    def replays(self) -> int:
        """How many forwards, or calls of the function, were replayed."""
        graphed = [module.te_graph for module in self.model.modules() if hasattr(module, "te_graph")]
        graphed += [self.function] if hasattr(self.function, "info") else []
        return sum(each.info()["forward_replays"] for each in graphed)


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, style: str, region: Any, autocast: Any) -> Any:
    """A function of that style. All that it leads to is compared before each replay, so it does not know more."""

    def train(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:  # [n, WIDTH] -> [] each
        losses, evaluations = [], []
        for number in range(1 + ("accumulates" in style)):
            with region(), autocast():
                loss = model(x * (number + 1.0)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            if "steps" in style:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            if "evaluates" in style:
                with torch.no_grad(), region(), autocast():
                    evaluations.append(model(x).float().mean())
        return losses, evaluations

    return train
