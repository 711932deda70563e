"""States of layers that captures move to other scopes, and that are loaded, evaluated or trained on from there."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
DELAYED = tg.DelayedScaling(amax_history_len=8)
RECIPES = {"same": DELAYED, "shorter": tg.DelayedScaling(amax_history_len=2), "current": tg.Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def a_layer(device: str) -> tg.Linear:
    return tg.Linear(WIDTH, WIDTH, device=device)


def a_model(device: str) -> nn.Sequential:
    return nn.Sequential(a_layer(device), nn.GELU(), a_layer(device))


def inputs(device: str, count: int) -> list[Tensor]:
    values = torch.Generator().manual_seed(1)
    scales = [1 + 3 * (number % 3 == 1) for number in range(count)]
    return [(scale * torch.randn(16, WIDTH, generator=values)).to(device) for scale in scales]


def train(model: nn.Module, recipe: Any, xs: list[Tensor], steps: bool = True) -> list[float]:
    """Losses for xs [16, WIDTH] each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.5), []
    for x in xs:
        with tg.fp8_autocast(recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_both(program: Callable[[bool], list[Any]]) -> None:
    """``program`` gives the same numbers and tensors, [...] each, graphed and eagerly."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        results.append([torch.as_tensor(one) for one in program(is_graphed)])
    assert len(results[0]) == len(results[1])
    assert [i for i, pair in enumerate(zip(*results, strict=True)) if not same_bits(*pair)] == []


class Holder(nn.Module):
    """Trains a layer of its own beside a model that it holds, and does not call."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.held = a_layer(device), [model]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def capture(model: nn.Module, recipe: Any, x: Tensor, **options: Any) -> None:
    """In a region of ``recipe``, with the sample x [16, WIDTH]."""
    with tg.fp8_autocast(recipe=recipe):
        tg.make_graphed_callables(model, (x,), **options)


def a_saved_model(device: str, x: Tensor) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """A trained model, and the state of its parameters and scales, saved amid an accumulation, with x [16, WIDTH]."""
    model = a_model(device)
    train(model, DELAYED, inputs(device, 5))
    train(model, DELAYED, [x], steps=False)
    plain = {name: value.clone() for name, value in model.state_dict().items() if "_extra_state" not in name}
    return model, plain, tg.fp8_state_dict(model)


@recipes
@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_state_is_loaded_after_a_capture_of_what_holds_the_model(
    device: str, recipe: Any, is_evaluated: bool
) -> None:
    def program(is_graphed: bool) -> list[Any]:
        xs = inputs(device, 9)
        _, plain, scales = a_saved_model(device, xs[1])
        model = a_model(device)
        if is_evaluated:
            with torch.no_grad(), tg.fp8_autocast(recipe=DELAYED):
                model(xs[0])
        if is_graphed:
            capture(Holder(model, device), recipe, xs[0])
        model.load_state_dict(plain, strict=False)
        tg.load_fp8_state_dict(model, scales)
        saved_again = tg.fp8_state_dict(model)
        assert all(same_bits(saved_again[name], scales[name]) for name in scales)
        return [*train(model, DELAYED, xs[5:]), *tg.fp8_state_dict(model).values()]

    in_both(program)


@recipes
def test_a_resumed_model_keeps_its_state_through_a_capture_of_what_holds_it(device: str, recipe: Any) -> None:
    xs = inputs(device, 3)
    _, plain, scales = a_saved_model(device, xs[1])
    model = a_model(device)
    model.load_state_dict(plain, strict=False)
    tg.load_fp8_state_dict(model, scales)
    capture(Holder(model, device), recipe, xs[0])
    assert all(same_bits(state, scales[name]) for name, state in tg.fp8_state_dict(model).items())


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("end", ["recipe", "holder"])
def test_what_replays_have_trained_goes_on(device: str, is_frozen: bool, steps: int, end: str) -> None:
    """Not what was loaded before the capture."""

    def program(is_graphed: bool) -> list[Any]:
        xs = inputs(device, 9)
        _, plain, scales = a_saved_model(device, xs[1])
        model = a_model(device)
        model.load_state_dict(plain, strict=False)
        tg.load_fp8_state_dict(model, scales)
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(not is_frozen)
        if is_graphed:
            capture(model, DELAYED, xs[0], on_mismatch="eager")
        found = train(model, DELAYED, [3 * x for x in xs[:steps]])
        if end == "holder" and is_graphed:
            capture(Holder(model, device), RECIPES["shorter"], xs[0])
        return found + train(model, DELAYED if end == "holder" else RECIPES["shorter"], xs[5:])

    in_both(program)


@pytest.mark.parametrize("first", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("then", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("kind", ["callable", "layers", "again"])
@pytest.mark.one_of(4)
def test_a_model_is_captured_by_another_recipe_than_it_has_trained_by(
    device: str, first: Any, then: Any, kind: str
) -> None:
    model = a_model(device)

    def program(is_graphed: bool) -> list[Any]:
        nonlocal model
        model, xs = a_model(device), inputs(device, 10)
        if is_graphed and kind == "again":
            capture(model, first, xs[0], on_mismatch="capture")
        found = train(model, first, xs[:3])
        if is_graphed and kind == "callable":
            capture(model, then, xs[0])
        if is_graphed and kind == "layers":
            tg.graph_layers(model, lambda: train(model, then, [9 * xs[0]], steps=False))
        found += train(model, then, xs[3:7])
        return found + train(model, then, xs[7:]) + list(tg.fp8_state_dict(model).values())

    in_both(program)
    layers = [layer for layer in model.modules() if hasattr(layer, "te_graph")]
    assert layers
    assert all(layer.te_graph.info()["forward_replays"] >= 7 for layer in layers)


@pytest.mark.parametrize("is_training", [False, True])
def test_the_step_of_graph_layers_is_undone_for_layers_that_another_thread_has_called(
    device: str, is_training: bool
) -> None:
    def program(is_graphed: bool) -> list[Any]:
        model, xs, found = a_model(device), inputs(device, 8), []

        def evaluate() -> None:
            with torch.no_grad(), tg.fp8_autocast(recipe=DELAYED):
                found.append(model(xs[0]).sum().item())

        def work() -> None:
            found.extend(train(model, DELAYED, xs[:3]))

        if not is_training:
            work()
        thread = threading.Thread(target=work if is_training else evaluate)
        thread.start()
        thread.join()
        if is_graphed:
            tg.graph_layers(model, lambda: train(model, DELAYED, [20 * xs[0]], steps=False))
        return found + train(model, DELAYED, xs[3:])

    in_both(program)


class OwnRegion(nn.Module):
    """Enters regions by itself."""

    def __init__(self, device: str, *, is_double: bool) -> None:
        super().__init__()
        self.layer, self.other = a_layer(device), a_layer(device) if is_double else None

    def forward(self, x: Tensor) -> Tensor:
        with tg.fp8_autocast(recipe=DELAYED):
            y = self.layer(x)
        if self.other is not None:
            with tg.fp8_autocast(recipe=DELAYED):
                y = self.other(y)
            with torch.no_grad(), tg.fp8_autocast(recipe=DELAYED):
                more = self.layer(x)
            y = y + more
        return y


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("captured_inside", [False, True])
@pytest.mark.parametrize("called_inside", [False, True])
def test_regions_inside_what_is_captured(
    device: str, is_double: bool, captured_inside: bool, called_inside: bool
) -> None:
    """Updates follow where eager execution has them, whatever region is around the capture, and the calls. Where a
    graph has them in the middle, calls that want them elsewhere are refused."""

    def around(is_inside: bool) -> contextlib.AbstractContextManager[Any]:
        return tg.fp8_autocast(recipe=DELAYED) if is_inside else contextlib.nullcontext()

    def program(is_graphed: bool) -> list[Any]:
        model, xs, found = OwnRegion(device, is_double=is_double), inputs(device, 8), []
        train(model, DELAYED, xs[:1])
        if is_graphed:
            with around(captured_inside):
                tg.make_graphed_callables(model, (xs[0],))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for x in xs:
            with around(called_inside):
                loss = model(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    found.append(model.layer(x).sum().item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), tg.fp8_autocast(recipe=DELAYED):
                found += [loss.item(), model.layer(0.5 * x).sum().item()]
        return found

    if is_double and captured_inside != called_inside:
        word = "left" if captured_inside else "entered"
        with pytest.raises(RuntimeError, match=f"fp8_autocast was {word} since capture"):
            program(True)
    else:
        in_both(program)


class Discriminator(nn.Module):
    """Trains on what a generator makes, which it evaluates."""

    def __init__(self, generator: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.generator = a_layer(device), [generator]

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fake = self.generator[0](z)
        return self.layer(fake), fake


def gan(device: str, is_graphed: bool, on_mismatch: str, *, is_whole: bool) -> list[Any]:
    """One region for each iteration, or for all (``is_whole``), in which the generator trains before the other
    evaluates it."""
    generator, xs, found = a_layer(device), inputs(device, 6), []
    discriminator = Discriminator(generator, device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (generator, discriminator.layer)]
    if is_graphed:
        capture(discriminator, DELAYED, xs[0], on_mismatch=on_mismatch)
    with tg.fp8_autocast(recipe=DELAYED) if is_whole else contextlib.nullcontext():
        for x in xs:
            with tg.fp8_autocast(recipe=DELAYED):
                discriminator.layer(generator(x)).square().mean().backward()
                optimizers[0].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                y, fake = discriminator(2 * x)
                y.square().mean().backward()
            optimizers[1].step()
            found += [y.sum().item(), fake.sum().item()]
    return [*found, generator.weight.detach(), discriminator.layer.weight.detach()]


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_update_that_would_come_before_an_evaluation_is_refused(device: str, is_whole: bool) -> None:
    with pytest.raises(RuntimeError, match="evaluated inside, before others train there, was trained since capture"):
        gan(device, True, "raise", is_whole=is_whole)
    in_both(lambda is_graphed: gan(device, is_graphed, "eager", is_whole=is_whole))


def test_a_graphed_function_runs_eagerly_where_that_is_so(device: str) -> None:
    def program(is_graphed: bool) -> list[Any]:
        generator, discriminator, z = a_layer(device), a_layer(device), torch.zeros(16, WIDTH, device=device)
        discriminator.weight.grad, discriminator.bias.grad = map(torch.zeros_like, discriminator.parameters())

        def step() -> Tensor:
            with torch.no_grad():
                fake = generator(z)
            loss = discriminator(fake).square().mean()
            loss.backward()
            return loss.detach()

        called, found = tg.graphed(step) if is_graphed else step, []
        optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.5)
        for number, x in enumerate(inputs(device, 9)):
            z.copy_(x)
            with tg.fp8_autocast(recipe=DELAYED):
                if number % 3 == 2:  # with the discriminator: both are due
                    discriminator(generator(2 * x)).sum().backward()
                    optimizer.zero_grad(set_to_none=False)
                found.append(called().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if is_graphed:
            assert called.info()["forward_replays"] > 0
        return [*found, discriminator.weight.detach()]

    in_both(program)


@pytest.mark.parametrize("order", ["te", "ete", "et"])
def test_an_evaluation_by_another_recipe_than_what_is_captured_trains_by_is_refused(device: str, order: str) -> None:
    """And leaves no cast behind."""

    def program(is_graphed: bool) -> list[Any]:
        model, x, found = a_model(device), torch.zeros(16, WIDTH, device=device), []
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def step() -> list[Tensor]:
            results = []
            for letter in order:
                is_training = letter == "t"
                recipe = DELAYED if is_training else RECIPES["shorter"]
                with torch.set_grad_enabled(is_training), tg.fp8_autocast(recipe=recipe):
                    results.append(model(x).square().mean())
                if is_training:
                    results[-1].backward()
            return [result.detach() for result in results]

        called = tg.graphed(step) if is_graphed else step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for number, given in enumerate(inputs(device, 5)):
            x.copy_(given)
            if is_graphed and number == 1:
                with pytest.raises(RuntimeError, match=r"by the (same recipe|recipe of the capture)"):
                    called()
                called = step
            found += called()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return found

    in_both(program)


class Twice(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = a_layer(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(10 * self.layer(x))


@pytest.mark.parametrize("graphed", ["one", "other", "both"])
def test_after_an_update_inside_of_a_graph_others_are_updated_when_they_are_due(device: str, graphed: str) -> None:
    recipe = tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")

    def program(is_graphed: bool) -> list[Any]:
        one, other, xs, found = nn.Sequential(a_layer(device)), Twice(device), inputs(device, 6), []
        for model in (one, other):
            train(model, recipe, xs[:1], steps=False)
            if is_graphed and graphed in ("both", "one" if model is one else "other"):
                capture(model, recipe, xs[0])
        for number, x in enumerate(xs):
            with tg.fp8_autocast(recipe=recipe):
                for model, factor in ((one, 5), (other, 7 * (number + 1)), (one, 1)):
                    model(factor * x).sum().backward()
                with torch.no_grad():
                    found.append(other.layer(7 * xs[3]).sum().item())
        return found

    in_both(program)


@recipes
def test_a_teacher_that_is_copied_in_the_middle_of_an_accumulation(device: str, recipe: Any) -> None:
    """Held by the student that is captured, and evaluated by another recipe."""

    def program(is_graphed: bool) -> list[Any]:
        student, xs, found = a_model(device), inputs(device, 8), []
        train(student, DELAYED, xs[:2])
        train(student, DELAYED, xs[2:3], steps=False)
        teacher = copy.deepcopy(student).requires_grad_(False)
        holder = Holder(teacher, device)
        holder.layer = student
        if is_graphed:
            capture(holder, DELAYED, xs[0])
        optimizer = torch.optim.SGD(student.parameters(), lr=0.3)
        for x in xs[3:]:
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                target = teacher(x)
            with tg.fp8_autocast(recipe=DELAYED):
                loss = (holder(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    in_both(program)


def test_a_resumed_model_evaluates_alike_in_the_region_of_a_training(device: str) -> None:
    def program(is_graphed: bool) -> list[Any]:
        trained, model, xs, found = a_model(device), a_model(device), inputs(device, 5), []
        train(trained, DELAYED, xs[:2])
        model.load_state_dict(trained.state_dict())
        if is_graphed:
            capture(model, DELAYED, xs[0])
        for x in xs[2:]:
            with tg.fp8_autocast(recipe=DELAYED):
                model(30 * x).square().mean().backward()
                with torch.no_grad():
                    found.append(model(x).sum().item())
        return found

    in_both(program)
