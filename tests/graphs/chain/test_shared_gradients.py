"""A layer of a chain that has one gradient for two of its inputs: what becomes of one of them leaves the other alone.
The reference is eager execution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class First(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [3, 4] -> [3, 4] each
        return self.p(x), self.q(x)


class Second(nn.Module):
    """The norm of a hidden state and a residual, which get one gradient."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, device=device)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # [3, 4] each -> [3, 4]
        return self.norm(pair[0] + pair[1])


class Between(nn.Module):
    """Passes both on, one of them unchanged."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, device=device))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [3, 4] each -> [3, 4] each
        return pair[0] * self.scale, pair[0] + pair[1]


@pytest.mark.parametrize("case", ["plain", "hook", "auxiliary loss", "detached"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_of_inputs_that_share_one_are_apart(device: str, case: str, count: int) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(3)
        return [First(device), *(Between(device) for _ in range(count - 2)), Second(device)]

    eager, graphed = layers(), layers()
    sample = torch.randn(3, 4, device=device)
    tg.make_graphed_callables(tuple(graphed), ((sample,),), chain=True)
    for _ in range(2):
        seen = []
        x, weight = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
        for first, *others in (eager, graphed):
            a, b = first(x)
            if case == "hook":
                a.register_hook(lambda grad: grad * 2)
            auxiliary = a.square().mean() if case == "auxiliary loss" else 0.0
            result = (a.detach().requires_grad_(), b) if case == "detached" else (a, b)
            for other in others:
                result = other(result)
            ((result * weight).sum() + auxiliary).backward()
            seen.append(dict(nn.ModuleList([first, *others]).named_parameters()))
        given = [{name: p.grad for name, p in parameters.items() if p.grad is not None} for parameters in seen]
        assert len(given[0]) > 3
        assert_bitwise_equal(*given)
    assert all(not layer.te_graph.info()["eager_calls"] for layer in graphed)


def test_a_conjugate_of_a_result_is_not_read_in_its_place(device: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, dtype=torch.cfloat, device=device))

        def forward(self, x: Tensor) -> Tensor:  # [2] -> [2]
            return x * self.w

    one, two = Scale(), Scale()
    weights = [layer.w.detach().clone().requires_grad_() for layer in (one, two)]
    sample = torch.ones(2, dtype=torch.cfloat, device=device)
    tg.make_graphed_callables((one, two), ((sample,),), chain=True, on_mismatch="eager")
    x = torch.randn(2, dtype=torch.cfloat, device=device)
    z, expected = two(one(x).conj()), (x * weights[0]).conj() * weights[1]
    assert_bitwise_equal(z.detach(), expected.detach())
    z.real.sum().backward()
    expected.real.sum().backward()
    assert_bitwise_equal([one.w.grad, two.w.grad], [weight.grad for weight in weights])
