"""cuDNN's recurrent layers: flat weights that torch sets tensors to, and a dropout state that torch keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from twins import eager_copy, train

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch() -> torch.Tensor:
    return torch.randn(5, 3, 8, device="cuda", requires_grad=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_replay_equals_eager_before_and_after_some_layer_used_dropout(kind: type[nn.Module]) -> None:
    for _ in range(2):
        model = kind(8, 16, 2).cuda()
        twin = eager_copy(model)
        tg.make_graphed_callables(model, (batch(),))
        steps = [[(batch(),) for _ in range(2)] for _ in range(3)]
        assert_bitwise_equal(train(model, steps), train(twin, steps))
        assert model.te_graph.info()["forward_replays"] == 6
        nn.LSTM(8, 16, 2, dropout=0.5).cuda()(batch())


@pytest.mark.gpu
def test_dropout_between_layers_draws_anew_at_each_replay() -> None:
    model = nn.LSTM(8, 16, 2, dropout=0.5).cuda()
    tg.make_graphed_callables(model, (batch(),))
    x = batch()
    results = []
    for _ in range(3):
        output, _ = model(x)
        output.sum().backward()
        results.append(output.detach())
    assert all(torch.isfinite(result).all() for result in results)
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
