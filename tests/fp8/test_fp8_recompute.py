"""Activation checkpointing around FP8 layers: the bits, and the scales, of a training without it.

The reference is the same training without checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from fp8_recipes import BOTH_KINDS, both_kinds
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
modes = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Layer(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]; ``up`` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = tg.Linear(WIDTH, 2 * WIDTH), tg.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) + self.up(x * 0.5)
        return x + self.dropout(self.down(hidden))


class Model(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self, layer_call: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layer_call = layer_call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.layer_call(layer, x)
        return x


def evaluate_by_other_recipe(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), tg.fp8_autocast(recipe=BOTH_KINDS["delayed"]):
        layer(x)


def evaluate_with_other_weights(layer: nn.Module, x: Tensor) -> None:
    weights = {name: 5 * one.detach() for name, one in layer.named_parameters()}
    with torch.no_grad(), tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
        torch.func.functional_call(layer, weights, (x,))


def evaluate_with_swapped_weights(layer: nn.Module, x: Tensor) -> None:
    kept = {name: one.detach().clone() for name, one in layer.named_parameters()}
    with torch.no_grad():
        for one in layer.parameters():
            one.mul_(7)
    with torch.no_grad(), tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
        layer(x)
    with torch.no_grad():
        for name, one in layer.named_parameters():
            one.copy_(kept[name])


BETWEEN = (evaluate_by_other_recipe, evaluate_with_other_weights, evaluate_with_swapped_weights)


@modes
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_an_evaluation_between_forward_and_backward_changes_no_gradient(
    device: str, between: object, use_reentrant: bool
) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    x = torch.randn(16, WIDTH, device=device).bfloat16().requires_grad_()
    found = []
    for act in (plainly, between):
        layer.zero_grad()
        x.grad = None
        with tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
            y = checkpoint(layer, x, use_reentrant=use_reentrant)
        act(layer, x.detach())
        y.sum().backward()
        found.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("between", BETWEEN[1:], ids=lambda between: between.__name__)
@pytest.mark.parametrize("on_cpu", [False, True], ids=["saved", "saved as copies"])
def test_without_a_checkpoint_such_an_evaluation_is_named_in_the_backward(
    device: str, between: object, on_cpu: bool
) -> None:
    layer = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    x = torch.randn(16, WIDTH, device=device).bfloat16().requires_grad_()
    keep = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)
    with tg.fp8_autocast(recipe=BOTH_KINDS["current"]), keep if on_cpu else contextlib.nullcontext():
        y = layer(x)
    between(layer, x.detach())
    with pytest.raises(RuntimeError, match=r"te_graph.Linear: .* run the backward before"):
        y.sum().backward()


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def train(layer_call: object, recipe: object, device: str, order: str, graphed: bool = False) -> list[Tensor]:
    """Losses, parameters and FP8 states of three steps of two micro-batches: "FBFB", or "FFBB" or "FFbb", where two are
    in flight and the first, or the last, has its backward first."""
    torch.manual_seed(0)
    model = Model(layer_call).to(device, torch.bfloat16)
    values = torch.Generator().manual_seed(1)
    if graphed:
        sample = torch.randn(5, WIDTH, dtype=torch.bfloat16).to(device).requires_grad_()
        with tg.fp8_autocast(recipe=recipe):
            tg.make_graphed_callables(model, (sample,), max_in_flight=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(2)
    results = []
    for _ in range(3):
        losses = []
        for move in order:
            if move == "F":
                x = torch.randn(5, WIDTH, generator=values).to(device, torch.bfloat16).requires_grad_()
                with tg.fp8_autocast(recipe=recipe):
                    losses.append(model(x).float().square().mean())
                results.append(losses[-1].detach())
            else:
                losses.pop(0 if move == "B" else -1).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
            results.append(model(x.detach()).clone())
    return [*results, *model.parameters(), *(m.get_extra_state() for m in model.modules() if isinstance(m, tg.Linear))]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    different = [number for number, pair in enumerate(zip(actual, expected, strict=True)) if not same_bits(*pair)]
    assert not different


@both_kinds
@modes
@pytest.mark.parametrize("order", ["FBFB", "FFBB", "FFbb"])
@pytest.mark.one_of(3)
def test_a_checkpoint_changes_no_bit(device: str, recipe: object, use_reentrant: bool, order: str) -> None:
    def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    assert_equal(train(checkpointed, recipe, device, order), train(plainly, recipe, device, order))


@both_kinds
@pytest.mark.parametrize(
    "kinds",
    [*itertools.product([False, True], repeat=2), (True,) * 3, (True, False, True)],
    ids=lambda kinds: str(kinds),
)
@pytest.mark.one_of(5)
def test_checkpoints_in_checkpoints_change_no_bit(device: str, recipe: object, kinds: tuple[bool, ...]) -> None:
    """``kinds``: whether they are reentrant, outermost first."""
    call = plainly
    for use_reentrant in reversed(kinds):
        call = functools.partial(checkpoint, call, use_reentrant=use_reentrant)
    assert_equal(train(call, recipe, device, "FBFB"), train(plainly, recipe, device, "FBFB"))


@pytest.mark.parametrize(
    ("recipe", "use_reentrant"),
    [("delayed", False), ("newest", False), ("current", False), ("current", True)],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_call_without_gradients_inside_is_repeated_and_remains_an_evaluation(
    device: str, recipe: str, use_reentrant: bool, depth: int
) -> None:
    """Not of delayed scaling in reentrant checkpoints, of which it is not to be known (docs/limits.md)."""
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        student, teacher = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))

        def function(x: Tensor, student: nn.Module = student, teacher: nn.Module = teacher) -> Tensor:
            with torch.no_grad():
                target = teacher(x)
            return student(x) * target

        call = function
        for _ in range(depth if is_checkpointed else 0):
            call = functools.partial(checkpoint, call, use_reentrant=use_reentrant)
        found = []
        for factor in (1, 3, 9):
            x = (torch.randn(5, WIDTH, device=device) * factor).requires_grad_()
            with tg.fp8_autocast(recipe=BOTH_KINDS[recipe]):
                y = call(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad, student.weight.grad.clone()]
        results.append([*found, student.get_extra_state(), teacher.get_extra_state()])
    assert_equal(*results)


@modes
def test_an_evaluation_by_a_hook_in_the_backward_is_none_that_is_repeated(device: str, use_reentrant: bool) -> None:
    """Of the very layer that the checkpoint computes again."""
    layer, results = tg.Linear(WIDTH, WIDTH, device=device), []
    x, other = torch.randn(5, WIDTH, device=device, requires_grad=True), torch.randn(5, WIDTH, device=device)

    def evaluate(grad: Tensor | None = None) -> None:
        with torch.no_grad(), tg.fp8_autocast(recipe=BOTH_KINDS["delayed"]):
            results.append(layer(other))

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(layer(x))
        if y.requires_grad:
            y.register_hook(evaluate)
        return layer(y)

    evaluate()
    for is_checkpointed in (False, True):
        layer.zero_grad()
        x.grad = None
        with tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
            y = checkpoint(function, x, use_reentrant=use_reentrant) if is_checkpointed else function(x)
        y.sum().backward()
        results.append(x.grad)
    assert same_bits(results.pop(), results.pop(-2))
    assert all(same_bits(each, results[0]) for each in results)
    assert len(results) >= 3


@both_kinds
def test_a_checkpoint_inside_a_graph_changes_no_bit(device: str, recipe: object) -> None:
    """Of the non-reentrant kind: the other one is refused by torch under ``autograd.grad``, by which captures go."""

    def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    plain = train(plainly, recipe, device, "FFBB")
    assert_equal(train(checkpointed, recipe, device, "FFBB", graphed=True), plain)
    assert_equal(train(plainly, recipe, device, "FFBB", graphed=True), plain)


def test_checkpoints_save_the_memory_of_activations() -> None:
    """What a layer saves goes to the checkpoint, which drops it."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    layer, x = tg.Linear(WIDTH, WIDTH).bfloat16(), torch.randn(64, WIDTH, dtype=torch.bfloat16)
    with tg.fp8_autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert 64 * WIDTH in saved


