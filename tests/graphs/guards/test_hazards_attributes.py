"""Plain attributes that the code of a callable can read are guarded by value, also those of objects and classes.

The reference is the same program built again and run eagerly, changed in the same way.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import decimal
import enum
import functools
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from calls import replays
from mutations import assert_equal_runs, assert_not_seen, assert_seen, batch, both, linear
from torch import Tensor, nn

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Modules of torch ----


class Embedded(nn.Module):
    """[3, 4] -> [3, 2, 4] by way of indices."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, max_norm=None, scale_grad_by_freq=False, device=device)
        self.register_buffer("indices", torch.tensor([[0, 1], [2, 2], [4, 0]], device=device))

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 2, 4]
        return self.embedding(self.indices) * x[:, None]


class Attended(nn.Module):
    """[3, 4] -> [3, 4] with a sequence of three."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, device=device)

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [1, 3, 4]
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


class Convolved(nn.Module):
    """[3, 4] -> [1, 2, n]."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 2, 3, padding=1, padding_mode="circular", device=device)

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [1, 2, n]
        return self.convolution(x[None])


LIBRARY: dict[str, tuple[Callable[[str], nn.Module], Callable[[Any], Any], str]] = {
    "dropout": (lambda d: nn.Dropout(0.1), lambda m: setattr(m, "p", 0.5), "p changed from 0.1 to 0.5"),
    "dropout below": (
        lambda d: nn.Sequential(linear(d), nn.Dropout(0.1)),
        lambda m: setattr(m[1], "p", 0.5),
        "p of 1 changed from 0.1 to 0.5",
    ),
    "batch norm's momentum": (
        lambda d: nn.BatchNorm1d(4, device=d),
        lambda m: setattr(m, "momentum", None),
        "momentum changed from 0.1 to None",
    ),
    "layer norm's eps": (
        lambda d: nn.LayerNorm(4, device=d),
        lambda m: setattr(m, "eps", 0.5),
        "eps changed from 1e-05 to 0.5",
    ),
    "batch_first": (Attended, lambda m: setattr(m.attention, "batch_first", False), "batch_first of attention changed"),
    "attention's heads": (Attended, lambda m: setattr(m.attention, "num_heads", 1), "num_heads of attention changed"),
    "convolution's tuple": (
        Convolved,
        lambda m: setattr(m.convolution, "stride", (2,)),
        r"stride of convolution\[0\] changed from 1 to 2",
    ),
    "embedding": (Embedded, lambda m: setattr(m.embedding, "scale_grad_by_freq", True), "scale_grad_by_freq of emb"),
    "leaky slope": (
        lambda d: nn.LeakyReLU(0.1),
        lambda m: setattr(m, "negative_slope", -1.0),
        "negative_slope changed",
    ),
    "gelu": (lambda d: nn.GELU(), lambda m: setattr(m, "approximate", "tanh"), "approximate changed from 'none'"),
    "inplace": (
        lambda d: nn.Sequential(linear(d), nn.ReLU()),
        lambda m: setattr(m[1], "inplace", True),
        "inplace of 1 is now True|inplace of 1 changed from False to True",
    ),
    "encoder's activation": (
        lambda d: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, device=d),
        lambda m: setattr(m, "activation", torch.tanh),
        "activation was replaced",
    ),
    "encoder's order": (
        lambda d: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, device=d),
        lambda m: setattr(m, "norm_first", True),
        "norm_first changed from False to True",
    ),
}


@pytest.mark.parametrize("case", LIBRARY)
def test_an_attribute_of_a_module_of_torch_is_seen(device, case):
    make, change, words = LIBRARY[case]

    def build() -> tuple[Callable, nn.Module]:
        module = make(device)
        return module, module

    assert_seen(build, change, words, device)


# ---- Modules of the user's own ----


class Mode(enum.Enum):
    PLUS = 1
    MINUS = -1


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    unused: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


Pair = namedtuple("Pair", ["first", "second"])


