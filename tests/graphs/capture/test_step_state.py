"""StepState: flags that kernels read at run time, written only when they change, and counters; each state by itself."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_references import reciprocal
from fp8_tensors import assert_same_bits
from tensor_lists import all_same_bits, capture, capture_alone, copies, no_sync, same_bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_graph as tg


class Calls(TorchDispatchMode):
    """Names of the operators called inside that write a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.writes.append(str(func))
        return func(*args, **(kwargs or {}))


def writes_of(call: Callable[[], object]) -> list[str]:
    with Calls() as calls:
        call()
    return calls.writes


def flags(state: tg.StepState) -> list[int]:
    """First micro-batch, skip of the weight cast, update of the weights' scale_inv."""
    return [t.item() for t in (state.is_first_microbatch, state.skip_weight_cast, state.update_weight_scale_inv)]


def counters(state: tg.StepState) -> tuple[int, int]:
    return state.step.item(), state.microbatch.item()


# Flags


def test_flags_and_counters_are_views_of_one_block(device):
    state = tg.StepState(device)
    assert (state.block.dtype, state.block.shape, state.block.device.type) == (torch.int32, (16,), device)
    named = (
        state.is_first_microbatch,
        state.skip_weight_cast,
        state.update_weight_scale_inv,
        state.step,
        state.microbatch,
    )
    start = state.block.data_ptr()
    assert all(t.shape == (1,) and t.dtype == torch.int32 for t in named)
    places = [(t.data_ptr() - start) // 4 for t in named]
    assert len(set(places)) == 5 and all(0 <= place < 16 for place in places)
    assert counters(state) == (0, -1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((True,), [1, 0, 1]),
        ((False,), [0, 1, 0]),
        ((False, True), [0, 1, 1]),
        ((True, False), [1, 0, 0]),
        ((True, None), [1, 0, 1]),
    ],
    ids=str,
)
def test_set_writes_the_flags_and_nothing_else(arguments, expected, device):
    for start in ((True, True), (True, False), (False, True), (False, False)):
        state = tg.StepState(device)
        state.set_(*start)
        state.advance_()
        before = counters(state)
        rest = state.block[5:].clone()
        with no_sync(device):
            assert state.set_(*arguments) is None
        assert flags(state) == expected and counters(state) == before
        assert torch.equal(state.block[5:], rest)


def test_the_block_is_written_only_when_a_flag_changes_and_then_once(device):
    state = tg.StepState(device)
    state.set_(False)
    turns = [((False,), 0), ((False, False), 0), ((True,), 1), ((True,), 0), ((True, True), 0), ((True, False), 1)]
    turns += [((True, None), 1), ((False,), 1), ((False, False), 0), ((False, True), 1)]
    for arguments, expected in turns:
        assert len(writes_of(lambda arguments=arguments: state.set_(*arguments))) == expected, arguments


def test_what_was_launched_before_sees_the_old_flags(device):
    """Device order alone: the host writes a flag and goes on."""
    state, seen = tg.StepState(device), []
    with no_sync(device):
        for value in (True, False, False, True, False):
            state.set_(value)
            seen.append(state.is_first_microbatch.clone())
    assert torch.cat(seen).tolist() == [1, 0, 0, 1, 0]


def test_two_states_never_see_each_others_flags(device):
    """A10: two models, whose graphs are replayed in turns."""
    states = [tg.StepState(device) for _ in range(2)]
    sources = [torch.randn(4, 6, device=device) for _ in states]
    weights = [tg.Fp8Weights([source]) for source in sources]
    replays = []
    for state, one in zip(states, weights, strict=True):
        state.set_(True)
        replays.append(capture(lambda state=state, one=one: one.cast_(noop=state.skip_weight_cast), device)[0])
    for turn in range(16):
        for number, (state, one) in enumerate(zip(states, weights, strict=True)):
            is_first = bool(turn >> number & 1)
            state.set_(is_first)
            sources[number].mul_(1.5)
            before = one.data[0].view(torch.uint8).clone()
            replays[number]()
            expected = sources[number].clamp(-448, 448).to(one.data[0].dtype) if is_first else before
            assert torch.equal(one.data[0].view(torch.uint8), expected.view(torch.uint8)), (turn, number)
        assert [flags(state)[0] for state in states] == [turn & 1, turn >> 1 & 1]


