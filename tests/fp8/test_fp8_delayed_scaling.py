"""Delayed scaling over several steps: casts that record amaxes, and updates that turn them into scales."""

from __future__ import annotations

import io
import math

import pytest
import torch
from fp8_references import ALGORITHMS, E4M3, E5M2, FP8_MAX, ScaleState, reciprocal, reference_cast, reference_update
from fp8_tensors import assert_same_bits, assert_same_state, no_mask, numbers
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

INF = torch.inf


def new_state(length: int, count: int, device: str) -> ScaleState:
    """A state [length, count] as training starts with."""
    ones = [torch.ones(count, device=device) for _ in range(2)]
    return ScaleState(torch.zeros(length, count, device=device), *ones)


def update(state: ScaleState, mask: Tensor, flag: bool, *args: object, **kwargs: object) -> ScaleState:
    """Update ``state`` in place; returns what it was to become."""
    expected = reference_update(state, mask, flag, *args, **kwargs)
    tg.amax_and_scale_update_inplace(*state.tensors(), mask, flag, *args, **kwargs)
    return expected


@pytest.mark.parametrize("is_first_microbatch", [None, True, False])
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("length", [31, 1024])
def test_a_linear_layer_with_a_cached_weight(length, algo, is_first_microbatch, device):
    """TransformerEngine's case: columns [input, weight, output], margin 2; the weight is cast if it is to be."""
    state, mask = new_state(length, 3, device), torch.tensor([True, False, True], device=device)
    casts_weight = is_first_microbatch is not False
    for _ in range(10):
        x, weight = (numbers((16, 16), torch.bfloat16, device) for _ in range(2))
        before = state.clone()
        tg.fp8_cast_transpose(x, state.scale[0], amax=state.history[0, 0])
        if casts_weight:
            tg.fp8_cast_transpose(weight, state.scale[1], amax=state.history[0, 1])
        amaxes = [x.abs().max().item(), weight.abs().max().item() if casts_weight else 0.0, 0.0]
        assert state.history[0].tolist() == amaxes
        staged = state.clone()
        assert_same_state(state, update(state, mask, casts_weight, 448.0, 2.0, algo))
        for j, ran in enumerate((True, casts_weight, False)):
            if not ran:
                assert same_bits(state.history[:, j], staged.history[:, j])
                assert same_bits(state.scale[j], before.scale[j])
                continue
            rolled = staged.history[:, j].roll(-1)
            rolled[0] = 0
            assert same_bits(state.history[:, j], rolled)
            amax = amaxes[j] if algo == "most_recent" else staged.history[:, j].max().item()
            assert state.scale[j].item() == pytest.approx(448 / amax / 4, rel=1e-6)


def test_histories_of_constant_tensors_are_exact(device):
    """TransformerEngine's case: input step + 0.25, weight step + 0.5, gradient step + 0.75, in four steps."""
    forward, backward = new_state(6, 2, device), new_state(6, 1, device)
    for step in range(4):
        for state, j, value in ((forward, 0, step + 0.25), (forward, 1, step + 0.5), (backward, 0, step + 0.75)):
            x = torch.full((16, 32), -value, dtype=torch.bfloat16, device=device)
            tg.fp8_cast(x, state.scale[j], E5M2 if state is backward else E4M3, amax=state.history[0, j])
        update(forward, no_mask(device), True, 448.0)
        update(backward, no_mask(device), True, 57344.0)
    for state, offsets, largest in ((forward, [0.25, 0.5], 448.0), (backward, [0.75], 57344.0)):
        rows = [[0.0] * len(offsets)] * 2 + [[step + offset for offset in offsets] for step in range(4)]
        assert state.history.tolist() == rows
        assert state.scale.tolist() == pytest.approx([largest / (3 + offset) for offset in offsets], rel=1e-6)


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_an_infinity_freezes_the_scale_for_as_long_as_the_window_holds_it(length, algo, device):
    state, frozen = new_state(length, 1, device), []
    for step in range(length + 6):
        state.history[0] = INF if step == 3 else float(step + 1)
        before = state.scale.item()
        assert_same_state(state, update(state, no_mask(device), True, 448.0, 0.0, algo))
        if state.scale.item() == before:
            frozen.append(step)
        assert math.isfinite(state.scale.item())
    assert frozen == list(range(3, 3 + (length if algo == "max" else 1)))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_infinity_that_is_kept_out_of_the_window_costs_one_update(algo, device):
    state, clean = new_state(4, 1, device), new_state(4, 1, device)
    for step in range(9):
        state.history[0] = INF if step == 3 else float(step + 1)
        update(state, no_mask(device), True, 448.0, 0.0, algo, skip_nonfinite=True)
        if step != 3:
            clean.history[0] = float(step + 1)
            update(clean, no_mask(device), True, 448.0, 0.0, algo)
        assert all(map(same_bits, state.tensors(), clean.tensors())), step


