"""Trainings on threads of one process: each has the bits that it has alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph import _C
from te_graph.common.kept_state import state_kept
from te_graph.fp8.scaling_scope import scaling_scopes

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


DELAYED, OTHER = tg.DelayedScaling(amax_history_len=8), tg.DelayedScaling(amax_history_len=7)


def on_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Adapted(nn.Module):
    """x [n, 32] -> [n, 32]: a layer whose weight is frozen, and so cast once, beside one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = tg.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.adapter(torch.tanh(self.base(x)))


class Training:
    """One of a model by ``DELAYED``, whose inputs are of sizes that differ from step to step."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device, self.losses = model.to(device), device, []
        self.optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
        self.values = torch.Generator().manual_seed(1)

    def loss(self, x: Tensor) -> Tensor:  # [n, 32] -> []
        with tg.fp8_autocast(recipe=DELAYED):
            return self.model(x).square().mean()

    def step(self, scale: float) -> None:
        x = scale * torch.randn(16, 32, generator=self.values)
        loss = self.loss(x.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.parametrize("layers", [Adapted, "graph_layers"], ids=["make_graphed_callables", "graph_layers"])
def test_a_thread_that_goes_on_with_frozen_weights_captures_without_a_trace(device: str, layers: object) -> None:
    """Their scales are those of the thread that called them last, though another one has cast them."""
    losses = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        training = Training(nn.Sequential(Adapted(), Adapted()), device)

        def work(training: Training = training, is_graphed: bool = is_graphed) -> None:
            x = 1000 * torch.ones(16, 32, device=device)
            if is_graphed and layers == "graph_layers":
                tg.graph_layers(training.model, lambda: training.loss(x).backward(), layers=Adapted)
            elif is_graphed:
                with tg.fp8_autocast(recipe=DELAYED):
                    tg.make_graphed_callables(training.model, (x,))
            for number in range(6):
                training.step(1 + number % 3)

        training.step(1)
        training.step(2)
        on_thread(work)
        losses.append(training.losses)
    assert losses[0] == losses[1]


def test_a_capture_leaves_frozen_weights_that_another_thread_trains_with(device: str) -> None:
    losses = []
    for is_captured_beside in (False, True):
        torch.manual_seed(0)
        training, begins, is_done = Training(Adapted(), device), threading.Event(), threading.Event()

        def work(training: Training = training, begins: threading.Event = begins, is_done: Any = is_done) -> None:
            begins.wait(20)
            for number in range(4):
                training.step(30 - 5 * number)
            is_done.set()

        training.step(1)
        thread = threading.Thread(target=work)
        thread.start()
        if is_captured_beside:
            other = tg.Linear(32, 32, device=device)
            with tg.fp8_autocast(recipe=OTHER), state_kept():
                other(torch.ones(16, 32, device=device))
                begins.set()
                is_done.wait(20)
        begins.set()
        thread.join()
        on_thread(lambda training=training: training.step(3))
        losses.append(training.losses)
    assert losses[0] == losses[1]


def test_replays_keep_their_amaxes_while_another_thread_leaves_regions(device: str) -> None:
    """An update of all scopes may come between what a replay does on the host and its launch."""

    def losses_beside(call: Callable[[], object] | None) -> list[float]:
        torch.manual_seed(0)
        training = Training(nn.Sequential(tg.Linear(32, 32), nn.Tanh(), tg.Linear(32, 32)), device)
        with tg.fp8_autocast(recipe=DELAYED):
            tg.make_graphed_callables(training.model, (torch.randn(16, 32, device=device),))
        is_done = threading.Event()

        def repeat() -> None:
            while call is not None and not is_done.is_set():
                call()

        thread = threading.Thread(target=repeat)
        thread.start()
        for number in range(150):
            training.step(1 + number % 5)
        is_done.set()
        thread.join()
        return training.losses

    def leave_a_region() -> None:
        with tg.fp8_autocast(recipe=OTHER):
            pass

    assert losses_beside(None) == losses_beside(leave_a_region)


def test_members_are_listed_while_other_threads_make_some(device: str) -> None:
    scope = scaling_scopes.find(DELAYED, torch.device(device, 0) if device == "cuda" else torch.device(device), None)
    layers, is_done, kept = [tg.Linear(16, 16, device=device) for _ in range(300)], threading.Event(), []

    def make() -> None:
        for layer in layers:
            kept.append(scope.add(layer))
        is_done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=make)
        thread.start()
        while not is_done.is_set():
            assert scope in scaling_scopes.all() and len(scope.members) <= len(layers)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert {id(member) for member in kept} <= {id(member) for member in scope.members}
