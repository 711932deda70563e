"""Activation checkpointing inside graphed callables: backward graphs compute again, with the same random numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from twins import backward_of, eager_copy, gradients_of, leaf_copy

from te_graph import _C, graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


class Block(nn.Module):
    """Parts, of which each is computed again, between random numbers that are not."""

    def __init__(self, device: str, parts: int, nested: bool = False) -> None:
        super().__init__()
        self.before, self.nested = nn.Dropout(0.3), nested
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 4), nn.Dropout(0.25)).to(device)
            for _ in range(parts)
        )

    def again(self, part: nn.Module, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if self.nested:
            x = checkpoint(part, self.before(x), use_reentrant=False)
        return self.before(part(x))

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        for part in self.parts:
            x = checkpoint(self.again, part, self.before(x), use_reentrant=False) + torch.rand_like(x)
        return x


def trained(model: nn.Module, steps: list[list[Tensor]], seed: int, reverse: bool = False) -> list[Any]:
    """Results, gradients, and the next random numbers; all forwards of a step come before its backwards."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    for step in steps:
        inputs = leaf_copy(step)
        results = [model(x) for x in inputs]
        for result in reversed(results) if reverse else results:
            backward_of(result)
            seen.append(torch.rand(2, device=result.device))
        seen += [[result.detach().clone() for result in results], gradients_of(inputs)]
    return [*seen, gradients_of(list(model.parameters()))]


@pytest.mark.parametrize(("parts", "nested", "slots", "reverse"), [(1, False, 1, False), (3, True, 2, True)])
def test_a_checkpoint_with_dropout_inside_is_right(device, parts, nested, slots, reverse):
    model = Block(device, parts, nested)
    twin, sample = eager_copy(model), batch(device)
    before = torch.get_rng_state()
    make_graphed_callables(model, (sample,), max_in_flight=slots)
    assert torch.equal(torch.get_rng_state(), before)
    steps = [[batch(device) for _ in range(slots)] for _ in range(3)]
    assert_bitwise_equal(trained(model, steps, 5, reverse), trained(twin, steps, 5, reverse))
    info = model.te_graph.info()
    assert (info["backward_replays"], info["eager_calls"]) == (3 * slots, {})


def test_layers_of_a_chain_compute_again_with_their_own_numbers(device):
    model = nn.Sequential(*(Block(device, 1) for _ in range(3)))
    twin = eager_copy(model)
    make_graphed_callables(tuple(model), (batch(device),), chain=True)
    steps = [[batch(device)] for _ in range(4)]
    assert_bitwise_equal(trained(model, steps, 7), trained(twin, steps, 7))
    assert [layer.te_graph.info()["backward_replays"] for layer in model] == [4] * 3


def test_a_backward_that_runs_twice_draws_the_same_twice(device):
    model = Block(device, 2)
    twin, x = eager_copy(model), batch(device)
    make_graphed_callables(model, (batch(device),))
    seen = []
    for one in (model, twin):
        torch.manual_seed(9)
        result = one(x)
        torch.rand(5, device=device)
        for _ in range(2):
            result.sum().backward(retain_graph=True)
        seen.append([result.detach(), gradients_of([x, *one.parameters()]), torch.rand(2, device=device)])
        x.grad = None
    assert_bitwise_equal(*seen)


class Rewound(nn.Module):
    """Draws the same numbers twice in its forward, or those of a state from outside."""

    def __init__(self, state: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4))
        self.state = state

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        kind = torch.cuda if x.is_cuda else torch
        state = kind.get_rng_state() if self.state is None else self.state
        y = torch.nn.functional.dropout(x * self.weight, 0.5)
        kind.set_rng_state(state)
        return torch.nn.functional.dropout(y, 0.5)


@pytest.mark.parametrize("outside", [False, True])
def test_states_that_no_forward_noted_before_its_backward_are_refused(device, outside):
    kind = torch.cuda if device == "cuda" else torch
    model = Rewound(kind.get_rng_state() if outside else None).to(device)
    with pytest.raises(RuntimeError, match=r"generator.*set|set.*generator"):
        make_graphed_callables(model, (batch(device),))
    torch.manual_seed(3)
    drawn = torch.rand(3, device=device)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3, device=device), drawn)


class Reading(nn.Module):
    """[3, 4] -> [3, 4]; what no graph can hold is inside a checkpoint."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = nn.Linear(4, 4), options

    def _read(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        y = self.inner(x)
        return y * 2 if y.sum().item() > 1e9 else y

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return checkpoint(self._read, x, use_reentrant=False, **self.options)


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}], ids=["plain", "some"])
@pytest.mark.parametrize("kind", ["callable", "function"])
def test_a_checkpoint_that_could_not_be_captured_is_over_when_the_error_comes(device, kind, options):
    """While the error is handled, too: what eager code saves then is not the checkpoint's."""
    model, x = Reading(options).to(device), batch(device)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()

    for parameter in (x, *model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    replay = graphed(step)
    replay()
    try:
        replay() if kind == "function" else make_graphed_callables(model, (x,))
    except RuntimeError as error:
        assert "_read" in str(error)
        assert _C.saved_tensor_pack_hooks() == _get_current_dispatch_mode_stack() == []
        step()
    else:
        pytest.fail("was captured")
