"""What FP8 layers keep over copies, moves and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
RECIPES = {"delayed": tg.DelayedScaling(amax_history_len=3), "current": tg.Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def new_model(device: str, make: Any = tg.Linear) -> nn.Sequential:
    options = {"device": device, "dtype": torch.bfloat16}
    return nn.Sequential(make(WIDTH, 2 * WIDTH, **options), nn.GELU(), make(2 * WIDTH, WIDTH, **options))


def micro_batch(model: nn.Module, recipe: object, values: torch.Generator, device: str) -> Tensor:
    """The loss of one, whose gradients are added."""
    x = torch.randn(6, WIDTH, generator=values).to(device, torch.bfloat16)
    with tg.fp8_autocast(recipe=recipe):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model: nn.Module, recipe: object, device: str, stop: tuple[int, int] | None, converted: bool) -> list[Tensor]:
    """Losses of 5 steps of 3 micro-batches, and parameters and states; at ``stop`` (step, micro-batch) all that a
    checkpoint holds goes through a file into a new model and optimizer."""
    values = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        for number in range(3):
            losses.append(micro_batch(model, recipe, values, device))
            if (step, number) == stop:
                grads = [p.grad for p in model.parameters()]
                saved = through_a_file([model.state_dict(), optimizer.state_dict(), grads, tg.fp8_state_dict(model)])
                model = new_model(device, nn.Linear if converted else tg.Linear)
                if converted:
                    tg.convert_to_fp8(model, min_features=16)
                model.load_state_dict(saved[0])
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                optimizer.load_state_dict(saved[1])
                for parameter, grad in zip(model.parameters(), saved[2], strict=True):
                    parameter.grad = grad
                if converted:
                    tg.load_fp8_state_dict(model, saved[3])
        optimizer.step()
        optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, tg.Linear):
            module.fp8.update_if_due()
    return [*losses, *model.parameters(), *tg.fp8_state_dict(model).values()]


@recipes
@pytest.mark.parametrize("stop", [(0, 0), (1, 2), (3, 1)])
@pytest.mark.parametrize("converted", [False, True], ids=["by hand", "converted"])
def test_a_resumed_training_is_bit_equal(device: str, recipe: object, stop: tuple[int, int], converted: bool) -> None:
    results = []
    for where in (None, stop):
        torch.manual_seed(0)
        model = new_model(device, nn.Linear if converted else tg.Linear)
        if converted:
            tg.convert_to_fp8(model, min_features=16)
        results.append(train(model, recipe, device, where, converted))
    assert all(map(same_bits, *results))


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """Of tensors that name none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@recipes
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize(
    ("dtype", "elsewhere"),
    [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")],
    ids=["bfloat16", "float64", "meta"],
)
def test_defaults_of_dtype_and_device_change_nothing(
    device: str, recipe: object, graphed: bool, dtype: torch.dtype, elsewhere: str | None
) -> None:
    results = []
    for usual in (True, False):
        torch.manual_seed(0)
        model, xs = new_model(device), torch.randn(3, 6, WIDTH).to(device, torch.bfloat16)
        start = tg.fp8_state_dict(model)
        with contextlib.nullcontext() if usual else defaults(dtype, elsewhere):
            if graphed:
                with tg.fp8_autocast(recipe=recipe):
                    tg.make_graphed_callables(model, (xs[0],))
            for number, x in enumerate(xs):
                with tg.fp8_autocast(recipe=recipe):
                    y = model(x)
                y.float().square().mean().backward()
                if number == 0:
                    tg.load_fp8_state_dict(model, start)
            states = list(tg.fp8_state_dict(model).values())
            empty = tg.Linear(WIDTH, WIDTH, device=device).get_extra_state()
        assert {state.dtype for state in (*states, empty)} == {torch.float32}
        assert empty.device.type == device
        results.append([y.detach().clone(), *(p.grad for p in model.parameters()), *states, empty])
    assert all(map(same_bits, *results))


def test_checkpoints_of_torch_layers_load_strictly(device: str) -> None:
    plain, model = new_model(device, nn.Linear), new_model(device)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    assert same_bits(model[0].weight, plain[0].weight)
    tg.convert_to_fp8(plain, min_features=16)
    back = new_model(device, nn.Linear)
    back.load_state_dict(plain.state_dict())
    assert same_bits(back[2].bias, plain[2].bias)


def test_the_state_has_one_shape(device: str) -> None:
    """So that checkpoints made before and after the first call, and under other recipes, fit each other."""
    layer, shapes = tg.Linear(WIDTH, WIDTH, device=device), set()
    for recipe in (None, *RECIPES.values(), tg.DelayedScaling()):
        if recipe is not None:
            with tg.fp8_autocast(recipe=recipe):
                layer(torch.randn(2, WIDTH, device=device))
        state = layer.state_dict()["_extra_state"]
        shapes.add((state.shape, state.dtype))
    assert shapes == {((3, 1032), torch.float32)}
    with pytest.raises(ValueError, match=r"expected FP8 state of version 1, got shape \[2, 3\]"):
        layer.set_extra_state(torch.zeros(2, 3))


def test_copies_have_scales_of_their_own(device: str) -> None:
    recipe, values = RECIPES["delayed"], torch.Generator().manual_seed(0)
    model = new_model(device)
    for _ in range(3):
        micro_batch(model, recipe, values, device)
    for layer in (model[0], model[2]):
        layer.fp8.update_if_due()
    before = tg.fp8_state_dict(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert all(map(same_bits, tg.fp8_state_dict(twin).values(), before.values()))
        micro_batch(twin, recipe, values, device)
        assert not all(map(same_bits, tg.fp8_state_dict(twin).values(), before.values()))
        assert all(map(same_bits, tg.fp8_state_dict(model).values(), before.values()))


def test_casts_of_the_model_leave_scales_float32(device: str) -> None:
    recipe, values = RECIPES["delayed"], torch.Generator().manual_seed(0)
    model = new_model(device)
    micro_batch(model, recipe, values, device)
    before = tg.fp8_state_dict(model)
    model.float().bfloat16()
    after = tg.fp8_state_dict(model)
    for name in before:
        before[name][1, 3:5] = 0  # the weights are others
        assert same_bits(before[name], after[name])
    assert not list(model.buffers())
    micro_batch(model, recipe, values, device)


@pytest.mark.gpu
def test_a_moved_model_takes_its_scales_along() -> None:
    recipe, values = RECIPES["delayed"], torch.Generator().manual_seed(0)
    model = new_model("cpu")
    micro_batch(model, recipe, values, "cpu")
    model[0].fp8.update_if_due()
    before = tg.fp8_state_dict(model)
    model.cuda()
    x = torch.zeros(6, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        model(x)
    assert same_bits(model[0].get_extra_state().cpu(), before["0"])


def test_meta_models_get_their_state_when_they_are_loaded(device: str) -> None:
    model = new_model(device)
    micro_batch(model, RECIPES["delayed"], torch.Generator().manual_seed(0), device)
    empty = new_model("meta").to_empty(device=device)
    empty.load_state_dict(model.state_dict())
    assert all(map(same_bits, tg.fp8_state_dict(empty).values(), tg.fp8_state_dict(model).values()))


def test_names_have_to_fit(device: str) -> None:
    model = new_model(device)
    with pytest.raises(KeyError, match=r"got others: missing in the state: \['2'\]"):
        tg.load_fp8_state_dict(model, {"0": model[0].get_extra_state()})
    state = tg.fp8_state_dict(model) | {f"head.{number}": model[0].get_extra_state() for number in range(7)}
    first = r"\['head.0', 'head.1', 'head.2', 'head.3', 'head.4'\]"
    with pytest.raises(KeyError, match=f"got others: of no FP8 layer of the model: {first} and 2 more"):
        tg.load_fp8_state_dict(model, state)


def test_a_model_that_is_not_converted_is_told_to_be(device: str) -> None:
    names = r"load_fp8_state_dict: .* without any: convert it first \(convert_to_fp8\), .* which has \['0', '2'\]"
    with pytest.raises(KeyError, match=names):
        tg.load_fp8_state_dict(nn.Sequential(nn.Linear(32, 32)), tg.fp8_state_dict(new_model(device)))
    tg.load_fp8_state_dict(nn.Sequential(nn.Linear(32, 32)), {})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_differ_by_a_wrapper_are_told_apart_from_others(prefix: str) -> None:
    model, odd = new_model("cpu"), "expected the names of the model's FP8 layers, got others: "
    state = tg.fp8_state_dict(model)
    wrapped = {prefix + name: value for name, value in state.items()}
    with pytest.raises(KeyError, match=rf"{odd}.* \(a prefix '{prefix}': save the state of the unwrapped model\)"):
        tg.load_fp8_state_dict(model, wrapped)
    outer = model
    for name in reversed(prefix.split(".")[:-1]):
        inner, outer = outer, nn.Module()
        setattr(outer, name, inner)
    tg.load_fp8_state_dict(outer, wrapped)
    with pytest.raises(KeyError, match=rf"{odd}.* \(a prefix '{prefix}': load into the unwrapped model\)"):
        tg.load_fp8_state_dict(outer, state)
    for other in ({}, {**wrapped, "head": state["0"]}, {prefix + "0": state["0"]}):
        with pytest.raises(KeyError, match=rf"{odd}.*\]( and \d+ more)?\W*$"):
            tg.load_fp8_state_dict(model, other)
