"""When te_graph.Linear records amaxes and updates scales.

The reference is delayed scaling written down in Python: each tensor of a module has a history, which grows by one
between two casts of it, in whatever regions and orders modules run.
"""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch
from fp8_recipes import RECIPES, recipes
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 16


@pytest.fixture(autouse=True)
def modules_of_earlier_tests_are_gone() -> None:
    """Those of one recipe share launches."""
    gc.collect()


class Tracked:
    """One tensor of a module under ``recipe``: amaxes, oldest first, of which the scale is made."""

    def __init__(self, recipe: tg.DelayedScaling, dtype: torch.dtype) -> None:
        self.recipe, self.largest = recipe, torch.finfo(dtype).max
        self.amaxes: list[float] = []
        self.newest = 0.0  # since the last update
        self.scale = 1.0

    def cast(self, x: Tensor) -> None:
        """A cast of x [...] that records."""
        self.update()
        self.newest = float(x.detach().float().abs().max()) if x.numel() else 0.0

    def update(self) -> None:
        if self.newest == 0:
            return
        self.amaxes = [*self.amaxes, self.newest][-self.recipe.amax_history_len :]
        amax = max(self.amaxes) if self.recipe.amax_compute_algo == "max" else self.newest
        # Row 0 is free for the next one: of H rows, H - 1 are kept, and none of a history of one.
        self.amaxes = (
            self.amaxes[-(self.recipe.amax_history_len - 1) :]
            if len(self.amaxes) > 1
            else (self.amaxes if self.recipe.amax_history_len > 1 else [])
        )
        scaled = torch.tensor(self.largest) * 2.0**-self.recipe.margin
        self.scale = float(scaled / torch.tensor(amax))
        self.newest = 0.0

    def assert_is(self, module: tg.Linear, tensor: int) -> None:
        """The module's state says the same, once what was recorded has been taken up."""
        self.update()
        state = module.get_extra_state()[tensor]
        history = state[8 : 8 + self.recipe.amax_history_len]
        assert [value for value in history[1:].tolist() if value] == pytest.approx(self.amaxes, rel=0)
        assert state[2].item() == self.scale


