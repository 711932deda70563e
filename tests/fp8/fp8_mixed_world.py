"""What random FP8 programs run in (fp8_mixed_programs.py): their models, what each event does, and what was seen."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from fp8_mixed_models import RECIPES, WIDTH, Spec, Trained, converted
from torch import Tensor, nn

import te_graph as tg

_HISTORY = 8  # the column of a state where the history begins


@dataclass(frozen=True)
class Event:
    """One thing that a program does.

    Attributes:
        kind, how: of ``EVENTS``.
        model: the number of that which it does it with.
        rows, scale: of inputs.
        number: of a parameter, a layer or a recipe.
        seed: of inputs.
    """

    kind: str
    how: str
    model: int
    rows: int
    scale: float
    number: int
    seed: int


class World:
    """Runs a program eagerly or graphed. Both enter the same regions, since leaving one updates scales."""

    def __init__(self, specs: Sequence[Spec], seed: int, is_whole: bool, is_graphed: bool, device: str) -> None:
        self.models = [Trained(spec, seed + number, is_whole, device) for number, spec in enumerate(specs)]
        self.is_whole, self.is_graphed, self.device = is_whole, is_graphed, device
        self.pending: list[tuple[int, Tensor]] = []  # numbers of models, and losses []
        self.others: list[nn.Module] = []
        self.values, self.place = torch.Generator(), ""
        self.seen: list[tuple[str, Tensor]] = []

    def run(self, events: Sequence[Event]) -> list[tuple[str, Tensor]]:
        """What was seen after each event, and the states at the end."""
        with self.models[0].region_of(0) if self.is_whole else contextlib.nullcontext():
            for number, event in enumerate(events):
                self.place = f"event {number}, {event.kind} {event.how}"
                self.values.manual_seed(event.seed)
                is_step = event.kind == "train" and "steps" in self.models[event.model].spec.style
                if event.kind in WRITES or is_step:
                    self._finish(event.model)
                EVENTS[event.kind][0](self, event)
                self._note_parameters()
            self.place = "the end"
            self._finish()
        self._note_parameters()
        for number, one in enumerate(self.models):
            # Amaxes that no update has taken up yet may be taken up sooner on one side: docs/limits.md.
            for module in one.model.modules():
                if getattr(module, "fp8", None) is not None:
                    module.fp8.update_if_due()
            for name, state in tg.fp8_state_dict(one.model).items():
                if state[:, _HISTORY:].any():  # to one that is empty a capture adds its length
                    self._note(f"state of {name} of {number}", state)
        return self.seen

    def train(self, event: Event) -> None:
        one, x = self.models[event.model], self._input(event)
        if one.spec.mode == "function":
            losses, evaluations = one.call_function(x)
            for loss in losses:
                self._note("loss", loss)
            for result in evaluations:
                self._note_evaluation(result)
        else:
            self._backward(one.loss(x))

    def step(self, event: Event) -> None:
        optimizer = self.models[event.model].optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=event.how == "to none")

    def evaluate(self, event: Event) -> None:
        """In the region of the training, one of another recipe, or one that is off and may calibrate."""
        one, x = self.models[event.model], self._input(event)
        region = one.region()
        if "other" in event.how:
            region = one.region_of(1)
        elif "off" in event.how:
            recipe = RECIPES[one.recipe]
            region = tg.fp8_autocast(enabled=False, calibrating="calibrating" in event.how, recipe=recipe)
        one.model.train("eval" not in event.how)
        with torch.inference_mode("inference" in event.how), torch.no_grad(), region, one.autocast():
            result = one.model(x)
        one.model.train()
        self._note_evaluation(result)

    def nested(self, event: Event) -> None:
        """Train in a region inside one of another recipe."""
        one = self.models[event.model]
        with one.region_of(1), one.region_of(0):
            loss = one.loss(self._input(event))
        self._backward(loss)

    def interrupt(self, event: Event) -> None:
        """Leave a region by an exception, before or after a backward."""
        one = self.models[event.model]
        with contextlib.suppress(KeyError), one.region():
            loss = one.loss(self._input(event))
            if event.how == "after backward":
                loss.backward()
            raise KeyError

    def forward(self, event: Event) -> None:
        """Leave the backward for later: other events come in between."""
        self.pending.append((event.model, self.models[event.model].loss(self._input(event))))

    def backward(self, event: Event) -> None:
        """Of all forwards that are pending, in either order."""
        if event.how == "newest first":
            self.pending.reverse()
        self._finish()

    def retain(self, event: Event) -> None:
        """Run a backward twice."""
        loss = self.models[event.model].loss(self._input(event))
        loss.backward(retain_graph=True)
        self._backward(loss)

    def grad(self, event: Event) -> None:
        """Ask for gradients of parameters, and let a backward follow or not."""
        one = self.models[event.model]
        loss = one.loss(self._input(event))
        parameters = [parameter for parameter in one.model.parameters() if parameter.requires_grad]
        is_kept = event.how == "and backward"
        for grad in torch.autograd.grad(loss, parameters, retain_graph=is_kept):
            self._note("gradient", grad)
        if is_kept:
            self._backward(loss)

    def edit(self, event: Event) -> None:
        """Write a parameter in one of the ways that there are, or give it other memory."""
        one = self.models[event.model]
        weight = one.model[event.number % len(one.model)].up.weight
        if event.how == "transpose":
            weight.data = weight.data.t().contiguous()
        elif event.how == "replace":
            weight.data = (weight.data * 0.75).clone()
        elif event.how == "data":
            weight.data.mul_(1.5)
        else:
            with torch.no_grad():
                one.parameter(event.number).mul_(1.25)

    def freeze(self, event: Event) -> None:
        """A parameter, or thaw it."""
        parameter = self.models[event.model].parameter(event.number)
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.grad = None

    def hook(self, event: Event) -> None:
        """Put a hook on a parameter, or take away the one that is there."""
        one = self.models[event.model]
        parameter = one.parameter(event.number)
        if one.hook is not None:
            one.hook.remove()
            one.hook = None
        elif parameter.requires_grad and event.how == "on gradients":
            one.hook = parameter.register_hook(_half)
        elif parameter.requires_grad:
            one.hook = parameter.register_post_accumulate_grad_hook(_halve_grad)

    def save(self, event: Event) -> None:
        one = self.models[event.model]
        state = (one.model.state_dict(), one.optimizer.state_dict(), tg.fp8_state_dict(one.model))
        one.saved = copy.deepcopy(state)

    def load(self, event: Event) -> None:
        """What was saved last, if anything was: weights and scales, and the optimizer's state or not."""
        one = self.models[event.model]
        if one.saved is None:
            return
        weights, optimizer, scales = copy.deepcopy(one.saved)
        one.model.load_state_dict(weights)
        if event.how == "all":
            one.optimizer.load_state_dict(optimizer)
        tg.load_fp8_state_dict(one.model, scales)

    def other(self, event: Event) -> None:
        """Train another model, which goes or stays, and is captured before or not."""
        model = converted(("", "conv")[: 1 + event.number % 2], event.seed, self.device, torch.float32)
        optimizer, recipe = torch.optim.SGD(model.parameters(), lr=0.1), RECIPES[event.number % len(RECIPES)]
        x = torch.randn(16, WIDTH, generator=self.values).to(self.device)
        if "captured" in event.how:
            with tg.fp8_autocast(recipe=recipe):
                if self.is_graphed:
                    tg.make_graphed_callables(model, (torch.zeros_like(x),))
        for _ in range(2):
            with tg.fp8_autocast(recipe=recipe):
                loss = model(x).square().mean()
            self._backward(loss)
            optimizer.step()
        if "kept" in event.how:
            self.others.append(model)
        del model, optimizer, loss
        gc.collect()

    def fail(self, event: Event) -> None:
        """A capture that is refused leaves everything as it was before."""
        one, x = self.models[event.model], self._input(event)

        def refused(x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
            y = one.model(x)
            if event.how == "in backward":
                y.float().sum().backward()
            return y * y.float().sum().item()

        with contextlib.suppress(_Refusal), one.region(), one.autocast():
            if self.is_graphed:
                try:
                    tg.make_graphed_callables(refused, (x,))
                except RuntimeError as error:
                    raise _Refusal from error
                raise AssertionError("expected that a capture with a host read is refused")
            raise _Refusal

    def capture(self, event: Event) -> None:
        """Once, or once more after a reset."""
        one = self.models[event.model]
        if not one.is_captured:
            one.is_captured = True
            one.capture(self.is_graphed)

    def reset(self, event: Event) -> None:
        """Free what was captured, until the next capture."""
        self.models[event.model].reset()

    def switch(self, event: Event) -> None:
        """Go on with another recipe, but in a function that has a region of its own. A capture wants layers that have
        trained by another one to have been called in its region before."""
        one = self.models[event.model]
        one.recipe = event.number % len(RECIPES)
        self._backward(one.loss(self._input(event)))

    def copy(self, event: Event) -> None:
        """Evaluate with a copy."""
        one = self.models[event.model]
        copied = copy.deepcopy(one.model)
        with torch.no_grad(), one.region(), one.autocast():
            result = copied(self._input(event))
        self._note_evaluation(result)
        if event.how == "kept":
            self.others.append(copied)

    def _input(self, event: Event) -> Tensor:
        """[event.rows, WIDTH], another one at each call."""
        x = torch.randn(event.rows, WIDTH, generator=self.values) * event.scale
        return x.to(self.device, self.models[event.model].spec.dtype)

    def _backward(self, loss: Tensor) -> None:  # []
        loss.backward()
        self._note("loss", loss)

    def _finish(self, number: int | None = None) -> None:
        """Run the backwards that are pending, of one model or of all: before its weights are written at the latest."""
        due = [one for one in self.pending if number in (None, one[0])]
        self.pending = [one for one in self.pending if number not in (None, one[0])]
        for _, loss in due:
            self._backward(loss)

    def _note(self, name: str, value: Tensor) -> None:  # [...]
        self.seen.append((f"{self.place}: {name}", value.detach().clone()))

    def _note_evaluation(self, result: Tensor) -> None:  # [...]
        """In a region that goes on evaluations see scales before or after the next update: docs/limits.md."""
        if not self.is_whole:
            self._note("evaluation", result)

    def _note_parameters(self) -> None:
        for number, one in enumerate(self.models):
            for name, parameter in one.model.named_parameters():
                self._note(f"{name} of {number}", parameter)
                if parameter.grad is not None:
                    self._note(f"gradient of {name} of {number}", parameter.grad)


class _Refusal(Exception):
    """Ends a region in which a capture was refused, or would have been."""


def _half(grad: Tensor) -> Tensor:  # [...] -> [...]
    return grad * 0.5


def _halve_grad(parameter: Tensor) -> None:  # [...]
    parameter.grad.mul_(0.5)


# What each kind of event does, and the ways in which it may.
EVENTS: dict[str, tuple[Callable[[World, Event], None], tuple[str, ...]]] = {
    "train": (World.train, ("",)),
    "step": (World.step, ("to none", "to zero")),
    "evaluate": (
        World.evaluate,
        ("same", "other", "off", "same eval", "other eval", "same inference", "off calibrating"),
    ),
    "nested": (World.nested, ("",)),
    "interrupt": (World.interrupt, ("before backward", "after backward")),
    "forward": (World.forward, ("",)),
    "backward": (World.backward, ("oldest first", "newest first")),
    "retain": (World.retain, ("",)),
    "grad": (World.grad, ("alone", "and backward")),
    "edit": (World.edit, ("transpose", "replace", "data", "in place", "in place")),
    "freeze": (World.freeze, ("",)),
    "hook": (World.hook, ("on gradients", "after accumulation")),
    "save": (World.save, ("",)),
    "load": (World.load, ("all", "without optimizer")),
    "other": (World.other, ("dropped", "kept", "captured, dropped", "captured, kept")),
    "fail": (World.fail, ("in forward", "in backward")),
    "capture": (World.capture, ("",)),
    "reset": (World.reset, ("",)),
    "switch": (World.switch, ("",)),
    "copy": (World.copy, ("dropped", "kept")),
}
WRITES = ("step", "edit", "freeze", "hook", "load")  # before which a model runs its pending backwards
