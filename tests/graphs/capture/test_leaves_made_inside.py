"""Callables that take derivatives inside, with respect to leaves of their own over memory that others have, too."""

from __future__ import annotations

import copy

import pytest
import torch
from hazards import batch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Energy(nn.Module):
    """An energy and the forces, its derivative, for what is given detached."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6, device=device), nn.Linear(6, 1, device=device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [], [n, 4]
        x = x.detach().requires_grad_()
        energy = self.outer(self.inner(x).tanh()).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, forces


class Adapted(Energy):
    """Takes a step of its weight, by the derivative with respect to a detached one, before it is used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [], [n, 6]
        weight = self.inner.weight.detach().requires_grad_()  # [6, 4]
        loss = (x @ weight.T).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss, torch.tanh(x @ (self.inner.weight - 0.1 * gradient).T)


class MadeAtFirst(Energy):
    """Makes a weight at the first call, over memory that a buffer has, and keeps it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [], [n, 6]
        if not hasattr(self, "scale"):
            self.register_buffer("ones", torch.ones(6, device=x.device))
            self.scale = nn.Parameter(self.ones.detach())
        result = self.inner(x) * self.scale
        return result.sum(), result


@pytest.mark.parametrize("kind", [Energy, Adapted, MadeAtFirst])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_warmup_iters", [1, 3])
def test_the_leaf_is_none_of_the_parameters(device, kind, max_in_flight, num_warmup_iters):
    net = kind(device)
    twin = copy.deepcopy(net)
    options = {"max_in_flight": max_in_flight, "num_warmup_iters": num_warmup_iters}
    make_graphed_callables(net, (batch(device, False),), **options)
    for _ in range(3):
        x = batch(device, False)
        for one in (net, twin):
            first, second = one(x)
            (first + second.square().sum()).backward()
        assert_bitwise_equal([*net(x)], [*twin(x)])
        grads = [[p.grad for p in one.parameters()] for one in (net, twin)]
        assert_bitwise_equal(*grads)
