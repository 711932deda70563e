"""graph_layers of FP8 models at any point of a training: the step that it watches leaves no trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
WIDTH = 32
DELAYED, CURRENT = tg.DelayedScaling(amax_history_len=4), tg.Float8CurrentScaling()


class Layer(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = tg.Linear(WIDTH, 2 * WIDTH), tg.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Training:
    """Of a model, event by event; ``results`` are its losses.

    Args:
        graphed: "C" captures; else it does nothing.
        with_backward: the step that it watches has one.
    """

    def __init__(self, device: str, recipe: object, graphed: bool, with_backward: bool) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(Layer(), Layer()).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        self._values = torch.Generator().manual_seed(1)
        self._device, self._graphed, self._with_backward = device, graphed, with_backward
        self._region = functools.partial(tg.fp8_autocast, recipe=recipe)
        self.results: list[Tensor] = []

    def _batch(self, values: torch.Generator) -> Tensor:
        return torch.randn(5, WIDTH, generator=values).to(self._device)

    def _loss(self, x: Tensor) -> Tensor:
        with self._region():
            return self._model(x).square().mean()

    def run(self, events: str) -> list[Tensor]:
        """Losses, and weights and states at the end."""
        for event in events:
            getattr(self, f"_{event}")()
        for module in self._model.modules():
            if isinstance(module, tg.Linear):
                module.fp8.update_if_due()
        return [*self.results, *self._model.parameters(), *tg.fp8_state_dict(self._model).values()]

    def _T(self) -> None:
        """A step of the training."""
        loss = self._loss(self._batch(self._values))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.results.append(loss.detach())

    def _E(self) -> None:
        """An evaluation."""
        self._model.eval()
        with torch.no_grad():
            self.results.append(self._loss(self._batch(torch.Generator().manual_seed(2))))
        self._model.train()

    def _F(self) -> None:
        """A forward without a backward."""
        self.results.append(self._loss(self._batch(torch.Generator().manual_seed(3))).detach())

    def _D(self) -> None:
        """A change of the weights."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.25)

    def _C(self) -> None:
        """The capture, with a batch whose amaxes are others."""
        if not self._graphed:
            return
        x = self._batch(torch.Generator().manual_seed(4)) * 100
        if self._with_backward:
            tg.graph_layers(self._model, lambda: self._loss(x).backward())
        else:
            with self._region():
                tg.graph_layers(self._model, x)
        assert all(hasattr(layer, "te_graph") for layer in self._model)


@pytest.mark.parametrize("with_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("events", ["CTT", "ECTT", "TCTT", "TECTT", "FCTT", "TDCETT", "TCETT", "TTEDECTT"])
@pytest.mark.one_of(5)
def test_a_training_is_bit_equal_whenever_its_layers_are_captured(
    device: str, recipe: object, events: str, with_backward: bool
) -> None:
    expected, results = (Training(device, recipe, graphed, with_backward).run(events) for graphed in (False, True))
    assert all(map(same_bits, results, expected))


class BlockOfTwoRecipes(nn.Module):
    """A block that enters a region of its own for a part of it, [*, WIDTH] to [*, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tg.Linear(WIDTH, WIDTH), tg.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        with tg.fp8_autocast(recipe=CURRENT):
            return x + self.second(x)


def test_blocks_that_enter_a_region_of_their_own_are_captured_before_they_train(device: str) -> None:
    trained = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(BlockOfTwoRecipes(), BlockOfTwoRecipes()).to(device), torch.randn(5, WIDTH).to(device)

        def step(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with tg.fp8_autocast(recipe=DELAYED):
                loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        if is_graphed:
            assert not tg.graph_layers(model, step, show_progress=False).left_out
        results = []
        for _ in range(3):
            results += [step().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        trained.append(results)
    assert all(
        layer.te_graph.info()["recaptures"] == 0 and layer.te_graph.info()["backward_replays"] == 3 for layer in model
    )
    assert all(map(same_bits, *trained))


def raising() -> None:
    raise KeyError


@pytest.mark.parametrize("end", [lambda: None, raising], ids=["returns", "raises"])
def test_other_models_keep_what_they_are_about_to_update(device: str, end: Callable[[], None]) -> None:
    """The step's region ends with an update of all scopes."""
    states = []
    for watches in (False, True):
        torch.manual_seed(0)
        model, other = nn.Sequential(Layer(), Layer()).to(device), tg.Linear(WIDTH, WIDTH, device=device)
        x = torch.randn(5, WIDTH, device=device)
        with tg.fp8_autocast(recipe=DELAYED):
            model(x).sum().backward()
            other(x).sum().backward()

        def step(model: nn.Module = model, other: nn.Module = other, x: Tensor = x) -> None:
            with tg.fp8_autocast(recipe=DELAYED):
                other(model(x) * 3).sum().backward()
            end()

        before = [*tg.fp8_state_dict(model).values(), other.get_extra_state()]
        if watches:
            with contextlib.suppress(KeyError):
                tg.graph_layers(model, step)
            after = [*tg.fp8_state_dict(model).values(), other.get_extra_state()]
            assert all(map(same_bits, after, before))
        with tg.fp8_autocast(recipe=DELAYED):
            other(x).sum().backward()
        other.fp8.update_if_due()
        states.append(other.get_extra_state())
    assert same_bits(*states)


@pytest.mark.parametrize("on_mismatch", ["capture", "eager", "raise"])
def test_layers_are_captured_in_the_region_that_the_step_enters(device: str, on_mismatch: str) -> None:
    """Whichever region graph_layers is called in."""

    def train(is_graphed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*(tg.Linear(32, 32) for _ in range(2))).to(device)
        x, found = torch.randn(16, 32, device=device), []

        def step() -> Tensor:
            with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3)):
                loss = model(x).square().mean()
            loss.backward()
            return loss.detach().clone()

        if is_graphed:
            tg.graph_layers(model, step, on_mismatch=on_mismatch)
        for _ in range(3):
            found += [step(), *(parameter.grad.clone() for parameter in model.parameters())]
            model.zero_grad()
        for module in model if is_graphed else ():
            info = module.te_graph.info()
            assert (info["fp8_calls"], info["recaptures"], info["forward_replays"]) == (1, 0, 3)
        return found

    for one, other in zip(train(False), train(True), strict=True):
        assert same_bits(one, other)


def test_a_capture_in_the_region_of_the_step_updates_no_scales(device: str) -> None:
    """Those of another model, whose forward has raised, stay due."""
    model, other = nn.Sequential(Layer(), Layer()).to(device), tg.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(5, WIDTH, device=device)

    def step() -> None:
        with tg.fp8_autocast(recipe=DELAYED):
            model(x).sum().backward()

    with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=DELAYED):
        other(x)
        raising()
    before = other.get_extra_state()
    tg.graph_layers(model, step)
    assert same_bits(other.get_extra_state(), before)
