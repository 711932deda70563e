"""A state that was loaded goes with the weight that was loaded, and with no other one."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
RECIPE = tg.DelayedScaling(amax_history_len=4)


def forward(layer: nn.Module, x: Tensor) -> Tensor:
    with tg.fp8_autocast(recipe=RECIPE):
        return layer(x)


def new_layer(device: str) -> tg.Linear:
    torch.manual_seed(0)
    return tg.Linear(WIDTH, WIDTH, bias=False, device=device)


def an_input(device: str) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.fixture
def saved(device: str) -> dict[str, Tensor]:
    """The state dict of a layer that has run three times."""
    layer = new_layer(device)
    for _ in range(3):
        forward(layer, an_input(device)).sum().backward()
    layer.fp8.update_if_due()
    return copy.deepcopy(layer.state_dict())


def scaled(layer: tg.Linear, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        layer.weight.mul_(8)


def stepped(layer: tg.Linear, saved: dict[str, Tensor], fused: bool) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=100.0, fused=fused)
    layer(torch.ones(2, WIDTH, device=layer.weight.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def replaced(layer: tg.Linear, saved: dict[str, Tensor]) -> None:
    layer.weight = nn.Parameter(saved["weight"] * 8)


def halved(layer: tg.Linear, saved: dict[str, Tensor]) -> None:
    layer.bfloat16().float()


CHANGES: dict[str, Callable] = {
    "in place": scaled,
    "by an optimizer": lambda layer, saved: stepped(layer, saved, False),
    "by a fused optimizer": lambda layer, saved: stepped(layer, saved, True),
    "another parameter": replaced,
    "another dtype": halved,
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changes_after_it_was_loaded_is_recorded(
    device: str, saved: dict[str, Tensor], change: Callable, assign: bool
) -> None:
    layer = new_layer(device)
    layer.load_state_dict(copy.deepcopy(saved), assign=assign)
    change(layer, saved)
    state = layer.get_extra_state()
    assert not state[1, 3:5].any()  # it is not as it was cast
    twin = new_layer(device)
    twin.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = an_input(device)
    for _ in range(3):
        assert same_bits(forward(layer, x), forward(twin, x))
    layer.fp8.update_if_due()
    assert layer.get_extra_state()[1, 8:12].max() == layer.weight.detach().abs().max()


@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_that_stays_is_not_recorded_again(device: str, saved: dict[str, Tensor], assign: bool) -> None:
    layer = new_layer(device)
    layer.load_state_dict(copy.deepcopy(saved), assign=assign)
    layer = layer.to(device).to("cpu").to(device)
    assert same_bits(layer.get_extra_state().to(device), saved["_extra_state"])
    forward(layer, an_input(device))
    layer.fp8.update_if_due()
    assert same_bits(layer.get_extra_state()[1], saved["_extra_state"][1])


APPLIED = {
    "other values": (lambda t: t.detach() * 0.5, False),
    "written": (lambda t: t.mul_(0.5), False),
    "written, and copied": (lambda t: t.mul_(0.5).clone(), False),
    "without values": (lambda t: torch.full_like(t, 3.0), False),
    "copied": (lambda t: t.clone(), True),
    "there and back": (lambda t: t.double().float(), True),
    "the same": (lambda t: t, True),
}


@pytest.mark.parametrize(("function", "stays"), APPLIED.values(), ids=APPLIED)
def test_a_state_goes_with_a_weight_whose_memory_is_another_and_whose_values_are_not(
    device: str, saved: dict[str, Tensor], function: Callable[[Tensor], Tensor], stays: bool
) -> None:
    layer = new_layer(device)
    layer.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        layer._apply(function)
    assert layer.get_extra_state()[1, 4] == stays
    layer.share_memory()
    assert layer.get_extra_state()[1, 4] == stays
    layer.to("meta").state_dict()


def test_what_a_state_dict_holds_is_a_copy(device: str, saved: dict[str, Tensor]) -> None:
    layer = new_layer(device)
    layer.load_state_dict(saved)
    for _ in range(2):
        layer.get_extra_state().zero_()
    assert same_bits(layer.get_extra_state(), saved["_extra_state"])


def new_model(device: str, is_tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(tg.Linear(WIDTH, WIDTH, device=device), tg.Linear(WIDTH, WIDTH, device=device))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def micro_batch(model: nn.Module, device: str) -> Tensor:
    y = forward(model, an_input(device))
    y.square().mean().backward()
    return y.detach()


def rest(model: nn.Module, grads: list[Tensor], device: str) -> list[Tensor]:
    """The results of what is left of a training."""
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    optimizer, results = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(4):
        results.append(micro_batch(model, device))
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("way", ["load", "assign", "deepcopy", "pickle"])
def test_a_training_goes_on_bit_for_bit(device: str, way: str, is_tied: bool, is_known: bool) -> None:
    """In the middle of a step, after which weights are as they were cast."""
    model = new_model(device, is_tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        micro_batch(model, device)
        optimizer.step()
        optimizer.zero_grad()
    micro_batch(model, device)
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    if way in ("deepcopy", "pickle"):
        other = copy.deepcopy(model) if way == "deepcopy" else through_a_file(model)
    else:
        other = new_model(device, is_tied)
        if is_known:
            micro_batch(other, device)
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=way == "assign")
        if is_tied:
            other[1].weight = other[0].weight
    assert all(map(same_bits, rest(other, grads, device), rest(model, grads, device)))


def test_tied_layers_that_load_other_values_go_with_the_last(device: str) -> None:
    model = new_model(device, True)
    micro_batch(model, device)
    state = copy.deepcopy(model.state_dict())
    state["1.weight"] = state["1.weight"] * 2
    model = new_model(device, True)
    model.load_state_dict(state)
    assert model[0].get_extra_state()[1, 4] == 0
    assert model[1].get_extra_state()[1, 4] == 1


def test_a_layer_that_is_copied_on_the_meta_device_computes_when_it_is_real(device: str) -> None:
    with torch.device("meta"):
        layer = copy.deepcopy(tg.Linear(WIDTH, WIDTH))
    layer = layer.to_empty(device=device)
    layer.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
    forward(layer, an_input(device)).sum().backward()
    assert layer.state_dict()["_extra_state"].device == torch.device(layer.weight.device)


def test_weights_of_inference_mode_are_refused_by_name(device: str) -> None:
    with torch.inference_mode():
        layer = new_layer(device)
    known = new_layer(device)
    forward(known, an_input(device))
    with torch.inference_mode():
        known.load_state_dict({"weight": known.weight.clone()}, assign=True)
    for each in (layer, known):
        each.state_dict()
        with pytest.raises(TypeError, match="got one that was made in inference mode"), torch.no_grad():
            forward(each, an_input(device))
        each(an_input(device))
        forward(new_layer(device), an_input(device))  # others go on


@pytest.mark.parametrize("is_known", [False, True])
def test_states_of_another_form_are_refused_when_they_are_loaded(device: str, is_known: bool) -> None:
    layer = new_layer(device)
    if is_known:
        forward(layer, an_input(device))
    for state in (torch.zeros(2, 3), torch.zeros(3, 1032), torch.zeros(4)):
        with pytest.raises(ValueError, match="expected FP8 state of version 1, got shape"):
            layer.set_extra_state(state)
    layer.state_dict()


def with_entry(state: Tensor, row: int, column: int, value: float) -> Tensor:
    """A copy of ``state`` [3, n] that has ``value`` there."""
    state = state.clone()
    state[row, column] = value
    return state


DAMAGED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "halves": (Tensor.half, r"got one of torch\.float16: a checkpoint whose tensors were cast"),
    "bfloat16": (Tensor.bfloat16, r"got one of torch\.bfloat16: a checkpoint whose tensors were cast"),
    "doubles": (Tensor.double, r"got one of torch\.float64: a checkpoint whose tensors were cast"),
    "halves and back": (
        lambda state: with_entry(state, 0, 2, 1e9).half().float(),
        "a scale that is finite and positive, got inf for the input",
    ),
    "no scale": (lambda state: with_entry(state, 2, 2, 0), "got 0 for the gradient of the result"),
    "a negative scale": (lambda state: with_entry(state, 1, 2, -1), "got -1 for the weight"),
    "no number": (lambda state: with_entry(state, 1, 2, float("nan")), "got nan for the weight"),
    "the scale of a cast": (lambda state: with_entry(state, 1, 3, float("inf")), "got inf for the weight"),
    "half a step": (
        lambda state: with_entry(state, 0, 1, 2.5),
        "a history length of a whole number up to 1024, got 2.5",
    ),
    "a long history": (lambda state: with_entry(state, 2, 1, 1025), "got 1025"),
    "a negative length": (lambda state: with_entry(state, 0, 1, -1), "got -1"),
    "an infinite length": (lambda state: with_entry(state, 0, 1, float("inf")), "got inf"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("is_known", [False, True])
def test_damaged_states_are_refused_when_they_are_loaded(
    device: str, saved: dict[str, Tensor], damage: Callable, message: str, is_known: bool
) -> None:
    layer = new_layer(device)
    if is_known:
        forward(layer, an_input(device))
    before = layer.get_extra_state()
    for load in (layer.set_extra_state, lambda state: tg.load_fp8_state_dict(nn.Sequential(layer), {"0": state})):
        with pytest.raises(ValueError, match=f"expected FP8 state .*{message}"):
            load(damage(saved["_extra_state"]))
    assert same_bits(layer.get_extra_state(), before)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_a_state_of_before_the_first_call_leads_back_there(device: str, graphed: bool) -> None:
    model, x = nn.Sequential(new_layer(device)), an_input(device).requires_grad_()
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(model[0], (x,))
    start, results = tg.fp8_state_dict(model), []
    for _ in range(2):
        for factor in (50, 1, 3):
            y = forward(model, x * factor)
            y.sum().backward()
            results.append(y.detach().clone())
        tg.load_fp8_state_dict(model, start)
    assert all(map(same_bits, results[:3], results[3:]))


@pytest.mark.parametrize("is_left_by_an_exception", [False, True])
def test_a_state_that_is_loaded_again_takes_the_place_of_what_came_since(
    device: str, is_left_by_an_exception: bool
) -> None:
    """As when a step is taken back; also where updates were due, of forwards or of backwards."""
    model = new_model(device, False)
    for _ in range(3):
        micro_batch(model, device)
    saved, before = tg.fp8_state_dict(model), copy.deepcopy(model)
    model.zero_grad()
    with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=RECIPE):
        model(an_input(device) * 5).sum().backward()
        if is_left_by_an_exception:
            raise KeyError
    tg.load_fp8_state_dict(model, saved)
    for state in (tg.fp8_state_dict(model), tg.fp8_state_dict(before)):
        assert all(map(same_bits, state.values(), saved.values()))
    model.zero_grad()
    before.zero_grad()
    for _ in range(3):
        assert same_bits(micro_batch(model, device), micro_batch(before, device))


@pytest.mark.parametrize("changes", [False, True])
def test_a_weight_that_was_cast_here_is_cast_as_the_state_says(device: str, changes: bool) -> None:
    """With the scale of its cast there; or, where it changed there since and was not cast again, with the present one,
    and its amax is recorded."""
    x, source, known = an_input(device), new_layer(device), new_layer(device)
    with tg.fp8_autocast(enabled=False, calibrating=True, recipe=RECIPE):
        source(x)
    forward(source, x)
    if changes:
        scaled(source, {})
        with torch.no_grad():
            known.weight.copy_(source.weight)
    forward(known, x * 7)
    unknown = new_layer(device)
    with torch.no_grad():
        unknown.weight.copy_(source.weight)
    state = source.get_extra_state()
    for layer in (known, unknown):
        layer.set_extra_state(state)
        assert same_bits(layer.get_extra_state(), state)
    for _ in range(3):
        expected = forward(source, x)
        for layer in (known, unknown):
            assert same_bits(forward(layer, x), expected)
            assert same_bits(layer.get_extra_state(), source.get_extra_state())


@pytest.mark.parametrize("gradient", [1.0, 0.0])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_state_says_whether_updates_are_due(device: str, gradient: float, is_known: bool) -> None:
    """Its amaxes do not: those of a gradient of zeros are zero, and other ranks may wait for its update. In states of
    before, which do not say, those that are not zero are due."""

    def due(layer: tg.Linear) -> list[bool]:
        return [state > 0 for state in layer.fp8.state()[:, 7].tolist()]

    source, x = new_layer(device), an_input(device)
    (forward(source, x) * gradient).sum().backward()
    assert due(source) == [False, False, True]
    for is_said in (True, False):
        state, layer = source.get_extra_state(), new_layer(device)
        state[:, 7] *= is_said
        if is_known:
            forward(layer, x)
        layer.set_extra_state(state)
        if not is_known:
            forward(layer, x)
        assert due(layer) == [False, False, bool(gradient) or is_said]
