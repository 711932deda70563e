"""amax_and_scale_update_inplace against a loop over columns (``reference_update``): values, edges, flags and views.

Sequences of updates and casts are in test_fp8_delayed_scaling.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from fp8_references import ALGORITHMS, E4M3, E5M2, FLT_MAX, FP8_MAX, ScaleState, reference_update
from fp8_tensors import FLAGS, SET_FLAGS, assert_same_bits, assert_same_state, no_mask
from tensor_lists import capture, copies, no_sync, same_bits
from torch import Tensor

import te_graph as tg

INF, NAN = torch.inf, torch.nan
algorithms = pytest.mark.parametrize("algo", ALGORITHMS)
HISTORY_LENGTHS = (1, 2, 3, 31, 255, 256, 257, 1024)


def random_state(length: int, count: int, device: str, rng: random.Random) -> ScaleState:
    """A state [length, count] whose columns are far from each other in magnitude; some did not run (row 0 is 0)."""
    history = torch.rand(length, count) * torch.exp2(torch.randint(-30, 30, (count,)))
    history[:, [rng.random() < 0.2 for _ in range(count)]] *= torch.arange(length).clamp(max=1)[:, None]
    history[torch.rand(length, count) < 0.1] = 0
    scale = torch.rand(count) * 100 + 0.01
    return ScaleState(history.to(device), scale.to(device), torch.rand(count).to(device))


def a_mask(count: int, device: str) -> Tensor:
    return torch.rand(count, device=device) < 0.5


def update(state: ScaleState, mask: Tensor, flag: Tensor | bool, *args: object, **kwargs: object) -> None:
    with no_sync(mask.device.type):
        assert tg.amax_and_scale_update_inplace(*state.tensors(), mask, flag, *args, **kwargs) is None


def check(state: ScaleState, mask: Tensor, flag: bool, *args: object, **kwargs: object) -> None:
    """One update, with the flag as a Python bool and as a tensor."""
    expected, other = reference_update(state, mask, flag, *args, **kwargs), state.clone()
    update(state, mask, flag, *args, **kwargs)
    assert_same_state(state, expected)
    update(other, mask, torch.tensor([flag], device=mask.device), *args, **kwargs)
    assert_same_state(other, expected)


@algorithms
@pytest.mark.parametrize("count", [1, 3, 6, 40])
@pytest.mark.parametrize("length", HISTORY_LENGTHS)
@pytest.mark.one_of(5)
def test_histories_roll_and_scales_follow_their_amax(length, count, algo, device, rng):
    for dtype, margin in ((E4M3, 0.0), (E5M2, 2.0), (E4M3, -1.0)):
        for flag in (False, True):
            state = random_state(length, count, device, rng)
            check(state, a_mask(count, device), flag, FP8_MAX[dtype], margin, algo)


def test_no_margin_and_the_maximum_of_the_history_are_the_defaults(device, rng):
    state = random_state(5, 8, device, rng)
    expected = reference_update(state, no_mask(device), True, 448.0, 0.0, "max")
    update(state, no_mask(device), True, 448.0)
    assert_same_state(state, expected)


@algorithms
def test_a_margin_that_is_no_integer_is_within_one_ulp(algo, device, rng):
    state = random_state(7, 40, device, rng)
    expected = reference_update(state, no_mask(device), True, 448.0, 0.5, algo)
    update(state, no_mask(device), True, 448.0, 0.5, algo)
    assert_same_bits(state.history, expected.history)
    assert torch.allclose(state.scale.cpu(), expected.scale, rtol=2.0**-23, atol=0)
    assert_same_bits(state.scale_inv, (1 / state.scale.cpu().double()).float())


def test_many_modules_are_updated_at_once(device, rng):
    for length, count in ((1024, 300), (1, 5000), (3, 1365)):
        check(random_state(length, count, device, rng), a_mask(count, device), False, 448.0)


# A2: the window of a column, from the slot of the newest amax; what becomes of a scale of 3, by algorithm.
# None: the scale stays.
EDGES: dict[str, tuple[list[float], dict[str, float | None]]] = {
    "did not run": ([0.0, 5.0, 7.0, 2.0], {"max": None, "most_recent": None}),
    "all zero": ([0.0, 0.0, 0.0, 0.0], {"max": None, "most_recent": None}),
    "zero before": ([2.0, 0.0, 0.0, 0.0], {"max": 224.0, "most_recent": 224.0}),
    "NaN now": ([NAN, 4.0, 7.0, 2.0], {"max": 64.0, "most_recent": None}),
    "NaN before": ([4.0, 1.0, NAN, 7.0], {"max": 64.0, "most_recent": 112.0}),
    "NaN in the row that goes": ([4.0, NAN, 1.0, 7.0], {"max": 64.0, "most_recent": 112.0}),
    "NaN alone": ([NAN, NAN, NAN, NAN], {"max": None, "most_recent": None}),
    "Inf now": ([INF, 4.0, 7.0, 2.0], {"max": None, "most_recent": None}),
    "Inf before": ([4.0, 1.0, INF, 7.0], {"max": None, "most_recent": 112.0}),
    "Inf in the row that goes": ([4.0, INF, 1.0, 7.0], {"max": None, "most_recent": 112.0}),
    "Inf and NaN": ([NAN, INF, 1.0, 7.0], {"max": None, "most_recent": None}),
    "the largest is in the row that goes": ([1.0, 7.0, 2.0, 3.0], {"max": 64.0, "most_recent": 448.0}),
    "the smallest number": ([1e-45, 0.0, 0.0, 0.0], {"max": FLT_MAX, "most_recent": FLT_MAX}),
    "a scale that overflows": ([448 / FLT_MAX / 2, 0.0, 0.0, 0.0], {"max": FLT_MAX, "most_recent": FLT_MAX}),
    "the largest number": ([FLT_MAX, 1.0, 1.0, 1.0], {"max": 448 / FLT_MAX, "most_recent": 448 / FLT_MAX}),
}


@algorithms
@pytest.mark.parametrize("name", EDGES)
def test_edges(name, algo, device):
    window, scales = EDGES[name]
    state = ScaleState(*(torch.tensor(v, device=device) for v in ([[v] for v in window], [3.0], [9.0])))
    expected = scales[algo]
    check(state, no_mask(device), True, 448.0, 0.0, algo)
    scale = torch.tensor([3.0 if expected is None else expected])
    rolled = window if window[0] == 0 else [0.0, *window[2:], window[0]]
    assert_same_bits(state.scale, scale)
    assert torch.equal(state.history[:, 0].cpu().nan_to_num(-1.0), torch.tensor(rolled).nan_to_num(-1.0))
    assert_same_bits(state.scale_inv, (1 / scale.double()).float())


@algorithms
@pytest.mark.parametrize("value", [0.0, NAN, INF, 1e-45, FLT_MAX, FLT_MAX / 2, 3.0])
@pytest.mark.parametrize("length", [1, 2, 257])
def test_edges_anywhere_in_histories_of_any_length(length, value, algo, device, rng):
    for skip_nonfinite in (False, True):
        state = random_state(length, 12, device, rng)
        for j in range(12):
            state.history[rng.choice([0, 0, -1, rng.randrange(length)]), j] = value
        check(state, a_mask(12, device), False, 57344.0, 0.0, algo, skip_nonfinite=skip_nonfinite)


@algorithms
def test_an_infinite_scale_becomes_the_largest_finite_one_when_its_module_runs(algo, device):
    state = ScaleState(*(torch.tensor(v, device=device) for v in ([[INF]], [INF], [9.0])))
    check(state, no_mask(device), True, 448.0, 0.0, algo)
    assert state.scale.item() == FLT_MAX


# skip_nonfinite


@algorithms
@pytest.mark.parametrize("value", [INF, NAN])
def test_what_is_not_finite_can_be_kept_out_of_the_window(value, algo, device):
    state = ScaleState(*(torch.tensor(v, device=device) for v in ([[value], [4.0], [7.0]], [3.0], [9.0])))
    update(state, no_mask(device), True, 448.0, 0.0, algo, skip_nonfinite=True)
    assert state.history[:, 0].tolist() == [0, 4, 7] and state.scale.item() == 3
    assert_same_bits(state.scale_inv, (1 / torch.tensor([3.0]).double()).float())
    state.history[0] = 2.0
    update(state, no_mask(device), True, 448.0, 0.0, algo, skip_nonfinite=True)
    assert state.history[:, 0].tolist() == [0, 7, 2]
    assert state.scale.item() == (64 if algo == "max" else 224)


# Which scale_invs are written.


@pytest.mark.parametrize("flag", [False, True])
def test_scale_invs_of_weights_are_written_only_with_the_flag(flag, device, rng):
    """Paddle's case: six GEMMs, [input, weight] each; scales and scale_invs start at 0."""
    history = torch.rand(1024, 12, device=device) + 0.01
    mask = torch.tensor([True, False] * 6, device=device)
    state = ScaleState(history, torch.zeros(12, device=device), torch.zeros(12, device=device))
    before = state.clone()
    check(state, mask, flag, 448.0, 0.0, "max")
    assert_same_bits(state.scale, (448 / before.history.amax(0).double()).float().cpu())
    assert bool((state.scale_inv[mask] > 0).all()) and bool((state.scale_inv[~mask] > 0).all()) == flag
    rolled = before.history.roll(-1, 0)
    rolled[0] = 0
    assert same_bits(state.history, rolled)


