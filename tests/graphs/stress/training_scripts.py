"""Random training scripts: a model of blocks, a loop of habits, run eagerly and with te_graph.

A script is a few fixed choices and a list of events, each with a seed of its own, so that any of them can be left out.
``python tests/graphs/stress/training_scripts.py --seeds 0:500`` runs many and makes small what differs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import logging
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from training_blocks import BLOCKS, TAKE_MASKS, WIDTH
from training_habits import EVENTS, OPTIMIZERS

import te_graph as tg
from te_graph.testing import same_bits

VOCABULARY = 11
MODES = ("layers", "chain", "some layers", "one by one", "whole", "parts", "step", "optimizer")
_PARTS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)
# Events after which a gradient has several parts, which docs/limits.md say are added in another order.
_SEVERAL_PARTS = {"summed", "several_in_flight", "shared_block", "penalty", "recompute", "retained", "hold_loss"}


class Model(nn.Module):
    """Embedding, blocks, norm and head: tokens [batch, length] -> logits, and what blocks returned besides."""

    def __init__(self, names: tuple[str, ...], is_tied: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(BLOCKS[name]() for name in names)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_recomputed = False
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        x, extra = self.embed(tokens), []
        for block in self.blocks:
            keywords = {"mask": mask} if isinstance(block, TAKE_MASKS) and mask is not None else {}
            if self.is_recomputed and self.training:
                result = checkpoint(block, x, use_reentrant=False, **keywords)
            else:
                result = block(x, **keywords)
            x, *others = tree_leaves(result)
            extra += others
        return self.head(self.norm(x)), extra


@dataclass(frozen=True)
class Event:
    kind: str
    seed: int


@dataclass(frozen=True)
class Script:
    """What a seed stands for.

    Attributes:
        names: of the blocks.
        mode: what of the model, or of the loop, is graphed.
        options: of ``make_graphed_callables``; ``autograd_params`` True stands for all parameters.
        clip: how gradients are clipped.
    """

    seed: int
    names: tuple[str, ...]
    mode: str
    optimizer: str
    options: dict[str, Any]
    events: tuple[Event, ...]
    is_tied: bool
    is_autocast: bool
    dtype: torch.dtype
    accumulation: int
    set_to_none: bool
    clip: str

    @property
    def may_round(self) -> bool:
        """True where docs/limits.md tell of other rounding: the order of sums, autocast, layouts of gradients."""
        has_parts = any(event.kind in _SEVERAL_PARTS for event in self.events) or self.is_autocast
        return has_parts or (self.is_tied and self.mode == "whole") or "convolution" in self.names

    def smaller(self) -> Iterator[Script]:
        """Scripts that have one thing less."""
        for index in range(len(self.events)):
            yield replace(self, events=self.events[:index] + self.events[index + 1 :])
        if len(self.names) > 1:
            for index in range(len(self.names)):
                yield replace(self, names=self.names[:index] + self.names[index + 1 :])
        for name in self.options:
            yield replace(self, options={k: v for k, v in self.options.items() if k != name})
        plain = {"is_tied": False, "is_autocast": False, "accumulation": 1, "clip": "none", "dtype": torch.float32}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})


def draw(seed: int) -> Script:
    rng = random.Random(seed)
    kinds = [*EVENTS, *["train"] * (len(EVENTS) // 2)]
    options = {"on_mismatch": rng.choice(["capture", "eager"]), "max_in_flight": rng.choice([2, 3])}
    options |= {name: value for name, value in (("autograd_params", True),) if rng.random() < 0.2}
    events = ["train", *(rng.choice(kinds) for _ in range(rng.randint(2, 7))), "train"]
    names = tuple(rng.choice(list(BLOCKS)) for _ in range(rng.randint(1, 4)))
    if "recomputed" in names:
        options["max_in_flight"] = 8  # a call that is computed again must find a slot if the first did (docs/limits.md)
    return Script(
        seed=seed,
        names=names,
        mode=rng.choice(MODES),
        optimizer=rng.choice(list(OPTIMIZERS)),
        options={**options, "on_exhausted": "eager"},
        events=tuple(Event(kind, rng.randrange(2**31)) for kind in events),
        is_tied=rng.random() < 0.4,
        is_autocast=rng.random() < 0.25,
        dtype=rng.choice([torch.float32] * 3 + [torch.bfloat16, torch.float64]),
        accumulation=rng.choice([1, 1, 2, 3]),
        set_to_none=rng.random() < 0.7,
        clip=rng.choice(["none", "norm", "value", "te_graph"]),
    )


@dataclass(eq=False)
class Trainer:
    """One run of a script. ``seen`` holds what eager execution and te_graph must agree on."""

    script: Script
    is_graphed: bool
    seen: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.script.seed)
        self.model = Model(self.script.names, self.script.is_tied).to(self.script.dtype)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) is is_matrix], "weight_decay": 0.1 * is_matrix}
            for is_matrix in (True, False)
        ]
        self.use(OPTIMIZERS[self.script.optimizer](groups))
        self.scaler: Any = None
        self.average: Any = None
        self.kept: list[Any] = []
        self.length, self.size = 6, 3
        self.step = None
        if self.script.mode == "step":
            self.step = self._whole_step()
        if self.is_graphed:
            self.graph()

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with ``optimizer`` from now on."""
        self.optimizer, self.optimizer_step, self.step = optimizer, optimizer.step, None
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))

    def graph(self) -> None:
        """Use te_graph, as the mode says."""
        mode, options = self.script.mode, dict(self.script.options)
        if mode == "step":
            self.step = tg.graphed(self.step)
        elif mode == "optimizer":
            self.optimizer_step = tg.graphed(self.optimizer.step)
        else:
            with self.autocast():
                samples = self._samples(self._chosen())
            if options.pop("autograd_params", False):
                options["autograd_params"] = list({p: 0 for module in samples for p in module.parameters()})
            each = [[module] for module in samples] if mode == "one by one" else [list(samples)]
            for modules in filter(None, each):
                if "autograd_params" in options and mode == "one by one":
                    options["autograd_params"] = list(modules[0].parameters())
                args, keywords = zip(*(samples[module] for module in modules), strict=True)
                with self.autocast():
                    tg.make_graphed_callables(
                        tuple(modules), args, sample_kwargs=keywords, chain=mode == "chain", **options
                    )

    def _chosen(self) -> list[nn.Module]:
        blocks = list(dict.fromkeys(self.model.blocks))
        if self.script.mode == "whole":
            return [self.model]
        if self.script.mode == "parts":
            return [part for block in blocks for part in block.modules() if isinstance(part, _PARTS)]
        return blocks[::2] if self.script.mode == "some layers" else blocks

    def _samples(self, modules: list[nn.Module]) -> dict[nn.Module, tuple[tuple, dict]]:
        """What the modules are called with, seen in a forward that leaves no trace."""
        seen: dict[nn.Module, tuple[tuple, dict]] = {}

        def see(module: nn.Module, args: tuple, keywords: dict) -> None:
            seen.setdefault(module, (args, keywords))

        hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in modules]
        kept = copy.deepcopy(self.model.state_dict())
        with torch.random.fork_rng(devices=[]):
            self.model(torch.randint(VOCABULARY, (self.size, self.length)))
        self.model.load_state_dict(kept)
        for hook in hooks:
            hook.remove()
        return seen

    def _whole_step(self) -> Callable[..., Tensor]:
        model, optimizer, autocast = self.model, self.optimizer, self.autocast

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            with autocast():
                logits, _ = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        return step

    def autocast(self) -> Any:
        is_on = self.script.is_autocast and self.script.dtype == torch.float32
        return torch.autocast("cpu", torch.bfloat16) if is_on else contextlib.nullcontext()

    def note(self, name: str, value: Any) -> None:
        self.seen.append((name, value.detach().clone() if isinstance(value, Tensor) else value))

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (self.size, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, rng: random.Random, **keywords: Tensor) -> Tensor:
        tokens, targets = self.batch()
        with self.autocast():
            logits, extra = self.model(tokens, **keywords)
        smoothing = rng.choice([0.0, 0.1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
        for one in extra:
            if rng.random() < 0.6:
                loss = loss + 0.01 * one.float().square().mean()
        return loss

    def backward(self, loss: Tensor) -> None:
        self.note("loss", loss)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.script.clip == "norm":
            self.note("norm", nn.utils.clip_grad_norm_(parameters, 0.5))
        elif self.script.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.1)
        elif self.script.clip == "te_graph":
            self.note("norm", tg.clip_grad_norm_(parameters, 0.5))
        if self.scaler is None:
            self.optimizer_step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        for name, parameter in self.model.named_parameters():
            self.note(f"grad of {name}", parameter.grad)
        self.optimizer.zero_grad(set_to_none=self.script.set_to_none)
        if self.average is not None:
            self.average.update_parameters(self.model)


def run(script: Script, is_graphed: bool) -> tuple[list[tuple[str, Any]], str, int]:
    """What a run of the script shows, the error that ended it, and how many replays there were."""
    seen: list[tuple[str, Any]] = []
    trainer, where, error = None, "capture", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(script, is_graphed, seen)
            for number, event in enumerate(script.events):
                where = f"event {number} ({event.kind})"
                torch.manual_seed(event.seed)
                EVENTS[event.kind](trainer, random.Random(event.seed))
                seen += [(f"{name} after {where}", value.clone()) for name, value in trainer.model.state_dict().items()]
                seen.append((f"random state after {where}", torch.get_rng_state()))
            states = enumerate(trainer.optimizer.state.values())
            seen += [(f"{name} of optimizer, {n}", value) for n, state in states for name, value in state.items()]
        except Exception as raised:
            error = f"{where}: {type(raised).__name__}: {raised}"
    return seen, error, 0 if trainer is None else _replays(trainer)


def _replays(trainer: Trainer) -> int:
    things = [*trainer.model.modules(), trainer.step, trainer.optimizer_step]
    infos = (getattr(thing, "te_graph", thing) for thing in things)
    return sum(one.info()["forward_replays"] for one in infos if hasattr(one, "info"))


def compare(script: Script) -> tuple[str, str, int]:
    """A verdict (same, rounded, differs, refused, eager error), what it is about, and the number of replays."""
    want, error, _ = run(script, False)
    if error:
        return "eager error", error, 0
    got, error, replays = run(script, True)
    for (name, one), (other_name, other) in zip(got, want, strict=False):
        if name != other_name:
            return "differs", f"{name} where eager execution shows {other_name}", replays
        if (verdict := _verdict(one, other, script.is_autocast)) != "same":
            return verdict, name, replays
    if error:
        return "refused", error, replays
    return ("same", "", replays) if len(got) == len(want) else ("differs", "the number of things seen", replays)


def _verdict(one: Any, other: Any, is_autocast: bool) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "same" if type(one) is type(other) and one == other else "differs"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return "differs"
    if same_bits(one, other):
        return "same"
    distance = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-6)
    return "rounded" if distance < (0.05 if is_autocast or one.dtype == torch.bfloat16 else 1e-3) else "differs"


