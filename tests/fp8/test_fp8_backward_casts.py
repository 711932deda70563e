"""Backwards of graphed callables that call FP8 layers themselves, as those of checkpoints do, with other casts of their
weights between the forward and the backward: bit-equal to eager execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_recipes import BOTH_KINDS, both_kinds
from tensor_lists import all_same_bits
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32


class Checkpointed(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.a, self.b = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))

    def inner(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Again(torch.autograd.Function):
    """x [n, WIDTH] -> [n, WIDTH], computed again by the backward without torch's checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module, recipe: Any) -> Tensor:
        ctx.model, ctx.recipe = model, recipe
        ctx.save_for_backward(x)
        return model.inner(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), tg.fp8_autocast(recipe=ctx.recipe):
            y = ctx.model.inner(x)
        return torch.autograd.grad(y, x, grad)[0], None, None


class Function(Checkpointed):
    recipe: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(x, self, self.recipe)


class Beside(Checkpointed):
    """With averages evaluated inside."""

    averages: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            given = functional_call(self.a, self.averages, (x,))
        return y * given


class Run:
    """Of a model, eagerly or from graphs."""

    def __init__(self, model: nn.Module, recipe: Any, device: str, is_graphed: bool, in_flight: int = 1) -> None:
        self.model, self.recipe, self.found = model, recipe, []
        self.averages = {name: 2 * p.detach() for name, p in model.a.named_parameters()}
        model.averages = {name: 3 * p.detach() for name, p in model.a.named_parameters()}
        self.x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        self.forward(1).sum().backward()
        model.zero_grad()
        if is_graphed:
            sample = torch.zeros(16, WIDTH, device=device, requires_grad=True)
            with tg.fp8_autocast(recipe=recipe):
                tg.make_graphed_callables(model, (sample,), allow_unused_input=True, max_in_flight=in_flight)

    def forward(self, factor: float) -> Tensor:
        self.x.requires_grad_()
        with tg.fp8_autocast(recipe=self.recipe):
            return self.model(self.x * factor)

    def do(self, letter: str) -> None:
        """e evaluates averages, o the model's own weights, both eagerly; w writes a weight; t trains eagerly."""
        layer = self.model.a
        given = self.averages if letter == "e" else dict(layer.named_parameters())
        if letter == "w":
            with torch.no_grad():
                layer.weight.mul_(1.5)
        elif letter == "t":
            with tg.fp8_autocast(recipe=self.recipe):
                layer(self.x * 3)
        else:
            with torch.no_grad(), tg.fp8_autocast(recipe=self.recipe):
                self.found.append(functional_call(layer, given, (self.x,)))

    def backward(self, y: Tensor) -> None:
        y.square().mean().backward()
        self.found += [
            y.detach().clone(),
            self.x.grad,
            *(p.grad for p in self.model.parameters() if p.grad is not None),
        ]
        self.found += [layer.get_extra_state() for layer in (self.model.a, self.model.b)]
        self.x.grad = None
        self.model.zero_grad()


def results_of(make: type, text: str, recipe: Any, device: str, is_graphed: bool) -> list[Tensor]:
    """Of steps with ``text`` between forward and backward, and behind it: letters of ``Run.do``."""
    torch.manual_seed(0)
    model = make(device)
    model.recipe = recipe
    run = Run(model, recipe, device, is_graphed)
    for _ in range(3):
        y = run.forward(1)
        between, behind = text.split("|")
        for letter in between:
            run.do(letter)
        run.backward(y)
        for letter in behind:
            run.do(letter)
    return run.found


TEXTS = ["|", "e|", "w|", "eo|", "ew|", "we|", "wt|", "wte|", "e|e", "o|oe", "|we"]


@both_kinds
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.one_of(4)
def test_a_checkpoint_inside_takes_the_casts_of_the_forward(device: str, recipe: Any, text: str) -> None:
    assert all_same_bits(*(results_of(Checkpointed, text, recipe, device, is_graphed) for is_graphed in (False, True)))


@pytest.mark.parametrize("make", [Function, Beside])
@pytest.mark.parametrize("text", TEXTS)
def test_what_calls_layers_in_another_way_does_so_under_current_scaling(device: str, make: type, text: str) -> None:
    recipe = BOTH_KINDS["current"]
    assert all_same_bits(*(results_of(make, text, recipe, device, is_graphed) for is_graphed in (False, True)))


def test_calls_of_other_functions_are_refused_under_delayed_scaling(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"got a call of another autograd\.Function"):
        results_of(Function, "|", BOTH_KINDS["delayed"], device, True)


@both_kinds
@pytest.mark.parametrize("text", ["", "w", "e", "we", "wte"])
def test_forwards_in_flight_have_a_cast_each(device: str, recipe: Any, text: str) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        run = Run(Checkpointed(device), recipe, device, is_graphed, in_flight=2)
        for _ in range(3):
            first = run.forward(1)
            for letter in text:
                run.do(letter)
            second = run.forward(2)
            for letter in text:
                run.do(letter)
            run.backward(first)
            run.backward(second)
        results.append(run.found)
    assert all_same_bits(*results)


class Pair(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH], by two callables with a layer in common."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.lower, self.upper = Checkpointed(device), Checkpointed(device)
        self.a, self.b = self.lower.a, self.upper.b
        self.upper.a = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


@both_kinds
def test_callables_of_a_chain_that_share_a_layer_have_a_cast_each(device: str, recipe: Any) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = Pair(device)
        run = Run(model, recipe, device, False)
        if is_graphed:
            samples = tuple((torch.zeros(16, WIDTH, device=device, requires_grad=True),) for _ in range(2))
            with tg.fp8_autocast(recipe=recipe):
                tg.make_graphed_callables((model.lower, model.upper), samples, chain=True)
        for _ in range(4):
            y = run.forward(1)
            run.do("e")
            run.backward(y)
        results.append(run.found)
    assert all_same_bits(*results)


def test_a_layer_that_goes_on_by_another_recipe_before_the_backward_is_refused(device: str) -> None:
    torch.manual_seed(0)
    run = Run(Checkpointed(device), BOTH_KINDS["delayed"], device, True)
    y = run.forward(1)
    run.do("w")
    run.recipe = BOTH_KINDS["current"]
    run.do("t")
    with pytest.raises(
        RuntimeError, match="expected a layer that goes by the recipe of its forward until the backward"
    ):
        run.backward(y)