def test_scale_invs_are_written_for_modules_that_did_not_run_too(device):
    state = ScaleState(
        torch.zeros(3, 2, device=device), torch.tensor([4.0, 8.0], device=device), torch.zeros(2).to(device)
    )
    check(state, torch.tensor([True, False], device=device), False, 448.0)
    assert state.scale_inv.tolist() == [0.25, 0.0]
    check(state, torch.tensor([True, False], device=device), True, 448.0)
    assert state.scale_inv.tolist() == [0.25, 0.125]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"), [*((dtype, 0) for dtype in FLAGS), (torch.float32, -0.0), *SET_FLAGS], ids=str
)
def test_any_flag_that_is_not_zero_is_set(dtype, value, shape, device, rng):
    state, mask = random_state(4, 9, device, rng), a_mask(9, device)
    expected = reference_update(state, mask, value != 0, 448.0)
    update(state, mask, torch.full(shape, value, dtype=dtype, device=device), 448.0)
    assert_same_state(state, expected)


def test_an_empty_mask_updates_every_scale_inv(device, rng):
    state = random_state(4, 9, device, rng)
    check(state, no_mask(device), False, 448.0)
    assert bool((state.scale_inv == 1 / state.scale).all())


# Views


def test_columns_may_be_any_view_and_those_beside_them_stay(device, rng):
    for length, count in ((1, 30), (6, 30), (300, 30)):
        for view in (slice(1, None, 3), slice(0, 7), slice(29, 30), slice(4, 20, 2)):
            whole, mask = random_state(length, count, device, rng), a_mask(count, device)
            part = ScaleState(whole.history[:, view], whole.scale[view], whole.scale_inv[view])
            expected = whole.clone()
            for target, new in zip(
                (expected.history[:, view], expected.scale[view], expected.scale_inv[view]),
                reference_update(part, mask[view], False, 448.0).tensors(),
                strict=True,
            ):
                target.copy_(new)
            update(part, mask[view], False, 448.0)
            assert all(map(same_bits, whole.tensors(), expected.tensors()))