class Model(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]: layers in the order that is asked for."""

    def __init__(self, count: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(count))
        self.inputs: list[tuple[int, Tensor]] = []
        self.gradients: list[tuple[int, Tensor]] = []

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            self.inputs.append((number, x.detach()))
            y = self.layers[number](x)
            if y.requires_grad:
                y.register_hook(lambda grad, number=number: self.gradients.append((number, grad.detach())))
            x = F.gelu(y) + x
        return x


def settle(model: Model) -> None:
    for layer in model.layers:
        if layer.fp8 is not None:
            layer.fp8.update_if_due()


@recipes
def test_scales_follow_what_was_cast(device: str, rng: random.Random, recipe: tg.DelayedScaling) -> None:
    model = Model(3, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    forward, backward = recipe.fp8_format.forward_dtype, recipe.fp8_format.backward_dtype
    tracked = [[Tracked(recipe, dtype) for dtype in (forward, forward, backward)] for _ in model.layers]
    was_cast: dict[int, int] = {}
    for _ in range(8):
        pending: list[Tensor] = []
        for _ in range(rng.randint(1, 4)):
            order = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
            x = torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16) * 2.0 ** rng.uniform(-4, 4)
            model.inputs.clear()
            kind = rng.choice(("train", "train", "evaluate", "left by an exception", "outside"))
            if kind == "outside":
                model(x, order)
                continue
            if kind == "evaluate":
                before = [layer.get_extra_state()[:, 2:] for layer in model.layers]
                with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                    model(x, order)
                assert all(map(same_bits, before, [layer.get_extra_state()[:, 2:] for layer in model.layers]))
                continue
            try:
                with tg.fp8_autocast(recipe=tg.DelayedScaling(**vars(recipe))):
                    pending.append(model(x, order))
                    if kind != "train":
                        raise KeyError
            except KeyError:
                pending.pop()
            changed = any(was_cast.get(n) != layer.weight._version for n, layer in enumerate(model.layers) if layer.fp8)
            for number, value in model.inputs:
                tracked[number][0].cast(value)
            for number, layer in enumerate(model.layers):
                # With a weight that has changed all those are cast that have, of layers that were called before.
                if changed and layer.fp8 is not None and was_cast.get(number) != layer.weight._version:
                    tracked[number][1].cast(layer.weight)
                    was_cast[number] = layer.weight._version
            if pending and rng.random() < 0.5:
                model.gradients.clear()
                pending.pop(rng.randrange(len(pending))).float().square().sum().backward()
                for number, value in model.gradients:
                    tracked[number][2].cast(value)
        for loss in pending:
            model.gradients.clear()
            loss.float().square().sum().backward()
            for number, value in model.gradients:
                tracked[number][2].cast(value)
        optimizer.step()
        optimizer.zero_grad()
    settle(model)
    for number, layer in enumerate(model.layers):
        if layer.fp8 is not None:
            for tensor in range(3):
                tracked[number][tensor].assert_is(layer, tensor)


def train(model: Model, other: Model | None, recipe: object, device: str) -> list[Tensor]:
    """Losses, parameters, and states of ``model``; ``other`` runs in the same regions."""
    values = torch.Generator().manual_seed(1)
    both = [model] if other is None else [model, other]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in both]
    results = []
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(5, WIDTH, generator=values).to(device, torch.bfloat16)
            with tg.fp8_autocast(recipe=recipe):
                losses = [each(x, [0, 1, 0]).float().square().mean() for each in both]
            results.append(losses[0].detach())
            for loss in reversed(losses):
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    settle(model)
    return [*results, *model.parameters(), *(layer.get_extra_state() for layer in model.layers)]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), tg.Float8CurrentScaling()])
def test_models_in_one_region_do_not_see_each_other(device: str, recipe: object) -> None:
    results = []
    for with_other in (False, True):
        torch.manual_seed(0)
        model = Model(2, device)
        other = Model(2, device) if with_other else None
        results.append(train(model, other, recipe, device))
    assert all(map(same_bits, *results))


def test_a_place_that_another_module_had_is_empty(device: str) -> None:
    recipe = tg.DelayedScaling(amax_history_len=7)
    x = torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(40):
        layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
        with tg.fp8_autocast(recipe=recipe):
            layer(x)
            layer(x)
        assert layer.get_extra_state()[0, 8 + 6] == x.float().abs().max()
        assert not layer.get_extra_state()[0, 8 + 1 : 8 + 5].any()
        del layer


@pytest.mark.parametrize(
    "changed",
    [
        tg.DelayedScaling(amax_history_len=3, margin=1),
        tg.DelayedScaling(amax_history_len=5),
        tg.DelayedScaling(amax_history_len=2),
        tg.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
        tg.DelayedScaling(amax_history_len=3, fp8_format=tg.Format.E4M3),
    ],
    ids=["margin", "longer", "shorter", "most recent", "format"],
)
def test_another_recipe_is_in_force_at_once_with_the_histories_of_the_first(device: str, changed: Any) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    inputs = [torch.full((4, WIDTH), value, device=device, dtype=torch.bfloat16) for value in (8.0, 4.0, 2.0, 1.0)]
    for x in inputs[:3]:
        with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3)):
            layer(x).sum().backward()
    with tg.fp8_autocast(recipe=changed):
        layer(inputs[3]).sum().backward()
    state = layer.get_extra_state()[0]
    kept = [8.0, 4.0, 2.0, 1.0][-changed.amax_history_len :]
    if changed.amax_history_len > 3:
        kept = [4.0, 2.0, 1.0]  # no more were kept before
    amax = 1.0 if changed.amax_compute_algo == "most_recent" else max(kept)
    assert state[2] == 448 * 2.0**-changed.margin / amax
    layer.fp8.update_if_due()
    assert layer.get_extra_state()[2, 2] == torch.finfo(changed.fp8_format.backward_dtype).max * 2.0**-changed.margin


@pytest.mark.parametrize("trains_other", [False, True])
def test_before_another_recipe_what_is_due_is_updated_whoever_else_trains(device: str, trains_other: bool) -> None:
    """The other layer's second backward updates the gradients' scales of all layers."""
    layer, other = (tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    x = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    for trained in (other, layer) + (other,) * trains_other:
        with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3, margin=2)):
            trained(x).backward(torch.full_like(x, 8.0))
    with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3)):
        layer(x).backward(torch.full_like(x, 4.0))
    state = layer.get_extra_state()[2]
    assert state[2] == 57344 / 8 / 4
    assert state[8:11].tolist() == [4, 0, 8]


def test_a_change_to_current_scaling_and_back_starts_anew(device: str) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    x = torch.full((4, WIDTH), 8.0, device=device, dtype=torch.bfloat16)
    for recipe in (RECIPES["max"], tg.Float8CurrentScaling(), RECIPES["max"]):
        with tg.fp8_autocast(recipe=recipe):
            layer(x)
        assert layer.get_extra_state()[0, 2] == (1 if recipe == tg.Float8CurrentScaling() else 448 / 8)


def test_calibration_records_and_computes_in_high_precision(device: str) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    x = torch.randn(4, WIDTH, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), tg.fp8_autocast(enabled=False, calibrating=True, recipe=RECIPES["max"]):
        assert same_bits(layer(x), F.linear(x, layer.weight, layer.bias))
    state = layer.get_extra_state()
    assert state[0, 2] == torch.tensor(448.0) / x.float().abs().max().cpu()
    assert state[1, 2] == torch.tensor(448.0) / layer.weight.float().abs().max().cpu()


def test_an_evaluation_of_a_model_that_others_train_beside_leaves_no_trace(device: str) -> None:
    """A teacher, whose weights change and are cast for the student's forwards, too."""
    recipe = tg.DelayedScaling(amax_history_len=6)
    teacher, student = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    for _ in range(3):
        x = torch.randn(5, WIDTH, device=device)
        with tg.fp8_autocast(recipe=recipe):
            with torch.no_grad():
                teacher(x)
            student(x).sum().backward()
        with torch.no_grad():
            teacher.weight.lerp_(student.weight, 0.5)
            student.weight.mul_(1.5)
    state = teacher.get_extra_state()
    assert not state[:, 8:].any()
    assert state[:, 2].tolist() == [1, 1, 1]
    assert student.get_extra_state()[:2, 2].ne(1).all()


def test_an_evaluation_does_not_take_up_what_an_exception_left(device: str) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(5, WIDTH, device=device)
    with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=RECIPES["max"]):
        layer(x)
        raise KeyError
    before = layer.get_extra_state()
    with torch.no_grad(), tg.fp8_autocast(recipe=RECIPES["max"]):
        layer(x * 2)
    assert same_bits(layer.get_extra_state(), before)


@pytest.mark.parametrize("margin", [-110, 29])
@pytest.mark.parametrize("fp8_format", tg.Format)
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-126, 1.0, torch.finfo(torch.float32).max])
def test_with_any_margin_states_can_be_loaded(device: str, margin: float, fp8_format: tg.Format, amax: float) -> None:
    layer, other = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    recipe = tg.DelayedScaling(amax_history_len=2, margin=margin, fp8_format=fp8_format)
    for _ in range(3):
        with tg.fp8_autocast(recipe=recipe):
            y = layer(torch.full((8, WIDTH), amax, device=device))
        y.backward(torch.full_like(y, amax))
    layer.fp8.update_if_due()
    other.set_extra_state(layer.get_extra_state())
    assert same_bits(other.get_extra_state()[0], layer.get_extra_state()[0])
