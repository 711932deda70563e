"""Activation checkpointing around FP8 layers that have another weight at each call, or had one since their first call.

The reference is the same training without checkpoints, or without what came in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_recipes import BOTH_KINDS, both_kinds
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import te_graph as tg

pytestmark = [
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]
WIDTH = 32
modes = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
Move = Callable[[nn.Module, Tensor], None]


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


COMPUTED = {"pruned": pruned, "weight norm": weight_norm, "spectral norm": spectral_norm}


def a_model(device: str, computed: Callable | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(tg.Linear(WIDTH, WIDTH), nn.Tanh(), tg.Linear(WIDTH, WIDTH)).to(device)
    for layer in (model[0], model[2]) if computed is not None else ():
        computed(layer)
    return model


def inputs(device: str, count: int) -> list[Tensor]:
    """[8, WIDTH] each, which require gradients."""
    values = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=values).to(device).requires_grad_() for _ in range(count)]


def states_of(model: nn.Module) -> list[Tensor]:
    return [layer.get_extra_state() for layer in model.modules() if isinstance(layer, tg.Linear)]


@both_kinds
@modes
@pytest.mark.parametrize("computed", COMPUTED.values(), ids=COMPUTED)
def test_weights_that_hooks_compute_are_cast_again_as_they_were(
    device: str, recipe: Any, use_reentrant: bool, computed: Callable
) -> None:
    results = []
    for is_checkpointed in (False, True):
        model, found = a_model(device, computed), []
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        if computed is spectral_norm:
            model.eval()  # in training each call moves its estimate on
        for x in inputs(device, 5):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=use_reentrant) if is_checkpointed else model(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        results.append([*found, *states_of(model)])
    assert all(map(same_bits, *results))


def evaluate_teacher(model: nn.Module, x: Tensor) -> None:
    """By weights of its own, for x [8, WIDTH]."""
    others = {name: 7 * parameter.detach() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, others, (x,))


def evaluate_average(model: nn.Module, x: Tensor) -> None:
    """By weights that take the place of the model's for the time being, for x [8, WIDTH]."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.mul_(7)
    model(x)
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.copy_(values)


def evaluate_teacher_and_model(model: nn.Module, x: Tensor) -> None:
    """The model then has its own weights cast, by the scales of then."""
    evaluate_teacher(model, x)
    model(x)


