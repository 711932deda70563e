"""Patterns of TransformerEngine, in a package that is installed: what of it matters to a callable, what does not."""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, run

import te_graph as tg
from te_graph.graphs.guards.readers import memos
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

ENGINE = """
import dataclasses
import torch
from torch import nn

chosen = {"shape": None, "backend": None}
offsets = {}
calls = {"count": 0}
settings = {"scale": 2.0}
unread = {"scale": 2.0}


@dataclasses.dataclass
class State:
    enabled: bool = False
    depth: int = 0
    arguments: dict = dataclasses.field(default_factory=dict)


class Manager:
    state = State()

    @classmethod
    def is_enabled(cls):
        return cls.state.enabled

    @classmethod
    def enter(cls):
        cls.state.depth += 1
        cls.state.arguments[len(cls.state.arguments)] = object()


@dataclasses.dataclass(eq=True)
class Params:
    shape: tuple

    def __eq__(self, other):
        return all(getattr(self, one.name) == getattr(other, one.name, None) for one in dataclasses.fields(self))


def backend_of(params):
    if chosen["shape"] is None or params != chosen["shape"]:
        chosen["shape"] = params
        chosen["backend"] = params.shape[0] % 2
    return chosen["backend"]


def offsets_of(count):
    if count not in offsets:
        offsets[count] = torch.arange(float(count))
    return offsets[count]


def never_called():
    return unread["scale"]


def scaled(x):
    return x * settings["scale"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.note = 0

    def set_fast(self, name, value):
        self.__dict__[name] = value

    def rarely(self):
        return never_called() * self.note

    def forward(self, x):
        self.set_fast("dtype", x.dtype)
        if Manager.is_enabled():
            return self.rarely()
        sign = 1 if backend_of(Params(tuple(x.shape))) else -1
        return scaled(self.inner(x)) * sign + offsets_of(x.shape[0])[:, None]


class Version:
    def __init__(self, text):
        self.text = text


class Noted:
    once = False
    needed = Version("1.0")
    instance = None


def tell(rows):
    if rows > 4 and not Noted.once:
        Noted.once = True
        Noted.needed = Version("2.0")
    if Noted.instance is None:
        Noted.instance = Version("one")
    return 2.0 if Noted.once else len(Noted.needed.text) * len(Noted.instance.text) / 3


class Noting(Layer):
    def forward(self, x):
        return super().forward(x) * tell(x.shape[0])


class Counting(Layer):
    def forward(self, x):
        calls["count"] = calls["count"] + 1
        return super().forward(x)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """That package, where packages are installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "an_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("an_engine")
    del sys.modules["an_engine"]


def batch(rows: int = 4) -> Tensor:  # [rows, 3]
    return torch.randn(rows, 3, requires_grad=True)


