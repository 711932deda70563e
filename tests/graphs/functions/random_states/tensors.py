"""What random functions compute, beside what they do to Python objects, and what they are given for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Computation:
    """Tensors and what is done with them.

    Attributes:
        names: attributes of the trainer.
        setup: statements that set them.
        first: statements that a function begins with.
        statements: that read ``x``, [3], and those.
    """

    names: tuple[str, ...]
    setup: tuple[str, ...]
    first: tuple[str, ...]
    statements: tuple[str, ...]

    @staticmethod
    def draw(rng: random.Random) -> Computation:
        """Mostly a few vectors; else there is a model with its optimizer, too."""
        if rng.random() < 0.8:
            return _VECTORS
        return replace(_MODEL, setup=(*_MODEL.setup, f"tr.optimizer = {rng.choice(_OPTIMIZERS)}"))


_VECTORS = Computation(
    ("total", "w", "p"),
    (
        "tr.total = torch.zeros(3, device=DEVICE)",
        "tr.w = torch.ones(3, device=DEVICE)",
        "tr.p = torch.ones(3, device=DEVICE, requires_grad=True)",
        "tr.p.grad = torch.zeros(3, device=DEVICE)",
    ),
    ("tr.total.add_(1)",),
    (
        "tr.total.add_(x)",
        "tr.w.mul_(0.5)",
        "tr.total.copy_(tr.w)",
        "(tr.p * x).sum().backward()",
        "tr.total.add_(tr.p.grad)",
        "tr.p.grad.zero_()",
        "with torch.no_grad():\n    tr.p.sub_(tr.p.grad)",
    ),
)
_OPTIMIZERS = (
    "torch.optim.SGD(tr.model.parameters(), lr=0.1)",
    "torch.optim.SGD(tr.model.parameters(), lr=0.1, momentum=0.9)",
    "torch.optim.AdamW(tr.model.parameters(), lr=torch.tensor(0.1, device=DEVICE), fused=True)",
)
_MODEL = Computation(
    ("total", "model", "optimizer", "average"),
    (
        "tr.total = torch.zeros(3, device=DEVICE)",
        "tr.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(DEVICE)",
        "tr.average = [p.detach().clone() for p in tr.model.parameters()]",
        "for p in tr.model.parameters(): p.grad = torch.zeros_like(p)",
    ),
    ("tr.model(x).square().mean().backward()", "tr.optimizer.step()", "tr.optimizer.zero_grad(set_to_none=False)"),
    (
        "tr.model(x).sum().backward()",
        "tr.optimizer.step()",
        "torch.nn.utils.clip_grad_norm_(tr.model.parameters(), 1.0)",
        "tr.total.add_(x)",
        "torch._foreach_lerp_(tr.average, [p.detach() for p in tr.model.parameters()], 0.5)",
    ),
)


@dataclass(frozen=True)
class Batch:
    """What a function is given.

    Attributes:
        made: an expression, with ``*`` for a part that is no tensor.
        x: how the function gets at ``x``.
        part: the path to that part; empty where there is none.
        is_new: in each call.
    """

    made: str
    x: str
    part: str
    is_new: bool

    @staticmethod
    def draw(rng: random.Random) -> Batch:
        return Batch(*rng.choice(_BATCHES), is_new=rng.random() < 0.6)


_BATCHES = (
    *(("x", "batch", ""),) * 3,
    ("{'x': x, 'meta': *}", "batch['x']", "batch['meta']"),
    ("OrderedDict({'x': x, 'meta': *})", "batch['x']", "batch['meta']"),
    ("UserDict({'x': x, 'meta': *})", "batch['x']", "batch['meta']"),
    ("Row(x, *)", "batch.n", "batch.l"),
)