class Base(nn.Module):
    gain = 1.0


class Net(Base):
    """[3, 4] -> [3, 4]: depends on attributes of many types."""

    factors: ClassVar[list[float]] = [1.0, 2.0]

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = nn.ModuleList([linear(device)])
        self.integer, self.real, self.flag, self.text, self.nothing = 2, 0.5, True, "plus", None
        self.mode, self.dtype, self.pair, self.frozen_set = Mode.PLUS, torch.float32, (1, (2, 3.0)), frozenset({1})
        self.named, self.numpy, self.decimal = Pair(1, 2), np.float32(0.5), decimal.Decimal("0.5")
        self.list, self.dict, self.set, self.nested = [1, 2], {"a": 1.0}, {1, 2}, {"a": [1, {"b": 2}]}
        self.ordered, self.moved = {"a": 1, "b": 2}, OrderedDict(a=1, b=2)
        self.config, self.frozen, self.slotted = Config(), Frozen(), Slotted()
        self.space, self.arguments = types.SimpleNamespace(scale=2.0), argparse.Namespace(scale=2.0)
        self.function, self.deeper = torch.relu, types.SimpleNamespace(config=Config())

    @property
    def doubled(self) -> int:
        return self.integer * 2

    def helper(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x + 1

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        x = self.inner[0](self.helper(x)) * self.doubled * self.real * (2 if self.flag else 3) * self.gain
        x = x * (1 if self.text == "plus" else -1) * (1 if self.nothing is None else 2) * self.mode.value
        x = x.to(self.dtype).float() * self.pair[1][0] * len(self.frozen_set) * self.named.first
        x = x * float(self.numpy) * float(self.decimal) * sum(self.list) * self.dict["a"] * len(self.set)
        x = x * self.nested["a"][1]["b"] * self.config.scale * self.frozen.scale * self.slotted.scale
        x = x * self.space.scale * self.arguments.scale * sum(self.factors) * self.deeper.config.scale
        x = x + next(iter(self.ordered.values())) + next(iter(self.moved.values()))
        return self.function(x) * getattr(self, "optional", 1) * getattr(self.config, "missing", 1)


def another_helper(net: Net) -> None:
    net.helper = lambda x: x + 2


ATTRIBUTES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "int": (lambda n: setattr(n, "integer", 3), "integer changed from 2 to 3"),
    "int to float": (lambda n: setattr(n, "integer", 2.0), "integer changed from 2 to 2.0"),
    "float": (lambda n: setattr(n, "real", 0.25), "real changed from 0.5 to 0.25"),
    "bool": (lambda n: setattr(n, "flag", False), "flag changed from True to False"),
    "str": (lambda n: setattr(n, "text", "minus"), "text changed from 'plus' to 'minus'"),
    "None": (lambda n: setattr(n, "nothing", 1), "nothing changed from None to 1"),
    "None to a tensor": (lambda n: setattr(n, "nothing", torch.ones(2)), "nothing changed from None to a tensor"),
    "enum": (lambda n: setattr(n, "mode", Mode.MINUS), "mode changed from"),
    "dtype": (lambda n: setattr(n, "dtype", torch.bfloat16), "dtype changed from torch.float32 to torch.bfloat16"),
    "tuple": (lambda n: setattr(n, "pair", (1, (4, 3.0))), r"pair\[1\]\[0\] changed from 2 to 4"),
    "tuple, by the sign of zero": (lambda n: setattr(n, "pair", (-1, (-0.0, 3.0))), r"pair\[0\] changed from 1 to -1"),
    "frozenset": (lambda n: setattr(n, "frozen_set", frozenset({1, 2})), "frozen_set changed"),
    "named tuple": (lambda n: setattr(n, "named", Pair(3, 2)), r"named\[0\] changed"),
    "scalar of NumPy": (lambda n: setattr(n, "numpy", np.float32(2)), "numpy changed"),
    "decimal": (lambda n: setattr(n, "decimal", decimal.Decimal(2)), "decimal changed"),
    "list item": (lambda n: n.list.__setitem__(0, 5), r"list\[0\] changed from 1 to 5"),
    "list append": (lambda n: n.list.append(5), "length of list changed"),
    "list": (lambda n: setattr(n, "list", [3]), "list changed"),
    "dict item": (lambda n: n.dict.update(a=2.0), r"dict\['a'\] changed from 1.0 to 2.0"),
    "dict in another order": (
        lambda n: n.ordered.update(a=n.ordered.pop("a")),
        "keys of ordered changed",
    ),
    "OrderedDict.move_to_end": (lambda n: n.moved.move_to_end("a"), "moved changed"),
    "set": (lambda n: n.set.add(3), "set changed"),
    "nested": (lambda n: n.nested["a"][1].update(b=3), r"nested\['a'\]\[1\]\['b'\] changed from 2 to 3"),
    "nested list": (lambda n: n.nested["a"].__setitem__(1, {"b": 4}), r"nested\['a'\]\[1\]\['b'\] changed from 2 to 4"),
    "dataclass": (lambda n: setattr(n.config, "scale", 3.0), r"config\.scale changed from 2.0 to 3.0"),
    "dataclass, another": (lambda n: setattr(n, "config", Config(3.0)), "config was replaced"),
    "frozen dataclass": (lambda n: setattr(n, "frozen", Frozen(3.0)), "frozen was replaced"),
    "slots": (lambda n: setattr(n.slotted, "scale", 3.0), r"slotted\.scale changed"),
    "SimpleNamespace": (lambda n: setattr(n.space, "scale", 3.0), r"space\.scale changed"),
    "argparse.Namespace": (lambda n: setattr(n.arguments, "scale", 3.0), r"arguments\.scale changed"),
    "two objects down": (lambda n: setattr(n.deeper.config, "scale", 3.0), r"deeper\.config\.scale changed"),
    "function": (lambda n: setattr(n, "function", torch.tanh), "function was replaced"),
    "function to a builtin": (lambda n: setattr(n, "function", abs), "function was replaced"),
    "over the class's value": (lambda n: setattr(n, "gain", 3.0), "gain changed"),
    "over a method": (another_helper, "helper changed"),
    "by getattr": (lambda n: setattr(n, "optional", 2), "optional changed"),
    "by getattr of an object": (lambda n: setattr(n.config, "missing", 2), "missing of config changed"),
    "by vars": (lambda n: vars(n).update(real=0.25), "real changed"),
    "deleted, over a method": (lambda n: delattr(n, "real") or setattr(n, "real", 1.0), "real changed"),
}


