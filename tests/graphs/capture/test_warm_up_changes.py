"""What only some calls of a module do, the first, the second, until a counter stops: refused where a replay would tell
it from eager execution, whatever the number of iterations that a warm-up has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Changing(nn.Module):
    """[3, 4] -> [3, 4]: does what `step` says, which is given the module and the argument, detached."""

    def __init__(self, step: Callable[[Changing, Tensor], Any]) -> None:
        super().__init__()
        self.calls, self.factor, self.step = 0, 1.0, step
        self.register_buffer("scale", torch.ones(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        factor = self.step(self, x.detach())
        return x * self.scale * factor


def saturates(module: Changing, x: Tensor) -> int:  # x: [3, 4]
    module.calls = min(module.calls + 1, 2)
    return module.calls


def second_sets(module: Changing, x: Tensor) -> float:  # x: [3, 4]
    if module.calls == 1:
        module.factor = 2.0
    if module.calls < 2:
        module.calls += 1
    return module.factor


def second_writes(module: Changing, x: Tensor) -> int:  # x: [3, 4]
    if module.calls == 1:
        module.scale.copy_(x.abs().amax(0))
    module.calls = min(module.calls + 1, 2)
    return 1


def second_reads(module: Changing, x: Tensor) -> float:  # x: [3, 4]
    if module.calls == 1:
        module.factor = max(x.abs().flatten().tolist())
    module.calls = min(module.calls + 1, 2)
    return module.factor


def first_is_another_number(module: Changing, x: Tensor) -> int:  # x: [3, 4]
    factor, module.calls = 1 if module.calls else 10, 1
    return factor


def first_is_another_operator(module: Changing, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    result = x.sin() if module.calls else x.cos()
    module.calls = 1
    return result


def first_is_another_tensor(module: Changing, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    one, other = x.sin(), x.cos()
    result = one if module.calls else other
    module.calls = 1
    return result


def first_keeps_a_tensor(module: Changing, x: Tensor) -> int:  # x: [3, 4]
    if not hasattr(module, "table"):
        module.table = torch.ones(4, device=x.device)
        return 10
    return 1


def first_draws(module: Changing, x: Tensor) -> float:  # x: [3, 4]
    if not module.calls:
        module.factor, module.calls = random.random(), 1
    return module.factor


def first_reads(read: Callable[[Tensor], float]) -> Callable[[Changing, Tensor], float]:
    def step(module: Changing, x: Tensor) -> float:  # x: [3, 4]
        if not module.calls:
            module.factor, module.calls = read(x), 1
        return module.factor

    return step


def first_finds(state: Callable[[nn.Module], Any], change: Callable[[Changing], Any]) -> Callable:
    """Computes otherwise as long as its inner module is in the first `state`, which it ends by `change`."""

    def step(module: Changing, x: Tensor) -> int:  # x: [3, 4]
        factor = 10 if state(module.inner) else 1
        change(module)
        return factor

    return step


def becomes_tanh(module: Changing) -> None:
    module.inner.__class__ = nn.Tanh


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


TANH = nn.Tanh()
FLAGS: dict[str, tuple[Callable[[Changing, Tensor], Any], str]] = {
    "training": (
        first_finds(lambda inner: inner.training, lambda module: module.inner.eval()),
        r"sets training of inner \(from True to False; override train\(\) to set it\) and runs",
    ),
    "class": (first_finds(is_linear, becomes_tanh), r"sets class of inner \(from Linear to Tanh\) and runs"),
    "forward": (
        first_finds(
            lambda inner: "forward" not in vars(inner),
            lambda module: setattr(module.inner, "forward", first_draws),
        ),
        "sets forward of inner and runs",
    ),
    "requires_grad": (
        first_finds(lambda inner: inner.bias.requires_grad, lambda module: module.inner.bias.requires_grad_(False)),
        r"sets requires_grad of bias of inner \(from True to False\) and runs",
    ),
    "no parameter": (
        first_finds(lambda inner: inner.bias is not None, lambda module: setattr(module.inner, "bias", None)),
        r"sets bias of inner \(from a tensor to None\) and runs",
    ),
    "another module": (
        first_finds(is_linear, lambda module: setattr(module, "inner", TANH)),
        "sets inner and runs",
    ),
}
CHANGES: dict[str, tuple[Callable[[Changing, Tensor], Any], str]] = {
    "a counter that stops": (saturates, r"changes calls \(from 1 to 2\)"),
    "the second sets": (second_sets, r"changes (calls|factor) \(from 1"),
    "the second writes": (second_writes, r"changes calls \(from 1 to 2\)"),
    "the second reads": (second_reads, r"changes (calls|factor) \(from 1"),
    "another number": (first_is_another_number, r"sets calls \(from 0 to 1\) and runs .*mul.* differently"),
    "another operator": (first_is_another_operator, r"sets calls \(from 0 to 1\) and runs .*cos.* differently"),
    "another tensor": (first_is_another_tensor, r"sets calls \(from 0 to 1\) and runs .*mul.* differently"),
    "a tensor kept": (first_keeps_a_tensor, r"sets table \(set to a tensor\) and runs .*mul.* differently"),
    "a draw": (first_draws, "draws from Python's random module"),
    "tolist": (first_reads(lambda x: max(x.flatten().tolist())), "reads values of its arguments and sets"),
    "numpy": (first_reads(lambda x: float(x.cpu().numpy().max())), "reads values of its arguments and sets"),
    "float": (first_reads(lambda x: float(x.max())), "reads values of its arguments and sets"),
    **FLAGS,
    "a list of tensors": (
        first_reads(lambda x: torch.tensor([x[0, 0], x[0, 1]], device=x.device).sum()),
        "makes factor of its",
    ),
}
EACH_CALL: dict[str, tuple[Callable[[Changing, Tensor], Any], str]] = {
    "training": (lambda module, x: module.inner.train(not module.inner.training) and 1, "changes training of inner"),
    "module": (lambda module, x: setattr(module, "inner", nn.Tanh()) or 1, "changes inner, and a replay"),
}


def keeps_a_table(module: Changing, x: Tensor) -> Tensor:  # [3, 4] -> [4]
    module.scale.lerp_(x.mean(0), 0.1)
    return module.__dict__.setdefault("table", torch.arange(4, device=x.device).type_as(x).sin())


def freezes(module: Changing, x: Tensor) -> float:  # x: [3, 4]
    module.scale.lerp_(x.mean(0), 0.1)
    module.inner.eval().requires_grad_(False)
    return 2.0


NO_CHANGES: dict[str, Callable[[Changing, Tensor], Any]] = {
    "a table beside statistics": keeps_a_table,
    "a frozen layer beside statistics": freezes,
    "a flag": lambda module, x: setattr(module, "calls", 1) or 2.0,
    "a cache": lambda module, x: module.__dict__.setdefault("cache", {}).setdefault(x.shape, 1.0 / len(x)),
    "a table": lambda module, x: module.__dict__.setdefault("table", torch.arange(4, device=x.device).type_as(x).sin()),
    "a view": lambda module, x: x.t().t() if module.__dict__.setdefault("is_flat", x.reshape(12).dim() == 1) else x,
}


@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize(("step", "words"), CHANGES.values(), ids=CHANGES)
def test_what_some_calls_do_is_refused_and_undone(device: str, step: Callable, words: str, iterations: int) -> None:
    module, state = Changing(step).to(device), random.getstate()
    with pytest.raises(RuntimeError, match=words):
        make_graphed_callables(module, (torch.rand(3, 4, device=device, requires_grad=True),), iterations)
    assert (module.calls, module.factor, random.getstate()) == (0, 1.0, state)
    assert_bitwise_equal(module.scale, torch.ones(4, device=device))
    inner = module.inner
    assert (type(inner), inner.training, "forward" in vars(inner)) == (nn.Linear, True, False)
    assert all(parameter.requires_grad for parameter in (inner.weight, inner.bias))


@pytest.mark.parametrize(("step", "words"), EACH_CALL.values(), ids=EACH_CALL)
def test_modules_that_each_call_changes_are_refused(step: Callable, words: str) -> None:
    module = Changing(step)
    with pytest.raises(RuntimeError, match=words):
        make_graphed_callables(module, (torch.rand(3, 4, requires_grad=True),))
    assert (type(module.inner), module.inner.training) == (nn.Linear, True)


def test_setting_of_torch_that_the_first_call_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)

    def step(module: Changing, x: Tensor) -> int:  # x: [3, 4]
        factor = 10 if torch.backends.mkldnn.enabled else 1
        torch.backends.mkldnn.enabled = False
        return factor

    with pytest.raises(RuntimeError, match=r"sets a setting of torch \(torch.backends.mkldnn.enabled changed\) and"):
        make_graphed_callables(Changing(step), (torch.rand(3, 4, requires_grad=True),))
    make_graphed_callables(Changing(step), (torch.rand(3, 4, requires_grad=True),))


@pytest.mark.parametrize("step", [step for step, _ in CHANGES.values()], ids=CHANGES)
def test_after_some_calls_it_is_captured(device: str, step: Callable) -> None:
    module, twin = Changing(step).to(device), Changing(step).to(device)
    first, second, third = (torch.rand(3, 4, device=device) for _ in range(3))
    for x in (first, second):
        random.seed(0)
        module(x)
        random.seed(0)
        twin(x)
    make_graphed_callables(module, (first,))
    assert_bitwise_equal(module(third), twin(third))
    assert replays(module) == 1


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("step", NO_CHANGES.values(), ids=NO_CHANGES)
def test_what_changes_no_result_is_captured(device: str, step: Callable, iterations: int) -> None:
    module, twin = Changing(step).to(device), Changing(step).to(device)
    make_graphed_callables(module, (torch.rand(3, 4, device=device),), iterations)
    for _ in range(2):
        x = torch.rand(3, 4, device=device)
        assert_bitwise_equal(module(x), twin(x))
    assert replays(module) == 2
