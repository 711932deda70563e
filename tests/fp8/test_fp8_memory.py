"""What arguments of FP8 ops may lie in: not in each other's memory where one is written, not in other tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fp8_references import E4M3
from tensor_lists import all_same_bits, copies, same_bits
from test_fp8_bad_input import GOOD, tensors_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import te_graph as tg

N = 24


def arguments_of(op: str) -> dict[str, bool]:
    """Each tensor, or list of some, that the op takes: whether it writes it."""
    schema = getattr(torch.ops.te_graph, op).default._schema
    tensors = [one for one in schema.arguments if "Tensor" in str(one.type)]
    return {one.name: one.alias_info is not None and one.alias_info.is_write for one in tensors}


def pairs() -> list[tuple[str, str, str]]:
    found = []
    for op, make in GOOD.items():
        given = {name: written for name, written in arguments_of(op).items() if name in make("cpu")}
        found += [(op, *pair) for pair in itertools.combinations(given, 2) if given[pair[0]] or given[pair[1]]]
    return found


def placed(argument: Tensor | list[Tensor], memory: Tensor, byte: int) -> Any:
    """The tensor, or the last of a list, with the same values at a byte of ``memory`` [bytes] uint8."""
    if isinstance(argument, list):
        return [*argument[:-1], placed(argument[-1], memory, byte)]
    place = memory[byte : byte + argument.nbytes].view(argument.dtype).view(argument.shape)
    return place.copy_(argument)


@pytest.mark.parametrize(("op", "one", "other"), pairs())
def test_what_is_written_lies_apart_from_all_else(op, one, other, device):
    arguments = GOOD[op](device)
    memory = torch.zeros(1024, dtype=torch.uint8, device=device)
    # The last element of one, and where it begins the other.
    last = arguments[one][-1] if isinstance(arguments[one], list) else arguments[one]
    end = (last.nbytes - last.element_size()) // 8 * 8
    arguments[other] = placed(arguments[other], memory, end)
    arguments[one] = placed(arguments[one], memory, 0)
    before = copies(tensors_in(arguments))
    with pytest.raises(ValueError, match=rf"^{op}: expected \w+ and \w+ that do not overlap, got two that share") as e:
        getattr(tg, op)(**arguments)
    # out and out_t are one to messages about lists.
    assert one in str(e.value) or op == "fp8_cast_weights_"
    assert other in str(e.value) or op == "fp8_cast_weights_"
    assert all_same_bits(tensors_in(arguments), before)


def test_columns_of_one_table_are_apart(device):
    def weights_table(table: Tensor) -> list[Tensor]:
        scale, scale_inv, amax = table.unbind(1)
        out = [torch.zeros(4, 4, device=device).to(E4M3) for _ in range(N)]
        tg.fp8_cast_weights_(out, [], list(x), scale, scale_inv, amax)
        return [scale, scale_inv, amax, *out]

    def update_table(table: Tensor) -> list[Tensor]:  # rows of a module, columns of its history and scales
        *_, scale, scale_inv = columns = table.unbind(1)
        history = table[:, :-2].t()
        tg.amax_and_scale_update_inplace(
            history, scale, scale_inv, torch.ones(N, dtype=torch.bool, device=device), True, 448.0
        )
        return list(columns)

    x = torch.randn(N, 4, 4, device=device)
    for function, width in ((weights_table, 3), (update_table, 5)):
        table = torch.rand(N, width, device=device) + 1
        # The same in tensors of their own, each far from the others.
        apart = torch.empty(N, 1000, device=device)[:, :width].copy_(table)
        assert all_same_bits(function(table), function(apart))


@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op in GOOD for name, written in arguments_of(op).items() if written]
)
def test_inference_tensors_are_written_in_inference_mode_alone(op, argument, device):
    arguments = GOOD[op](device)
    with torch.inference_mode():
        good = arguments[argument]
        arguments[argument] = [one.clone() for one in good] if isinstance(good, list) else good.clone()
    before = copies(tensors_in(arguments))
    with pytest.raises(RuntimeError, match=rf"^{op}: expected {argument} made outside .*got an inference"):
        getattr(tg, op)(**arguments)
    assert all_same_bits(tensors_in(arguments), before)
    with torch.inference_mode():
        getattr(tg, op)(**arguments)


@pytest.mark.parametrize("is_cast_inside", [False, True])
def test_prepared_weights_of_inference_mode_are_as_any(is_cast_inside, device):
    x = torch.randn(4, 6, device=device)
    with torch.inference_mode():
        weights = tg.Fp8Weights([x])
    with torch.inference_mode(is_cast_inside):
        weights.cast_()
        assert same_bits(weights.data[0], tg.fp8_cast(x, weights.scale)[0]) and not weights.is_stale
        x.mul_(2)
    assert weights.is_stale
    weights.update([x.clone()])
    weights.cast_()
    assert not weights.is_stale


@pytest.mark.parametrize("makes_inside", [False, True])
def test_weights_and_amaxes_made_in_inference_mode_are_refused(makes_inside, device):
    """No version counter tells that they change."""
    x = torch.randn(4, 6, device=device)
    with torch.inference_mode():
        inference, amax = x.clone(), torch.zeros(1, device=device)
    with torch.inference_mode(makes_inside):
        weights = tg.Fp8Weights([x])
        for make in (lambda: tg.Fp8Weights([inference]), lambda: weights.update([inference])):
            with pytest.raises(ValueError, match=r"Fp8Weights: expected weights\[0\] made outside .*; clone\(\) it"):
                make()
        with pytest.raises((ValueError, RuntimeError), match=r"Fp8Weights: expected amax made outside .*clone\(\) it"):
            tg.Fp8Weights([x], amax=amax)


def test_a_flag_of_prepared_weights_lies_apart_from_what_they_write(device):
    weights = tg.Fp8Weights([torch.randn(4, 6, device=device)])
    for flag, name in (
        (weights.scale_inv, "scale_inv"),
        (weights.amax, "amax"),
        (weights.data[0].view(torch.uint8).flatten()[4:8].view(torch.float32), "out"),
        (weights.transposed[0].view(torch.uint8).flatten()[8:12].view(torch.int32), "out"),
    ):
        with pytest.raises(ValueError, match=f"Fp8Weights: expected {name} and noop that do not overlap"):
            weights.cast_(noop=flag)
    assert not weights.data[0].view(torch.uint8).any()


def wrappers(x: Tensor) -> dict[str, Tensor]:
    return {
        "fake": FakeTensorMode().from_tensor(x),
        "subclass": TwoTensor(x.clone(), x.clone()),
        "functional": torch._to_functional_tensor(x.clone()),
    }


@pytest.mark.parametrize("kind", wrappers(torch.ones(1)))
def test_prepared_weights_have_memory_of_their_own(kind, device):
    x = torch.randn(4, 6, device=device)
    weights = tg.Fp8Weights([x])
    weights.cast_()
    for call in (
        lambda: tg.Fp8Weights([x, wrappers(x)[kind]]),
        lambda: tg.Fp8Weights([x], scale=wrappers(torch.ones(1, device=device))[kind]),
        lambda: tg.Fp8Weights([x], amax=wrappers(torch.ones(1, device=device))[kind]),
        lambda: weights.update([wrappers(x)[kind]]),
    ):
        with pytest.raises(TypeError, match=r"^Fp8Weights: expected \S+ with memory of its own, got .*"):
            call()
    weights.check()
    with pytest.raises(TypeError, match=r"^Fp8Weights: expected \S+ with memory of its own, got a tensor without"):
        tg.Fp8Weights([x.to("meta")])


def test_a_plan_or_prepared_weights_of_memory_that_was_freed_are_refused(device):
    x = torch.randn(4, 6, device=device)
    x.untyped_storage().resize_(0)
    for make in (tg.MultiTensorPlan, tg.Fp8Weights):
        with pytest.raises(TypeError, match=r"expected (weights|tensors)\[0\] with memory of its own"):
            make([x])


def test_weights_do_not_take_the_place_of_their_casts(device):
    large, small = torch.randn(32, 32, device=device), torch.randn(4, 4, device=device)
    weights = tg.Fp8Weights([large, small])
    inside = weights.data[0].view(torch.uint8).flatten()[:64].view(torch.float32).view(4, 4)
    with pytest.raises(ValueError, match="Fp8Weights: expected weights apart from the FP8 buffers"):
        weights.update([large, inside])
    weights.cast_()
    assert same_bits(weights.data[1], tg.fp8_cast(small, weights.scale[1:])[0])