class OwnDict(dict):
    pass


class OwnList(list):
    pass


@pytest.mark.parametrize(
    "make", [OwnDict, collections.Counter, functools.partial(collections.defaultdict, int), OwnList], ids=str
)
def test_members_of_derived_containers_are_seen(device: str, make: Callable[[Any], Any]) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = make({0: 2}) if make is not OwnList else make([2])

        def forward(self, x: Tensor) -> Tensor:  # [3, 4]
            return x * self.scales[0]

    def build() -> tuple[nn.Module, nn.Module]:
        module = Scales()
        return module, module

    assert_seen(build, lambda module: module.scales.__setitem__(0, 5), r"scales\[0\] changed from 2 to 5", device)


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_an_attribute_that_the_code_names_is_seen(device, change):
    def build() -> tuple[Callable, Net]:
        net = Net(device)
        return net, net

    assert_seen(build, *ATTRIBUTES[change], device)


@pytest.mark.parametrize(
    ("change", "restore", "words"),
    [
        (lambda: setattr(Base, "gain", 3.0), lambda: setattr(Base, "gain", 1.0), r"Base\.gain changed from 1.0 to 3.0"),
        (lambda: Net.factors.append(3.0), lambda: Net.factors.pop(), r"Net\.factors changed"),
    ],
    ids=["number", "list"],
)
def test_a_class_attribute_is_seen(device, change, restore, words):
    def build() -> tuple[Callable, Net]:
        net = Net(device)
        return net, net

    graphed, _, twin, _ = both(build, device)
    assert_equal_runs(graphed, twin, device)
    change()
    try:
        with pytest.raises(RuntimeError, match=words):
            graphed(batch(device))
    finally:
        restore()
    assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 2


