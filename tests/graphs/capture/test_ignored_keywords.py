"""Keyword arguments that a callable provably ignores do not matter, nor does the order of a dictionary of which it only
reads what is under constant keys."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import pytest
import torch
from keyword_programs import run_program
from seeds import first_seed
from torch import Tensor, nn
from twins import eager_copy, run

import te_graph as tg
from te_graph.graphs.tracing.keyword_uses import collecting_variable, uses_of
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")

_PROGRAMS, _LEAST, _MOST_SECONDS = 20, 2, 3
followed = pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 and newer tell what is called")


def batch(device: str) -> Tensor:  # [3, 5]
    return torch.randn(3, 5, device=device, requires_grad=True)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        y = self.linear(x)
        return y if mask is None else y * mask


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return functools.partial(self.inner, **kwargs)(x) if self.training else self.inner(x, **kwargs)


class Counting(Plain):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x) / kwargs.get("num_items_in_batch", 1.0)


def replays(module: nn.Module) -> int:
    return module.te_graph.info()["forward_replays"]


MANY = [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(9)}, {"more": [object()], "other": print}]


@pytest.mark.parametrize("given", MANY[:3])
@pytest.mark.parametrize("kind", [Plain, pytest.param(Passing, marks=followed)])
def test_what_is_ignored_may_be_given_or_not(device: str, kind: type[nn.Module], given: dict[str, Any]) -> None:
    module = kind().to(device)
    twin = eager_copy(module)
    sample = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    tg.make_graphed_callables(module, (batch(device),), sample_kwargs=sample)
    for more in MANY:
        x = batch(device)
        assert_bitwise_equal(run(lambda x, kw=more: module(x, **kw), x), run(lambda x, kw=more: twin(x, **kw), x))
    assert replays(module) == len(MANY)


def test_what_is_read_counts(device: str) -> None:
    module = Counting().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(device),), on_mismatch="eager")
    x = batch(device)
    assert_bitwise_equal(run(functools.partial(module, num_items_in_batch=4.0), x), run(lambda x: twin(x) / 4.0, x))
    assert replays(module) == 0
    run(functools.partial(module, something=1), x)
    assert replays(module) == 1


@followed
def test_what_another_takes_as_a_parameter_counts(device: str) -> None:
    module = Passing().to(device)
    tg.make_graphed_callables(module, (batch(device),))
    words = r'got keyword argument mask, which was not given at capture: capture with sample_kwargs={"mask": ...}'
    with pytest.raises(ValueError, match=words):
        module(batch(device), mask=torch.ones(3, 5, device=device))


def test_a_chain_is_captured_without_what_is_ignored(device: str) -> None:
    model = nn.Sequential(Passing(), Plain(), Passing()).to(device)
    twin = eager_copy(model)
    kwargs = tuple({"num_items_in_batch": 3} for _ in model)
    tg.make_graphed_callables(tuple(model), (batch(device),), sample_kwargs=kwargs, chain=True)
    x = batch(device)

    def call(layers: nn.Sequential, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, num_items_in_batch=3)
        return x

    assert_bitwise_equal(run(functools.partial(call, model), x), run(functools.partial(call, twin), x))
    assert [replays(layer) for layer in model] == [1, 1, 1]


def test_hooks_that_are_captured_may_look_at_what_is_passed_on(device: str) -> None:
    module = Passing().to(device)
    module.inner.register_forward_pre_hook(
        lambda inner, args, kwargs: ((args[0] * (2.0 if "num" in kwargs else 1.0),), {}), with_kwargs=True
    )
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(device),), hooks="captured", on_mismatch="eager")
    x = batch(device)
    assert_bitwise_equal(run(functools.partial(module, num=1), x), run(functools.partial(twin, num=1), x))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.linear(batch["x"]) + batch.get("y") if "x" in batch else batch["y"]


class Going(Reading):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        first, second = batch.values()
        return self.linear(first) + second * 2.0


@pytest.mark.parametrize(("kind", "count"), [(Reading, 1), (Going, 0)])
def test_the_order_of_a_dictionary_counts_where_code_can_tell(device: str, kind: type[nn.Module], count: int) -> None:
    module = kind().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, ({"x": batch(device), "y": batch(device)},))
    given = {"y": batch(device), "x": batch(device)}
    assert_bitwise_equal(run(module, given), run(twin, given))
    assert replays(module) == count


def test_keys_that_are_equal_but_of_other_types_are_told_apart(device: str) -> None:
    module = Reading().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, ({"x": batch(device), "y": batch(device), 1: 2.0},))
    given = {"y": batch(device), "x": batch(device), True: 2.0}
    assert_bitwise_equal(run(module, given), run(twin, given))
    assert replays(module) == 0


def _uses(text: str) -> Any:
    scope: dict[str, Any] = {}
    source = "\n    ".join(
        ["    def told(self, x, c=1, y='z', **kwargs):", *(f"    {line}" for line in text.split("\n"))]
    )
    exec(f"def around(key):\n{source}\n    return told\nmade = around('k')", scope)
    return uses_of(scope["made"].__code__, collecting_variable(scope["made"].__code__))


@pytest.mark.parametrize(
    "text",
    [
        "return x",
        "return self.a(x, k=1, **kwargs)",
        "return kwargs['a']",
        "return kwargs.get('a', self.config.b)",
        "return kwargs.pop('a', x)",
        "return 'a' not in kwargs",
        "return key in kwargs or kwargs[key]",
        "kwargs[key] = kwargs.pop('a')",
    ],
)
def test_code_that_names_all_that_it_reads(text: str) -> None:
    assert not _uses(text).other_lines


@pytest.mark.parametrize(
    "text",
    [
        "return kwargs",
        "return g(kwargs)",
        "return kwargs.get('a' + y)",
        "return kwargs.get('a' if c else y)",
        "return y in kwargs",
        "return kwargs[y]",
        "return len(kwargs)",
        "if kwargs: return 1",
        "return {**kwargs}",
        "for k in kwargs: pass",
        "return kwargs.items()",
        "return lambda: kwargs['a']",
        "return locals()",
        "kwargs = {}",
        "kwargs |= {'a': 1}",
        "return kwargs == {}",
        "return [k for k in kwargs]",
        "return kwargs.get",
        "return (kwargs or {})['a']",
        "first, *_ = kwargs",
        "return kwargs.get('a', g())",
        "return f'{kwargs}'",
        "return kwargs is None",
        "return g(**kwargs, m=h(*x))",
    ],
)
def test_code_that_may_look_at_more(text: str) -> None:
    uses = _uses(text)
    assert uses is None or uses.other_lines


def test_random_calls_with_keywords() -> None:
    first, started, count, replayed = first_seed("keywords"), time.monotonic(), 0, 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        torch.manual_seed(first + count)
        replayed += run_program(first + count)
        count += 1
    print(f"{count} programs, seeds from {first}, {replayed} replays with other keywords")


def scaled(x: Tensor, *, scale: float) -> Tensor:  # [...]
    return x * scale


class Trying(Plain):
    """What it passes the keywords on to may not take them."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        y = self.linear(x)
        try:
            return scaled(y, **kwargs)
        except TypeError:
            return y


