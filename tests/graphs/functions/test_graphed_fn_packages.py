"""Functions that get hold of objects of packages whose classes lead to thousands of functions that never run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
knows_what_ran = pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")

PACKAGE = """
import functools
import itertools

tokens = itertools.count()
settings = {"scale": 2.0}
others = {"scale": 3.0}
seen = {"calls": 0}


def noted(function):
    @functools.wraps(function)
    def inner(self, *args):
        return function(self, *args)
    return inner


class Config:
    size = 4

    @noted
    def scaled(self, x):
        return x * settings["scale"] * vars(self).get("gain", 1.0)

    @noted
    def other(self, x):
        return x * others["scale"]

    @noted
    def save(self, x):
        return next(tokens)

    @noted
    def count(self, x):
        seen["calls"] += 1
        return x * seen["calls"]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package that is installed, with methods that one decorator wraps."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "package_of_a_test.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("package_of_a_test")
    del sys.modules["package_of_a_test"]


def a_config() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    return transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)


def a_model() -> nn.Module:
    config = a_config()
    return pytest.importorskip("transformers").LlamaForCausalLM(config)


@knows_what_ran
def test_a_configuration_of_hugging_face_alone_is_replayed() -> None:
    config, x = a_config(), torch.ones(3)
    function = tg.graphed(lambda x: x * config.hidden_size)
    for _ in range(4):
        assert torch.equal(function(x), x * 16)
    assert function.info()["forward_replays"] == 3
    config.hidden_size = 32
    assert torch.equal(function(x), x * 32)


@knows_what_ran
def test_a_forward_of_a_hugging_face_model_is_replayed() -> None:
    model, tokens = a_model().eval(), torch.arange(8)[None]
    mask = torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e9)

    @torch.no_grad()
    def forward(tokens: Tensor) -> Tensor:  # [1, 8] -> [1, 8, 32]
        return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits

    graphed = tg.graphed(forward)
    for _ in range(4):
        assert torch.equal(graphed(tokens), forward(tokens))
    assert graphed.info()["forward_replays"] == 3
    model.model.layers[0].self_attn.scaling *= 2
    assert torch.equal(graphed(tokens), forward(tokens))
    assert graphed.info()["forward_replays"] == 3


@knows_what_ran
def test_what_ran_of_a_package_is_compared_and_other_methods_are_not(package: types.ModuleType) -> None:
    config, x, which = package.Config(), torch.ones(3), {"name": "scaled"}
    function = tg.graphed(lambda x: getattr(config, which["name"])(x))

    def assert_replayed(factor: float, replays: int) -> None:
        for _ in range(3):
            assert torch.equal(function(x), x * factor)
        assert function.info()["forward_replays"] == replays

    assert_replayed(2.0, 2)
    package.others["scale"] = 5.0
    assert_replayed(2.0, 5)
    package.settings["scale"] = 4.0
    assert_replayed(4.0, 7)
    config.gain = 2.0
    assert_replayed(8.0, 9)
    which["name"] = "other"
    assert_replayed(5.0, 11)
    package.others["scale"] = 6.0
    assert_replayed(6.0, 13)
    package.Config.other = lambda self, x: x * 7.0
    assert_replayed(7.0, 15)


@pytest.mark.parametrize(("method", "first"), [("count", 1), ("save", 0)])
def test_what_a_package_counts_is_not_captured(package: types.ModuleType, method: str, first: int) -> None:
    config, x = package.Config(), torch.ones(3)
    function = tg.graphed(lambda x: x * getattr(config, method)(x))
    for number in range(3):
        try:
            result = function(x)
        except tg.CaptureError:
            break
        assert torch.equal(result, x * (first + number))
    assert function.info()["forward_replays"] == 0


@knows_what_ran
def test_what_others_undo_before_each_call_of_a_package_is_never_captured_wrongly(package: types.ModuleType) -> None:
    config, x = package.Config(), torch.ones(3)
    function = tg.graphed(lambda x: config.count(x))
    for _ in range(5):
        package.seen["calls"] = 0
        with contextlib.suppress(tg.CaptureError):
            assert torch.equal(function(x), x)
    assert function.info()["forward_replays"] == 0


@knows_what_ran
def test_clip_and_step_of_a_hugging_face_model_are_replayed() -> None:
    model = a_model()
    twin = copy.deepcopy(model)
    steps = []
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=torch.tensor(0.1), fused=True)

        def step(one: nn.Module = one, optimizer: torch.optim.Optimizer = optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        steps.append(step)
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
    graphed = tg.graphed(steps[0])
    for number in range(6):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad.copy_(torch.randn(parameter.shape))
            other.grad.copy_(parameter.grad)
        graphed()
        steps[1]()
        assert all(map(torch.equal, model.parameters(), twin.parameters())), number
    assert graphed.info()["forward_replays"] >= 3


class Settings:
    """Has a method that a context manager decorates: an object with a generator that nothing uses up."""

    gain = 2.0

    @contextlib.contextmanager
    @staticmethod
    def _noted() -> Iterator[None]:
        yield

    @_noted()
    def scaled(self, x: Tensor) -> Tensor:  # [n] -> [n]
        return x * self.gain


def test_a_method_that_a_context_manager_decorates_is_replayed() -> None:
    settings, x = Settings(), torch.ones(3)
    function = tg.graphed(lambda x: settings.scaled(x))
    for _ in range(4):
        assert torch.equal(function(x), x * 2)
    assert function.info()["forward_replays"] >= 2
    settings.gain = 3.0
    assert torch.equal(function(x), x * 3)