def test_histories_may_be_transposed_or_every_second_row(device, rng):
    for view in (lambda t: t.t(), lambda t: t[::2], lambda t: t[3:9]):
        whole = random_state(12, 12, device, rng)
        history = view(whole.history)
        count = history.shape[1]
        before = whole.history.clone()
        state = ScaleState(history, whole.scale[:count], whole.scale_inv[:count])
        expected = reference_update(state, no_mask(device), True, 448.0)
        update(state, no_mask(device), True, 448.0)
        assert_same_state(state, expected)
        view(before).copy_(expected.history)
        assert same_bits(whole.history, before)


def test_no_module_at_all_is_no_error(device, rng):
    update(random_state(4, 0, device, rng), no_mask(device), True, 448.0)


# A4: one capture, and a flag that the device writes.


def test_the_flag_of_a_captured_update_is_read_at_each_replay(device, rng):
    state, mask = random_state(5, 9, device, rng), torch.tensor([True, False, True] * 3, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    start = copies(state.tensors())
    replay, _ = capture(lambda: tg.amax_and_scale_update_inplace(*state.tensors(), mask, flag, 448.0), device)
    for tensor, value in zip(state.tensors(), start, strict=True):
        tensor.copy_(value)
    expected = state.clone()
    for turn, value in enumerate((1, 0, 0, 0, 1, 0, 0, 0)):
        amaxes = torch.rand(9, device=device) * 10 ** (turn - 3) + 1e-3
        for one in (state, expected):
            one.history[0].copy_(amaxes)
        flag.fill_(value)
        before = state.clone()
        replay()
        tg.amax_and_scale_update_inplace(*expected.tensors(), mask, bool(value), 448.0)
        assert all(map(same_bits, state.tensors(), expected.tensors())), turn
        assert_same_state(state, reference_update(before, mask, bool(value), 448.0))
        weights = slice(1, None, 3)
        changed = [
            not same_bits(a[..., weights], b[..., weights])
            for a, b in zip((state.history, state.scale_inv), (before.history, before.scale_inv), strict=True)
        ]
        assert changed == [True, bool(value)]
        assert bool((state.scale_inv[mask] == 1 / state.scale[mask]).all())


OVERLAPPING = {
    "windows": lambda device: torch.arange(1.0, 10.0, device=device).unfold(0, 3, 1),
    "one row for all": lambda device: torch.ones(1, 3, device=device).expand(7, 3),
    "steps of less than a row": lambda device: torch.ones(30, device=device).as_strided((7, 3), (2, 1)),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_history_whose_elements_overlap_is_refused_before_anything_is_written(kind, device):
    history = OVERLAPPING[kind](device)
    vectors = [torch.full((3,), 2.0, device=device) for _ in range(2)]
    before = copies([history.clone(), *vectors])
    with pytest.raises(ValueError, match="expected amax_history without overlapping elements"):
        tg.amax_and_scale_update_inplace(history, *vectors, no_mask(device), True, FP8_MAX[E4M3])
    assert all(same_bits(now, then) for now, then in zip([history.clone(), *vectors], before, strict=True))