def test_a_captured_module_keeps_what_it_named_when_it_is_captured_again(device):
    def build() -> tuple[Callable, Net]:
        net = Net(device)
        return net, net

    graphed, net, twin, other = both(build, device, on_mismatch="capture")
    for real in (0.25, 0.75, 0.125):
        net.real = other.real = real
        assert_equal_runs(graphed, twin, device)
        another_helper(net)
        another_helper(other)
        assert_equal_runs(graphed, twin, device)
    assert graphed.te_graph.info()["recaptures"] == 6


# ---- What does not matter ----


class Trained(nn.Module):
    """[3, 4] -> [3, 4]: attributes and objects that its forward does not name change all the time."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.global_step, self.losses, self.best = linear(device), 0, [], None
        self.owner, self.scale = types.SimpleNamespace(step=0, model=[self]), 2.0

    def training_step(self, x: Tensor) -> Tensor:  # [3, 4] -> []
        self.global_step += 1
        self.losses.append(self.global_step)
        self.owner.step += 1
        return self(x).sum()

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.layer(x) * self.scale


def test_attributes_that_the_code_does_not_name_may_change(device):
    def build() -> tuple[Callable, Trained]:
        trained = Trained(device)
        return trained, trained

    def change(trained: Trained) -> None:
        trained.global_step += 1
        trained.losses.append(0.5)
        trained.owner.step += 1
        trained.best, trained.layer.note, trained.config = 0.1, "x", Config()

    assert_not_seen(build, change, device)


def test_what_only_the_call_around_a_replay_reads_may_change(device):
    """As gradient checkpointing in Hugging Face's layers: their ``__call__`` is not what was captured."""

    class Around(nn.Module):
        doubled = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(device)

        def __call__(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return super().__call__(x) * (2 if self.doubled else 1)

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return self.layer(x)

    def build() -> tuple[Callable, Around]:
        around = Around()
        return around, around

    assert_not_seen(build, lambda around: setattr(around, "doubled", not around.doubled), device)

    def build_two() -> tuple[Callable, Around]:
        around = Around()
        return nn.Sequential(around), around

    assert_seen(build_two, lambda around: setattr(around, "doubled", True), "doubled of 0 changed", device)


def test_equal_values_may_take_the_place_of_each_other(device):
    def build() -> tuple[Callable, Net]:
        net = Net(device)
        return net, net

    def change(net: Net) -> None:
        net.real, net.text, net.pair = float("0.5"), "".join(["pl", "us"]), (1, (2, float("3")))
        net.list, net.dict, net.set, net.numpy = [1, 2], {"a": 1.0}, {2, 1}, np.float32(0.5)
        net.nested = {"a": [1, {"b": 2}]}

    assert_not_seen(build, change, device)


def test_a_config_may_change_where_the_code_does_not_name_it(device):
    def build() -> tuple[Callable, Net]:
        net = Net(device)
        return net, net

    def change(net: Net) -> None:
        net.config.unused += 1
        net.arguments.epoch = getattr(net.arguments, "epoch", 0) + 1
        net.inner[0].extra_attribute = net.config.unused

    assert_not_seen(build, change, device)


def test_an_ignored_attribute_may_change(device):
    net = Net(device)
    graphed = make_graphed_callables(net, (batch(device),), ignore_attributes=("real", "config.scale"))
    net.real, net.config.scale = 0.25, 3.0
    graphed(batch(device))
    net.flag = False
    with pytest.raises(RuntimeError, match="flag changed"):
        graphed(batch(device))
    assert replays(graphed) == 1