# Captures


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("start", [True, False])
def test_flags_cannot_be_set_inside_a_capture_whether_they_change_or_not(start, value, device):
    state = tg.StepState(device)
    state.set_(start)
    with pytest.raises(RuntimeError, match=r"StepState\.set_: .* call it outside, before the graphed call"):
        capture_alone(lambda: state.set_(value), device)
    assert flags(state)[0] == start
    state.set_(not start)
    assert flags(state)[0] == (not start)


def test_a_replay_reads_the_flags_as_they_are_then(device):
    state, total = tg.StepState(device), torch.zeros(3, dtype=torch.int32, device=device)
    state.set_(True)
    replay, _ = capture(lambda: total.add_(state.block[:3]), device)
    total.zero_()
    for value in (True, False, False, True):
        state.set_(value)
        replay()
    assert total.tolist() == [2, 2, 2]


# Counters


def reference_counters(flags: list[bool]) -> list[tuple[int, int]]:
    """Step and micro-batch after each advance."""
    step, microbatch, seen = 0, -1, []
    for is_first in flags:
        step, microbatch = (step + 1, 0) if is_first else (step, microbatch + 1)
        seen.append((step, microbatch))
    return seen


SEQUENCES = [[True] * 4, [True, False, False, True, False, True], [False, False, True], [True] + [False] * 7]


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda s: "".join("10"[not v] for v in s))
def test_advance_counts_micro_batches_from_the_first_of_each_step(sequence, device):
    state, seen = tg.StepState(device), []
    for is_first in sequence:
        state.set_(is_first)
        with no_sync(device):
            assert state.advance_() is None
        seen.append(counters(state))
    assert seen == reference_counters(sequence)
    assert flags(state)[0] == sequence[-1]


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda s: "".join("10"[not v] for v in s))
def test_advance_may_be_captured_and_counts_replays(sequence, device):
    state, seen = tg.StepState(device), []
    state.set_(True)
    start = state.block.clone()
    replay, _ = capture(state.advance_, device)
    state.block.copy_(start)
    for is_first in sequence:
        state.set_(is_first)
        replay()
        seen.append(counters(state))
    assert seen == reference_counters(sequence)


# Training: FP8 weights that are cast at first micro-batches, histories that go on at each.


def a_micro_batch(state: tg.StepState, weights: tg.Fp8Weights, x: Tensor, delayed: list[Tensor]) -> None:
    """Columns of ``delayed``: [input, weight]; ``x`` [M, N] is what the next micro-batch brings."""
    history, scale, scale_inv, mask = delayed
    state.advance_()
    tg.amax_and_scale_update_inplace(history, scale, scale_inv, mask, state.update_weight_scale_inv, 448.0)
    weights.cast_(noop=state.skip_weight_cast)
    tg.fp8_cast(x, scale[:1], amax=history[0, :1])


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_replays_of_a_step_are_the_eager_step_bit_for_bit(micro_batches, device):
    def new() -> tuple[tg.StepState, tg.Fp8Weights, list[Tensor]]:
        history, scale = torch.zeros(4, 2, device=device), torch.ones(2, device=device)
        delayed = [history, scale, torch.ones(2, device=device), torch.tensor([True, False], device=device)]
        return tg.StepState(device), tg.Fp8Weights([source], scale=scale[1:], amax=history[0, 1:]), delayed

    def everything(state: tg.StepState, weights: tg.Fp8Weights, delayed: list[Tensor]) -> list[Tensor]:
        return [state.block, *weights.data, *weights.transposed, weights.scale_inv, weights.amax, *delayed]

    source, x = torch.randn(8, 5, device=device), torch.zeros(3, 7, device=device)
    graphed, eager = new(), new()
    start = copies(everything(*graphed))
    replay, _ = capture(lambda: a_micro_batch(*graphed[:2], x, graphed[2]), device)
    for tensor, value in zip(everything(*graphed), start, strict=True):
        tensor.copy_(value)
    for step in range(3):
        for number in range(micro_batches):
            x.copy_(torch.randn_like(x) * (number + 1))
            for state, *_ in (graphed, eager):
                state.set_(number == 0)
            replay()
            a_micro_batch(*eager[:2], x, eager[2])
            assert all_same_bits(everything(*graphed), everything(*eager)), (step, number)
            assert counters(graphed[0]) == (step + 1, number)
            if number == 0:
                cast_with = eager[2][1][1:].clone()
            assert_same_bits(graphed[1].scale_inv, reciprocal(cast_with))
        source.mul_(1.25)