def graphed(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """It, graphed, and an eager twin."""
    twin = eager_copy(module)
    return tg.make_graphed_callables(module, (batch(),), **options), twin


def assert_replays(module: nn.Module, twin: nn.Module) -> None:
    before = module.te_graph.info()["forward_replays"]
    x = batch()
    assert_bitwise_equal(run(module, x), run(twin, x))
    assert module.te_graph.info()["forward_replays"] == before + 1


def test_memos_of_a_library_may_serve_other_calls_in_between(engine: types.ModuleType) -> None:
    module, twin = graphed(engine.Layer())
    assert_replays(module, twin)
    run(twin, batch(7))  # chooses anew, and fills in another one
    assert engine.chosen["shape"].shape == (7, 3) and set(engine.offsets) == {4, 7}
    assert_replays(module, twin)


def test_layers_of_two_shapes_are_captured_one_after_the_other(engine: types.ModuleType) -> None:
    layers = (engine.Layer(), engine.Layer())
    twins = [eager_copy(one) for one in layers]
    tg.make_graphed_callables(layers, ((batch(4),), (batch(7),)))
    for _ in range(2):
        for layer, twin, rows in zip(layers, twins, (4, 7), strict=True):
            x = batch(rows)
            assert_bitwise_equal(run(layer, x), run(twin, x))


def test_what_a_library_sets_for_its_messages_alone_may_be_set_in_between(
    engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memos._FOR_MESSAGES, "an_engine.Noted", ("once", "needed"))
    module, _ = graphed(engine.Noting())
    engine.tell(5)
    assert engine.Noted.once and engine.Noted.needed.text == "2.0"
    module(batch())
    assert module.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda engine: engine.tell(5), "Noted.once"),
        (lambda engine: setattr(engine.Noted, "needed", engine.Version("3.0.0")), "Noted.needed"),
        (lambda engine: setattr(engine.Noted, "instance", engine.Version("other")), "Noted.instance"),
        (lambda engine: setattr(engine.Noted.instance, "text", "other"), "Noted.instance.text"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_library_puts_on_its_classes_is_compared(
    engine: types.ModuleType, is_there: bool, change: Callable[[types.ModuleType], Any], name: str
) -> None:
    if is_there:
        engine.tell(1)
    module, twin = graphed(engine.Noting())
    assert_replays(module, twin)
    change(engine)
    with pytest.raises(RuntimeError, match=rf"{name} .*since capture"):
        module(batch())


def test_a_tensor_in_a_memo_is_compared(engine: types.ModuleType) -> None:
    module, _ = graphed(engine.Layer())
    engine.offsets[4] = engine.offsets[4].clone()
    with pytest.raises(RuntimeError, match=r"offsets.* since capture"):
        module(batch())


def test_a_counter_in_a_memo_is_refused(engine: types.ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"the forward changes .*calls"):
        graphed(engine.Counting())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")
def test_settings_that_ran_code_reads_are_compared_and_others_are_not(engine: types.ModuleType) -> None:
    module, twin = graphed(engine.Layer())
    engine.unread["scale"], module.note = 3.0, 5  # of code that did not run
    engine.Manager.enter()  # of the same object as what is read
    assert_replays(module, twin)
    engine.settings["scale"] = 3.0
    with pytest.raises(RuntimeError, match=r"settings.* since capture"):
        module(batch())
    engine.settings["scale"] = 2.0
    engine.Manager.state.enabled = True
    with pytest.raises(RuntimeError, match=r"enabled changed from False to True since capture"):
        module(batch())


def test_kernels_that_add_to_main_grad_are_refused_by_name() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.inner.fuse_wgrad_accumulation = True

        def forward(self, x: Tensor) -> Tensor:  # [n, 3]
            return self.inner(x)

    module = Fused()
    with pytest.raises(RuntimeError, match="Fused: fuse_wgrad_accumulation of inner is True"):
        graphed(module)
    module.inner.requires_grad_(False)
    assert_replays(*graphed(module))


@pytest.mark.parametrize(
    ("cudnn", "setting", "is_refused"), [(91400, "1", True), (91400, "0", False), (91900, "1", False)]
)
def test_attention_on_a_cudnn_that_is_wrong_in_graphs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, cudnn: int, setting: str, is_refused: bool
) -> None:
    class DotProductAttention(nn.Linear):
        __module__ = "transformer_engine.pytorch.attention"

    kernels = types.ModuleType("transformer_engine_torch")
    kernels.get_cudnn_version = lambda: cudnn
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setenv("NVTE_FUSED_ATTN", setting)
    module = nn.Sequential(DotProductAttention(3, 3))
    if is_refused:
        with pytest.raises(RuntimeError, match=r"Sequential: .* cuDNN 9\.14, .* NVTE_FUSED_ATTN=0"):
            graphed(module)
    else:
        assert_replays(*graphed(module))


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that looks like an extension module, with functions that are not of Python code."""
    module = types.ModuleType("some_kernels")
    module.__file__ = str(tmp_path / "site-packages" / f"some_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}")

    class Kernels:
        __module__ = "some_kernels"

    class Reader(weakref.ref):
        __module__ = "some_kernels"

    module.touch, module.read = Kernels, Reader
    monkeypatch.setitem(sys.modules, "some_kernels", module)
    return module


class CallsKernels(nn.Module):
    def __init__(self, kernels: types.ModuleType | None) -> None:
        super().__init__()
        self.kernels = kernels
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        if self.kernels is not None:
            self.kernels.touch()
        return x * self.table.shape[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")
def test_tensors_that_no_dispatcher_sees_used_are_compared_where_an_extension_is_called(
    extension: types.ModuleType,
) -> None:
    module = CallsKernels(extension)
    tg.make_graphed_callables(module, (batch(),))
    module(batch())
    module.table.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="table moved to other memory since capture"):
        module(batch())
    module = CallsKernels(None)
    tg.make_graphed_callables(module, (batch(),))
    module.table.data = torch.ones(3)
    module(batch())


class Settings:
    def __init__(self) -> None:
        self.gain, self.inner = 2.0, [Inner()]


class Inner:
    def __init__(self) -> None:
        self.bias = 1.0


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read, self.settings, self.steps = read, Settings(), 0

    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        self.read(self.settings)
        return x * 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")
@pytest.mark.parametrize("change", ["module.settings.gain = 3.0", "module.settings.inner[0].bias = 3.0"])
def test_attributes_of_an_object_that_an_extension_is_given_are_compared(
    change: str, extension: types.ModuleType
) -> None:
    module = tg.make_graphed_callables(Reading(extension.read), (batch(),))
    module.steps = 1  # of a module, which is given to nobody
    module(batch())
    exec(change, {"module": module})
    with pytest.raises(RuntimeError, match=r"changed from [12]\.0 to 3\.0 since capture"):
        module(batch())
    module = tg.make_graphed_callables(Reading(callable), (batch(),))
    exec(change, {"module": module})
    module(batch())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")
@pytest.mark.parametrize("method", ["model_dump", "model_dump_json"])
def test_fields_that_a_package_hands_over_to_its_extension_are_compared(method: str) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Gains(pydantic.BaseModel):
        first: float = 2.0

    gains = Gains()
    scaled = tg.make_graphed_callables(lambda x: x * len(getattr(gains, method)()), (batch(),))
    scaled(batch())
    gains.first = 30.0
    with pytest.raises(RuntimeError, match=r"first changed from 2\.0 to 30\.0 since capture"):
        scaled(batch())
