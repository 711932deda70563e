"""Random little models and how they are trained, for ``graph_layers`` beside eager execution.

python -m tests.graphs.layers.layer_programs  # or with seeds: 0:200
"""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import te_graph as tg
from te_graph.testing import assert_bitwise_equal, deterministic

WIDTH = 6


class Plain(nn.Module):
    """[..., n, 6] -> [..., n, 6]"""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 7), nn.Dropout(drop), nn.Linear(7, WIDTH)

    def inner(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return x + self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return self.inner(x)


class Masked(Plain):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:  # [..., n, 6]
        y = self.inner(x) * scale
        return y if mask is None else y.masked_fill(mask, 0.0)


class Positioned(Plain):
    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:  # [..., n, 6], int64 [n]
        return self.inner(hidden + self.table[positions])


class Pair(Plain):
    def forward(self, x: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:  # [..., n, 6], [..., n, 6]
        return self.inner(x), aux + x.square()


class Named(Plain):
    def forward(self, x: Tensor, **other: Any) -> dict[str, Tensor]:  # [..., n, 6]
        return {"x": self.inner(x + other["bias"])}


class Normed(Plain):
    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return self.norm(self.inner(x).flatten(0, -2)).view(x.shape)


class Exact(Plain):
    """Parts that autocast leaves alone, and a weight that is used before and after."""

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        y = self.up(x)
        with torch.autocast("cpu", enabled=False):
            y = F.softmax(y.float(), -1)
        with torch.no_grad():
            z = self.up(x).sum()
        return x + self.down(y) * z.sigmoid() + F.linear(self.up(x), self.down.weight)


class Thrifty(Plain):
    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return checkpoint(self.inner, x, use_reentrant=False)


class Reading(Plain):
    """What no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return self.inner(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


class Counting(Plain):
    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        self.calls += 1
        return self.inner(x)


class Twins(nn.Module):
    """Two of one class inside."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.left, self.right = Plain(drop), Plain(drop)

    def forward(self, x: Tensor) -> Tensor:  # [..., n, 6]
        return self.left(x) - self.right(x)


KINDS = (Plain, Masked, Positioned, Pair, Named, Normed, Exact, Thrifty, Reading, Counting, Twins)


@dataclass(frozen=True)
class Arrangement:
    """How a stack of layers is kept and called."""

    kind: type[nn.Module]
    count: int
    container: str
    between: str
    keywords: bool
    wrapper: str
    shares: str
    odd: int | None


class Stack(nn.Module):
    def __init__(self, way: Arrangement, drop: float) -> None:
        super().__init__()
        self.way = way
        made = [way.kind(drop) for _ in range(way.count)]
        if way.odd is not None:
            made[way.odd] = Reading(drop)
        if way.shares == "module":
            made[-1] = made[0]
        elif way.shares == "weight" and all(isinstance(one, Plain) for one in made):
            made[-1].up.weight = made[0].up.weight
        if way.container == "list":
            self.parts = nn.ModuleList(made)
        elif way.container == "dict":
            self.parts = nn.ModuleDict({f"part{number}": one for number, one in enumerate(made)})
        elif way.container == "sequential" and not isinstance(made[-1], (Masked, Positioned, Pair, Named)):
            self.parts = nn.Sequential(*made)
        elif way.container == "nested":
            self.parts = nn.ModuleList([nn.ModuleList(made[:1]), nn.ModuleList(made[1:])])
        else:
            self.parts = nn.Module()
            for number, one in enumerate(made):
                setattr(self.parts, f"part{number}", one)
        self.norm = nn.LayerNorm(WIDTH)

    def each(self) -> list[nn.Module]:
        if self.way.container == "dict":
            return list(self.parts.values())
        if self.way.container == "nested":
            return [one for some in self.parts for one in some]
        if isinstance(self.parts, nn.ModuleList):
            return list(self.parts)
        return [getattr(self.parts, f"part{number}") for number in range(self.way.count)]

    def call(self, layer: nn.Module, x: Tensor, shared: dict[str, Any]) -> Tensor:  # [..., n, 6]
        named = self.way.keywords
        if isinstance(layer, Masked):
            options = {"mask": shared["mask"], "scale": shared["scale"]}
            return layer(x=x, **options) if named else layer(x, **options)
        if isinstance(layer, Positioned):
            if named:
                return layer(positions=shared["positions"], hidden=x)
            return layer(x, shared["positions"])
        if isinstance(layer, Pair):
            y, shared["aux"] = layer(x, shared.get("aux", x))
            return y
        if isinstance(layer, Named):
            return layer(x, bias=shared["bias"])["x"]
        return layer(x=x) if named else layer(x)

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:  # [..., n, 6]
        if isinstance(self.parts, nn.Sequential):
            return self.parts(x)
        seen = []
        for number, layer in enumerate(self.each()):
            if self.way.wrapper == "checkpoint":
                x = checkpoint(self.call, layer, x, shared, use_reentrant=False)
            elif self.way.wrapper == "no_grad" and number == 0:
                with torch.no_grad():
                    x = self.call(layer, x, shared)
            elif self.way.wrapper == "exact" and number == 1:
                with torch.autocast("cpu", enabled=False):
                    x = self.call(layer, x.float(), shared)
            else:
                x = self.call(layer, x, shared)
            if self.way.between == "norm":
                x = self.norm(x)
            elif self.way.between == "add":
                x = x + shared["bias"]
            elif self.way.between == "add_":
                x = x * 1
                x += shared["bias"]
            elif self.way.between == "keep":
                seen.append(x)
        return x + sum(seen[:-1]) if len(seen) > 1 else x


class Model(nn.Module):
    def __init__(self, ways: list[Arrangement], drop: float, ties: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        for number, way in enumerate(ways):
            setattr(self, f"stack{number}", Stack(way, drop))
        self.count = len(ways)
        self.head = nn.Linear(WIDTH, 11)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:  # int64 [b, n]
        x = self.embed(tokens)
        shared = {"mask": mask, "scale": scale, "bias": self.bias, "positions": torch.arange(tokens.shape[1])}
        for number in range(self.count):
            x = getattr(self, f"stack{number}")(x, shared)
        out = self.head(x)
        return out + shared["aux"].sum(-1, keepdim=True) if "aux" in shared else out


@dataclass
class Program:
    """A model, and how it is captured and trained."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        count = rng.choice((1, 1, 2))
        self.ways = [self._way(rng) for _ in range(count)]
        self.drop = rng.choice((0.0, 0.25))
        self.autocast = rng.choice((None, None, "around", "inside"))
        self.ties = rng.random() < 0.3
        self.batch = rng.choice(("tuple", "dict", "call", "step"))
        self.penalty = rng.random() < 0.3 and self.batch in ("call", "step")  # what the step shows
        self.micro_batches = rng.choice((1, 1, 2))
        self.set_to_none = rng.random() < 0.6
        self.lengths = [5, 5, rng.choice((3, 5)), 5]
        if self.autocast and any(way.shares for way in self.ways):
            self.lengths = [5, 5, 5, 5]  # a capture in the middle of a region lets go of its casts
        self.layers = rng.choice((None, None, None, "types", "names", "function"))

    def _way(self, rng: random.Random) -> Arrangement:
        count = rng.choice((2, 3, 4))
        return Arrangement(
            kind=rng.choice(KINDS),
            count=count,
            container=rng.choice(("list", "dict", "sequential", "nested", "attributes")),
            between=rng.choice(("", "", "norm", "add", "add_", "keep")),
            keywords=rng.random() < 0.3,
            wrapper=rng.choice(("", "", "", "", "checkpoint", "no_grad", "exact")),
            shares=rng.choice(("", "", "", "module", "weight")),
            odd=rng.randrange(count - 1) if rng.random() < 0.15 else None,
        )

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(self.ways, self.drop, self.ties).train()

    def batch_of(self, number: int) -> tuple[Tensor, Tensor | None, float]:
        generator = torch.Generator().manual_seed(self.seed * 100 + number)
        tokens = torch.randint(11, (2, self.lengths[number % 4]), generator=generator)
        mask = torch.rand(2, self.lengths[number % 4], 1, generator=generator) < 0.3
        return tokens, mask if self.seed % 2 else None, 1.0

    def loss(self, model: nn.Module, number: int) -> Tensor:
        tokens, mask, scale = self.batch_of(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast == "inside"):
            out = model(tokens, mask, scale=scale)
        loss = F.cross_entropy(out.float().flatten(0, 1), tokens.flatten())
        return loss + 1e-3 * sum(p.square().sum() for p in model.parameters()) if self.penalty else loss

    def graph(self, model: Model) -> Any:
        batch: Any = self.batch_of(0)
        if self.batch == "dict":
            batch = dict(zip(("tokens", "mask", "scale"), batch, strict=True))
        elif self.batch == "call":
            batch = partial(self.loss, model, 0)
        elif self.batch == "step":
            batch = lambda: self.loss(model, 0).backward()  # noqa: E731
        layers: Any = {"types": KINDS, "names": ("stack*.parts.*",), "function": lambda name, one: type(one) in KINDS}
        inside = self.autocast is not None and (self.autocast == "around" or not callable(batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return tg.graph_layers(model, batch, layers=layers.get(self.layers), show_progress=False)

    def train(self, model: Model) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(self.seed)
        seen: list[Any] = []
        for step in range(4):
            for micro in range(self.micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast == "around"):
                    loss = self.loss(model, step * self.micro_batches + micro)
                loss.backward()
                seen.append(loss.detach())
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(self.set_to_none)
        model.eval()
        with torch.no_grad():
            seen.append(model(*self.batch_of(0)))
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        seen.append([module.calls for module in model.modules() if isinstance(module, Counting)])
        return seen


def run(seed: int) -> str:
    """Train eagerly and graphed, and compare; what was captured, or why nothing was."""
    program = Program(seed)
    with deterministic():
        model = program.model()
        twin = copy.deepcopy(model)
        before = copy.deepcopy((model.state_dict(), torch.get_rng_state()))
        try:
            report = str(program.graph(model))
        except RuntimeError as error:
            if "graph_layers:" not in str(error):
                raise
            report = f"nothing: {error}"
        assert_bitwise_equal((model.state_dict(), torch.get_rng_state()), before)
        assert all(parameter.grad is None for parameter in model.parameters())
        try:
            eager = program.train(twin)
        except CheckpointError:  # what is computed again need not be the same
            return "invalid"
        graphed = program.train(model)
        assert_bitwise_equal(graphed, eager)
    return report


def main(argument: str = "0:50") -> None:
    first, last = map(int, argument.split(":"))
    for seed in range(first, last):
        try:
            print(seed, run(seed), flush=True)
        except Exception as error:
            print(f"{seed} FAILED {Program(seed)} {vars(Program(seed))}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