def evaluate_model_and_teacher(model: nn.Module, x: Tensor) -> None:
    model(x)
    evaluate_teacher(model, x)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Of x [8, WIDTH]."""
    return model(model(x))


MOVES = (evaluate_teacher, evaluate_average, evaluate_teacher_and_model, evaluate_model_and_teacher)


@both_kinds
@modes
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("is_same_region", [True, False], ids=["same region", "another region"])
@pytest.mark.parametrize("call", [nn.Module.__call__, twice], ids=["once", "twice"])
@pytest.mark.one_of(5)
def test_a_weight_is_cast_again_as_it_was_where_the_layer_had_another_one_since(
    device: str, recipe: Any, use_reentrant: bool, move: Move, is_same_region: bool, call: Callable
) -> None:
    results = []
    for has_moved in (False, True):
        model, found = a_model(device), []

        def come_between(x: Tensor, model: nn.Module = model, has_moved: bool = has_moved) -> None:
            with torch.no_grad():
                if has_moved:
                    move(model, x)

        for x in inputs(device, 4):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(call, model, x, use_reentrant=use_reentrant)
                if is_same_region:
                    come_between(x)
            if not is_same_region:
                with tg.fp8_autocast(recipe=recipe):
                    come_between(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
            states = states_of(model)
            for state in states if move is evaluate_average else ():
                state[1, 3:5] = 0  # the scale of the weight's cast: it counts as written, and will be recorded again
            found += states
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.7)  # so that its scale changes
            model.zero_grad()
        results.append(found)
    assert all(map(same_bits, *results))


@modes
def test_a_capture_beside_it_leaves_the_scale_of_the_first_cast(device: str, use_reentrant: bool) -> None:
    """It casts the weight itself, and puts that back."""
    recipe, results = BOTH_KINDS["delayed"], []
    for is_captured in (False, True):
        model, found = a_model(device), []
        for x in inputs(device, 3):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=use_reentrant)
            if is_captured:
                with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                    tg.make_graphed_callables(lambda x, model=model: model(x), (x.detach(),))
            y.square().mean().backward()
            found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters()), *states_of(model)]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.7)
            model.zero_grad()
        results.append(found)
    assert all(map(same_bits, *results))


@both_kinds
@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_graph_casts_the_weight_again_or_names_what_came_between(device: str, recipe: Any, has_teacher: bool) -> None:
    """Under delayed scaling, where the cast would count as recorded."""
    results, xs = [], [x.detach() for x in inputs(device, 5)]
    is_refused = has_teacher and recipe is not BOTH_KINDS["current"]
    for is_graphed in (False, True):
        model, x, found = a_model(device), torch.zeros_like(xs[0]), []
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def step(x: Tensor, model: nn.Module = model) -> Tensor:
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=False)
                if has_teacher:
                    with torch.no_grad():
                        evaluate_teacher(model, x)
            loss = y.square().mean()
            loss.backward()
            return loss.detach()

        called = tg.graphed(step, on_mismatch="raise") if is_graphed else step
        for number, given in enumerate(xs):
            x.copy_(given)
            if is_graphed and is_refused and number:
                with pytest.raises(tg.CaptureError, match="another weight in between"):
                    called(x)
                return
            found.append(called(x).clone())
            found += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        results.append([*found, *states_of(model)])
        assert not is_graphed or called.info()["forward_replays"] == len(xs) - 1
    assert all(map(same_bits, *results))


def averaged(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() * 0.3 for name, p in layer.named_parameters()}


@pytest.mark.parametrize("between", ["nothing", "evaluation", "replay", "capture", "refused capture"])
def test_what_evaluates_while_a_checkpoint_waits_leaves_its_gradients(device: str, between: str) -> None:
    """With other weights, and with its own, which are cast anew; a plain micro-batch comes in between, too."""

    def gradients(between: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = tg.Linear(32, 32, device=device), torch.randn(8, 32, device=device)
        averages, recipe = averaged(layer), tg.DelayedScaling(amax_history_len=3)

        def evaluate(x: Tensor) -> Tensor:  # [8, 32] -> []
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                result = torch.func.functional_call(layer, averages, (x,)).sum() + layer(x).sum()
            return result * result.item() if between == "refused capture" else result

        with tg.fp8_autocast(recipe=recipe):
            layer(x).square().mean().backward()
        if between == "replay":
            with torch.no_grad():
                evaluate = tg.make_graphed_callables(evaluate, (x.clone(),), show_progress=False)
        layer.zero_grad()
        with torch.no_grad():
            layer.weight.mul_(1.7)
        leaf = x.clone().requires_grad_()
        with tg.fp8_autocast(recipe=recipe):
            waiting = checkpoint(layer, leaf, use_reentrant=False).square().mean()
        with torch.no_grad():
            if between in ("evaluation", "replay"):
                evaluate(x)
            elif between == "capture":
                tg.make_graphed_callables(evaluate, (x.clone(),), show_progress=False)
            elif between == "refused capture":
                with pytest.raises(tg.CaptureError):
                    tg.make_graphed_callables(evaluate, (x.clone(),), show_progress=False)
        if between != "replay":  # behind which the weight is cast once more
            with tg.fp8_autocast(recipe=recipe):
                other = layer(x).square().mean()
        waiting.backward()
        if between != "replay":
            other.backward()
        return [leaf.grad, *([] if between == "replay" else [layer.weight.grad])]

    for got, expected in zip(gradients(between), gradients("nothing"), strict=False):
        assert same_bits(got, expected)


@modes
def test_a_weight_that_is_written_before_the_backward_is_yet_to_be_recorded(device: str, use_reentrant: bool) -> None:
    """As where it is written behind the backward."""
    recipe, states = tg.DelayedScaling(amax_history_len=3), []
    for is_before in (False, True):
        model, (x,) = a_model(device), inputs(device, 1)
        for _ in range(2):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=use_reentrant)
            for act in ("write", "go back") if is_before else ("go back", "write"):
                if act == "go back":
                    y.sum().backward()
                else:
                    with torch.no_grad():
                        model[0].weight.mul_(16)
        with tg.fp8_autocast(recipe=recipe):
            model(x).sum().backward()
        states.append(model[0].get_extra_state()[1])
    assert same_bits(*states)
