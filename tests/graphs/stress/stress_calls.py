"""Operations of the stress test that run the models, and that hold on to what comes out: listed in ``CALLS``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from stress import World
from stress_model import BATCH, EAGER, GRAPHED, WIDTH, Operation, Pending, Side, assert_same, refusal_of
from torch import Tensor

# Forwards.


def forward(world: World) -> None:
    _forward(world, _inputs(world))


def forward_whose_inner_result_is_used(world: World) -> None:
    _forward(world, _inputs(world), uses_inner=True)


def forward_with_other_arguments(world: World) -> None:
    rows, requires_grad = world.rng.choice(((3, True), (5, True), (BATCH, False)))
    world.note(f"{rows} rows, requires_grad={requires_grad}")
    _forward(world, world.fresh(rows, WIDTH, requires_grad=requires_grad))


def forwards_until_all_slots_are_used(world: World) -> None:
    path = world.rng.choice(world.paths)
    for _ in range(world.slots + 1):
        _forward(world, world.fresh(BATCH, WIDTH, requires_grad=True), path=path)


def forward_of_two_stages(world: World) -> None:
    """As in a pipeline: the second layer gets a leaf over the result of the first, which may be dropped meanwhile."""
    first, second = world.rng.choice(((0, 1), (1, 2)) if world.is_chain else ((0, 1), (1, 2), (2, 0)))
    world.note(f"layers {first}, {second}")
    stage = world.forward((first,), _inputs(world), [])
    if stage is None:
        return
    cut = [y.detach().requires_grad_() for y in stage.outputs]
    next_stage = world.forward((second,), cut, [])
    if world.rng.random() < 0.5:
        # Where the input is copied, a later edit of it does not reach the replay, as it would eager execution.
        stage.is_read = not world.reads_in_place
        world.pending.append(stage)
    if next_stage is None:
        return
    if world.is_chain and all(call.handle is not None for call in (*stage.calls, *next_stage.calls)):
        # It is read in place, so its slot is in use as long as the second backward is due.
        next_stage.calls.insert(0, replace(stage.calls[0], is_due=False))
    world.pending.append(next_stage)


def forward_without_gradients(world: World) -> None:
    with torch.no_grad():
        path = world.rng.choice(world.paths)
        world.keep(world.forward(path, world.fresh(BATCH, WIDTH), _between(world, path)).outputs)


def forward_of_a_deepcopy(world: World) -> None:
    number, x = world.rng.randrange(3), world.fresh(BATCH, WIDTH, requires_grad=True)

    def run(side: Side) -> list[Tensor]:
        layer, leaf = copy.deepcopy(side.model).layers[number], x[world.sides.index(side)]
        output = layer(leaf)
        output.square().sum().backward()
        return [output, leaf.grad, *(p.grad for p in layer.parameters())]

    for pair in zip(*world.both(run), strict=True):
        assert_same("deepcopy", *pair)
    world.count("eager")


def _forward(world: World, pair: list[Tensor], path: Sequence[int] = (), uses_inner: bool = False) -> None:
    path = path or world.rng.choice(world.paths)
    world.note(f"layers {path}")
    holds_inner = uses_inner or world.rng.random() < 0.3
    pending = world.forward(path, pair, _between(world, path), holds_inner)
    if pending is not None:
        pending.uses_inner = uses_inner
        pending.weights = world.fresh(*pair[GRAPHED].shape) if world.rng.random() < 0.7 else []
        world.pending.append(pending)


def _inputs(world: World) -> list[Tensor]:
    """A new leaf, or one used before: [BATCH, WIDTH] each."""
    if world.leaves and world.rng.random() < 0.3:
        return world.rng.choice(world.leaves)
    pair = world.fresh(BATCH, WIDTH, requires_grad=True)
    world.leaves = [*world.leaves[-2:], pair]
    return pair


def _between(world: World, path: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
    """What is done to the results between the layers of ``path``."""
    changes = (torch.relu, _double, _edit, _edit_unseen)
    often = 0.08 if world.is_chain else 0.2
    return [world.rng.choice(changes) if world.rng.random() < often else _pass for _ in path[1:]]


def _pass(y: Tensor) -> Tensor:  # [n, WIDTH] -> the same
    return y


def _double(y: Tensor) -> Tensor:  # [n, WIDTH] -> the same
    return y * 2


def _edit(y: Tensor) -> Tensor:  # [n, WIDTH] -> the same
    return y.mul_(1.5)


def _edit_unseen(y: Tensor) -> Tensor:  # [n, WIDTH] -> the same
    y.data.mul_(1.5)
    return y


# Backwards.


def backward(world: World) -> None:
    world.backward(world.rng.choice(world.pending), lambda _, loss: loss.backward(), last=True)


def backward_with_retained_graph_and_again(world: World) -> None:
    pending = world.rng.choice(world.pending)
    done = world.backward(pending, lambda _, loss: loss.backward(retain_graph=True), last=False)
    if done is not None and world.rng.random() < 0.7:
        world.backward(pending, lambda _, loss: loss.backward(), last=True)


def backward_a_second_time(world: World) -> None:
    pending = world.rng.choice(world.pending)
    if world.backward(pending, lambda _, loss: loss.backward(), last=True) is not None:
        for side, loss in enumerate(pending.losses):
            _, refusal = refusal_of(loss.backward)
            assert "a second time" in refusal, f"the second backward of side {side}: {refusal}"


def backward_for_inputs_only(world: World) -> None:
    pending = world.rng.choice([pending for pending in world.pending if pending.inputs[EAGER].requires_grad])
    world.backward(pending, lambda side, loss: loss.backward(inputs=[pending.inputs[side]]), last=True)


def gradients_of_inputs(world: World) -> None:
    pending = world.rng.choice([pending for pending in world.pending if pending.inputs[EAGER].requires_grad])
    sources = [pair for pair in (pending.inputs, pending.inner) if pair is not None]
    results = world.backward(
        pending, lambda side, loss: torch.autograd.grad(loss, [pair[side] for pair in sources]), last=True
    )
    for pair in zip(*(results or []), strict=True):
        assert_same("gradient of an input", *pair)
        world.keep(pair)


def backward_through_hooks_on_inner_results(world: World) -> None:
    kind = world.rng.choice(("retained", "scaled", "scaled in place"))
    path = world.rng.choice([path for path in world.paths if len(path) > 1])
    world.note(f"layers {path}, {kind}")

    def hooked(y: Tensor) -> Tensor:  # [n, WIDTH] -> the same
        if kind == "retained":
            y.retain_grad()
        else:
            y.register_hook(lambda grad: grad.mul_(0.5) if kind == "scaled in place" else grad * 0.5)
        return y

    pending = world.forward(path, _inputs(world), [hooked] * (len(path) - 1), holds_inner=True)
    if pending is None:
        return
    world.pending.append(pending)
    done = world.backward(pending, lambda _, loss: loss.backward(), last=True)
    if done is not None and kind == "retained":
        grads = [y.grad for y in pending.inner]
        assert_same("retained gradient", *grads)
        world.keep(grads)


def skip_a_micro_batch(world: World) -> None:
    world.pending.remove(world.rng.choice(world.pending))
    world.count("done")


# Results.


def edit_a_result(world: World) -> None:
    pending = world.rng.choice([pending for pending in world.pending if _is_editable(pending)])
    kind = world.rng.choice(("with gradients", "without gradients", "through .data"))
    world.note(kind)

    def edit(side: Side) -> None:
        output = pending.outputs[world.sides.index(side)]
        if kind == "through .data":
            output = output.data
        with torch.set_grad_enabled(kind == "with gradients"):
            output.mul_(1.5)

    world.do(edit, may_raise=(RuntimeError,))


def keep_grads(world: World) -> None:
    number = world.some_parameter()
    world.keep(world.both(lambda side: side.parameters[number].grad))
    world.count("done")


def keep_a_view_of_a_grad(world: World) -> None:
    number = world.some_parameter()
    grads = world.both(lambda side: side.parameters[number].grad)
    world.keep([None if grad is None else grad.t()[1:] for grad in grads])
    world.count("done")


def keep_a_result(world: World) -> None:
    world.keep([output.detach() for output in world.rng.choice(world.pending).outputs])
    world.count("done")


def keep_a_view_of_a_result(world: World) -> None:
    world.keep([output.detach().t()[2:] for output in world.rng.choice(world.pending).outputs])
    world.count("done")


def keep_the_gradient_of_an_input(world: World) -> None:
    world.keep([x.grad for x in world.rng.choice(world.leaves)])
    world.count("done")


def let_go_of_all_that_is_kept(world: World) -> None:
    world.kept.clear()
    world.count("done")


def collect_garbage(world: World) -> None:
    gc.collect()
    world.count("done")


# When they are possible.


def _has_room(world: World) -> bool:
    return len(world.pending) < max(world.slots, 1)


def _has_pending(world: World) -> bool:
    return bool(world.pending)


def _has_differentiable_input(world: World) -> bool:
    return any(pending.inputs[EAGER].requires_grad for pending in world.pending)


def _has_unused_result(world: World) -> bool:
    return any(_is_editable(pending) for pending in world.pending)


def _is_editable(pending: Pending) -> bool:
    return pending.losses is None and not pending.is_read


def _has_leaves(world: World) -> bool:
    return bool(world.leaves)


CALLS = (
    Operation(forward, 20, _has_room),
    Operation(forward_whose_inner_result_is_used, 4, _has_room),
    Operation(forward_with_other_arguments, 2),
    Operation(forwards_until_all_slots_are_used, 1),
    Operation(forward_of_two_stages, 3, _has_room),
    Operation(forward_without_gradients, 2),
    Operation(forward_of_a_deepcopy, 1),
    Operation(skip_a_micro_batch, 2, _has_pending),
    Operation(backward, 16, _has_pending),
    Operation(backward_with_retained_graph_and_again, 3, _has_pending),
    Operation(backward_a_second_time, 1, _has_pending),
    Operation(backward_for_inputs_only, 1, _has_differentiable_input),
    Operation(gradients_of_inputs, 3, _has_differentiable_input),
    Operation(backward_through_hooks_on_inner_results, 2),
    Operation(edit_a_result, 2, _has_unused_result),
    Operation(keep_grads, 3),
    Operation(keep_a_view_of_a_grad, 1),
    Operation(keep_a_result, 2, _has_pending),
    Operation(keep_a_view_of_a_result, 2, _has_pending),
    Operation(keep_the_gradient_of_an_input, 2, _has_leaves),
    Operation(let_go_of_all_that_is_kept, 1),
    Operation(collect_garbage, 1),
)
