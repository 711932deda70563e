"""When te_graph.Linear casts weights, in how many launches, and by which scales."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from fp8_recipes import RECIPES, recipes
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 16


@pytest.fixture(autouse=True)
def modules_of_earlier_tests_are_gone() -> None:
    """Those of one recipe share launches."""
    gc.collect()


class Layers(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]: layers in the order that is asked for."""

    def __init__(self, count: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(count))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = F.gelu(self.layers[number](x)) + x
        return x


class CountCasts(TorchDispatchMode):
    """Numbers of weights in the launches that cast weights."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.te_graph.fp8_cast_weights_.List:
            self.launches.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), tg.Float8CurrentScaling()])
def test_weights_are_cast_in_one_launch_when_they_have_changed(device: str, recipe: object) -> None:
    model = Layers(5, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16)
    launches = []
    for _ in range(3):
        for _ in range(2):
            with CountCasts() as casts, tg.fp8_autocast(recipe=recipe):
                y = model(x, [0, 1, 2, 3, 4, 0])
            launches.append(casts.launches)
            y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert launches == [[1] * 5, [], [5], [], [5], []]
    model.layers[2].requires_grad_(False)
    with CountCasts() as casts, tg.fp8_autocast(recipe=recipe):
        model(x, [0, 1, 2, 3, 4]).float().sum().backward()
    optimizer.step()
    with CountCasts() as after, tg.fp8_autocast(recipe=recipe), torch.no_grad():
        model(x, [3])
    assert (casts.launches, after.launches) == ([5], [4])  # all but that which is frozen


@pytest.mark.parametrize("recipe", [*RECIPES.values(), tg.Float8CurrentScaling()])
def test_weights_in_several_blocks_of_columns_share_a_launch(device: str, recipe: object) -> None:
    """Blocks hold 32, 64, ... modules. Some members are gone, and have left holes. Weights are of sizes that no scale
    of another one suits."""
    layers = [(tg.Linear(WIDTH, WIDTH, bias=False, device=device), 64.0 ** (number % 5)) for number in range(110)]
    x = torch.randn(5, WIDTH, device=device)
    for turn in range(4):
        with torch.no_grad():
            for layer, size in layers:
                layer.weight.normal_().mul_(size)
        with CountCasts() as casts, tg.fp8_autocast(recipe=recipe):
            results = [layer(x) for layer, _ in layers]
        assert casts.launches == [[1] * 110, [110], [106], [106]][turn]
        for (layer, _), y in zip(layers, results, strict=True):
            expected = F.linear(x, layer.weight)
            assert (y - expected).norm() < 0.2 * expected.norm()
            y.sum().backward()
        if turn == 1:
            for number in (98, 41, 40, 3):
                del layers[number]
            del layer, results, y
            gc.collect()


ENDS = {
    "double": lambda layer: layer.double(),
    "sparse": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().to_sparse())),
    "csr": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().to_sparse_csr())),
    "without memory": lambda layer: layer.weight.untyped_storage().resize_(0),
    "meta": lambda layer: layer.to("meta"),
    "integers": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().to(torch.int8), False)),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("recipe", [tg.DelayedScaling(amax_history_len=3), tg.Float8CurrentScaling()])
@pytest.mark.one_of(5)
def test_what_has_become_of_another_layer_is_no_matter(device: str, recipe: object, end: Any) -> None:
    """Weights of a scope are cast together; one that is called no more may have been moved, packed or freed."""
    layers = [tg.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
    x = torch.randn(5, WIDTH, device=device)
    for turn in range(3):
        with tg.fp8_autocast(recipe=recipe):
            results = [layer(x) for number, layer in enumerate(layers) if turn == 0 or number != 1]
        sum(result.sum() for result in results).backward()
        if turn == 0:
            end(layers[1])
        with torch.no_grad():
            layers[0].weight.mul_(0.5)
            layers[2].weight.mul_(0.5)
    assert (results[1] - F.linear(x, 2 * layers[2].weight, layers[2].bias)).norm() < 0.2 * results[1].norm()


@recipes
@pytest.mark.parametrize("size", [0.004, 1.0, 5e4])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.one_of(4)
def test_the_first_cast_of_a_weight_goes_by_its_own_amax(
    device: str, recipe: tg.DelayedScaling, size: float, evaluates: bool
) -> None:
    """So that a frozen one, which is cast once, has a scale that suits it, as under a base of LoRA."""
    layer = tg.Linear(WIDTH, WIDTH, bias=False, device=device).requires_grad_(False)
    x = torch.randn(5, WIDTH, device=device).requires_grad_()
    with torch.no_grad():
        layer.weight.normal_().mul_(size)
    expected = tg.fp8_scale(layer.weight.abs().max(), margin=recipe.margin)
    if evaluates:
        before = layer.get_extra_state()[:, 3:]
        with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
            layer(x)
        assert same_bits(layer.get_extra_state()[:, 8:], before[:, 5:])
        assert layer.get_extra_state()[1, 2] == 1
    for _ in range(3):
        with tg.fp8_autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        assert layer.get_extra_state()[1, 2:6].tolist() == [expected, expected, 1, 1]
        assert (y - F.linear(x, layer.weight)).norm() < 0.05 * F.linear(x, layer.weight).norm()
    kept = [value for value in layer.get_extra_state()[1, 8:].tolist() if value]
    assert len(kept) == (recipe.amax_history_len > 1)  # recorded once


def test_a_weight_that_has_no_scale_yet_takes_none_of_others(device: str) -> None:
    """Where weights with and without one are cast together, in any order."""
    recipe, x = tg.DelayedScaling(amax_history_len=3), torch.randn(5, WIDTH, device=device)
    layers = [tg.Linear(WIDTH, WIDTH, device=device) for _ in range(5)]
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        for layer in layers:
            layer(x)
    for number in (1, 3):
        with tg.fp8_autocast(recipe=recipe):
            layers[number](x)
    scales = [layer.get_extra_state()[1, 2].item() for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(4)
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        layers[0](x)
    for number, (layer, scale) in enumerate(zip(layers, scales, strict=True)):
        own = tg.fp8_scale(layer.weight.detach().abs().max()).item()
        block = layer.fp8.block
        assert block.weight_scale[layer.fp8.number] == (scale if number in (1, 3) else own)
        assert (scale == 1) == (number not in (1, 3))


@pytest.mark.parametrize("pending", range(3))
def test_weights_that_are_cast_together_are_all_noted(device: str, pending: int) -> None:
    """Where one of them was cast since its last update, too: the update that it asks for forgets none of the others."""
    recipe = tg.DelayedScaling(amax_history_len=9)
    layers = [tg.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
    x, amaxes = torch.randn(5, WIDTH, device=device), [[] for _ in layers]

    def call(numbers: list[int]) -> None:
        """A training forward of some layers, whose region is left by an exception: nothing is updated."""
        with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=recipe):
            for number in numbers:
                layers[number](x)
            raise KeyError

    def change(numbers: list[int]) -> None:
        for number in numbers:
            with torch.no_grad():
                layers[number].weight.mul_(1.5)

    call([0, 1, 2])
    change([pending])
    call([pending])
    change([0, 1, 2])
    call([0])
    change([0, 1, 2])
    call([0, 1, 2])
    for number, layer in enumerate(layers):
        layer.fp8.update_if_due()
        kept = [value for value in layer.get_extra_state()[1, 8:17].tolist() if value]
        largest = layer.weight.detach().abs().max().item()
        amaxes[number] = [largest / 1.5**power for power in ((3, 2, 1, 0) if number == pending else (2, 1, 0))]
        assert kept == pytest.approx(amaxes[number])


@pytest.mark.parametrize(("pending", "other"), [(1, 2), (2, 1)])
def test_an_update_that_one_cast_asks_for_forgets_no_other(device: str, pending: int, other: int) -> None:
    """Seen where only that other one is called next. Repeated: the order in which weights are cast is arbitrary."""
    x = torch.randn(5, WIDTH, device=device)
    for _ in range(6):
        layers = [tg.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
        recipe = tg.DelayedScaling(amax_history_len=9)
        calls = [([0, 1, 2], []), ([pending], [pending]), ([0], [0, 1, 2]), ([other], [other])]
        for called, changed in calls:
            with torch.no_grad():
                for number in changed:
                    layers[number].weight.mul_(1.5)
            with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=recipe):
                for number in called:
                    layers[number](x)
                raise KeyError  # nothing is updated at the end of the region
        layers[other].fp8.update_if_due()
        kept = [value for value in layers[other].get_extra_state()[1, 8:17].tolist() if value]
        largest = layers[other].weight.detach().abs().max().item()
        assert kept == pytest.approx([largest / 1.5**2, largest / 1.5, largest])