def test_a_second_backward_repeats_the_scales(device: str) -> None:
    """Two backwards of one forward have the bits of those of a layer that keeps its activations."""
    layer = tg.Linear(WIDTH, WIDTH).to(device, torch.bfloat16)
    twin = copy.deepcopy(layer)
    recipe = tg.DelayedScaling(amax_history_len=2)
    for _ in range(3):
        x = torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        found = []
        for each, call in ((layer, checkpointed_call), (twin, nn.Module.__call__)):
            with tg.fp8_autocast(recipe=recipe):
                y = call(each, x * 3)
            (first,) = torch.autograd.grad(y.sum(), each.weight, retain_graph=True)
            with tg.fp8_autocast(recipe=recipe):
                each(x * 100)
            state = each.get_extra_state()
            (second,) = torch.autograd.grad(y.sum(), each.weight, retain_graph=True)
            assert state[0, 2] == each.get_extra_state()[0, 2]
            found.append((first, second))
        assert all(map(same_bits, *found))


def checkpointed_call(layer: nn.Module, x: Tensor) -> Tensor:  # x: [..., WIDTH] -> [..., WIDTH]
    return checkpoint(layer, x, use_reentrant=False)


@both_kinds
@modes
@pytest.mark.parametrize("first", ["off", "on"])
@pytest.mark.parametrize("off", [{"enabled": False}, None], ids=["disabled", "left out"])
def test_calls_without_fp8_are_repeated_without_it(
    device: str, recipe: object, use_reentrant: bool, first: str, off: dict | None
) -> None:
    """Of a layer that computes in FP8 as well, in one checkpoint."""
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(5, WIDTH, device=device, requires_grad=True)

        def function(x: Tensor, layer: nn.Module = layer) -> Tensor:
            for is_on in (first == "on", first != "on"):
                if off is None and not is_on:
                    x = layer(x)
                else:
                    with tg.fp8_autocast(recipe=recipe, **({} if is_on else off)):
                        x = layer(torch.tanh(x))
            return x**2

        y = checkpoint(function, x, use_reentrant=use_reentrant) if is_checkpointed else function(x)
        y.sum().backward()
        layer.fp8.update_if_due()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters()), layer.get_extra_state()])
    assert_equal(*results)


