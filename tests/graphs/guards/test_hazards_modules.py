"""Every module that a callable can get to is guarded: tensors or not, wherever it stands; and the tables of modules.

The reference is the same program built again and run eagerly, changed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutations import assert_not_seen, assert_seen, batch, both, linear
from torch import Tensor, nn

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Modules without tensors, wherever they stand ----


def in_a_closure(device: str) -> tuple[Callable, nn.Module]:
    drop = nn.Dropout(0.9)
    return lambda x: drop(x * 1.0), drop


def inside_another_in_a_closure(device: str) -> tuple[Callable, nn.Module]:
    outer = nn.Sequential(nn.Dropout(0.9), nn.Identity())
    return lambda x: outer(x * 1.0), outer


def in_a_list(device: str) -> tuple[Callable, nn.Module]:
    modules = [nn.Identity(), nn.Dropout(0.9)]
    return lambda x: modules[1](modules[0](x)), modules[1]


def in_a_dict_beside_a_layer(device: str) -> tuple[Callable, nn.Module]:
    layer, holder = linear(device), {"drop": nn.Dropout(0.9)}
    return lambda x: holder["drop"](layer(x)), holder["drop"]


class Encoder(nn.Module):
    """[3, 4] -> [3, 4], by a method that is not forward."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.drop, self.plain = nn.Dropout(0.9), [nn.Dropout(0.9)]

    def encode(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.drop(x)

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.plain[0](x)


def below_a_bound_method(device: str) -> tuple[Callable, nn.Module]:
    encoder = Encoder(device)
    return encoder.encode, encoder


def in_a_plain_list_of_a_module(device: str) -> tuple[Callable, nn.Module]:
    encoder = Encoder(device)
    return encoder, encoder.plain[0]


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.module(x)


def in_a_callable_object(device: str) -> tuple[Callable, nn.Module]:
    holder = Holder(nn.Dropout(0.9))
    return holder, holder.module


def below_another_function(device: str) -> tuple[Callable, nn.Module]:
    drop = nn.Dropout(0.9)

    def inner(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return drop(x)

    return lambda x: inner(x) * 2, drop


PLACES = [
    in_a_closure,
    inside_another_in_a_closure,
    in_a_list,
    in_a_dict_beside_a_layer,
    below_a_bound_method,
    in_a_plain_list_of_a_module,
    in_a_callable_object,
    below_another_function,
]


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 10)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_eval_of_a_module_without_tensors_is_seen(device, place):
    assert_seen(lambda: place(device), lambda module: module.eval(), "training flag of .* is now False", device)


@pytest.mark.parametrize("place", [p for p in PLACES if p is not below_a_bound_method], ids=lambda p: p.__name__)
def test_a_hook_on_a_module_without_tensors_is_seen_and_refused_at_capture(device, place):
    assert_seen(lambda: place(device), hooked, "forward hooks of .* changed", device)
    call, module = place(device)
    hooked(module)
    with pytest.raises(RuntimeError, match=r'forward hooks, which a replay would not run.*hooks="captured"'):
        make_graphed_callables(call, (batch(device),))
    make_graphed_callables(call, (batch(device),), hooks="captured")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda m: m.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,)),
        lambda m: m.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
        lambda m: setattr(m, "forward", lambda x: x * 3),
    ],
    ids=["pre-hook", "backward hook", "backward pre-hook", "forward"],
)
def test_other_ways_to_change_what_a_module_without_tensors_does_are_seen(device, change):
    def build() -> tuple[Callable, nn.Module]:
        act = nn.Identity()
        return lambda x: act(x * 1.0), act

    assert_seen(build, change, "of act changed|of closure variable act changed", device)


