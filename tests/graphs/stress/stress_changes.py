"""Operations of the stress test that change gradients, parameters, modes, hooks and captures: listed in ``CHANGES``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from stress import World
from stress_model import EAGER, Hook, Operation, Side
from torch import Tensor

# Gradients and steps.


def zero_grad_to_none(world: World) -> None:
    world.do(lambda side: side.model.zero_grad(set_to_none=True))


def zero_grad_in_place(world: World) -> None:
    world.do(lambda side: side.optimizer.zero_grad(set_to_none=False))


def some_grads_to_none(world: World) -> None:
    chosen = world.rng.sample(range(len(world.sides[EAGER].parameters)), 4)

    def drop(side: Side) -> None:
        for number in chosen:
            side.parameters[number].grad = None

    world.do(drop)


def grad_replaced(world: World) -> None:
    number = world.some_parameter()
    kind = world.rng.choice(("same", "same", "transposed", "strided", "offset"))
    world.note(f"parameter {number}, {kind}")
    shape = world.sides[EAGER].parameters[number].shape
    values = world.fresh(*shape)

    def replace(side: Side) -> None:
        grad = values[world.sides.index(side)]
        if kind == "transposed":
            grad = grad.t().contiguous().t()
        elif kind == "strided":
            grad = grad.repeat_interleave(2, dim=-1)[..., ::2]
        elif kind == "offset":
            grad = torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(shape)
        side.parameters[number].grad = grad

    world.do(replace)


def grad_replaced_by_another_dtype(world: World) -> None:
    number = world.some_parameter()
    kind = world.rng.choice(("set .grad.data", "allow any dtype"))
    world.note(f"parameter {number}, {kind}")
    values = world.fresh(*world.sides[EAGER].parameters[number].shape)

    def replace(side: Side) -> None:
        parameter, grad = side.parameters[number], values[world.sides.index(side)]
        if kind == "allow any dtype":
            parameter.grad_dtype = None
            parameter.grad = grad.bfloat16()
        else:
            parameter.grad = grad.clone()
            parameter.grad.data = grad.double()

    world.do(replace)


def grads_scaled_in_place(world: World) -> None:
    def scale(side: Side) -> None:
        for parameter in side.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    world.do(scale)


def optimizer_step(world: World) -> None:
    def step(side: Side) -> None:
        torch.nn.utils.clip_grad_norm_(side.parameters, 1.0)
        side.optimizer.step()

    world.do(step, may_raise=(RuntimeError,))


# Modes.


def evaluation_mode(world: World) -> None:
    part = world.rng.choice(("model", "layer", "norm", "drop"))
    number = world.rng.randrange(3)
    world.note(f"{part} {number}")

    def evaluate(side: Side) -> None:
        layer = side.model.layers[number]
        {"model": side.model, "layer": layer, "norm": layer.norm, "drop": layer.drop}[part].eval()

    world.do(evaluate)
    world.repair_later(lambda: world.both(lambda side: side.model.train()))


# Parameters.


def load_state(world: World) -> None:
    model = world.sides[EAGER].model
    state = {name: 0.4 * world.fresh(*tensor.shape)[0] for name, tensor in model.state_dict().items()}
    # A variance is not negative; tied weights have one value.
    state = {name: value.abs() + 0.5 if name.endswith("running_var") else value for name, value in state.items()}
    world.do(lambda side: side.model.load_state_dict(state))


def move_a_parameter(world: World) -> None:
    number = world.some_parameter()
    world.note(f"parameter {number}")
    before = world.both(lambda side: side.parameters[number].data)
    captures = world.captures

    def move(side: Side) -> None:
        side.parameters[number].data = side.parameters[number].data.clone()

    def move_back(side: Side) -> None:
        memory = before[world.sides.index(side)]
        side.parameters[number].data = memory.copy_(side.parameters[number].data)

    world.do(move)
    world.repair_later(lambda: world.captures == captures and world.both(move_back))


def change_values_of_a_parameter(world: World) -> None:
    number, by_data = world.some_parameter(), world.rng.random() < 0.5
    world.note(f"parameter {number}, {'through .data' if by_data else 'without gradients'}")
    values = world.fresh(*world.sides[EAGER].parameters[number].shape)

    def change(side: Side) -> None:
        parameter = side.parameters[number]
        with torch.no_grad():
            (parameter.data if by_data else parameter).copy_(0.4 * values[world.sides.index(side)])

    world.do(change)


def flip_requires_grad(world: World) -> None:
    number = world.some_parameter()
    world.note(f"parameter {number}")

    def flip(side: Side) -> None:
        parameter = side.parameters[number]
        parameter.requires_grad_(not parameter.requires_grad)

    world.do(flip)
    world.repair_later(lambda: world.both(flip))


# Hooks.


def hook_on_a_parameter(world: World) -> None:
    kind = world.rng.choice(("tensor", "scaling tensor", "post-accumulate", "releasing", "accumulator"))
    number = world.rng.choice([i for i, p in enumerate(world.sides[EAGER].parameters) if p.requires_grad])
    world.note(f"{kind} hook on parameter {number}")

    def register(side: Side) -> Hook:
        parameter, hook = side.parameters[number], Hook()
        log = hook.log
        if kind == "tensor":
            hook.handle = parameter.register_hook(lambda grad: log.append(grad.clone()))
        elif kind == "scaling tensor":
            hook.handle = parameter.register_hook(lambda grad: grad * 0.5)
        elif kind == "post-accumulate":
            hook.handle = parameter.register_post_accumulate_grad_hook(lambda p: log.append(_copied(p.grad)))
        elif kind == "releasing":
            hook.handle = parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        else:
            # The node lives only as long as it is referred to.
            hook.anchor = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            hook.handle = hook.anchor.register_hook(lambda *_: log.append(_copied(parameter.grad)))
        return hook

    _add_hooks(world, register)


def hook_on_a_layer(world: World) -> None:
    kind = world.rng.choice(("forward", "forward, scaling", "forward pre", "backward", "backward pre"))
    number = world.rng.randrange(3)
    world.note(f"{kind} hook on layer {number}")

    def register(side: Side) -> Hook:
        layer, hook = side.model.layers[number], Hook()
        log = hook.log
        if kind == "forward":
            hook.handle = layer.register_forward_hook(lambda module, args, y: log.append(y.detach().clone()))
        elif kind == "forward, scaling":
            hook.handle = layer.register_forward_hook(lambda module, args, y: y * 0.5)
        elif kind == "forward pre":
            hook.handle = layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        elif kind == "backward":
            hook.handle = layer.register_full_backward_hook(lambda module, grads, _: log.append(grads[0]))
        else:
            hook.handle = layer.register_full_backward_pre_hook(lambda module, grads: log.append(grads[0]))
        return hook

    _add_hooks(world, register)
    hooks = [side.hooks[-1] for side in world.sides]
    world.repair_later(lambda: [hook.handle.remove() for hook in hooks])


def hook_on_a_submodule(world: World) -> None:
    number = world.rng.randrange(3)
    world.note(f"layer {number}")
    hooks = world.both(
        lambda side: side.model.layers[number].up.register_forward_hook(lambda module, args, output: output * 0.5)
    )
    world.count("done")
    world.repair_later(lambda: [hook.remove() for hook in hooks])


def remove_a_hook(world: World) -> None:
    number = world.rng.randrange(len(world.sides[EAGER].hooks))
    world.do(lambda side: side.hooks.pop(number).handle.remove())


def _add_hooks(world: World, register: Callable[[Side], Hook]) -> None:
    """At most four at a time."""

    def add(side: Side) -> None:
        side.hooks.append(register(side))
        if len(side.hooks) > 4:
            side.hooks.pop(0).handle.remove()

    world.do(add)


# Captures.


def reset_and_capture_again(world: World) -> None:
    together = world.is_chain or world.rng.random() < 0.7
    slots = world.rng.randint(1, 3)
    world.note(f"{slots} slots, {'together' if together else 'one by one'}")
    world.capture(slots, together)


def _copied(grad: Tensor | None) -> Tensor | None:  # [...]; another hook may have taken it away
    return None if grad is None else grad.clone()


def _has_hooks(world: World) -> bool:
    return bool(world.sides[EAGER].hooks)


CHANGES = (
    Operation(zero_grad_to_none, 3),
    Operation(zero_grad_in_place, 2),
    Operation(some_grads_to_none, 3),
    Operation(grad_replaced, 3),
    Operation(grad_replaced_by_another_dtype, 1),
    Operation(grads_scaled_in_place, 1),
    Operation(optimizer_step, 4),
    Operation(evaluation_mode, 2),
    Operation(load_state, 1),
    Operation(move_a_parameter, 1),
    Operation(change_values_of_a_parameter, 2),
    Operation(flip_requires_grad, 1),
    Operation(hook_on_a_parameter, 3),
    Operation(hook_on_a_layer, 2),
    Operation(hook_on_a_submodule, 1),
    Operation(remove_a_hook, 3, _has_hooks),
    Operation(reset_and_capture_again, 1),
)
