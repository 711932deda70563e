"""Random training programs of graphed blocks among companions: compilers, checkpoints, wrappers, scalers, copies.

``PYTHONPATH=.:tests/helpers python tests/compat/companion_programs.py --seeds 0:500`` runs many, shrinks what differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from twins import leaf_copy

import te_graph as tg
from te_graph.testing import find_differences

WIDTH = 8


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH))


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


class Recomputed(nn.Module):
    """Checkpoints inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Dropped(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        if self.training:
            return self.drop(checkpoint(self.inner, self.drop(x), use_reentrant=False))
        return self.inner(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 9, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        return self.layer(x[None])[0]


BLOCKS = {kind.__name__: kind for kind in (Plain, Dropped, Normed, Recomputed, Attention)}


class Model(nn.Module):
    """Eager ends around the blocks; ``around`` is what each block is called through."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.around = ""

    def forward(self, x: Tensor) -> Tensor:  # [n, 5] -> [n, 3]
        x = self.stem(x)
        for block in self.blocks:
            x = x + AROUND[self.around](block, x)
        return self.head(x)


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=_selective),
    "keyword": lambda block, x: block(x=x) if isinstance(block, Recomputed | Attention) else block(x),
    "forward": lambda block, x: block.forward(x),
    "functional": lambda block, x: functional_call(block, dict(block.named_parameters()), (x,)),
    "offload": lambda block, x: _offloaded(block, x),
}
# A checkpoint that is compiled runs once what eager execution runs twice.
UNCOMPILED = ("", "keyword", "forward", "functional", "offload")
WHOLE = ("", "compile", "checkpoint", "ddp", "functional", "compile ddp")
EVENTS = (
    *("step", "step", "step", "evaluate", "load", "copy", "save", "pickle", "to", "freeze", "thaw", "reset", "clip"),
    *("twice", "around", "hook", "new grads", "short"),
)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}


def around_in(whole: str) -> list[str]:
    """What blocks may be called through where the model is called through ``whole``."""
    return list(UNCOMPILED if "compile" in whole else AROUND)


def _offloaded(block: nn.Module, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
    with torch.autograd.graph.save_on_cpu():
        return block(x)


@dataclass(frozen=True)
class Program:
    """What is drawn from ``seed``.

    Attributes:
        blocks: kinds of the blocks.
        graphed: which of them are captured.
        options: of ``make_graphed_callables``.
        around: what each block is called through, when training begins.
        whole: what the model is called through; "ddp" before the capture or after it.
        wraps_first: the model is wrapped before the capture.
        autocast: "", or "cached" or "uncached".
        scaler: a GradScaler scales the loss.
        optimizer: its kind.
        step: "" or "graphed".
        events: what happens, in order, each with a seed.
    """

    seed: int
    blocks: tuple[str, ...]
    graphed: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    around: str
    whole: str
    wraps_first: bool
    autocast: str
    scaler: bool
    optimizer: str
    step: str
    events: tuple[tuple[str, int], ...]

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        blocks = tuple(rng.choice(list(BLOCKS)) for _ in range(rng.randint(1, 3)))
        graphed = tuple(i for i in range(len(blocks)) if rng.random() < 0.8) or (0,)
        options = {"on_mismatch": rng.choice(("eager", "capture"))}
        if rng.random() < 0.3:
            options["max_in_flight"] = 2
        if rng.random() < 0.2:
            options["accumulate_grads"] = False
        optimizer, whole = rng.choice(list(OPTIMIZERS)), rng.choice([*WHOLE, "", ""])
        return cls(
            seed=seed,
            blocks=blocks,
            graphed=graphed,
            options=tuple(options.items()),
            around=rng.choice([*around_in(whole), "", "", ""]),
            whole=whole,
            wraps_first=rng.random() < 0.5,
            autocast=rng.choice(("", "", "cached", "uncached")),
            scaler=rng.random() < 0.3,
            optimizer=optimizer,
            step="graphed" if optimizer == "fused" and rng.random() < 0.5 else "",
            events=tuple((rng.choice(EVENTS), rng.randrange(10**6)) for _ in range(rng.randint(3, 8))),
        )

    def smaller(self) -> Iterator[Program]:
        """With one thing less."""
        for number in range(len(self.events)):
            yield replace(self, events=self.events[:number] + self.events[number + 1 :])
        for number in range(len(self.blocks) if len(self.blocks) > 1 else 0):
            kept = [i for i in range(len(self.blocks)) if i != number]
            graphed = tuple(kept.index(i) for i in self.graphed if i != number)
            yield replace(self, blocks=tuple(self.blocks[i] for i in kept), graphed=graphed)
        simple = {"around": "", "whole": "", "wraps_first": False, "autocast": "", "scaler": False, "step": ""}
        for name, value in {**simple, "optimizer": "sgd"}.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        for one in self.options[1:]:
            yield replace(self, options=tuple(other for other in self.options if other != one))


class Run:
    """One run of a program."""

    def __init__(self, program: Program, is_graphed: bool) -> None:
        self.program, self.is_graphed = program, is_graphed
        torch.manual_seed(program.seed)
        self.model = Model(program.blocks)
        self.seen: list[Any] = []

    def go(self) -> list[Any]:
        """What is seen on the way: losses, gradients, states, random numbers."""
        program = self.program
        if program.wraps_first:
            self._wrap()
        if self.is_graphed:
            chosen = tuple(self.model.blocks[i] for i in program.graphed)
            samples = self._samples()
            with self._autocast():
                tg.make_graphed_callables(chosen, tuple(samples[i] for i in program.graphed), **dict(program.options))
        if not program.wraps_first:
            self._wrap()
        self.model.around = program.around
        self.optimizer = OPTIMIZERS[program.optimizer](self.model)
        self.update = tg.graphed(self.optimizer.step) if program.step and self.is_graphed else self.optimizer.step
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=program.scaler)
        for event, seed in program.events:
            torch.manual_seed(seed)
            getattr(self, f"_{event.replace(' ', '_')}")(random.Random(seed))
            self.seen += [event, torch.rand(2), self._state()]
        return self.seen

    @property
    def replays(self) -> int:
        handles = [getattr(block, "te_graph", None) for block in self.model.blocks]
        return sum(handle.info()["forward_replays"] for handle in handles if handle is not None)

    def _samples(self) -> list[tuple[Tensor]]:
        """What the blocks of a copy are given."""
        probe, samples = copy.deepcopy(self.model), []
        for block in probe.blocks:
            block.register_forward_pre_hook(lambda module, args: samples.append((leaf_copy(args[0]),)))
        with self._autocast():
            probe(torch.randn(4, 5))
        return samples

    def _wrap(self) -> None:
        whole, model = self.program.whole, self.model
        self.call: Callable[[Tensor], Tensor] = model
        if "ddp" in whole:
            self.call = DistributedDataParallel(model)
        if "compile" in whole:
            self.call = torch.compile(self.call, backend="eager")
        if whole == "checkpoint":
            self.call = lambda x: checkpoint(model, x, use_reentrant=False)
        if whole == "functional":
            self.call = lambda x: functional_call(model, dict(model.named_parameters()), (x,))

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        kind = self.program.autocast
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(kind), cache_enabled=kind == "cached"):
            yield

    def _state(self) -> list[Any]:
        state = [tensor.detach().clone() for tensor in self.model.state_dict().values()]
        return [state, [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]]

    def _backward(self, rows: int = 4, calls: int = 1) -> None:
        losses = []
        for _ in range(calls):
            x = torch.randn(rows, 5)
            with self._autocast():
                losses.append(self.call(x).float().square().mean())
        for loss in losses:
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            self.seen.append(loss.detach().clone())

    def _finish(self, set_to_none: bool, clips: bool = False) -> None:
        if not any(p.grad is not None for p in self.model.parameters()):
            return
        if clips:
            self.scaler.unscale_(self.optimizer)
            self.seen.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        if self.program.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.update()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def _step(self, rng: random.Random) -> None:
        for _ in range(rng.randint(1, 2)):
            self._backward()
        self._finish(rng.random() < 0.5)

    def _clip(self, rng: random.Random) -> None:
        self._backward()
        self._finish(rng.random() < 0.5, clips=True)

    def _twice(self, rng: random.Random) -> None:
        """Two forwards before any backward, where there are slots."""
        if dict(self.program.options).get("max_in_flight") and "ddp" not in self.program.whole:
            for block in self.model.blocks:
                if isinstance(block, Normed):
                    return  # the second forward writes what the backward of the first needs: eager raises
            self._backward(calls=2)
            self._finish(True)

    def _short(self, rng: random.Random) -> None:
        self._backward(rows=3)
        self._finish(True)

    def _evaluate(self, rng: random.Random) -> None:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            self.seen.append(self.model(torch.randn(rng.choice((2, 4)), 5)).clone())
        self.model.train()

    def _load(self, rng: random.Random) -> None:
        state = {name: tensor * 0.5 for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        self.model.load_state_dict(state, strict=False)

    def _copy(self, rng: random.Random) -> None:
        """A copy trains by itself, eagerly."""
        twin = copy.deepcopy(self.model)
        twin(torch.randn(4, 5)).square().sum().backward()
        self.seen.append([p.grad for p in twin.parameters()])

    def _save(self, rng: random.Random) -> None:
        stream = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, stream)
        stream.seek(0)
        loaded = torch.load(stream)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def _pickle(self, rng: random.Random) -> None:
        stream = io.BytesIO()
        torch.save(self.model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
        self.seen.append(twin(torch.randn(4, 5)).detach())

    def _to(self, rng: random.Random) -> None:
        self.model.to("cpu").float()

    def _freeze(self, rng: random.Random) -> None:
        for parameter in rng.choice(list(self.model.blocks)).parameters():
            parameter.requires_grad_("ddp" in self.program.whole)

    def _thaw(self, rng: random.Random) -> None:
        self.model.requires_grad_(True)

    def _reset(self, rng: random.Random) -> None:
        handle = getattr(rng.choice(list(self.model.blocks)), "te_graph", None)
        if handle is not None:
            handle.reset()

    def _around(self, rng: random.Random) -> None:
        self.model.around = rng.choice(around_in(self.program.whole))

    def _hook(self, rng: random.Random) -> None:
        if "compile" in self.program.whole:
            return  # torch.compile does not look for hooks that come later
        block = rng.choice(list(self.model.blocks))
        kind = rng.choice(("forward", "pre", "tensor"))
        if kind == "forward":
            block.register_forward_hook(lambda module, args, result: result * 0.5)
        elif kind == "pre":
            block.register_forward_pre_hook(lambda module, args: (args[0] * 2,) if args else None)
        else:
            parameter = next(block.parameters())
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * 0.5)

    def _new_grads(self, rng: random.Random) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2


def outcome_of(program: Program, is_graphed: bool) -> tuple[list[Any] | None, str, int]:
    """What was seen, or the error, and how many forwards replayed."""
    torch._dynamo.reset()
    run = Run(program, is_graphed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run.go(), "", run.replays
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", 0


def verdict_of(program: Program) -> tuple[str, int]:
    """ "" where both runs leave the same, else what differs; and how many forwards replayed."""
    expected, failure, _ = outcome_of(program, is_graphed=False)
    if failure:
        return "", 0  # eager execution refuses it
    seen, failure, replays = outcome_of(program, is_graphed=True)
    if failure:
        return failure, 0
    differences = find_differences(seen, expected)
    return (str(differences[0]) if differences else ""), replays


def shrunk(program: Program) -> tuple[Program, str]:
    """A smaller program that fails as well, and how."""
    verdict, _ = verdict_of(program)
    for smaller in program.smaller():
        if smaller.graphed and verdict_of(smaller)[0]:
            return shrunk(smaller)
    return program, verdict


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    first, end = map(int, parser.parse_args().seeds.split(":"))
    torch.set_num_threads(1)
    failures = replays = replaying = 0
    with one_rank():
        for seed in range(first, end):
            program = Program.draw(seed)
            verdict, count = verdict_of(program)
            replays += count
            replaying += count > 0
            if verdict:
                failures += 1
                print(f"seed {seed}: {verdict[:300]}\n  {shrunk(program)}", flush=True)
    print(f"{end - first} programs, {failures} differ, {replaying} replay, {replays} forwards")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
