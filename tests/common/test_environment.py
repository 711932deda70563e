"""Switches in the environment: what is neither 0 nor 1 is refused by name, wherever it is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_graph as tg


@pytest.mark.parametrize("value", ["true", "2", "off"])
@pytest.mark.parametrize("name", ["TE_GRAPH_DISABLE", "TE_GRAPH_POISON"])
def test_another_value_is_refused_at_capture(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"environment variable {name} to be 0 or 1, got '{value}'$"):
        tg.make_graphed_callables(nn.Linear(3, 3), (torch.randn(2, 3),))


def test_another_value_is_refused_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_GRAPH_PEER", "no")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises((RuntimeError, ValueError), match="TE_GRAPH_PEER to be 0 or 1, got 'no'"):
            tg.PeerGroup(timeout=5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("value", "backend"), [("", "recorder"), ("0", "recorder"), ("1", None)])
def test_empty_is_unset(value: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_GRAPH_DISABLE", value)
    module = tg.make_graphed_callables(nn.Linear(3, 3), (torch.randn(2, 3),))
    assert module.te_graph.info()["backend"] == backend
