"""Silent hazards of graph replay where a graph reads or writes what another graph has lent.

What is lent moves before its memory is overwritten; the next result lies at the same address, which the other graph
goes on to use. The reference is eager execution.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
STEPS = 6
Keep = Callable[[Tensor], object]  # what a program does with a lent tensor [...]


def encoder(device: str, is_graphed: bool) -> nn.Module:
    """[2, 4] -> [2, 4]."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    if is_graphed:
        tg.make_graphed_callables(module, (torch.zeros(2, 4, device=device),))
    return module


def inputs(device: str) -> list[Tensor]:
    """[2, 4] each."""
    return list(torch.randn(STEPS, 2, 4, generator=torch.Generator().manual_seed(1)).to(device))


def sums_of_results(device: str, is_graphed: bool, keep: Keep) -> list[Tensor]:
    encode, total = encoder(device, is_graphed), torch.zeros(2, 4, device=device)

    def add(y: Tensor) -> Tensor:  # [2, 4] -> []
        total.add_(y.detach() * 2)
        return total.sum()

    add = tg.graphed(add) if is_graphed else add
    found = []
    for x in inputs(device):
        y = encode(x)
        y.sum().backward()
        keep(y.detach())
        found += [add(y.detach()).clone(), total.clone()]
    assert not is_graphed or add.info()["forward_replays"] == STEPS - 1
    return found


def results_changed_in_place(device: str, is_graphed: bool, keep: Keep) -> list[Tensor]:
    encode = encoder(device, is_graphed)

    def normalize_(y: Tensor) -> Tensor:  # [2, 4] -> []
        y.div_(y.norm(dim=-1, keepdim=True))
        return y.sum()

    normalize_ = tg.graphed(normalize_) if is_graphed else normalize_
    found = []
    for x in inputs(device):
        y = encode(x).detach()
        found += [normalize_(y).clone(), y.clone()]
        keep(y)
    return found


def buffers_that_are_results(device: str, is_graphed: bool, keep: Keep) -> list[Tensor]:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("memory", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:  # [2, 4] -> [2, 4]
            return self.linear(x) + self.memory

    encode, decoder = encoder(device, is_graphed), Decoder().to(device)
    if is_graphed:
        tg.make_graphed_callables(decoder, on_mismatch="capture")
    found = []
    for x in inputs(device):
        decoder.memory.data = encode(x).detach()
        keep(decoder.memory.data)
        y = decoder(x)
        y.sum().backward()
        found += [y.detach().clone()]
    return found


def steps_by_lent_gradients(device: str, is_graphed: bool, keep: Keep) -> list[Tensor]:
    """The gradient of ``prompt`` is that of the layer's input."""
    encode, prompt = encoder(device, False).requires_grad_(False), nn.Parameter(torch.ones(8, device=device))
    if is_graphed:
        tg.make_graphed_callables(encode, (torch.zeros(2, 4, device=device, requires_grad=True),))
    optimizer = torch.optim.SGD([prompt], 0.1, fused=True)
    step = tg.graphed(lambda: optimizer.step()) if is_graphed else optimizer.step
    found = []
    for x in inputs(device):
        (encode(prompt.view(2, 4)) * x).sum().backward()
        step()
        keep(prompt.grad)
        optimizer.zero_grad()
        found += [prompt.detach().clone()]
    return found


@pytest.mark.parametrize("holds", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize(
    "program",
    [sums_of_results, results_changed_in_place, buffers_that_are_results, steps_by_lent_gradients],
    ids=lambda program: program.__name__,
)
def test_what_another_graph_has_lent_is_read_and_written_where_it_is(
    device: str, program: Callable[[str, bool, Keep], list[Tensor]], holds: bool
) -> None:
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    keeps = [held.append if holds else id for held in kept]
    assert_bitwise_equal(program(device, True, keeps[0]), program(device, False, keeps[1]))
    assert_bitwise_equal(*kept)
