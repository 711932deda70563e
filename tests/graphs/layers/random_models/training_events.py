"""What happens between two steps of a training: each event is given the training, and a number of its own.

Not among them: a layer that one forward calls several times, and two forwards before one backward. docs/limits.md say
that gradients of calls that one backward runs through are then added in another order.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .training_layers import Lora, Mlp

if TYPE_CHECKING:
    from .training_programs import Training

MASKS = ("", "bool", "expanded", "strided")
EVENTS: dict[str, Callable[[Training, int], None]] = {}


def _event(function: Callable[[Training, int], None]) -> Callable[[Training, int], None]:
    EVENTS[function.__name__] = function
    return function


def _layer(t: Training, number: int) -> Mlp:
    layers = t.model.each()
    return layers[number % len(layers)]


def _trained(t: Training, number: int) -> nn.Parameter | None:
    """One of the parameters of a layer that require a gradient."""
    parameters = [p for p in _layer(t, number).parameters() if p.requires_grad]
    return parameters[number % len(parameters)] if parameters else None


# Forwards in other modes.


def _evaluate(t: Training, mode: Callable[[], contextlib.AbstractContextManager]) -> None:
    t.model.eval()
    with mode():
        t.note("evaluation", t.out(t.model)["logits"])
    t.train_mode()


@_event
def evaluate(t: Training, number: int) -> None:
    _evaluate(t, torch.no_grad)


@_event
def evaluate_in_inference_mode(t: Training, number: int) -> None:
    _evaluate(t, torch.inference_mode)


@_event
def forward_without_grad(t: Training, number: int) -> None:
    with torch.no_grad():
        t.note("without grad", t.out(t.model)["logits"])


@_event
def fail_in_forward(t: Training, number: int) -> None:
    with contextlib.suppress(RuntimeError):
        t.out(t.model, {**t.batch(), "mask": torch.zeros(2, 99, 3)})


@_event
def evaluate_layer(t: Training, number: int) -> None:
    layer = _layer(t, number)
    layer.train(not layer.training)


# Weights, gradients and optimizers.


@_event
def load(t: Training, number: int) -> None:
    state = t.model.state_dict()
    if t.saved.keys() == state.keys():
        t.model.load_state_dict(t.saved)
    else:
        t.saved = {name: value.clone() for name, value in state.items()}


@_event
def load_by_assignment(t: Training, number: int) -> None:
    shared = t.program.model.is_tied or t.program.model.uses_first_again or t.program.layer.shares_down
    if not shared:  # of which an assignment makes several
        state = {name: value.clone() for name, value in t.model.state_dict().items()}
        t.model.load_state_dict(state, assign=True)
        t.renew_optimizer()


@_event
def perturb(t: Training, number: int) -> None:
    with torch.no_grad():
        for p in _layer(t, number).parameters():
            p.add_(torch.randn(p.shape, generator=t.generator), alpha=0.01)


@_event
def set_data(t: Training, number: int) -> None:
    for p in _layer(t, number).parameters():
        p.data = p.data.clone() * 1.01 if number % 2 else p.data.mul(1.01)


@_event
def replace_parameter(t: Training, number: int) -> None:
    up = _layer(t, number).up
    if not isinstance(up, Lora):
        up.weight = nn.Parameter(up.weight.detach() * 0.9)
        t.renew_optimizer()


@_event
def replace_buffer(t: Training, number: int) -> None:
    layer = _layer(t, number)
    if layer.options.average:
        layer.average = layer.average.clone() + 0.1


@_event
def freeze(t: Training, number: int) -> None:
    _layer(t, number).requires_grad_(False)


@_event
def unfreeze(t: Training, number: int) -> None:
    known = {id(p) for group in t.optimizer.param_groups for p in group["params"]}
    new = [p for p in _layer(t, number).parameters() if id(p) not in known]
    _layer(t, number).requires_grad_(True)
    if new:
        t.optimizer.add_param_group({"params": new})


@_event
def freeze_embedding(t: Training, number: int) -> None:
    t.model.embed.requires_grad_(number % 2 == 0)


@_event
def drop_gradients(t: Training, number: int) -> None:
    _layer(t, number).zero_grad(set_to_none=number % 2 == 0)


@_event
def set_gradient(t: Training, number: int) -> None:
    p = _trained(t, number)
    if p is not None:
        p.grad = torch.randn(p.shape, generator=t.generator).to(p.dtype)


@_event
def halve_rate(t: Training, number: int) -> None:
    t.optimizer.param_groups[0]["lr"] *= 0.5


@_event
def add_group(t: Training, number: int) -> None:
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.1})


# Copies of the model, and graphs.


@_event
def copy_model(t: Training, number: int) -> None:
    copied = copy.deepcopy(t.model)
    loss = t.out(copied)["loss"]
    loss.backward()
    t.note("copy", loss, t.gradients(copied))


@_event
def pickle_model(t: Training, number: int) -> None:
    file = io.BytesIO()
    torch.save(t.model, file)
    file.seek(0)
    t.note("pickled", t.out(torch.load(file, weights_only=False))["loss"])


@_event
def go_on_with_copy(t: Training, number: int) -> None:
    t.model = copy.deepcopy(t.model)
    t.renew_optimizer()
    if number % 2 and t.number >= t.loop.captured_at:
        t.capture()


@_event
def reset(t: Training, number: int) -> None:
    t.reset()


@_event
def capture_again(t: Training, number: int) -> None:
    t.reset()
    if t.number >= t.loop.captured_at:
        t.capture()


# What batches and the model are like.


@_event
def set_length(t: Training, number: int) -> None:
    t.length = 3 + number % 6


@_event
def set_rows(t: Training, number: int) -> None:
    t.rows = 1 + number % 4


@_event
def set_mask(t: Training, number: int) -> None:
    t.mask = MASKS[number % len(MASKS)]


@_event
def set_extra(t: Training, number: int) -> None:
    t.extra = (None, 1, torch.ones(2), "x")[number % 4]


@_event
def set_dropout(t: Training, number: int) -> None:
    _layer(t, number).drop.p = 0.3


@_event
def set_activation(t: Training, number: int) -> None:
    _layer(t, number).has_gelu = not _layer(t, number).has_gelu


@_event
def set_factor(t: Training, number: int) -> None:
    _layer(t, number).factor *= 0.9


@_event
def toggle_adapters(t: Training, number: int) -> None:
    for module in _layer(t, number).modules():
        if isinstance(module, Lora):
            module.is_enabled = not module.is_enabled
            module.scaling["default"] *= 0.5


@_event
def toggle_last_layer(t: Training, number: int) -> None:
    t.model.drops_last = not t.model.drops_last


@_event
def set_checkpoint(t: Training, number: int) -> None:
    t.model.checkpointed = (None, 1, 2)[number % 3]


@_event
def toggle_autocast(t: Training, number: int) -> None:
    t.has_autocast = not t.has_autocast


@_event
def scale_results(t: Training, number: int) -> None:
    t.model.options = replace(t.model.options, between="scaled")


# Hooks; functions of a module, for models with them are pickled.


def _half(gradient: Tensor) -> Tensor:  # [...]
    return gradient * 0.5


def _scale_argument(module: nn.Module, args: tuple) -> tuple | None:
    return (args[0] * 1.1, *args[1:]) if args else None


def _scale_result(module: nn.Module, args: tuple, result: Any) -> Any:
    return result * 1.1 if isinstance(result, Tensor) else None


def _scale_gradients(module: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
    return tuple(None if gradient is None else gradient * 0.9 for gradient in inputs)


@_event
def hook_parameter(t: Training, number: int) -> None:
    p = _trained(t, number)
    if p is not None:
        p.register_hook(_half)


@_event
def hook_argument(t: Training, number: int) -> None:
    _layer(t, number).register_forward_pre_hook(_scale_argument)


@_event
def hook_result(t: Training, number: int) -> None:
    _layer(t, number).register_forward_hook(_scale_result)


@_event
def hook_backward(t: Training, number: int) -> None:
    t.model.norm.register_full_backward_hook(_scale_gradients)


# What the step does that comes next: ``Training`` reads the name.


def _habit(name: str) -> Callable[[Training, int], None]:
    return lambda t, number: t.habits.add(name)


HABITS = ("retain_graph", "two_forwards", "autograd_grad", "backward_to_inputs", "scale_loss")
EVENTS.update({name: _habit(name) for name in HABITS})
