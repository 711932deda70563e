"""max_in_flight and on_exhausted: schedules with many micro-batches in flight, and one forward too many.

The reference is eager execution of copies of the same modules in the same order, from the same generator state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def stage(device: str) -> nn.Module:
    """[n, 6] -> [n, 6], with random numbers and with buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 6)).to(device)


def batch(device: str) -> Tensor:  # [4, 6]
    return torch.randn(4, 6, device=device, requires_grad=True)


@dataclass(frozen=True)
class Action:
    """A forward or backward of one micro-batch through one chunk of a model."""

    is_forward: bool
    chunk: int
    micro_batch: int


def all_forward_then_all_backward(count: int) -> list[Action]:
    return [Action(forward, 0, number) for forward in (True, False) for number in range(count)]


def reversed_backward(count: int) -> list[Action]:
    schedule = all_forward_then_all_backward(count)
    return schedule[:count] + schedule[: count - 1 : -1]


def one_forward_one_backward(count: int, warm_up: int) -> list[Action]:
    """1F1B of a stage that has ``warm_up`` stages behind it."""
    forwards, backwards = (iter([Action(kind, 0, number) for number in range(count)]) for kind in (True, False))
    return list(_alternating(forwards, backwards, warm_up))


def interleaved(count: int, warm_up: int, chunks: int = 2, group: int = 2) -> list[Action]:
    """Interleaved 1F1B: groups of micro-batches go through one chunk after the other, backward in reverse."""
    firsts = range(0, count, group)
    order = [(chunk, first + i) for first in firsts for chunk in range(chunks) for i in range(group)]
    forwards = (Action(True, chunk, number) for chunk, number in order)
    backwards = (Action(False, chunks - 1 - chunk, number) for chunk, number in order)
    return list(_alternating(forwards, backwards, warm_up))


def _alternating(forwards: Iterator[Action], backwards: Iterator[Action], warm_up: int) -> Iterator[Action]:
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


SCHEDULES = {
    "all forward, all backward": all_forward_then_all_backward(4),
    "backward reversed": reversed_backward(4),
    "1F1B, first of 3": one_forward_one_backward(6, warm_up=2),
    "1F1B, last": one_forward_one_backward(4, warm_up=0),
    "interleaved, first of 2": interleaved(6, warm_up=4),
    "interleaved, last of 2": interleaved(6, warm_up=2),
}


def in_flight(schedule: list[Action]) -> list[int]:
    """Forwards of the same chunk that wait for their backward, after each action."""
    waiting, seen = [0, 0], []
    for action in schedule:
        waiting[action.chunk] += 1 if action.is_forward else -1
        seen.append(waiting[action.chunk])
    return seen


@pytest.mark.parametrize(("name", "expected"), list(zip(SCHEDULES, (4, 4, 3, 1, 4, 3), strict=True)))
def test_the_schedules_are_what_they_are_called(name, expected):
    schedule = SCHEDULES[name]
    assert max(in_flight(schedule)) == expected
    assert in_flight(schedule)[-1] == 0
    assert len({(a.is_forward, a.chunk, a.micro_batch) for a in schedule}) == len(schedule)