def test_modules_that_do_not_run_keep_history_and_scale_while_others_go_on(device):
    """A13: experts without a token, for instance."""
    state = new_state(5, 4, device)
    alone = [new_state(5, 1, device) for _ in range(4)]
    for step in range(20):
        runs = [step % (j + 1) == 0 for j in range(4)]
        for j in range(4):
            if runs[j]:
                amax = float(torch.rand(()) + 0.1)
                state.history[0, j] = amax
                alone[j].history[0] = amax
                update(alone[j], no_mask(device), True, 448.0)
        update(state, no_mask(device), True, 448.0)
        for j in range(4):
            assert same_bits(state.history[:, j : j + 1], alone[j].history), (step, j)
            assert same_bits(state.scale[j : j + 1], alone[j].scale), (step, j)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_scale_inv_belongs_to_the_scale_of_the_last_cast(dtype, device, rng):
    """A5, with scale_invs that the casts alone write (updates mask weights): any sequence of casts and updates."""
    state, mask = new_state(3, 1, device), torch.zeros(1, dtype=torch.bool, device=device)
    weight = numbers((40, 24), torch.float32, device)
    out, out_t = (torch.zeros(shape, device=device, dtype=dtype) for shape in ((40, 24), (24, 40)))
    noop, last = torch.zeros(1, device=device), None
    for step in range(40):
        skipped = bool(step) and rng.random() < 0.5
        noop.fill_(skipped)
        extras = {"scale_inv": state.scale_inv, "amax": state.history[0], "noop": noop}
        if not skipped:
            weight = weight * rng.uniform(0.5, 1.5)
            last = state.scale.clone(), reference_cast(weight, state.scale, dtype)
        tg.fp8_cast_transpose_out(out, out_t, weight, state.scale, **extras)
        scale, expected = last
        assert_same_bits(state.scale_inv, reciprocal(scale))
        assert_same_bits(out, expected.out)
        assert_same_bits(out_t, expected.out.t())
        back = tg.fp8_dequantize(out, state.scale_inv)
        bounded = weight.clamp(*(sign * FP8_MAX[dtype] / scale.item() for sign in (-1, 1)))
        relative, smallest = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
        allowed = torch.maximum(bounded.abs() * relative, smallest / scale) * (1 + 1e-6)
        assert bool(((back - bounded).abs() <= allowed).all())
        if rng.random() < 0.7:
            update(state, mask, False, FP8_MAX[dtype])


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(device):
    """A20: saved in the middle of a window."""
    state, other = new_state(8, 3, device), None
    for step in range(20):
        if step == 11:
            file = io.BytesIO()
            torch.save(state.tensors(), file)
            file.seek(0)
            other = ScaleState(*torch.load(file))
        amaxes = torch.rand(3, device=device)
        for one in (state, other or state):
            one.history[0].copy_(amaxes)
            update(one, no_mask(device), step % 4 == 0, 448.0)
            if other is None:
                break
    assert all(map(same_bits, state.tensors(), other.tensors()))
    assert not state.history[1:].eq(0).any()
