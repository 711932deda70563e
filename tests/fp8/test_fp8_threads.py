"""Trainings on threads of one process: each has the bits that it has alone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph import _C

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
STEPS, THREADS = 30, 3
RECIPES = {
    "current": [tg.Float8CurrentScaling()] * THREADS,
    "one recipe": [tg.DelayedScaling(amax_history_len=4)] * THREADS,
    "a recipe each": [tg.DelayedScaling(amax_history_len=length) for length in range(5, 5 + THREADS)],
}


def train(recipe: tg.DelayedScaling | tg.Float8CurrentScaling, number: int, device: str) -> list[float]:
    """Losses of a training whose inputs, and so their amaxes, differ from step to step."""
    values = torch.Generator().manual_seed(number)
    model = nn.Sequential(tg.Linear(64, 128), nn.GELU(), tg.Linear(128, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=values))
    model.to(device)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    x = torch.randn(32, 64, generator=values).to(device)
    for step in range(STEPS):
        with tg.fp8_autocast(recipe=recipe):
            loss = (model(x * (1 + step % 5)) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipes", RECIPES.values(), ids=RECIPES)
def test_trainings_on_several_threads_have_the_bits_of_each_alone(device: str, recipes: list) -> None:
    alone = [train(recipe, number, device) for number, recipe in enumerate(recipes)]
    for _ in range(4):
        found: dict[int, list[float]] = {}
        barrier = threading.Barrier(THREADS)

        def work(number: int, found: dict = found, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            found[number] = train(recipes[number], number, device)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found.get(number) for number in range(THREADS)] == alone


def test_threads_that_make_members_at_once_keep_them_apart(device: str) -> None:
    """All in one new scope, whose first block they outgrow."""
    recipe = tg.Float8CurrentScaling(fp8_format=tg.Format.E4M3)
    barrier, scopes = threading.Barrier(8), []

    def work() -> None:
        layers = [tg.Linear(16, 16, device=device) for _ in range(9)]
        barrier.wait()
        with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
            for layer in layers:
                layer(torch.ones(1, 16, device=device))
        scopes.append([(layer.fp8.scope, layer.fp8) for layer in layers])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [pair for each in scopes for pair in each]
    assert len({id(scope) for scope, _ in found}) == 1
    scope = found[0][0]
    assert {id(member) for _, member in found} <= {id(member) for member in scope.members}
    assert len({(id(member.block), member.number) for _, member in found}) == 72
    assert [block.order for block in scope.blocks] == list(range(len(scope.blocks)))


def test_what_another_thread_updates_is_due_until_the_launch(device: str) -> None:
    """An update begins with ``reduce``, in which another thread is about to cast a tensor that is due as well."""
    history = torch.zeros(4, 2, device=device)
    scale, scale_inv = torch.ones(2, device=device), torch.ones(2, device=device)
    table = _C.ScaleTable(history, scale, scale_inv, 448.0, 0.0, "max")
    history[0] = torch.tensor([2.0, 4.0], device=device)
    for column in (0, 1):
        table.end_cast(column)
    seen: list[list[float]] = []

    updates: list[list[float]] = []

    def begin_other() -> None:
        table.begin_cast(1)
        seen.append(scale.tolist())

    def reduce(row: Tensor) -> None:  # [2]
        updates.append(row.tolist())
        if len(updates) == 1:
            thread = threading.Thread(target=begin_other)
            thread.start()
            thread.join()

    table.set_reduce(reduce)
    table.begin_cast(0)
    assert updates == [[2.0, 4.0], [2.0, 4.0]]
    assert seen == [[448 / 2, 448 / 4]]
    assert scale.tolist() == seen[0]
    assert history[0].tolist() == [0.0, 0.0]
    assert not table.is_due(0)
    assert not table.is_due(1)