def test_a_keyword_that_a_failed_call_was_given_is_not_ignored(device: str) -> None:
    module = Trying().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(device),), on_mismatch="eager")
    x = batch(device)
    for given in ({}, {"scale": 2.0}, {}):
        assert_bitwise_equal(run(module, x, **given), run(twin, x, **given))


def count_above() -> int:
    return len(sys._getframe(1).f_locals["kwargs"])


class Looked(Plain):
    """What it calls looks at its variables."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x) * (1 + count_above())


class PassingLooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Looked()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.inner(x, **kwargs)


@pytest.mark.parametrize("kind", [Looked, PassingLooked])
def test_keywords_that_a_function_finds_in_the_frame_of_its_caller_count(device: str, kind: type[nn.Module]) -> None:
    module = kind().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(device),), on_mismatch="eager")
    x = batch(device)
    for given in ({}, {"scale": 2.0}, {}):
        assert_bitwise_equal(run(module, x, **given), run(twin, x, **given))


@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
def test_a_capture_at_the_first_call_and_later_ones_ignore_the_same(device: str, on_mismatch: str) -> None:
    module = Plain().to(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, on_mismatch=on_mismatch)
    rows = (3, 4) if on_mismatch == "capture" else (3,)
    for number in rows:
        for given in MANY:
            x = torch.randn(number, 5, device=device, requires_grad=True)
            assert_bitwise_equal(run(module, x, **given), run(twin, x, **given))
    info = module.te_graph.info()
    assert info["signatures"] == len(rows) and not info["eager_calls"]
