"""A training program as data; what is printed is a call of ``Training`` for each step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        width: of the model; from 140 on the ranks divide its matrices.
        dtypes: of its modules, in turn.
        ties: "head", the head's weight is the embedding's; "blocks", the last block has the first one's linear layer.
        frozen: whether a parameter is.
        left_over: whether it has a gradient from before.
        graphed: whether the blocks are graphed callables.
        scaled: whether losses are, by a FlatGradScaler.
        sends_bf16: whether ranks send gradients as bf16.
        gathers_late: whether parameters of blocks are gathered while the next forward goes on.
        optimizer: key of ``OPTIMIZERS``.
    """

    width: int = 12
    blocks: int = 2
    dtypes: tuple[str, ...] = ("float32",)
    ties: tuple[str, ...] = ()
    has_conv: bool = False
    has_head_bias: bool = True
    frozen: bool = False
    left_over: bool = False
    grad_dtype: str = "float32"
    shard: str = "none"
    gradient_scale: float = 1.0
    overlap: bool = True
    bucket_bytes: int = 2048
    optimizer: str = "sgd"
    graphed: bool = False
    scaled: bool = False
    sends_bf16: bool = False
    gathers_late: bool = False

    @property
    def has_main_grads(self) -> bool:
        return any(dtype != self.grad_dtype for dtype in self.dtypes)

    def changes(self) -> dict[str, Any]:
        """What is not as by default."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class Step:
    """A call of a method of ``Training``. Each may follow any other, so a program without some of them is one, too."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({_listed(self.arguments)})"


@dataclass(frozen=True)
class Program:
    """``seed``: of the values; the ranks have other tokens."""

    seed: int
    setup: Setup
    steps: tuple[Step, ...]

    def without(self, positions: Set[int]) -> Program:
        return replace(self, steps=tuple(step for n, step in enumerate(self.steps) if n not in positions))

    def __str__(self) -> str:
        lines = [f"training = Training({self.seed}, Setup({_listed(self.setup.changes())}), rank)"]
        return "\n".join([*lines, *(f"training.{step}" for step in self.steps)])


def _listed(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
