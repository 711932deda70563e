"""What is the same on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import te_graph as tg
from te_graph.testing import same_bits

from .reference import ReferenceOptimizer


def expect_same(name: str, one: Tensor, other: Tensor) -> None:  # [...] each
    """The same bits; NaN is NaN, whichever."""
    one, other = one.detach(), other.detach()
    if one.dtype == other.dtype and one.shape == other.shape and one.is_floating_point():
        are_nan = one.isnan() & other.isnan()
        one, other = one.masked_fill(are_nan, 0), other.masked_fill(are_nan, 0)
    if not same_bits(one, other):
        raise AssertionError(
            f"{name}: got {one.dtype} {one.flatten()[:6]}, expected {other.dtype} {other.flatten()[:6]}"
        )


def in_memory_order(values: Tensor, parameter: Tensor) -> Tensor:  # [...] each -> [n]
    """``values`` in the order in which the elements of ``parameter`` lie."""
    laid_out = torch.empty_like(parameter, dtype=values.dtype).detach().copy_(values.detach())
    return laid_out.as_strided((laid_out.numel(),), (1,))


def owned_ranges(flat: tg.FlatParameters) -> dict[Tensor, list[tuple[int, int]]]:
    """Of each parameter the elements, in the order in which they lie, whose gradient this rank has."""
    owned: dict[Tensor, list[tuple[int, int]]] = {}
    for buffer in flat.buffers:
        for parameter, offset in zip(buffer.parameters, buffer.layout.offsets, strict=True):
            ranges = [
                (max(begin - offset, 0), min(end - offset, parameter.numel())) for begin, end in flat.own_parts(buffer)
            ]
            owned[parameter] = [(begin, end) for begin, end in ranges if begin < end]
    return owned


def expect_same_state(state: dict[str, Any], optimizer: ReferenceOptimizer) -> None:
    """``state``: of a FlatOptimizer over the same parameters, whose masters are in it."""
    optimizer.read_parameters()
    expected = optimizer.inner.state_dict()["state"]
    for number, (parameter, master) in enumerate(optimizer.masters.items()):
        got, wanted = dict(state["state"].get(number, {})), dict(expected.get(number, {}))
        if parameter is not master:
            wanted["master"] = master
            if not got:  # the parameter tells it
                got["master"] = parameter.detach().float()
        if parameter.numel() == 0:
            continue  # lies nowhere
        assert got.keys() == wanted.keys(), f"state of parameter {number}: got {got.keys()}, expected {wanted.keys()}"
        for key, value in wanted.items():
            expect_same(f"{key} of parameter {number}", torch.as_tensor(got[key]), torch.as_tensor(value))
