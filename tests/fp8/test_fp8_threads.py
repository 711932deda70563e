"""Trainings on threads of one process: each has the bits that it has alone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import te_graph as tg

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
