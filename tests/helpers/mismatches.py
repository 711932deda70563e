"""Calls of a callable that captures again where a call does not match, beside an eager copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, gradients_of, leaf_copy

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str, rows: int = 4) -> Tensor:  # [rows, 6]
    return torch.randn(rows, 6, device=device, requires_grad=True)


def stateful(device: str) -> nn.Sequential:
    """Dropout draws random numbers, batch norm updates buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 6)).to(device)


def graphed_pair(device: str, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A module captured for [4, 6] with ``on_mismatch="capture"``, and its eager twin."""
    model = stateful(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch="capture", **options)
    return model, twin


def compare(model: nn.Module, twin: nn.Module, step: Callable[[nn.Module], Any]) -> None:
    """Let both do ``step`` from one generator state, and compare everything that it leaves."""
    device = next(twin.parameters()).device
    seed, seen = int(torch.randint(2**31, ())), []
    for net in (model, twin):
        torch.manual_seed(seed)
        state = [step(net), gradients_of(list(net.parameters())), leaf_copy(dict(net.named_buffers()))]
        seen.append([*state, torch.rand(3, device=device)])
    assert_bitwise_equal(*seen)


def counts(model: Any) -> tuple[int, int, int]:
    """Signatures, recaptures, eager calls."""
    info = model.te_graph.info()
    return info["signatures"], info["recaptures"], sum(info["eager_calls"].values())


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "te_graph" and r.levelno == level]
