"""Weights that are written otherwise than through themselves, and the layer that is called next.

The reference is a layer that was made with the new weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fp8_gradients import RECIPE, call
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
graphed_or_not = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])


def a_layer(device: str) -> tg.Linear:
    return tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)


def a_sample(device: str) -> Tensor:
    return torch.randn(16, WIDTH, device=device).bfloat16().requires_grad_()


class Writer:
    """What writes a weight, and what it has kept since it was made."""

    def __init__(self, layer: tg.Linear) -> None:
        self.weight, self.kept = layer.weight, layer.weight.data
        self.view, self.detached = layer.weight.data.view(-1)[5:], layer.weight.data.detach()


def add_to_data(writer: Writer) -> None:
    writer.weight.data += 1


def set_data_to_itself(writer: Writer) -> None:
    data = writer.weight.data
    writer.weight.data = data.mul_(3)


def copy_master(writer: Writer) -> None:
    writer.weight.data.copy_(torch.randn(WIDTH, WIDTH))


def write_what_was_kept(writer: Writer) -> None:
    writer.kept.mul_(-3)


def write_view(writer: Writer) -> None:
    writer.view.mul_(-2)


def write_detached(writer: Writer) -> None:
    writer.detached.mul_(-2)


def write_data_of_data(writer: Writer) -> None:
    writer.kept.data.data[3:7].zero_()


def write_list(writer: Writer) -> None:
    torch._foreach_mul_([writer.weight.data], -1.5)


def write_in_inference_mode(writer: Writer) -> None:
    with torch.inference_mode():
        writer.weight.data.mul_(-3)


def write_flat_buffer(writer: Writer) -> None:
    flat = torch.cat([writer.weight.detach().reshape(-1), torch.ones(3, device=writer.weight.device).bfloat16()])
    writer.weight.data = flat[:-3].view(WIDTH, WIDTH)
    writer.kept = flat


WRITES: dict[str, Callable[[Writer], None]] = {
    write.__name__: write
    for write in (
        add_to_data,
        set_data_to_itself,
        copy_master,
        write_what_was_kept,
        write_view,
        write_detached,
        write_data_of_data,
        write_list,
        write_in_inference_mode,
    )
}


def assert_is_up_to_date(layer: tg.Linear, x: Tensor) -> None:
    other = a_layer(x.device.type)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        other.bias.copy_(layer.bias)
    assert same_bits(call(layer, x), call(other, x))


@graphed_or_not
@pytest.mark.parametrize("write", WRITES)
def test_the_next_call_sees_what_was_written(device: str, write: str, graphed: bool) -> None:
    layer, x = a_layer(device), a_sample(device)
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(layer, (a_sample(device),), max_in_flight=3)
    writer = Writer(layer)
    before = call(layer, x).detach().clone()
    for _ in range(2):
        WRITES[write](writer)
        assert_is_up_to_date(layer, x)
        if write != "write_data_of_data":
            assert not same_bits(call(layer, x), before)
    assert not graphed or layer.te_graph.info()["forward_replays"] >= 3


def test_a_flat_buffer_that_holds_the_weight_is_seen_to_be_written(device: str) -> None:
    layer, x = a_layer(device), a_sample(device)
    writer = Writer(layer)
    call(layer, x)
    write_flat_buffer(writer)
    for _ in range(2):
        writer.kept.mul_(-2)
        assert_is_up_to_date(layer, x)


def test_reading_data_casts_nothing(device: str) -> None:
    """Histories would move on, and a run that saves its weights train otherwise than one that does not."""
    states = []
    for reads in (False, True):
        torch.manual_seed(1)
        layer = a_layer(device)
        for _ in range(4):
            with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3)):
                layer(torch.ones(16, WIDTH, device=device).bfloat16()).sum().backward()
            if reads:
                copy.deepcopy(layer)
                assert layer.weight.data.abs().sum() > 0
                assert layer.weight.detach().float().cpu().numpy().shape == (WIDTH, WIDTH)
        states.append(layer.state_dict()["_extra_state"])
    assert same_bits(*states)


def test_prepared_weights_are_stale_after_a_write_through_data(device: str) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    prepared = tg.Fp8Weights([weight])
    prepared.cast_()
    assert weight.data.numel() and not prepared.is_stale
    of_data = tg.Fp8Weights([weight.data])
    of_data.cast_()
    for write in (lambda: weight.data.mul_(2), lambda: weight.detach().mul_(2)):
        write()
        for one in (prepared, of_data):
            assert one.is_stale
            one.cast_()
            assert not one.is_stale


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("after", [1, 2])
def test_a_parameter_over_the_same_memory_is_another_one(device: str, before: int, after: int) -> None:
    """However often both were written."""
    for replace in (
        lambda old: nn.Parameter(old.data),
        lambda old: nn.Parameter(torch.empty(0, device=device, dtype=old.dtype).set_(old.detach())),
    ):
        layer, x = a_layer(device), a_sample(device)
        with torch.no_grad():
            for _ in range(before):
                layer.weight.mul_(1)
        call(layer, x)
        layer.weight = replace(layer.weight)
        call(layer, x)
        with torch.no_grad():
            for _ in range(after):
                layer.weight.mul_(4)
        assert_is_up_to_date(layer, x)


def test_counters_of_what_is_gone_are_kept_as_numbers(device: str) -> None:
    """A weight that is written each step through a new tensor takes no more memory each time."""
    layer, x = a_layer(device), a_sample(device)
    weight = layer.weight
    for _ in range(2000):
        weight.data.add_(1)
    assert_is_up_to_date(layer, x)
    for _ in range(2000):
        torch.ones(1).data.add_(1)
    assert_is_up_to_date(layer, x)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_square_weight_that_lies_the_other_way_round_is_another_one(device: str, through_data: bool) -> None:
    layer, x = a_layer(device), a_sample(device)
    call(layer, x)
    if through_data:
        layer.weight.data = layer.weight.data.t()
    else:
        layer.weight = nn.Parameter(layer.weight.detach().t())
    assert_is_up_to_date(layer, x)


def test_prepared_weights_know_other_memory_at_the_same_address(device: str) -> None:
    """As where a weight is moved to the CPU and, changed there, back to what has become free."""
    found = 0
    for _ in range(20):
        weight = nn.Parameter(torch.randn(128, 128, device=device))
        prepared = tg.Fp8Weights([weight])
        prepared.cast_()
        address, changed = weight.data_ptr(), weight.detach().cpu() * 0.3
        weight.data = torch.empty(0, device=device)
        others = [torch.empty(128, 128, device=device) for _ in range(8)]
        again = next((other for other in others if other.data_ptr() == address), None)
        if again is None:
            continue
        found += 1
        again.copy_(changed)
        weight.data = again
        assert prepared.is_stale
    assert found