# begin_: what graphed callables call before they replay.


class Caller:
    """A callable whose replay needs the state; anything will do."""


def a_model(device: str) -> tuple[list[Tensor], tg.Fp8Weights, tg.StepState]:
    sources = [torch.randn(4, 6, device=device), torch.randn(3, 3, device=device)]
    weights = tg.Fp8Weights(sources)
    return sources, weights, tg.StepState(device, weights=weights)


def casts_of(call: Callable[[], object]) -> int:
    return sum("fp8_cast_weights" in name for name in writes_of(call))


def test_begin_takes_the_callers_word(device):
    state, caller = tg.StepState(device), Caller()
    for value in (True, False, False, True):
        state.begin_(caller, value)
        assert flags(state) == [value, not value, value]


def test_versions_of_the_weights_tell_first_micro_batches(device):
    sources, weights, state = a_model(device)
    caller = Caller()
    for _ in range(3):
        for number in range(4):
            assert casts_of(lambda: state.begin_(caller)) == (number == 0)
            assert flags(state)[0] == (number == 0) and not weights.is_stale
        for source in sources:
            source.add_(1)


def test_callers_of_one_step_share_the_cast(device):
    sources, _, state = a_model(device)
    callers = [Caller() for _ in range(3)]
    for _ in range(3):
        for number in range(2):
            for place, caller in enumerate(callers):
                assert casts_of(lambda caller=caller: state.begin_(caller)) == (number == place == 0)
                assert flags(state)[0] == (number == 0)
        sources[1].add_(1)


def test_begin_tells_whether_the_caller_is_new_since_the_cast(device):
    sources, _, state = a_model(device)
    callers = [Caller() for _ in range(2)]
    for _ in range(3):
        assert [state.begin_(caller) for caller in callers * 2] == [True, True, False, False]
        sources[0].add_(1)


def test_a_first_micro_batch_by_word_casts_once_for_all_callers(device):
    """The weights' versions say nothing when they are written beneath autograd: the caller's word is enough."""
    sources, weights, state = a_model(device)
    callers = [Caller() for _ in range(3)]
    for _ in range(3):
        for number in range(2):
            for place, caller in enumerate(callers):
                cast = casts_of(lambda caller=caller, number=number: state.begin_(caller, number == 0))
                assert cast == (number == place == 0)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            for source in sources:
                source.add_(1)
        assert not weights.is_stale


@pytest.mark.parametrize("cast", [True, False])
def test_a_later_micro_batch_with_stale_weights_contradicts_them(cast, device):
    sources, weights, state = a_model(device)
    caller = Caller()
    if cast:
        state.begin_(caller)
        sources[1].add_(1)
    before = copies([*weights.data, weights.scale_inv, state.block])
    with pytest.raises((ValueError, RuntimeError), match=r"is_first_microbatch.*weight [01]"):
        state.begin_(caller, False)
    assert all_same_bits([*weights.data, weights.scale_inv, state.block], before)
    state.begin_(caller, True)
    assert not weights.is_stale


@pytest.mark.parametrize("caller", [3, None, "layer", [1]], ids=str)
def test_a_caller_that_cannot_be_remembered_is_named(caller, device):
    state = tg.StepState(device)
    for call in (state.begin_, state.forget_):
        with pytest.raises(TypeError, match=f"^StepState: expected caller to be .*, got {re.escape(repr(caller))}$"):
            call(caller)


