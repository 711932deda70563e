"""Results that are views of an input: their gradients are added to those of its uses in eager's order, or the log says
that they are not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch
from seeds import first_seed
from torch import Tensor

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")

_WORDS = "may be added in another order than in eager execution"
# Bodies of functions of x, [8, 8], and whether a replay may have to add in another order.
CASES = {
    "before its uses": ("v = x.t(); return v, x.cos() * x", False),
    "after its uses": ("y = x.cos() * x; return y, x.t()", False),
    "a view of a view, begun before its uses": ("a = x[:]; y = x.sin(); z = x.cos(); return a.t(), y, z", False),
    "two views": ("v = x.t(); return v, x[0], x * x", False),
    "of a result": ("y = x.cos() * x; return y, y.t()", False),
    "between two uses and one": ("return x.cos(), x.view(-1), x * x", True),
    "used twice": ("v = x.view(-1); return v * v, v", True),
    "used, and its input, too": ("v = x.t(); return v @ x, v", True),
    "a view of it is used": ("v = x.view(-1); w = v.view(8, 8); return v, w * x", True),
    "used beside another view": ("v = x.t(); return v, v.sin(), x.t()", True),
    "of a result, and used": ("y = x * x; v = y.t(); return y, v, v.sin()", True),
}


def function_of(body: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    namespace: dict = {}
    exec(f"def fn(x):\n    {body}", namespace)
    return namespace["fn"]


def gradient(function: Callable, x: Tensor, seed: int) -> Tensor:  # [8, 8]
    """Of a loss of all results, added in the order that ``seed`` says."""
    generator, leaf = torch.Generator().manual_seed(seed), x.detach().requires_grad_()
    results = function(leaf * 1)
    weights = [torch.randn(one.shape, generator=generator).to(x.device) for one in results]
    losses = [(one * weight * one).sum() for one, weight in zip(results, weights, strict=True)]
    random.Random(seed).shuffle(losses)
    sum(losses[1:], losses[0]).backward()
    return leaf.grad


def differs(body: str, device: str) -> bool:
    function = function_of(body)
    graphed = tg.make_graphed_callables(function, (torch.rand(8, 8, device=device, requires_grad=True),))
    inputs = [torch.rand(8, 8, device=device) for _ in range(8)]
    pairs = [(gradient(function, x, seed), gradient(graphed, x, seed)) for seed, x in enumerate(inputs)]
    assert graphed.te_graph.info()["forward_replays"] == len(inputs)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)
    return not all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("case", CASES)
def test_a_view_whose_gradient_is_added_elsewhere_is_told(device: str, case: str, caplog) -> None:
    body, is_told = CASES[case]
    assert differs(body, device) == is_told
    assert [_WORDS in record.getMessage() for record in caplog.records] == [True] * is_told


def random_body(rng: random.Random) -> str:
    """Some operations on x and on what they gave, all [8, 8], and two to four results."""
    values, lines = ["x"], []
    for number in range(rng.randint(2, 6)):
        one, other = rng.choice(values), rng.choice(values)
        ways = [f"{one}.t()", f"{one}[:]", f"{one}.sin()", f"{one} * {other}"]
        lines.append(f"v{number} = {rng.choice(ways)}")
        values.append(f"v{number}")
    results = [*rng.sample(values[1:], min(len(values) - 1, rng.randint(1, 3))), rng.choice(["x.sin()", "x.t()"])]
    return "; ".join([*lines, f"return {', '.join(results)}"])


def test_random_functions_round_as_eager_execution_or_tell(device: str, caplog) -> None:
    """At least one of each kind has to come, lest nothing be tried."""
    caplog.set_level(logging.WARNING)
    rng, kinds = random.Random(first_seed("view rounding")), set()
    for _ in range(30):
        body = random_body(rng)
        caplog.clear()
        does_differ = differs(body, device)
        is_told = any(_WORDS in record.getMessage() for record in caplog.records)
        assert is_told or not does_differ, body
        kinds.add(is_told)
    assert kinds == {False, True}
