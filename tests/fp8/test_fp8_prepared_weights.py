"""Fp8Weights: casts of all weights from a table that was built once; what is stale or has moved is named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from fp8_references import E4M3, FP8_DTYPES
from fp8_tensors import SET_FLAGS, numbers
from fp8_weights import SHAPES, assert_cast, random_weights, written
from profiled_launches import launches
from tensor_lists import Fences, all_same_bits, capture, capture_alone, copies, no_sync, same_bits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import te_graph as tg


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_a_cast_fills_all_buffers(dtype, transpose, device):
    sources = random_weights(device)
    count = len(sources)
    scale, amax = torch.rand(count, device=device) * 100 + 1, torch.rand(count, device=device)
    prepared = tg.Fp8Weights(sources, dtype=dtype, transpose=transpose, scale=scale, amax=amax, counts=True)
    before, start = copies(sources), amax.clone()
    with no_sync(device):
        assert prepared.cast_() is None
    assert_cast(prepared, sources, start, torch.zeros(count, 3, dtype=torch.int64))
    assert all_same_bits(sources, before) and len(prepared.transposed) == count * transpose
    again = prepared.counts.clone(), prepared.amax.clone()
    prepared.cast_()
    assert_cast(prepared, sources, again[1], again[0])


def test_defaults(device):
    prepared = tg.Fp8Weights(iter(random_weights(device)))
    assert prepared.counts is None
    assert [t.dtype for t in (*prepared.data, *prepared.transposed)] == [E4M3] * 2 * len(SHAPES)
    assert [tuple(t.shape) for t in prepared.data] == SHAPES
    assert [tuple(t.shape) for t in prepared.transposed] == [shape[::-1] for shape in SHAPES]
    assert bool((prepared.scale == 1).all()) and not prepared.amax.any() and len(prepared.scale_inv) == len(SHAPES)
    assert all(t.device.type == device for t in (*prepared.data, prepared.scale, prepared.scale_inv, prepared.amax))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_scales_are_fp32_whatever_the_default_dtype_is(dtype, device):
    sources, before = random_weights(device), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        prepared = tg.Fp8Weights(sources)
    finally:
        torch.set_default_dtype(before)
    prepared.cast_()
    assert_cast(prepared, sources, torch.zeros(len(sources)))


def test_scales_and_amaxes_may_be_views_of_a_delayed_scaling_state(device):
    sources = random_weights(device)
    fences = Fences()
    history = fences.place(torch.rand(5, 3 * len(sources), device=device))
    scales = fences.place(torch.rand(3 * len(sources), device=device) + 1)
    before = history.clone()
    prepared = tg.Fp8Weights(sources, scale=scales[1::3], amax=history[0, 1::3])
    prepared.cast_()
    assert_cast(prepared, sources, before[0, 1::3])
    before[0, 1::3] = history[0, 1::3]
    assert same_bits(history, before)
    scales[1::3] *= 3
    prepared.cast_()
    assert_cast(prepared, sources, history[0, 1::3])
    fences.assert_intact()


def test_parameters_are_cast_without_gradients_and_at_odd_addresses(device):
    storage = torch.randn(1 + 13 * 7, device=device)
    sources = [nn.Parameter(torch.randn(16, 16, device=device)), nn.Parameter(storage[1:].view(13, 7))]
    prepared = tg.Fp8Weights(sources)
    prepared.cast_()
    assert_cast(prepared, sources, torch.zeros(2))
    assert not any(t.requires_grad for t in written(prepared))


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 64, 65, 300, 2000])
def test_any_number_of_weights_is_one_launch_and_no_wait(number, rng):
    shapes = [(rng.randrange(1, 100), rng.randrange(1, 100)) for _ in range(number)]
    prepared = tg.Fp8Weights(random_weights("cuda", shapes), counts=True)
    found = launches.count_launches(launches.trace_step(prepared.cast_, "cuda"))
    assert (found["outside_graphs"], found["waits"]) == (1, 0)


def test_two_thousand_weights(device, rng):
    sources = random_weights(device, [(rng.randrange(1, 40), rng.randrange(1, 40)) for _ in range(2000)])
    prepared = tg.Fp8Weights(sources)
    prepared.cast_()
    assert_cast(prepared, sources, torch.zeros(2000))


@pytest.mark.parametrize(("dtype", "value"), SET_FLAGS, ids=str)
def test_a_set_noop_leaves_every_byte_as_it_was(dtype, value, device):
    prepared = tg.Fp8Weights(random_weights(device), counts=True)
    for tensor in written(prepared):
        # A view of integers of the same size, since scale_inv has gaps.
        whole = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        tensor.view(whole).fill_(0x25)
    before = copies(written(prepared))
    prepared.cast_(noop=torch.tensor([value], device=device).to(dtype))
    assert all_same_bits(written(prepared), before)


# What has changed since the cast.


def a_prepared_one(device: str, **kwargs: object) -> tuple[tg.Fp8Weights, list[Tensor]]:
    sources = random_weights(device, [(8, 8), (5, 3), (16, 32), (7, 7), (4, 4)])
    prepared = tg.Fp8Weights(sources, **kwargs)
    prepared.cast_()
    return prepared, sources


@pytest.mark.parametrize("value", [0, 1])
def test_a_cast_with_a_flag_that_the_host_does_not_read_leaves_weights_as_stale_as_they_are(value, device):
    prepared, sources = a_prepared_one(device)
    noop = torch.tensor(value, dtype=torch.int32, device=device)
    prepared.cast_(noop=noop)
    assert not prepared.is_stale
    sources[0].add_(1)
    prepared.cast_(noop=noop)
    assert prepared.is_stale
    prepared.cast_()
    assert not prepared.is_stale


def test_weights_are_stale_until_they_are_cast(device):
    prepared = tg.Fp8Weights(random_weights(device))
    assert prepared.is_stale
    with pytest.raises(RuntimeError, match="weight 0"):
        prepared.check()
    prepared.cast_()
    assert not prepared.is_stale and prepared.check() is None


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.mul_(2),
    "through a view": lambda w: w[0].add_(1),
    "by copy_": lambda w: w.copy_(torch.zeros_like(w)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changed_is_named(change, device):
    prepared, sources = a_prepared_one(device)
    CHANGES[change](sources[3])
    assert prepared.is_stale
    with pytest.raises(RuntimeError, match="weight 3 changed since it was cast"):
        prepared.check()
    prepared.cast_()
    assert not prepared.is_stale
    assert_cast(prepared, sources, prepared.amax)


def test_messages_call_weights_by_their_names(device):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).to(device)
    named = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    prepared = tg.Fp8Weights(named.values(), names=list(named))
    prepared.cast_()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"1\.weight changed"):
        prepared.check()


def test_a_step_of_an_optimizer_makes_weights_stale(device):
    model = nn.Linear(6, 4).to(device)
    prepared = tg.Fp8Weights([model.weight])
    prepared.cast_()
    model(torch.randn(2, 6, device=device)).sum().backward()
    assert not prepared.is_stale
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert prepared.is_stale


def test_a_weight_that_moved_is_named_and_not_cast_until_it_is_taken(device):
    prepared, sources = a_prepared_one(device)
    before = copies(written(prepared))
    sources[2].data = numbers((16, 32), sources[2].dtype, device)
    assert prepared.is_stale
    for call in (prepared.check, prepared.cast_):
        with pytest.raises(RuntimeError, match="weight 2 moved"):
            call()
    assert all_same_bits(written(prepared), before)
    prepared.update(sources)
    assert prepared.is_stale
    prepared.amax.zero_()
    prepared.cast_()
    assert_cast(prepared, sources, torch.zeros(5))
    assert prepared.check() is None


def with_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


# Over the same memory, [4, 4] and [1].
LAID_OUT: dict[str, Callable[[Tensor, Tensor], object]] = {
    "weight 0, transposed": lambda weight, scale: weight.t_(),
    "weight 0, transposed data": lambda weight, scale: with_data(weight, weight.data.t()),
    "weight 0, another shape": lambda weight, scale: with_data(weight, weight.data.view(2, 8)),
    "weight 0, fewer elements": lambda weight, scale: weight.resize_(2, 4),
    "weight 0, another dtype": lambda weight, scale: with_data(weight, weight.data.view(torch.int32)),
    "weight 0, negated": lambda weight, scale: with_data(weight, torch._neg_view(weight.data)),
    "scale, longer": lambda weight, scale: scale.as_strided_((2,), (1,)),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_is_laid_out_otherwise_is_named_and_not_cast(name, device):
    weight, scale = numbers((4, 4), torch.float32, device), torch.ones(2, device=device)[:1]
    prepared = tg.Fp8Weights([weight], scale=scale)
    prepared.cast_()
    before = copies(written(prepared))
    LAID_OUT[name](weight, scale)
    for call in (prepared.check, prepared.check_places, prepared.cast_):
        with pytest.raises(RuntimeError, match=f"{name.partition(',')[0]} changed its shape, strides or dtype"):
            call()
    assert all_same_bits(written(prepared), before)


def test_what_is_still_to_be_negated_is_refused(device):
    weight, vector = numbers((4, 4), torch.float32, device), torch.ones(1, device=device)
    negative = torch._neg_view(weight)
    for make in (
        lambda: tg.Fp8Weights([negative]),
        lambda: tg.Fp8Weights([weight], scale=torch._neg_view(vector)),
        lambda: tg.Fp8Weights([weight], amax=torch._neg_view(vector)),
        lambda: tg.Fp8Weights([weight]).update([negative]),
    ):
        with pytest.raises(ValueError, match="negated or conjugated lazily"):
            make()


BUFFERS: dict[str, Callable[[tg.Fp8Weights], Tensor]] = {
    "data": lambda prepared: prepared.data[1],
    "transposed": lambda prepared: prepared.transposed[4],
    "scale": lambda prepared: prepared.scale,
    "scale_inv": lambda prepared: prepared.scale_inv,
    "amax": lambda prepared: prepared.amax,
    "counts": lambda prepared: prepared.counts,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_moved_is_an_error_before_anything_is_written(name, device):
    prepared, sources = a_prepared_one(device, counts=True)
    kept = written(prepared)
    before = copies(kept)
    buffer = BUFFERS[name](prepared)
    buffer.data = buffer.clone()
    sources[0].add_(1)
    for call in (prepared.check, prepared.cast_):
        with pytest.raises(RuntimeError, match=f"{name}.*moved" if name in ("scale", "scale_inv") else "moved"):
            call()
    assert all_same_bits(written(prepared), before)


def test_buffers_never_move(device):
    """A11: addresses are those of the start after casts, updates and steps of an optimizer."""
    sources = [nn.Parameter(torch.randn(8, 8, device=device)) for _ in range(3)]
    prepared, optimizer = tg.Fp8Weights(sources), torch.optim.SGD(sources, lr=0.1)
    addresses = [t.data_ptr() for t in (*written(prepared), prepared.scale)]
    for turn in range(100):
        for source in sources:
            source.grad = torch.randn_like(source)
        optimizer.step()
        if turn % 10 == 0:
            prepared.update(sources)
        prepared.cast_()
    assert [t.data_ptr() for t in (*written(prepared), prepared.scale)] == addresses


# In a graph.


def test_a_captured_cast_reads_its_flag_and_the_weights_at_each_replay(device):
    sources = random_weights(device)
    noop = torch.zeros(1, dtype=torch.int32, device=device)
    prepared = tg.Fp8Weights(sources, counts=True)
    replay, _ = capture(lambda: prepared.cast_(noop=noop), device)
    for flag in (0, 1, 1, 0, 7, 0):
        for source in sources:
            source.copy_(numbers(source.shape, source.dtype, device))
        prepared.scale.mul_(1.5)
        noop.fill_(flag)
        before = copies(written(prepared))
        replay()
        if flag:
            assert all_same_bits(written(prepared), before)
        else:
            assert_cast(prepared, sources, before[-2], before[-1])


def test_a_captured_cast_takes_other_weights_after_an_update(device):
    first, second = random_weights(device), random_weights(device)
    prepared = tg.Fp8Weights(first)
    replay, _ = capture(prepared.cast_, device)
    for sources in (second, first, second):
        prepared.update(sources)
        assert all(a is b for a, b in zip(prepared.weights, sources, strict=True))
        prepared.amax.zero_()
        replay()
        assert_cast(prepared, sources, torch.zeros(len(sources)))


def test_a_capture_alone_casts_nothing_and_weights_stay_stale(device):
    sources = random_weights(device)
    prepared = tg.Fp8Weights(sources, counts=True)
    before = copies(written(prepared))
    graph = tg.Recorder() if device == "cpu" else torch.cuda.CUDAGraph()
    with tg.capture_to_graph(graph):
        prepared.cast_()
    assert all_same_bits(written(prepared), before)
    assert prepared.is_stale
    tg.replay_graph(graph)
    assert_cast(prepared, sources, before[-2], before[-1])


def test_an_update_inside_a_capture_is_refused(device):
    prepared, sources = a_prepared_one(device)
    with pytest.raises(RuntimeError, match=r"Fp8Weights\.update: .* call it outside, before the graphed call"):
        capture_alone(lambda: prepared.update(copies(sources)), device)
    prepared.cast_()
    assert_cast(prepared, sources, prepared.amax)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, AveragedModel, pickle.dumps])
def test_prepared_weights_are_not_copied_with_their_module(copied, device):
    module = nn.Linear(4, 4, device=device)
    module.prepared = tg.Fp8Weights([module.weight])
    with pytest.raises(TypeError, match=r"^Fp8Weights: cannot be copied or pickled; make one from the copy's tensors"):
        copied(module.prepared if copied is copy.copy else module)
