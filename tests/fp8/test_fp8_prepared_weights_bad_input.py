"""Weights, options and updates that ``Fp8Weights`` refuses, before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fp8_references import E4M3, E5M2
from fp8_weights import assert_cast
from torch import Tensor

import te_graph as tg


def some(device: str) -> list[Tensor]:
    return [torch.randn(6, 4, device=device), torch.randn(3, 5, device=device, dtype=torch.bfloat16)]


BAD_WEIGHTS: dict[str, tuple[Callable[[str], object], type[Exception]]] = {
    "no weight": (lambda d: [], ValueError),
    "one dimension": (lambda d: [*some(d), torch.randn(4, device=d)], ValueError),
    "three dimensions": (lambda d: [*some(d), torch.randn(4, 2, 2, device=d)], ValueError),
    "fp64": (lambda d: [*some(d), torch.randn(4, 2, device=d).double()], TypeError),
    "int32": (lambda d: [*some(d), torch.ones(4, 2, device=d).int()], TypeError),
    "FP8": (lambda d: [*some(d), torch.ones(4, 2, device=d).to(E4M3)], TypeError),
    "not contiguous": (lambda d: [*some(d), torch.randn(4, 2, device=d).t()], ValueError),
    "another device": (lambda d: [*some(d), torch.randn(4, 2, device="meta")], ValueError),
    "sparse": (lambda d: [*some(d), torch.eye(4, device=d).to_sparse()], (TypeError, ValueError)),
    "a number": (lambda d: [*some(d), 3], TypeError),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_cannot_be_cast_are_refused(case, device):
    make, error = BAD_WEIGHTS[case]
    with pytest.raises(error, match=r"expected .*got"):
        tg.Fp8Weights(make(device))


BAD_OPTIONS: dict[str, tuple[Callable[[str], dict[str, object]], type[Exception]]] = {
    "dtype": (lambda d: {"dtype": torch.float16}, TypeError),
    "scale of another shape": (lambda d: {"scale": torch.ones(3, device=d)}, ValueError),
    "scale in fp16": (lambda d: {"scale": torch.ones(2, device=d).half()}, TypeError),
    "scale on another device": (lambda d: {"scale": torch.ones(2, device="meta")}, ValueError),
    "amax of another shape": (lambda d: {"amax": torch.zeros(1, 2, device=d)}, ValueError),
    "amax in fp64": (lambda d: {"amax": torch.zeros(2, device=d).double()}, TypeError),
    "amax with a gradient": (lambda d: {"amax": torch.zeros(2, device=d, requires_grad=True)}, ValueError),
    "amax on another device": (lambda d: {"amax": torch.zeros(2, device="meta")}, ValueError),
    "names": (lambda d: {"names": ["one"]}, ValueError),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_do_not_fit_are_refused(case, device):
    make, error = BAD_OPTIONS[case]
    with pytest.raises(error, match=r"Fp8Weights: expected .*got"):
        tg.Fp8Weights(some(device), **make(device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, E5M2], ids=str)
def test_a_noop_of_another_dtype_is_refused_and_the_weights_stay_stale(dtype, device):
    prepared = tg.Fp8Weights(some(device))
    with pytest.raises(TypeError, match=r"noop .*got"):
        prepared.cast_(noop=torch.zeros(1, device=device).to(dtype))
    assert prepared.is_stale


BAD_UPDATES: dict[str, Callable[[str], list[Tensor]]] = {
    "fewer": lambda d: some(d)[:1],
    "another shape": lambda d: [torch.randn(4, 6, device=d), some(d)[1]],
    "another dtype": lambda d: [some(d)[0].half(), some(d)[1]],
    "not contiguous": lambda d: [torch.randn(4, 6, device=d).t(), some(d)[1]],
    "another device": lambda d: [some(d)[0], some("meta")[1]],
}


@pytest.mark.parametrize("name", ["scale_inv", "amax", "counts"])
def test_weights_in_what_casts_write_are_refused_by_updates_as_when_they_are_given(name, device):
    whole = torch.zeros(96, device=device)
    amax, weight = whole[:1], whole[:4].view(2, 2)
    with pytest.raises(ValueError, match="weights and amax that do not overlap"):
        tg.Fp8Weights([weight], amax=amax)
    source = torch.randn(2, 2, device=device)
    prepared = tg.Fp8Weights([source], amax=amax, counts=True)
    other = torch.empty(0, device=device).set_(getattr(prepared, name).untyped_storage(), 0, (2, 2))
    with pytest.raises(ValueError, match=f"^Fp8Weights: expected weights and {name} that do not overlap"):
        prepared.update([other])
    assert prepared.weights[0] is source


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_an_update_with_other_shapes_or_dtypes_is_refused_and_changes_nothing(case, device):
    sources = some(device)
    prepared = tg.Fp8Weights(sources)
    prepared.cast_()
    with pytest.raises((TypeError, ValueError), match=r"Fp8Weights: expected .*got"):
        prepared.update(BAD_UPDATES[case](device))
    assert prepared.check() is None
    sources[1].add_(1)
    prepared.amax.zero_()
    prepared.cast_()
    assert_cast(prepared, sources, torch.zeros(2))
