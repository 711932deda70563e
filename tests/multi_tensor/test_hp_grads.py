"""update_hp_grads against DeepSpeed's loop in plain PyTorch: hp += lp.grad in hp's dtype, then lp.grad is zero."""

import math

import pytest
import torch
from tensor_lists import CHUNK, all_same_bits, capture, copies, no_sync, same_bits
from torch import Tensor, nn

import te_graph as tg

ops = torch.ops.te_graph
SIZES = (1, 7, CHUNK + 1, 0, 2 * CHUNK + 5, 300)
WITHOUT = {1, 5}  # parameters without a gradient


def low_parameters(device: str, dtype: torch.dtype, without: set[int] = WITHOUT) -> list[nn.Parameter]:
    """Parameters with gradients, except those in ``without``."""
    parameters = [nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in SIZES]
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index in without else torch.randn_like(parameter)
    return parameters


def high_gradients(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in SIZES]


def updated(parameters: list[nn.Parameter], high: list[Tensor], store: bool) -> list[Tensor]:
    """Reference: what ``high`` [...] hold after one call."""
    results = []
    for parameter, destination in zip(parameters, high, strict=True):
        start = torch.zeros_like(destination) if store else destination.clone()
        results.append(start if parameter.grad is None else start + parameter.grad.to(destination.dtype))
    return results


