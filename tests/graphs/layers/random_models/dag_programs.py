"""Random graphs of layers: results are used several times, in several places, and gradients come from all of them.

PYTHONPATH=tests/helpers python -m tests.graphs.layers.random_models.dag_programs  # or with seeds: 0:200
"""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from program_outcomes import Outcome
from torch import Tensor, nn
from torch.nn import functional as F

from .outcomes import graph, outcome_of, rarely, replays_of, run_many

WIDTH, STEPS = 10, 5
KINDS = ("sum", "function", "gate", "where", "product")
BETWEEN = {  # what becomes of a result, with the first hidden states
    "": lambda y, first: y,
    "scaled": lambda y, first: y * 1.5,
    "scaled in place": lambda y, first: y.mul_(1.5),
    "added": lambda y, first: y + first,
    "dropped": lambda y, first: F.dropout(y, 0.2),
    "detached": lambda y, first: y.detach(),
    "relu in place": lambda y, first: y.relu_(),
    "split": lambda y, first: torch.cat([y[:1], y[1:] * 2]),
    "permuted": lambda y, first: y.transpose(0, 1).contiguous().transpose(0, 1),
}
SECOND = (lambda y: y, Tensor.detach, lambda y: y * 0.5, Tensor.clone)  # what becomes of a second argument


class _Product(torch.autograd.Function):
    """x * y"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # [n, 4, 10] each
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4, 10]
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Layer(nn.Module):
    """Of one or two hidden states [n, 4, 10], and a nest of tensors, new ones in a container of its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def _joined(self, h: Tensor, x: Tensor, y: Tensor) -> Tensor:  # [n, 4, 10] each
        if self.kind == "sum":
            return h + self.second(y) * y
        if self.kind == "function":
            return _Product.apply(h, y) + y.sin()
        if self.kind == "gate":
            return h * torch.sigmoid(self.second(y)) + x
        return torch.where(y > 0, h, y) + y * self.weight if self.kind == "where" else h + y + y * x

    def forward(self, x: Tensor, y: Tensor | None = None, nest: dict | None = None) -> Any:  # [n, 4, 10] each
        h = torch.tanh(self.first(x))
        if y is not None:
            h = self._joined(h, x, y)
        if nest is not None:
            h = h if nest["scales"][0] is None else h * nest["scales"][0]
            h = h if nest["shift"] is None else h + nest["shift"] * self.weight
        results = {"function": (h, h * 2), "gate": {"h": h, "mean": h.mean(-1)}, "where": (h, h.detach())}
        return results.get(self.kind, [h, None, h.view(-1, WIDTH)] if self.kind == "product" else h)


def _parts(result: Any) -> list[Tensor]:
    """The hidden states first."""
    if isinstance(result, Tensor):
        return [result]
    return [one for one in (result.values() if isinstance(result, dict) else result) if one is not None]


@dataclass(frozen=True)
class Call:
    """How a layer is called: with which earlier results, under what, and what becomes of its result."""

    x: int
    y: int | None
    second: int
    nest: str
    region: str
    between: str
    keeps_rest: bool

    @staticmethod
    def draw(rng: random.Random, number: int) -> Call:
        return Call(
            x=rng.choice((number, number, number, number, rng.randint(0, number))),
            y=rng.choice((None, None, 0, number, rng.randint(0, number))),
            second=rng.choice((0, 0, 0, 1, 2, 3)),
            nest=rng.choice(("", "", "", "", "nothing", "weight", "tensors")),
            region=rng.choice(("",) * 8 + ("autocast", "no_grad")),
            between=rarely(rng, *BETWEEN),
            keeps_rest=rng.random() < 0.25,
        )


class Model(nn.Module):
    """[n, 4, 10] -> a loss"""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        count, kind, is_mixed = rng.choice((2, 3, 4, 5)), rng.choice(KINDS), rng.random() < 0.2
        self.layers = nn.ModuleList(Layer(rng.choice(KINDS) if is_mixed else kind) for _ in range(count))
        self.calls = [Call.draw(rng, number) for number in range(count)]
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.end = rng.choice(("last", "last", "sum", "mean"))
        # Autocast casts a shared weight once for several calls, and sums their gradients otherwise: docs/limits.md.
        shares = rng.random() if all(call.region != "autocast" for call in self.calls) else 1.0
        if shares < 0.25:
            for layer in self.layers:
                layer.second = self.layers[0].second
        elif shares < 0.4:
            self.layers[-1].weight = self.layers[0].weight
        elif shares < 0.55:
            self.layers[0].weight = self.weight

    def forward(self, x: Tensor) -> Tensor:  # [n, 4, 10]
        hidden, rest = [self.stem(x)], []
        for layer, call in zip(self.layers, self.calls, strict=True):
            scales = [self.weight if call.nest in ("weight", "tensors") else None]
            nest = {"scales": scales, "shift": hidden[0] if call.nest == "tensors" else None}
            y = None if call.y is None else SECOND[call.second](hidden[call.y])
            given = (
                [hidden[call.x], y, nest] if call.nest else [hidden[call.x], y] if y is not None else [hidden[call.x]]
            )
            with _region(call.region):
                first, *others = _parts(layer(*given))
            rest += others if call.keeps_rest else []
            hidden.append(BETWEEN[call.between](first, hidden[0]).float())
        return F.mse_loss(self.head(self._end(hidden)), torch.ones(())) + sum(o.float().square().mean() for o in rest)

    def _end(self, hidden: list[Tensor]) -> Tensor:  # [n, 4, 10] each
        if self.end == "last":
            return hidden[-1]
        return sum(hidden) if self.end == "sum" else torch.stack(hidden[1:]).mean(0) + hidden[0] * self.weight


def _region(name: str) -> contextlib.AbstractContextManager:
    if name == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return torch.no_grad() if name == "no_grad" else contextlib.nullcontext()


@dataclass
class Program:
    """A model, and how it is captured and trained."""

    seed: int

    def outcome(self) -> Outcome:
        return outcome_of(self._train)

    def _train(self, is_graphed: bool) -> tuple[list[Any], int]:
        rng = random.Random(self.seed + 7)
        torch.manual_seed(self.seed)
        model = Model(self.seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        options = rarely(rng, {}, {"chain": False}, {"max_in_flight": 2})
        # Where the step has no backward, a graph reads a permuted gradient as the result lies: docs/limits.md.
        is_seen = any(call.between == "permuted" for call in model.calls)
        micro_batches, has_gradients, is_step = rng.choice((1, 1, 2)), rng.random() < 0.3, is_seen or rng.random() < 0.5
        requires_grad, rows = rng.random() < 0.3, [rng.choice((3, 3, 2)) for _ in range(STEPS)]
        if is_seen:
            rows = [3] * STEPS
        sample = torch.randn(3, 4, WIDTH, requires_grad=requires_grad)
        if has_gradients:
            model(sample).backward()
        if is_graphed:
            graph(model, (lambda: model(sample).backward()) if is_step else (sample,), layers="layers.*", **options)
        seen: list[Any] = []
        for count in rows:
            for x in torch.randn(micro_batches, count, 4, WIDTH):
                x.requires_grad_(requires_grad)
                loss = model(x)
                (loss * 0.5).backward()
                seen.append([loss.detach(), None if x.grad is None else x.grad.clone()])
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=rng.random() < 0.6)
        return seen, replays_of(model)


def main(seeds: str = "0:50") -> None:
    run_many(Program, seeds)


if __name__ == "__main__":
    main(*sys.argv[1:])