def shrink(script: Script) -> Script:
    """Leave out what the verdict does not need."""
    verdict = compare(script)[0]
    while (small := next((s for s in script.smaller() if compare(s)[0] == verdict), None)) is not None:
        script = small
    return script


def main() -> None:
    parser = argparse.ArgumentParser(description="Run many random training scripts and tell what came of them.")
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--time", type=float, default=120, help="seconds after which no more are begun")
    parser.add_argument("--shrinks", type=int, default=3, help="scripts that are made small")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("te_graph").setLevel(logging.ERROR)
    tally, refusals, wrong = collections.Counter(), collections.Counter(), []
    start = time.monotonic()
    for seed in range(*map(int, arguments.seeds.split(":"))):
        if time.monotonic() - start > arguments.time:
            break
        script = draw(seed)
        verdict, detail, _ = compare(script)
        tally[verdict] += 1
        if verdict == "differs" or (verdict == "rounded" and not script.may_round):
            print(seed, verdict, detail, script.mode, flush=True)
            wrong.append(script)
        if verdict in ("refused", "eager error"):
            refusals[f"{verdict}, {re.sub(r'[0-9]+', 'N', detail)[:300]}"] += 1
    print(dict(tally))
    for message, count in refusals.most_common():
        print(count, message)
    for script in wrong[: arguments.shrinks]:
        small = shrink(script)
        print(small, compare(small))


if __name__ == "__main__":
    main()
