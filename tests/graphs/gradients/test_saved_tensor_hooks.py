"""torch.autograd.graph.saved_tensors_hooks around calls of graphed callables: offloading, compression."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import replays
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from twins import eager_copy, gradients_of, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def net(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)


def coarse() -> saved_tensors_hooks:
    """Saves half of the bits, so that gradients tell whether it did."""
    return saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float())


@pytest.mark.parametrize("hooks", [coarse, save_on_cpu])
def test_hooks_around_a_call_see_what_is_saved(device, hooks, caplog):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))

    def hooked(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def inside(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            with hooks():
                return call(x)

        return inside

    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(hooked(model), x), run(hooked(twin), x))
    assert replays(model) == 0
    assert [record.message for record in caplog.records if "saved_tensors_hooks" in record.message] == [
        "Sequential: called under torch.autograd.graph.saved_tensors_hooks, which see no replay (runs eagerly)"
    ]
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert replays(model) == 1
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_hooks_that_concern_no_gradient_change_nothing(device):
    model = net(device).requires_grad_(False)
    twin = eager_copy(model)
    x = batch(device).detach()
    make_graphed_callables(model, (x,))
    with coarse():
        assert torch.equal(model(x), twin(x))
    assert replays(model) == 1