def assert_zeroed(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    """Gradients are the tensors that they were, full of zeros; what was None stays None."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_gradients_are_added_or_stored_and_then_zero_in_place(dtypes, store, device):
    parameters, high = low_parameters(device, dtypes[0]), high_gradients(device, dtypes[1])
    if store:
        for destination in high:
            destination.fill_(math.nan)
    expected, values = updated(parameters, high, store), copies(parameters)
    gradients, places = [p.grad for p in parameters], [t.data_ptr() for t in high]
    with no_sync(device):
        assert tg.update_hp_grads(parameters, high, store=store) is None
    assert all_same_bits(high, expected) and [t.data_ptr() for t in high] == places
    assert_zeroed(parameters, gradients)
    assert all_same_bits(copies(parameters), values)


def test_micro_batches_sum_up_in_fp32_and_each_counts_once(device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    expected = [torch.zeros_like(destination) for destination in high]
    for batch in range(5):
        for index, parameter in enumerate(parameters):
            new = torch.randn_like(parameter)
            if parameter.grad is not None:
                parameter.grad.add_(new)  # to zeros, as backward does
            elif batch >= 2 and index == 5:  # appears later
                parameter.grad = new
        expected = updated(parameters, expected, store=batch == 0)
        tg.update_hp_grads(parameters, high, store=batch == 0)
        assert all_same_bits(high, expected), batch


def test_any_iterables_do(device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    expected = updated(parameters, high, False)
    tg.update_hp_grads(iter(parameters), tuple(high))
    assert all_same_bits(high, expected)


def test_no_gradient_at_all_stores_zeros_or_adds_nothing(device):
    parameters, high = low_parameters(device, torch.bfloat16, set(range(len(SIZES)))), high_gradients(device)
    before = copies(high)
    tg.update_hp_grads(parameters, high)
    assert all_same_bits(high, before)
    tg.update_hp_grads(parameters, high, store=True)
    assert all_same_bits(high, [torch.zeros_like(t) for t in high])


@pytest.mark.parametrize("store", [False, True])
def test_the_squares_of_what_was_written_give_its_norm(store, device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    sum_squares = tg.new_sum_squares(device)
    with no_sync(device):
        tg.update_hp_grads(parameters, high, store=store, sum_squares=sum_squares)
        norm = tg.norm_of_sum_squares(sum_squares)
    assert same_bits(norm, tg.get_global_norm_of_tensors(high))
    if store:  # what had no gradient is zero
        written = [t for i, t in enumerate(high) if i not in WITHOUT]
        assert same_bits(norm, ops.multi_tensor_norm(written))


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-30])
def test_the_norm_has_what_lies_where_parameters_have_no_gradient(value, device):
    for without in ({5}, set(range(len(SIZES)))):
        parameters, high = low_parameters(device, torch.bfloat16, without), high_gradients(device)
        high[5][7] = value
        flags = {"found_inf": torch.zeros(1, device=device), "noop": torch.zeros((), device=device)}
        sum_squares = tg.new_sum_squares(device)
        with no_sync(device):
            tg.update_hp_grads(parameters, high, sum_squares=sum_squares, **flags)
        # The flag tells of what was written.
        assert flags["found_inf"].item() == 0
        assert same_bits(tg.norm_of_sum_squares(sum_squares), tg.get_global_norm_of_tensors(high))


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_set_noop_adds_no_squares(value, device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    sum_squares, noop = tg.new_sum_squares(device), torch.full((1,), value, device=device)
    tg.update_hp_grads(parameters, high, sum_squares=sum_squares, noop=noop)
    assert not sum_squares.any()


@pytest.mark.parametrize("store", [False, True])
def test_a_captured_update_adds_the_squares_of_each_replay(store, device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    sum_squares, noop = tg.new_sum_squares(device), torch.zeros(1, device=device)
    replay, _ = capture(
        lambda: tg.update_hp_grads(parameters, high, store=store, sum_squares=sum_squares, noop=noop), device
    )
    for skips in (False, True, False):
        noop.fill_(float(skips))
        sum_squares.zero_()
        with no_sync(device):
            replay()
        norm = tg.norm_of_sum_squares(sum_squares)
        assert not sum_squares.any() if skips else same_bits(norm, tg.get_global_norm_of_tensors(high))


SHAPES_THAT_FIT = [((2, 3), (6,)), ((6,), (2, 3)), ((), (1,)), ((2, 3), (2, 3))]
SHAPES_THAT_DO_NOT = [((2, 3), (3, 2)), ((2, 3), (1, 6)), ((2, 3), (5,)), ((1, 1), ())]


@pytest.mark.parametrize(("shape", "high_shape"), SHAPES_THAT_FIT)
def test_gradients_may_be_flat(shape, high_shape, device):
    parameter, high = nn.Parameter(torch.zeros(shape, device=device)), torch.zeros(high_shape, device=device)
    parameter.grad = torch.randn(shape, device=device)
    expected = parameter.grad.reshape(high_shape).clone()
    tg.update_hp_grads([parameter], [high])
    assert same_bits(high, expected)


@pytest.mark.parametrize(("shape", "high_shape"), SHAPES_THAT_DO_NOT)
def test_gradients_of_other_shapes_are_refused_and_nothing_is_written(shape, high_shape, device):
    parameters = [nn.Parameter(torch.zeros(n, device=device)) for n in ((4,), shape)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    high = [torch.zeros(n, device=device) for n in ((4,), high_shape)]
    with pytest.raises(ValueError, match=r"^update_hp_grads: expected hp_grads\[1\] of shape .* or flat, got "):
        tg.update_hp_grads(parameters, high)
    assert not any(t.any() for t in high) and all(bool((p.grad == 1).all()) for p in parameters)


@pytest.mark.parametrize("store", [False, True])
def test_found_inf_tells_of_what_is_not_finite_and_noop_gates_all_writes(store, device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    parameters[4].grad[CHUNK] = math.inf
    before, gradients = copies(high), [p.grad for p in parameters]
    kept = [None if g is None else g.clone() for g in gradients]
    flags = {"found_inf": torch.zeros(1, device=device), "noop": torch.ones(1, device=device)}
    sum_squares = tg.new_sum_squares(device)
    with no_sync(device):
        tg.update_hp_grads(parameters, high, store=store, sum_squares=sum_squares, **flags)
    assert all_same_bits(high, before) and not sum_squares.any() and flags["found_inf"].item() == 0
    for parameter, gradient, value in zip(parameters, gradients, kept, strict=True):
        assert parameter.grad is gradient and (gradient is None or same_bits(gradient, value))
    flags["noop"].zero_()
    expected = updated(parameters, high, store)
    with no_sync(device):
        tg.update_hp_grads(parameters, high, store=store, sum_squares=sum_squares, **flags)
    assert all_same_bits(high, expected) and flags["found_inf"].item() == 1
    assert tg.norm_of_sum_squares(sum_squares).item() == math.inf
    assert_zeroed(parameters, gradients)


def test_a_captured_update_adds_what_lies_in_the_gradients(device):
    parameters, high = low_parameters(device, torch.bfloat16), high_gradients(device)
    replay, _ = capture(lambda: tg.update_hp_grads(parameters, high), device)
    for _ in range(3):
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(torch.randn_like(parameter))
        expected = updated(parameters, high, False)
        with no_sync(device):
            replay()
        assert all_same_bits(high, expected)
        assert not any(p.grad.any() for p in parameters if p.grad is not None)


def test_the_optimizer_side_of_mixed_precision_without_a_sync(device):
    """Accumulate, norm, clip and a fused step over masters in fp32, beside the same in plain PyTorch."""
    low = [nn.Parameter(torch.randn(size, device=device).bfloat16()) for size in (7, 300, CHUNK + 1)]
    ours = [nn.Parameter(parameter.detach().float()) for parameter in low]
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in low]
    for master in ours:
        master.grad = torch.zeros_like(master)
    optimizers = [torch.optim.AdamW(masters, lr=0.1, fused=True) for masters in (ours, theirs)]
    for _ in range(4):
        sums = [torch.zeros_like(master) for master in theirs]
        for batch in range(3):
            for parameter, total in zip(low, sums, strict=True):
                parameter.grad = torch.randn_like(parameter)
                total += parameter.grad.float()
            with no_sync(device):
                tg.update_hp_grads(low, [master.grad for master in ours], store=batch == 0)
        with no_sync(device):
            norm = tg.clip_tensors_by_global_norm([master.grad for master in ours], 1.0)
        for master, total in zip(theirs, sums, strict=True):
            master.grad = total
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        torch.testing.assert_close(norm, expected)
        for optimizer in optimizers:
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
