"""Flat parameters and the reference side by side."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from ranks import Rank
from torch import Tensor

import te_graph as tg
from te_graph.common.gradient_state import gradient_state

from .backwards import FlatSide
from .comparisons import expect_same, expect_same_state, in_memory_order, owned_ranges
from .model import Model
from .program import Setup
from .reference import OPTIMIZERS, Reference, ReferenceOptimizer, ReferenceScaler

LENGTH = 3  # of sequences


class Sides:
    """A flat model with its optimizer and scaler, and the same in plain PyTorch."""

    def __init__(self, seed: int, setup: Setup, rank: Rank) -> None:
        torch.manual_seed(seed)
        self._setup, self._rank = setup, rank
        self._numbers = torch.Generator().manual_seed(seed)  # alike on all ranks
        self._tokens = torch.Generator().manual_seed(seed * 31 + rank.rank)
        reference = Model(setup)
        model = copy.deepcopy(reference)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            one.grad = None if other.grad is None else other.grad.clone()  # which copies are without
        self._reference = Reference(reference, setup, rank.world)
        self._reference_optimizer = ReferenceOptimizer(self._reference, setup)
        self._reference_scaler = ReferenceScaler()
        self._scaler = tg.FlatGradScaler("cpu", init_scale=8.0, growth_interval=2)
        self._is_parted = setup.shard == "optimizer" and rank.world > 1
        self._hooks: list[Any] = []
        self._nodes: list[tuple[Any, Any]] = []  # and hooks on them, which live as long
        self._held: list[tuple[Any, Any]] = []  # earlier gradients, and what they were
        self._flatten(model)
        if setup.graphed:
            x = torch.randn(1, LENGTH, setup.width, dtype=model.embedding.weight.dtype, requires_grad=True)
            samples = tuple((x,) for _ in model.blocks)
            tg.make_graphed_callables(tuple(model.blocks), samples, on_mismatch="eager", on_exhausted="eager")
        self.check()

    def check(self) -> None:
        """Parameters and gradients have the same bits; of gradients the parts that this rank has."""
        owned = owned_ranges(self._flat)
        names = [name for name, one in self._side.model.named_parameters() if one.requires_grad]
        for name, (one, other) in zip(names, self._pairs(), strict=True):
            expect_same(name, one, other)
            grad, expected = _grad_of(one), self._reference.grad(other)
            assert (grad is None) == (expected is None), f"gradient of {name}: got {grad}, expected {expected}"
            if grad is None:
                continue
            assert not (self._reference.has_main(other) and grad.requires_grad), f"main_grad of {name} has a graph"
            grad, expected = in_memory_order(grad, one), in_memory_order(expected, other)
            for begin, end in owned[one] if self._is_parted else [(0, None)]:
                expect_same(f"gradient of {name}", grad[begin:end], expected[begin:end])
        for one, other in zip(self._side.frozen, self._reference.frozen, strict=True):
            assert (one.grad is None) == (other.grad is None), f"gradient that was left: got {one.grad}"
            if one.grad is not None:
                expect_same("gradient that was left", one.grad, other.grad)
        for held, value in self._held:
            expect_same("held gradient", torch.as_tensor(held), torch.as_tensor(value))

    def close(self) -> None:
        self._saved_state()
        self._flat.close()

    def _flatten(self, model: Model) -> None:
        setup = self._setup
        self._flat = tg.FlatParameters(
            model,
            grad_dtype=getattr(torch, setup.grad_dtype),
            bucket_bytes=setup.bucket_bytes,
            shard=setup.shard,
            gradient_scale=setup.gradient_scale,
            overlap_grad_reduce=setup.overlap,
            reduce_dtype=torch.bfloat16 if setup.sends_bf16 else None,
            overlap_param_gather=model.blocks if setup.gathers_late else (),
        )
        self._side = FlatSide(model, self._flat)
        self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> Any:
        cls, options = OPTIMIZERS[self._setup.optimizer]
        return self._flat.optimizer(cls, [*self._side.parameters, *self._side.frozen], **options)

    def _saved_state(self) -> dict[str, Any]:
        state = copy.deepcopy(self._optimizer.state_dict())
        expect_same_state(state, self._reference_optimizer)
        return state

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters of both sides, [...] each."""
        yield from zip(self._side.parameters, self._reference.parameters, strict=True)

    def _pair(self, number: int) -> tuple[Tensor, Tensor]:
        pairs = list(self._pairs())
        return pairs[number % len(pairs)]


def _grad_of(parameter: Tensor) -> Tensor | None:  # [...] -> [...]
    """``.grad``, or ``main_grad``, which it will be added to."""
    state = gradient_state(parameter)
    if getattr(parameter, "main_grad", None) is None:
        return parameter.grad
    if state.main_grad_reset.is_pending:
        return None if parameter.grad is None else parameter.grad.to(parameter.main_grad.dtype)
    return parameter.main_grad if parameter.grad is None else parameter.main_grad + parameter.grad
