"""create_graph, capture_to_graph, replay_graph: on a GPU the CUDA graphs of torch, without one the recorder."""

from __future__ import annotations

import logging

import pytest
import torch

from te_graph import CaptureError, Recorder, capture_to_graph, create_graph, replay_graph
from te_graph.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def test_a_capture_does_nothing_and_each_replay_does_it_once() -> None:
    x, total = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    graph = create_graph()
    with capture_to_graph(graph):
        total.add_(x)
        doubled = total * 2
    assert_bitwise_equal(total, torch.zeros_like(x))
    for call in range(1, 4):
        replay_graph(graph)
        assert_bitwise_equal((total, doubled), (x * call, x * 2 * call))
    x.fill_(10)
    replay_graph(graph)
    assert_bitwise_equal(total, torch.full_like(x, 13))


def test_a_capture_that_fails_leaves_tensors_as_they_were() -> None:
    total = torch.zeros(3, device=DEVICE)
    with pytest.raises(ZeroDivisionError), capture_to_graph(create_graph()):
        total.add_(1)
        raise ZeroDivisionError
    assert_bitwise_equal(total, torch.zeros_like(total))


def test_random_numbers_go_on_after_a_capture() -> None:
    torch.manual_seed(7)
    expected = [torch.rand(4, device=DEVICE) for _ in range(2)]
    torch.manual_seed(7)
    graph = create_graph()
    with capture_to_graph(graph):
        drawn = torch.rand(4, device=DEVICE)
    for values in expected:
        replay_graph(graph)
        assert_bitwise_equal(drawn, values)


def test_the_recorder_refuses_host_reads() -> None:
    assert isinstance(create_graph(), torch.cuda.CUDAGraph if DEVICE == "cuda" else Recorder)
    total = torch.zeros(3)
    with pytest.raises(CaptureError, match=r"_local_scalar_dense.*test_graphs\.py"), capture_to_graph(Recorder()):
        total.add_(1).sum().item()
    assert_bitwise_equal(total, torch.zeros_like(total))


def test_disabled_the_body_runs_and_a_replay_says_that_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    total, graph = torch.zeros(3, device=DEVICE), create_graph()
    with capture_to_graph(graph):
        total.add_(1)
        assert total.sum().item() == 3
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for _ in range(3):
            replay_graph(graph)
    assert_bitwise_equal(total, torch.ones_like(total))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["replay_graph"]


def test_wrong_arguments_are_named() -> None:
    graph = create_graph()
    with pytest.raises(TypeError, match="capture_to_graph: expected a graph of create_graph"), capture_to_graph(3):
        pass
    with pytest.raises(TypeError, match="capture_to_graph: expected pool"), capture_to_graph(graph, pool=3):
        pass
    with pytest.raises(TypeError, match="capture_to_graph: expected stream"), capture_to_graph(graph, stream=3):
        pass
    with pytest.raises(TypeError, match="replay_graph: expected a graph of create_graph"):
        replay_graph(None)