def test_a_module_that_takes_the_place_of_another_is_seen(device):
    def build() -> tuple[Callable, Any]:
        act, table = nn.Sequential(nn.ReLU()), {"act": nn.ReLU()}
        return lambda x: act(x) + table["act"](x), (act, table)

    assert_seen(build, lambda owner: owner[0].__setitem__(0, nn.Identity()), r"0 was replaced", device)
    assert_seen(build, lambda owner: owner[1].update(act=nn.Identity()), r"table\['act'\] was replaced", device)


def test_a_module_more_in_a_list_or_dict_of_modules_is_seen(device):
    def build() -> tuple[Callable, Any]:
        acts, table = [nn.ReLU()], {"a": nn.ReLU()}

        def call(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            for act in (*acts, *table.values()):
                x = act(x - 0.5)
            return x

        return call, (acts, table)

    assert_seen(build, lambda owner: owner[0].append(nn.ReLU()), "length of .*acts changed", device)
    assert_seen(build, lambda owner: owner[1].update(b=nn.ReLU()), "keys of .*table changed", device)


# ---- Tables of parameters, buffers and submodules ----


class Table(nn.Module):
    """[3, 4] -> [3, 4]: uses whatever its tables hold, in their order."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.steps = nn.ModuleDict({"minus": linear(device, -1.0), "act": nn.ReLU(), "twice": linear(device, 2.0)})
        self.line = nn.Sequential(linear(device, -0.5), nn.ReLU())
        self.shifts = nn.ParameterList([torch.ones(4, device=device)])
        self.scales = nn.ParameterDict({"a": torch.ones(4, device=device)})
        self.layer = linear(device, bias=False)
        self.register_buffer("mask", None)
        self.extra = None

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        for step in self.steps.values():
            x = step(x)
        x = self.line(x) + self.layer(x)
        for shift in self.shifts:
            x = x + shift
        for scale in self.scales.values():
            x = x * scale
        if self.mask is not None:
            x = x * self.mask
        if self.extra is not None:
            x = self.extra(x)
        for name, buffer in self.named_buffers(recurse=False):
            x = x + buffer.sum() * len(name)
        return x


def fives() -> Tensor:  # [4]
    return torch.full((4,), 5.0)


def to_the_end(table: dict, name: str) -> None:
    table[name] = table.pop(name)


def filled(change: Callable[[Table], Any]) -> Callable[[Table], Any]:
    """``change``, with what it adds moved to the device of the rest."""

    def apply(table: Table) -> None:
        change(table)
        table.to(table.layer.weight.device)

    return apply


TABLES: dict[str, tuple[Callable[[Table], Any], str]] = {
    "bias where it was None": (lambda t: setattr(t.layer, "bias", nn.Parameter(fives())), "bias of layer changed from"),
    "ParameterList.append": (lambda t: t.shifts.append(nn.Parameter(fives())), "parameters of shifts changed"),
    "ParameterDict update": (lambda t: t.scales.update({"b": nn.Parameter(fives())}), "parameters of scales changed"),
    "ParameterDict pop": (lambda t: t.scales.pop("a"), "(parameters|keys|a) of scales"),
    "buffer set later": (lambda t: setattr(t, "mask", fives()), "mask changed from None"),
    "buffer registered later": (lambda t: t.register_buffer("more", fives()), "buffers of Table changed"),
    "parameter registered later": (lambda t: setattr(t, "more", nn.Parameter(fives())), "parameters of Table changed"),
    "module where it was None": (lambda t: setattr(t, "extra", linear("cpu", 3.0)), "submodules of Table changed"),
    "module appended": (lambda t: t.line.append(nn.ReLU()), "submodules of line changed"),
    "ModuleDict in another order": (lambda t: to_the_end(t.steps._modules, "minus"), "submodules of steps changed"),
    "Sequential in another order": (lambda t: to_the_end(t.line._modules, "0"), "submodules of line changed"),
}


@pytest.mark.parametrize("change", TABLES)
def test_a_change_of_a_table_is_seen(device, change):
    def build() -> tuple[Callable, Table]:
        table = Table(device)
        return table, table

    assert_seen(build, filled(TABLES[change][0]), TABLES[change][1], device)


# ---- One memory or object under several names ----


class Tied(nn.Module):
    """[3, 4] -> [3, 4]: what is registered is also kept in plain attributes, which forward uses."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(4, device=device)), linear(device)
        self.table, self.stages = {"weight": self.weight}, [[self.layer]]

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.stages[0][0](x * self.table["weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.table.update(weight=nn.Parameter(t.weight.detach() * 5)), r"table\['weight'\] moved"),
        (lambda t: t.stages[0].__setitem__(0, linear(t.weight.device, 3.0)), r"stages\[0\]\[0\] was replaced"),
        (lambda t: t.stages.__setitem__(0, [linear(t.weight.device, 3.0)]), r"stages\[0\]\[0\] was replaced"),
        (lambda t: setattr(t, "stages", [[linear(t.weight.device, 3.0)]]), r"stages\[0\]\[0\] was replaced"),
    ],
    ids=["parameter in a dict", "module in a list", "inner list", "outer list"],
)
def test_what_is_used_under_another_name_is_seen(device, change, words):
    def build() -> tuple[Callable, Tied]:
        tied = Tied(device)
        return tied, tied

    assert_seen(build, change, words, device)


# ---- What does not matter ----


def test_modules_that_the_code_does_not_name_may_change(device):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(device)

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return self.layer(x)

    def build() -> tuple[Callable, Layer]:
        layer = Layer()
        layer.trainer_of_it = Holder(nn.Sequential(nn.Dropout(), linear(device)))
        return layer, layer

    def change(layer: Layer) -> None:
        model = layer.trainer_of_it.module
        model.train(not model.training)
        model.append(nn.ReLU())
        hooked(model)

    assert_not_seen(build, change, device)


def test_hooks_on_a_module_that_the_code_does_not_name_do_not_refuse_the_capture(device):
    layer = linear(device)
    layer.owner = Holder(nn.Dropout())
    hooked(layer.owner.module)
    make_graphed_callables(layer, (batch(device),))


def test_hooks_of_a_module_that_is_named_but_not_called_do_not_matter(device):
    class Layer(nn.Module):
        def __init__(self, owner: nn.Module) -> None:
            super().__init__()
            self.layer, self.owner = linear(device), [owner]

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return self.layer(x) * self.owner[0].gain

    def build() -> tuple[Callable, nn.Module]:
        owner = nn.Identity()
        owner.gain = 2.0
        hooked(owner)
        return Layer(owner), owner

    assert_not_seen(build, hooked, device)
    assert_seen(build, lambda owner: setattr(owner, "gain", 3.0), r"gain of owner\[0\] changed from 2.0", device)


def test_containers_that_are_rebuilt_with_the_same_modules_go_on_replaying(device):
    def build() -> tuple[Callable, Tied]:
        tied = Tied(device)
        return tied, tied

    def change(tied: Tied) -> None:
        tied.table, tied.stages = dict(tied.table), [list(tied.stages[0])]
        tied.layer._parameters = dict(tied.layer._parameters)

    assert_not_seen(build, change, device)


def test_a_cache_of_tensors_may_grow(device):
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = {3: torch.ones(3, 1, device=device)}

        def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            if x.shape[0] not in self.cache:
                self.cache[x.shape[0]] = torch.ones(x.shape[0], 1, device=x.device)
            return x * self.cache[x.shape[0]]

    def build() -> tuple[Callable, Cached]:
        cached = Cached()
        return cached, cached

    graphed, _, twin, _ = both(build, device, on_mismatch="eager")
    with torch.no_grad():
        for call in (graphed, twin):
            call(torch.ones(5, 4, device=device))
    assert 5 in graphed.cache
    graphed.te_graph.reset()
    assert_not_seen(build, lambda cached: cached.cache.update({7: torch.ones(7, 1)}), device)