class Runner:
    """Runs schedules over chunks that are apart, as ranks in between would be: each has a leaf as its input."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        self.chunks = chunks

    def run(self, schedule: list[Action], inputs: list[Tensor], expected: list[int] | None = None) -> list:
        """``inputs`` [4, 6], one per micro-batch; ``expected`` is what info() has to say after each action."""
        leaves: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        kept = []
        for step, action in enumerate(schedule):
            key, above = (action.chunk, action.micro_batch), (action.chunk + 1, action.micro_batch)
            chunk = self.chunks[action.chunk]
            if action.is_forward:
                below = outputs.get((action.chunk - 1, action.micro_batch))
                leaves[key] = leaf_copy(inputs[action.micro_batch] if below is None else below)
                outputs[key] = chunk(leaves[key])
                kept.append(outputs[key].detach())
            elif above in leaves:
                outputs.pop(key).backward(leaves[above].grad)
            else:
                backward_of(outputs.pop(key))
            if expected is not None:
                assert chunk.te_graph.info()["in_flight"] == expected[step]
        gradients = [gradients_of(list(chunk.parameters())) for chunk in self.chunks]
        return [kept, gradients_of(leaves), gradients, [leaf_copy(dict(c.named_buffers())) for c in self.chunks]]


def compare(device: str, chunks: list[nn.Module], twins: list[nn.Module], schedule: list[Action], exact: bool) -> None:
    inputs, seed = [batch(device) for _ in range(6)], int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    seen = Runner(chunks).run(schedule, inputs, in_flight(schedule) if exact else None)
    torch.manual_seed(seed)
    assert_bitwise_equal(seen, Runner(twins).run(schedule, inputs))


def graphed_chunks(device: str, schedule: list[Action], **options: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    count = 1 + max(action.chunk for action in schedule)
    chunks = [stage(device) for _ in range(count)]
    twins = [eager_copy(chunk) for chunk in chunks]
    make_graphed_callables(tuple(chunks), tuple((batch(device),) for _ in chunks), **options)
    return chunks, twins


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_with_at_most_k_in_flight_is_right_with_k_slots(device, name):
    schedule = SCHEDULES[name]
    chunks, twins = graphed_chunks(device, schedule, max_in_flight=max(in_flight(schedule)))
    for _ in range(2):
        compare(device, chunks, twins, schedule, exact=True)
    for chunk in chunks:
        info = chunk.te_graph.info()
        assert (info["forward_replays"], info["eager_calls"]) == (info["backward_replays"], {})


@pytest.mark.parametrize("name", [name for name in SCHEDULES if max(in_flight(SCHEDULES[name])) > 1])
def test_with_one_slot_less_the_forward_that_has_none_says_how_many_are_needed(device, name):
    schedule = SCHEDULES[name]
    needed = max(in_flight(schedule))
    chunks, _ = graphed_chunks(device, schedule, max_in_flight=needed - 1)
    first = schedule[in_flight(schedule).index(needed)]
    words = rf"callable {first.chunk} \(Sequential\): .*while {needed - 1} earlier .*max_in_flight={needed} "
    with pytest.raises(RuntimeError, match=words):
        Runner(chunks).run(schedule, [batch(device) for _ in range(6)], in_flight(schedule))
    replays = [chunk.te_graph.info()["forward_replays"] for chunk in chunks]
    before = schedule[: in_flight(schedule).index(needed)]
    assert replays == [sum(a.is_forward and a.chunk == number for a in before) for number in range(len(chunks))]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("slots", [1, 2])
def test_eager_calls_step_in_where_slots_are_missing(device, name, slots, caplog):
    schedule = SCHEDULES[name]
    chunks, twins = graphed_chunks(device, schedule, max_in_flight=slots, on_exhausted="eager")
    for _ in range(2):
        compare(device, chunks, twins, schedule, exact=False)
    told = [r.getMessage() for r in caplog.records if r.name == "te_graph" and r.levelno == logging.WARNING]
    for number, chunk in enumerate(chunks):
        info = chunk.te_graph.info()
        calls = 2 * sum(action.is_forward and action.chunk == number for action in schedule)
        eager = sum(info["eager_calls"].values())
        assert info["forward_replays"] == info["backward_replays"] == calls - eager
        waiting = max(n for n, action in zip(in_flight(schedule), schedule, strict=True) if action.chunk == number)
        assert (eager > 0) is (waiting > slots)
        assert all(f"max_in_flight={slots + 1}" in reason for reason in info["eager_calls"])
        assert sum(line.startswith(f"callable {number} ") for line in told) == (waiting > slots)


def test_an_eager_call_in_between_takes_no_slot_and_dropped_outputs_free_theirs(device):
    model = stage(device)
    make_graphed_callables(model, (batch(device),), max_in_flight=2, on_exhausted="eager")
    handle = model.te_graph
    waiting = [model(batch(device)) for _ in range(4)]
    assert (handle.info()["in_flight"], handle.info()["forward_replays"]) == (2, 2)
    del waiting[2:]  # the eager ones
    assert handle.info()["in_flight"] == 2
    waiting.pop()
    assert handle.info()["in_flight"] == 1
    waiting.append(model(batch(device)))
    assert (handle.info()["in_flight"], handle.info()["forward_replays"]) == (2, 3)
    # A detached result does not wait for a backward, and a loss does so for as long as it is held.
    loss = waiting.pop().square().sum()
    waiting = [output.detach() for output in waiting]
    assert handle.info()["in_flight"] == 1
    backward_of(loss)
    assert handle.info()["in_flight"] == 0


@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
@pytest.mark.parametrize("on_exhausted", ["raise", "eager"])
def test_on_mismatch_has_no_say_in_what_exhausted_slots_do(device, on_mismatch, on_exhausted):
    model = stage(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch=on_mismatch, on_exhausted=on_exhausted)
    x, seen = batch(device), []
    waiting = model(batch(device))
    twin(batch(device))
    if on_exhausted == "raise":
        with pytest.raises(RuntimeError, match="max_in_flight=2"):
            model(x)
    else:
        twin.load_state_dict(model.state_dict())
        for net in (model, twin):
            torch.manual_seed(1)
            seen.append([run(net, x), leaf_copy(dict(net.named_buffers()))])
        assert_bitwise_equal(*seen)
    info = model.te_graph.info()
    assert (info["signatures"], info["recaptures"], info["in_flight"]) == (1, 0, 1)
    assert sum(info["eager_calls"].values()) == (on_exhausted == "eager")
    backward_of(waiting)


def test_exhausted_slots_of_a_function_with_gradients_there_before(device):
    weight = torch.randn(6, 6, device=device, requires_grad=True)
    other = weight.detach().clone().requires_grad_()
    weight.grad = torch.randn_like(weight)
    other.grad = weight.grad.clone()

    def function_of(weight: Tensor) -> Any:
        return lambda x: torch.tanh(x @ weight)

    graphed = make_graphed_callables(function_of(weight), (batch(device),), max_in_flight=2, on_exhausted="eager")
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        inputs, seen = [batch(device) for _ in order], []
        for call, leaf in ((graphed, weight), (function_of(other), other)):
            leaves = leaf_copy(inputs)
            outputs = [call(x) for x in leaves]
            for index in order:
                backward_of(outputs[index])
            seen.append([gradients_of(leaves), leaf.grad.clone(), [output.detach() for output in outputs]])
        assert_bitwise_equal(*seen)
    info = graphed.te_graph.info()
    assert (info["forward_replays"], list(info["eager_calls"].values())) == (6, [6])


class Counting(nn.Module):
    """Reads in its backward a buffer that its next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:  # [4, 6]
        self.steps.add_(1)
        return self.linear(x) * self.steps


def test_calls_that_cannot_be_in_flight_together_are_refused_and_one_at_a_time_replays(device: str) -> None:
    model = Counting().to(device)
    twin = eager_copy(model)
    with pytest.raises(RuntimeError, match=r"^Counting: each call changes in place .* max_in_flight=2 asks for that"):
        make_graphed_callables(model, (batch(device),), max_in_flight=2)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