@modes
def test_a_call_is_repeated_by_its_recipe_where_another_one_came_since(device: str, use_reentrant: bool) -> None:
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(5, WIDTH, device=device, requires_grad=True)
        losses = []
        for recipe in (BOTH_KINDS["delayed"], BOTH_KINDS["newest"]):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(layer, x * 3, use_reentrant=use_reentrant) if is_checkpointed else layer(x * 3)
            losses.append(y.square().sum())
        for loss in losses:
            loss.backward()
        results.append([x.grad, layer.weight.grad])
    assert_equal(*results)


@modes
@pytest.mark.parametrize("in_place", [False, True])
def test_a_call_is_repeated_with_its_weight_where_the_layer_had_another_one_since(
    device: str, use_reentrant: bool, in_place: bool
) -> None:
    """As that of a teacher. Current scales, so that a cast that is made again has the same bits."""
    results = []
    for has_teacher in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(tg.Linear(WIDTH, WIDTH), nn.Tanh(), tg.Linear(WIDTH, WIDTH)).to(device)
        x = torch.randn(5, WIDTH, device=device, requires_grad=True)
        with tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            if has_teacher:
                others = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
                own = copy.deepcopy(model.state_dict())
                with torch.no_grad():
                    if in_place:
                        model.load_state_dict(others, strict=False)
                        model(x)
                        model.load_state_dict(own)
                    else:
                        torch.func.functional_call(model, others, (x,))
        y.square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert_equal(*results)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_region_that_is_left_in_a_backward_updates_nothing(device: str, is_enabled: bool) -> None:
    """A GPU's backward runs on a thread that is in no region: one inside of what it computes again is no outermost."""
    recipe = BOTH_KINDS["delayed"]
    inner, other = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x = torch.randn(5, WIDTH, device=device, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        with tg.fp8_autocast(enabled=is_enabled, recipe=recipe):
            return inner(x)

    def scales() -> list[Tensor]:
        return [each.get_extra_state()[:2, 2].clone() for each in (inner, other)]  # of what forwards cast

    for _ in range(2):
        with tg.fp8_autocast(recipe=recipe):
            y = other(checkpoint(compute, x, use_reentrant=True))
            before = scales()
            y.square().sum().backward()
            assert all(map(same_bits, scales(), before))
    y = checkpoint(compute, x, use_reentrant=True)
    with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=recipe):
        other(x)
        raise KeyError  # so its amaxes are still to be taken up
    before = scales()
    y.square().sum().backward()
    assert all(map(same_bits, scales(), before))
    with tg.fp8_autocast(recipe=recipe):
        other(x)
    assert not same_bits(scales()[1], before[1])


def test_saved_tensors_of_a_checkpoint_are_read_several_times_outside_of_a_backward(device: str) -> None:
    """Each time it is computed again, by the scales of the first call."""
    layer, recipe = tg.Linear(WIDTH, WIDTH, device=device), BOTH_KINDS["delayed"]
    for _ in range(2):
        x = torch.randn(5, WIDTH, device=device, requires_grad=True)
        with tg.fp8_autocast(recipe=recipe):
            y = checkpoint(lambda x: torch.tanh(layer(x)).exp(), x, use_reentrant=False)
    for _ in range(3):
        assert same_bits(y.grad_fn._saved_result, y)
    y.sum().backward()
