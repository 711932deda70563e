"""Callables that write buffers and arguments by operators on lists: as by one operator after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from list_writes import WRITES
from torch import Tensor, nn
from twins import eager_copy

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Writing(nn.Module):
    def __init__(self, write: Callable) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("second", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:  # [4]
        with torch.no_grad():
            self.write([self.first, self.second])
        return x * self.weight


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_backward_that_has_saved_a_written_buffer_raises(device: str, write: Callable) -> None:
    model = Writing(write).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (torch.ones(4, device=device, requires_grad=True),))
    for _ in range(2):
        for each in (model, twin):
            x = torch.ones(4, device=device, requires_grad=True)
            waiting, version = (x * each.first).sum(), each.first._version
            each(x).sum().backward()
            assert each.first._version == version + 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                waiting.backward()
        assert_bitwise_equal(model.state_dict(), twin.state_dict())
    assert model.te_graph.info()["forward_replays"] == 2


def averages(x: Tensor, mean: Tensor, square: Tensor) -> Tensor:  # [3, 4], [4], [4]
    torch._foreach_mul_([mean, square], 0.9)
    torch._foreach_add_([mean, square], [x.detach().mean(0), x.detach().square().mean(0)])
    return (x - mean) / (square.sqrt() + 1)


@pytest.mark.parametrize("is_late", [False, True])
def test_arguments_that_a_list_write_changes_are_the_callers(device: str, is_late: bool) -> None:
    def fresh() -> tuple[Tensor, ...]:
        x = torch.randn(3, 4, device=device, requires_grad=True)
        return x, torch.zeros(4, device=device), torch.ones(4, device=device)

    call = make_graphed_callables(averages, None if is_late else fresh())
    for _ in range(2):
        x, *state = fresh()
        given, expected = [one.clone() for one in state], [one.clone() for one in state]
        assert_bitwise_equal(call(x, *given), averages(x, *expected))
        assert_bitwise_equal(given, expected)
        assert given[0]._version == 1  # by one copy
    assert call.te_graph.info()["forward_replays"] == 2