def test_begin_inside_a_capture_is_refused_before_anything_changes(device):
    sources, weights, state = a_model(device)
    caller = Caller()
    state.begin_(caller)
    sources[0].add_(1)
    before = copies([*weights.data, state.block])
    with pytest.raises(RuntimeError, match=r"StepState\.begin_: .* call it outside, before the graphed call"):
        capture_alone(lambda: state.begin_(caller), device)
    assert all_same_bits([*weights.data, state.block], before) and weights.is_stale
    assert casts_of(lambda: state.begin_(caller)) == 1
    assert flags(state)[0] == 1


def test_callers_are_not_kept_alive(device):
    state, caller = tg.StepState(device), Caller()
    for _ in range(2):
        state.begin_(caller)
    watched = weakref.ref(caller)
    del caller
    assert watched() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_no_caller_has_run_with_a_copy(copied, device):
    module, x = nn.Linear(4, 4, device=device), torch.randn(2, 4, device=device)
    module.state = tg.StepState(device)
    tg.make_graphed_callables(module, (x,), step_state=module.state)
    module(x)
    module.state.advance_()
    other = copied(module)
    assert flags(other.state) == flags(module.state) and counters(other.state) == counters(module.state)
    assert other.state.block.data_ptr() != module.state.block.data_ptr()
    assert same_bits(other(x), module(x))
    caller = Caller()
    assert not module.state.begin_(module.te_graph) and other.state.begin_(caller) and not other.state.begin_(caller)


# Bad input


def test_flags_are_bools(device):
    state = tg.StepState(device)
    before = state.block.clone()
    for call in (
        lambda: state.set_(1),
        lambda: state.set_(None),
        lambda: state.set_(True, 0),
        lambda: state.set_(torch.ones(1, device=device)),
        lambda: state.begin_(Caller(), 1),
    ):
        with pytest.raises(TypeError, match=r"expected .*got"):
            call()
    assert torch.equal(state.block, before)


def test_a_state_needs_a_device_and_weights_on_it(device):
    with pytest.raises((TypeError, ValueError), match=r"StepState"):
        tg.StepState()
    with pytest.raises(TypeError, match=r"StepState: expected weights .*got"):
        tg.StepState(device, weights=[torch.zeros(2, 2, device=device)])
    with pytest.raises(ValueError, match=r"StepState: expected weights on .*got"):
        tg.StepState("meta", weights=tg.Fp8Weights([torch.zeros(2, 2, device=device)]))


def test_begin_names_a_buffer_that_moved_in_the_middle_of_a_step(device):
    weights = tg.Fp8Weights([torch.randn(16, 16, device=device)])
    state, caller = tg.StepState(weights=weights), Caller()
    state.begin_(caller)
    weights.transposed[0].data = weights.transposed[0].clone()
    with pytest.raises(RuntimeError, match="the transposed FP8 data of weight 0 moved to other memory"):
        state.begin_(caller)


class ReadsFlag(nn.Module):
    """Adds its state's flag for first micro-batches to the input [n]."""

    def __init__(self, state: tg.StepState) -> None:
        super().__init__()
        self.register_buffer("flag", state.is_first_microbatch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.flag


def test_a_call_that_was_refused_was_no_micro_batch(device):
    state = tg.StepState(device)
    module = ReadsFlag(state)
    zeros = torch.zeros(4, device=device)
    tg.make_graphed_callables(module, (zeros,), step_state=state)
    with pytest.raises(ValueError, match="shape"):
        module(torch.zeros(5, device=device))
    assert [module(zeros)[0].item() for _ in range(3)] == [1, 0, 0]
    with pytest.raises(ValueError, match="shape"):
        module(torch.zeros(5, device=device))
    assert module(zeros)[0].item() == 0
    with pytest.raises(TypeError, match="is_first_microbatch: expected True, False or None, got int"):
        module(zeros, is_first_microbatch=1)
    assert module(zeros, is_first_microbatch=True)[0].item() == 1


def test_a_step_state_of_another_type_is_refused(device):
    with pytest.raises(TypeError, match="expected step_state to be a StepState, got bool"):
        tg.make_graphed_callables(nn.Linear(4, 4, device=device), (torch.zeros(4, device=device),), step_state=True)
