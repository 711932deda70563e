"""Random programs of what is done to a module, its class, hooks and copies, beside an eager module."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from own_copies import WithDeepcopy, WithReduce
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm
from twins import gradients_of, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal


class Scaled(nn.Module):
    """A parametrization with an inverse."""

    def forward(self, weight: Tensor) -> Tensor:  # [...]
        return weight / 2

    def right_inverse(self, weight: Tensor) -> Tensor:  # [...]
        return weight * 2


class Mixed:
    """Comes before the class of a module, as FSDP2's does."""


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "stack": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "own deepcopy": lambda: WithDeepcopy(4, 4),
    "own reduce": lambda: WithReduce(4, 4),
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
}


def _double(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output * 2


def _shift(module: nn.Module, args: tuple) -> tuple:
    return tuple(arg + 1 for arg in args)


def _halve(module: nn.Module, grad_input: tuple, grad_output: tuple) -> tuple:
    return tuple(None if grad is None else grad / 2 for grad in grad_input)


@dataclass(frozen=True)
class Step:
    """One thing that is done; ``seed`` decides its details."""

    name: str
    seed: int

    def __repr__(self) -> str:
        return f"{self.name}({self.seed})"


class _TooMuchError(Exception):
    """The eager module cannot do it."""


class Pair:
    """A module that may be graphed and an eager one, to which the same is done."""

    def __init__(self, kind: str) -> None:
        self.module = KINDS[kind]()
        self.eager = KINDS[kind]()
        self.eager.load_state_dict(self.module.state_dict())
        self.hooks: list[list] = []

    @property
    def is_graphed(self) -> bool:
        return getattr(self.module, "te_graph", None) is not None

    def do(self, step: Step) -> None:
        chance = random.Random(step.seed)
        torch.manual_seed(step.seed)
        getattr(self, step.name)(chance)
        self.compare()

    def both(self, action: Callable[[nn.Module], nn.Module | None]) -> None:
        """Do ``action`` to both, which may replace them: with the same result, or the same error."""
        errors = []
        for which in ("eager", "module"):
            try:
                replaced = action(getattr(self, which))
                errors.append(None)
                if replaced is not None:
                    setattr(self, which, replaced)
            except Exception as error:
                errors.append(type(error))
        assert errors[0] == errors[1], f"eager: {errors[0]}, graphed: {errors[1]}"

    def compare(self) -> None:
        assert_bitwise_equal(dict(self.module.state_dict()), dict(self.eager.state_dict()))
        assert self.module.__class__.__name__ == self.eager.__class__.__name__
        hidden = {"te_graph", "forward"}
        assert sorted(vars(self.module).keys() - hidden) == sorted(vars(self.eager).keys() - hidden)
        if not self.is_graphed:
            classes = [[base.__name__ for base in type(one).__mro__] for one in (self.module, self.eager)]
            assert classes[0] == classes[1]

    def part(self, chance: random.Random) -> Callable[[nn.Module], nn.Module]:
        names = [name for name, part in self.eager.named_modules() if isinstance(part, nn.Linear)]
        name = chance.choice(names)
        return lambda module: module.get_submodule(name)

    def graph(self, chance: random.Random) -> None:
        if self.is_graphed:
            return
        before, kind = sorted(vars(self.module)), type(self.module)
        try:
            x = torch.randn(3, 4, requires_grad=True)
            tg.make_graphed_callables(self.module, (x,), on_mismatch=chance.choice(["raise", "eager", "capture"]))
        except RuntimeError:  # hooks
            assert (sorted(vars(self.module)), type(self.module)) == (before, kind)
        except AttributeError as error:
            try:
                self.eager(x)
            except AttributeError:  # what was done before is too much for torch
                raise _TooMuchError from error
            raise

    def reset(self, chance: random.Random) -> None:
        if self.is_graphed:
            self.module.te_graph.reset()

    def call(self, chance: random.Random) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        try:
            expected = run(self.eager, x)
        except Exception as error:  # what was done before is too much for torch
            raise _TooMuchError from error
        try:
            found = run(self.module, x)
        except RuntimeError as error:
            if not self.is_graphed or "since capture" not in str(error):
                raise
            self.module.te_graph.reset()
            found = run(self.module, x)
        assert_bitwise_equal(found, expected)
        grads = [gradients_of(dict(one.named_parameters())) for one in (self.module, self.eager)]
        assert_bitwise_equal(*grads)

    def parametrize(self, chance: random.Random) -> None:
        part, name = self.part(chance), chance.choice(["weight", "bias"])
        self.both(lambda m: parametrize.register_parametrization(part(m), name, Scaled()) and None)

    def weight_norm(self, chance: random.Random) -> None:
        part = self.part(chance)
        if not parametrize.is_parametrized(part(self.eager)):
            self.both(lambda m: parametrizations.weight_norm(part(m)) and None)

    def old_weight_norm(self, chance: random.Random) -> None:
        part = self.part(chance)
        if chance.random() < 0.3 and not parametrize.is_parametrized(part(self.eager)):
            self.both(lambda m: old_weight_norm(part(m)) and None)

    def remove_parametrizations(self, chance: random.Random) -> None:
        part, name, leave = self.part(chance), chance.choice(["weight", "bias"]), chance.random() < 0.7
        if not isinstance(self.eager, Mixed):  # torch takes the class on top for the one that it made
            self.both(lambda m: parametrize.remove_parametrizations(part(m), name, leave) and None)

    def deepcopy(self, chance: random.Random) -> None:
        self.hooks.clear()
        try:
            copy.deepcopy(self.eager)
        except RuntimeError as error:  # torch copies no computed weights; those computed in a graph stay behind
            raise _TooMuchError from error
        self.both(copy.deepcopy)

    def pickle(self, chance: random.Random) -> None:
        protocol = chance.randrange(2, pickle.HIGHEST_PROTOCOL + 1)
        if not any(isinstance(one, Mixed) for one in (self.eager,)) and not self.hooks:
            self.both(lambda m: pickle.loads(pickle.dumps(m, protocol=protocol)))

    def mix_in(self, chance: random.Random) -> None:
        if isinstance(self.eager, Mixed) and type(self.eager).__name__.startswith("Mixed"):
            for one in (self.module, self.eager):
                one.__class__ = one.__class__.__bases__[-1]
        elif not isinstance(self.eager, Mixed):
            for one in (self.module, self.eager):
                one.__class__ = type(f"Mixed{one.__class__.__name__}", (Mixed, one.__class__), {})

    def add_hook(self, chance: random.Random) -> None:
        part = self.part(chance) if chance.random() < 0.3 else (lambda m: m)
        kind, hook = chance.choice(
            [
                ("register_forward_hook", _double),
                ("register_forward_pre_hook", _shift),
                ("register_full_backward_hook", _halve),
            ]
        )
        self.hooks.append([getattr(part(one), kind)(hook) for one in (self.module, self.eager)])

    def remove_hook(self, chance: random.Random) -> None:
        if self.hooks:
            for handle in self.hooks.pop(chance.randrange(len(self.hooks))):
                handle.remove()

    def mode(self, chance: random.Random) -> None:
        training = chance.random() < 0.5
        self.both(lambda m: m.train(training) and None)

    def update(self, chance: random.Random) -> None:
        with torch.no_grad():
            noise = [torch.randn_like(p) for p in self.eager.parameters()]
            for one in (self.module, self.eager):
                for parameter, change in zip(one.parameters(), noise, strict=True):
                    parameter.add_(change)

    def zero_grad(self, chance: random.Random) -> None:
        to_none = chance.random() < 0.5
        self.both(lambda m: m.zero_grad(to_none))


_WEIGHTS = {"call": 8, "graph": 5, "reset": 2}
NAMES = [
    *("graph", "reset", "call", "parametrize", "weight_norm", "old_weight_norm", "remove_parametrizations"),
    *("deepcopy", "pickle", "mix_in", "add_hook", "remove_hook", "mode", "update", "zero_grad"),
]


def program(seed: int, length: int = 14) -> tuple[str, list[Step]]:
    chance = random.Random(seed)
    kind = chance.choice(list(KINDS))
    weights = [_WEIGHTS.get(name, 1) for name in NAMES]
    names = chance.choices(NAMES, weights, k=length)
    return kind, [Step(name, chance.randrange(1000)) for name in names] + [Step("call", 0)]


def failure(kind: str, steps: list[Step]) -> BaseException | None:
    torch.manual_seed(0)
    pair = Pair(kind)
    try:
        for step in steps:
            pair.do(step)
    except _TooMuchError:
        return None
    except Exception as error:
        return error
    return None


def check(seed: int) -> None:
    """Run the program of ``seed``; where it fails, take steps away for as long as it does, and show what is left."""
    kind, steps = program(seed)
    error = failure(kind, steps)
    if error is None:
        return
    position = 0
    while position < len(steps):
        fewer = steps[:position] + steps[position + 1 :]
        shorter = failure(kind, fewer)
        if shorter is None:
            position += 1
        else:
            steps, error = fewer, shorter
    raise AssertionError(f"seed {seed}: {kind}: {steps}") from error


def main() -> None:
    """``PYTHONPATH=tests/helpers python <this file>`` runs as many programs as CLASS_PROGRAMS says."""
    first = int.from_bytes(os.urandom(4), "little")
    for seed in range(first, first + int(os.environ.get("CLASS_PROGRAMS", "1000"))):
        check(seed)
    print("seeds from", first)


if __name__ == "__main__":
    main()
