"""fp8_cast_weights_: all weights of a model at once have the bits of casts one by one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from fp8_references import E4M3, E5M2, FP8_DTYPES, reference_cast
from fp8_tensors import (
    EMPTY_SHAPES,
    FLAGS,
    LARGE_SHAPES,
    SET_FLAGS,
    SMALL_SHAPES,
    X_DTYPES,
    Poisoned,
    assert_same_bits,
    numbers,
    with_specials,
)
from profiled_launches import launches
from tensor_lists import all_same_bits, capture, copies, no_sync, same_bits
from torch import Tensor

import te_graph as tg

SOME_SHAPES = [*SMALL_SHAPES, *EMPTY_SHAPES, (120, 80), (64, 64), (128, 32)]


@dataclass
class Model:
    """Weights [M_i, N_i], and poisoned memory for what is made of them; ``per_weight`` are [n], in this order."""

    weights: list[Tensor]
    out: list[Tensor]
    out_t: list[Tensor]
    scale: Tensor
    scale_inv: Tensor
    amax: Tensor
    counts: Tensor
    poisoned: Poisoned

    def cast_(self, **extras: Tensor) -> None:
        tensors = self.scale, self.scale_inv, self.amax
        assert tg.fp8_cast_weights_(self.out, self.out_t, self.weights, *tensors, **extras) is None

    def written(self) -> list[Tensor]:
        return [*self.out, *self.out_t, self.scale_inv, self.amax, self.counts]


def a_model(
    shapes: Sequence[tuple[int, int]],
    device: str,
    rng: random.Random,
    dtypes: Sequence[torch.dtype] = X_DTYPES,
    fp8: Sequence[torch.dtype] = (E4M3,),
    transpose: bool = True,
) -> Model:
    """Weights of ``shapes`` whose dtypes go round; every third one starts at an odd address, as do some outputs."""
    poisoned, sources = Poisoned(device), Poisoned(device)
    weights, out, out_t = [], [], []
    for i, shape in enumerate(shapes):
        made = with_specials(numbers(shape, dtypes[i % len(dtypes)], device), rng)
        weights.append(sources.like(made, 1) if i % 3 == 2 else made)
        out.append(poisoned.empty(shape, fp8[i % len(fp8)], rng.choice([0, 0, 3])))
        if transpose:
            out_t.append(poisoned.empty(shape[::-1], fp8[i % len(fp8)], rng.choice([0, 0, 5])))
    count = len(shapes)
    scale = torch.exp2(torch.rand(count, device=device) * 10 - 2)
    scale_inv, amax = torch.zeros(count, device=device), torch.rand(count, device=device)
    counts = torch.randint(9, (count, 3), device=device)
    return Model(weights, out, out_t, scale, scale_inv, amax, counts, poisoned)


def check(model: Model) -> None:
    """Cast ``model``, whose amax and counts add to what they hold, and compare with the reference, one by one."""
    before = copies(model.weights)
    amax, counts = model.amax.cpu().clone(), model.counts.cpu().clone()
    with no_sync(model.scale.device.type):
        model.cast_(counts=model.counts)
    for i, weight in enumerate(before):
        expected = reference_cast(weight, model.scale[i], model.out[i].dtype)
        what = i, tuple(weight.shape)
        assert_same_bits(model.out[i], expected.out, what)
        if model.out_t:
            assert_same_bits(model.out_t[i], expected.out.t().contiguous(), what)
        assert_same_bits(model.scale_inv[i : i + 1], expected.scale_inv, what)
        assert_same_bits(model.amax[i : i + 1], torch.maximum(amax[i : i + 1], expected.amax), what)
        assert_same_bits(model.counts[i], counts[i] + expected.counts, what)
    model.poisoned.assert_guards_intact()
    assert all_same_bits(model.weights, before)


@pytest.mark.parametrize("records_amax", [True, False])
def test_vectors_may_be_pieces_of_any_strides(records_amax, device, rng):
    model = a_model(some_shapes(20, rng), device, rng)
    twin = dataclasses.replace(
        model, out=[o.clone() for o in model.out], out_t=[o.clone() for o in model.out_t], amax=model.amax.clone()
    )
    twin.cast_()
    lengths = [1, 7, 0, 12]
    table = torch.stack([model.scale, model.scale_inv, model.amax], dim=1)  # columns of stride 3
    scale, scale_inv, amax = ([*table[:, column].split(lengths)] for column in range(3))
    torch.ops.te_graph.fp8_cast_weights_.List(
        model.out, model.out_t, model.weights, scale, scale_inv, amax if records_amax else []
    )
    expected = [twin.scale, twin.scale_inv, twin.amax if records_amax else model.amax]
    assert all(map(same_bits, table.unbind(1), expected))
    assert all_same_bits([*model.out, *model.out_t], [*twin.out, *twin.out_t])
    model.poisoned.assert_guards_intact()


@pytest.mark.parametrize("argument", ["scale", "scale_inv", "amax"])
def test_vectors_of_another_number_of_elements_or_in_one_place_are_refused(argument, device, rng):
    model = a_model([(3, 5), (4, 2), (1, 1)], device, rng)
    given = {name: [getattr(model, name)[:1], getattr(model, name)[1:]] for name in ("scale", "scale_inv", "amax")}
    before = copies([model.scale_inv, model.amax, *model.out])

    def call(vectors):
        lists = {**given, argument: vectors}
        torch.ops.te_graph.fp8_cast_weights_.List(model.out, model.out_t, model.weights, *lists.values())

    first, rest = given[argument]
    with pytest.raises(ValueError, match=f"expected {argument} of 3 elements in all, got 4"):
        call([first, rest, first.clone()])
    with pytest.raises(ValueError, match=rf"expected {argument} of shape \[2\], got \[1, 2\]"):
        call([first, rest[None]])
    with pytest.raises(TypeError, match=f"expected {argument} of dtype torch.float32, got torch.float64"):
        call([first, rest.double()])
    if argument != "scale":
        with pytest.raises(ValueError, match=f"expected {argument} and {argument} that do not overlap"):
            call([rest[:1], rest])
    assert all_same_bits([model.scale_inv, model.amax, *model.out], before)


def some_shapes(number: int, rng: random.Random) -> list[tuple[int, int]]:
    return [
        rng.choice(SOME_SHAPES) if rng.random() < 0.5 else (rng.randrange(1, 40), rng.randrange(1, 40))
        for _ in range(number)
    ]


COUNTS = [*((count, True) for count in (1, 2, 63, 64, 65, 300, 2000)), (1, False), (65, False), (300, False)]


@pytest.mark.parametrize(("number", "transpose"), COUNTS, ids=str)
def test_any_number_of_mixed_weights_is_cast_as_one_by_one(number, transpose, device, rng):
    check(a_model(some_shapes(number, rng), device, rng, transpose=transpose))


@pytest.mark.parametrize("fp8", [*((dtype,) for dtype in FP8_DTYPES), FP8_DTYPES], ids=str)
@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
def test_all_shapes_in_all_formats(x_dtype, fp8, device, rng):
    check(a_model([*SOME_SHAPES, *LARGE_SHAPES], device, rng, [x_dtype], fp8))


@pytest.mark.parametrize("shape", SOME_SHAPES, ids=str)
def test_a_single_weight(shape, device, rng):
    for x_dtype in X_DTYPES:
        check(a_model([shape], device, rng, [x_dtype]))


@pytest.mark.gpu
def test_weights_of_a_transformer(rng):
    check(a_model([(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)] * 2 + [(50257, 512)], "cuda", rng))


def test_the_bits_are_those_of_the_op_for_one_weight(device, rng):
    model = a_model(some_shapes(65, rng), device, rng, fp8=FP8_DTYPES)
    twins = [[torch.zeros_like(t) for t in ts] for ts in (model.out, model.out_t)]
    scale_inv, amax, counts = (t.clone() for t in (model.scale_inv, model.amax, model.counts))
    for i, weight in enumerate(model.weights):
        extras = {"scale_inv": scale_inv[i], "amax": amax[i], "counts": counts[i]}
        tg.fp8_cast_transpose_out(twins[0][i], twins[1][i], weight, model.scale[i], **extras)
    model.cast_(counts=model.counts)
    assert all_same_bits(model.written(), [*twins[0], *twins[1], scale_inv, amax, counts])


def test_scales_and_amaxes_may_be_strided_views_and_what_is_beside_them_stays(device, rng):
    model = a_model(some_shapes(20, rng), device, rng)
    history, scales, inverses = (
        torch.rand(4, 60, device=device),
        torch.rand(60, device=device) + 1,
        torch.rand(60).to(device),
    )
    table = torch.zeros(30, 3, dtype=torch.int64, device=device)
    scales[1::3] = model.scale
    before = [t.clone() for t in (history, scales, inverses, table)]
    model.scale, model.scale_inv, model.amax = scales[1::3], inverses[1::3], history[0, 1::3]
    model.counts = table[4:24]
    check(model)
    for tensor, old, view in zip(
        (history, scales, inverses, table),
        before,
        ((0, slice(1, None, 3)), slice(1, None, 3), slice(1, None, 3), slice(4, 24)),
        strict=True,
    ):
        old[view] = tensor[view]
        assert same_bits(tensor, old)


def test_counts_are_optional_and_amaxes_are_maxed_into(device, rng):
    model = a_model(some_shapes(5, rng), device, rng)
    model.amax.fill_(1e30)
    untouched = model.counts.clone()
    for weight in model.weights:
        weight.nan_to_num_(0.0, 1.0, 1.0).clamp_(-1e4, 1e4)
    model.cast_()
    assert bool((model.amax == 1e30).all()) and same_bits(model.counts, untouched)
    assert_same_bits(model.out[0], reference_cast(model.weights[0], model.scale[0], E4M3).out)


# noop


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(("dtype", "value"), SET_FLAGS, ids=str)
def test_a_set_noop_leaves_every_byte_as_it_was(dtype, value, shape, device, rng):
    model = a_model(some_shapes(70, rng), device, rng)
    model.scale_inv, model.amax = (model.poisoned.empty((70,), torch.float32) for _ in range(2))
    model.counts = model.poisoned.empty((70, 3), torch.int64)
    with no_sync(device):
        model.cast_(counts=model.counts, noop=torch.full(shape, value, dtype=dtype, device=device))
    model.poisoned.assert_untouched()


@pytest.mark.parametrize("dtype", FLAGS, ids=str)
def test_a_noop_of_zero_changes_no_result(dtype, device, rng):
    model = a_model(some_shapes(70, rng), device, rng)
    start = model.amax.clone(), model.counts.clone()
    model.cast_(counts=model.counts)
    expected = copies(model.written())
    for tensor in (*model.out, *model.out_t):
        tensor.view(torch.uint8).fill_(1)
    for tensor, value in zip((model.amax, model.counts), start, strict=True):
        tensor.copy_(value)
    model.cast_(counts=model.counts, noop=torch.zeros(1, dtype=dtype, device=device))
    assert all_same_bits(model.written(), expected)


def test_a_captured_cast_reads_its_flag_at_each_replay(device, rng):
    """A8: replays with the flag set leave what there is, whatever became of the weights."""
    model = a_model(some_shapes(66, rng), device, rng)
    noop = torch.zeros(1, dtype=torch.int32, device=device)
    addresses = [t.data_ptr() for t in model.written()]
    replay, _ = capture(lambda: model.cast_(counts=model.counts, noop=noop), device)
    for value in (0, 1, 1, 0, -3, 0):
        for weight in model.weights:
            weight.copy_(numbers(weight.shape, weight.dtype, device))
        model.scale.mul_(1.25)
        model.amax.zero_()
        model.counts.zero_()
        before = copies(model.written())
        noop.fill_(value)
        replay()
        if value:
            assert all_same_bits(model.written(), before)
            continue
        replayed = copies(model.written())
        model.amax.zero_()
        model.counts.zero_()
        check(model)
        assert all_same_bits(replayed, model.written())
    assert [t.data_ptr() for t in model.written()] == addresses


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 64, 65, 300, 2000])
def test_384_weights_take_one_launch_and_none_waits(number, rng):
    model = a_model(some_shapes(number, rng), "cuda", rng)
    found = launches.count_launches(launches.trace_step(lambda: model.cast_(counts=model.counts), "cuda"))
    assert found["outside_graphs"] == -(-number // 384) and found["waits"] == 0


def test_e5m2_and_e4m3_differ(device, rng):
    """The dtype of each output decides, not that of the first."""
    model = a_model([(16, 16)] * 4, device, rng, [torch.float32], [E4M3, E5M2])
    model.weights[:] = [model.weights[0]] * 4
    model.cast_()
    raw = [t.view(torch.uint8) for t in model.out]
    model.scale.fill_(1.5)
    model.cast_()
    assert torch.equal(raw[0], raw[2]) and torch.equal(raw[1], raw[3]) and not torch.equal(raw[0], raw[1])
