"""TransformerEngine's FP8 regions, of a stand-in with its names: refused around, inside and after a capture in bf16."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
SENTENCE = r"Linear: TransformerEngine's FP8 autocast is on, .*te_graph.Linear or te_graph.convert_to_fp8"


class FP8GlobalStateManager:
    enabled = False
    calibrating = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.calibrating


class Linear(nn.Linear):
    """As TransformerEngine's: keeps how it was called last."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        self.fp8, self.fp8_calibration = FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.calibrating
        return super().forward(x) * (2 if self.fp8 else 1)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        with fp8():
            return self.inner(x)


class EntersItself(Linear):
    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        with fp8():
            return super().forward(x)


@contextlib.contextmanager
def fp8(what: str = "enabled") -> Iterator[None]:
    setattr(FP8GlobalStateManager, what, True)
    try:
        yield
    finally:
        setattr(FP8GlobalStateManager, what, False)


@pytest.fixture(autouse=True, params=["quantization", "fp8"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is where newer versions keep it, or older ones."""
    home = types.ModuleType(f"transformer_engine.pytorch.{request.param}")
    home.FP8GlobalStateManager = FP8GlobalStateManager
    monkeypatch.setitem(sys.modules, home.__name__, home)


def batch() -> Tensor:  # [2, 3]
    return torch.randn(2, 3, requires_grad=True)


@pytest.mark.parametrize("what", ["enabled", "calibrating"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_capture_in_a_region_is_refused(what: str, wrapped: bool) -> None:
    module = nn.Sequential(Linear(3, 3)) if wrapped else Linear(3, 3)
    with fp8(what), pytest.raises(RuntimeError, match=SENTENCE):
        tg.make_graphed_callables(module, (batch(),))
    tg.make_graphed_callables(module, (batch(),))


@pytest.mark.parametrize("make", [Inside, lambda: EntersItself(3, 3)])
def test_a_region_inside_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match=SENTENCE.replace("Linear", "(Linear|EntersItself)")):
        tg.make_graphed_callables(make(), (batch(),))


def test_modules_that_are_not_of_it_do_not_mind() -> None:
    module = nn.Linear(3, 3)
    with fp8():
        tg.make_graphed_callables(module, (batch(),))
        module(batch())
    module(batch())
    assert module.te_graph.info()["forward_replays"] == 2


@pytest.mark.parametrize("mode", ["raise", "eager", "capture"])
def test_a_region_after_the_capture(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    module = Linear(3, 3)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(),), on_mismatch=mode)
    x = batch()
    with fp8():
        if mode == "raise":
            with pytest.raises(RuntimeError, match=SENTENCE):
                module(x)
        else:
            with caplog.at_level(logging.WARNING, "te_graph"):
                assert_bitwise_equal(run(module, x), run(twin, x))
            assert ("te_graph.Linear" in caplog.text) is (mode == "capture")
    run(twin, x)
    for _ in range(2):
        assert_bitwise_equal(run(module, x), run(twin, x))
    assert module.te_graph.info()["forward_replays"] >= 1
