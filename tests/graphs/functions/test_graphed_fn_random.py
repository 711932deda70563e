"""graphed(): random programs that change what a function uses between its calls. The reference: a twin left eager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
STEPS = 60


class World:
    """What the function uses. Two of them, changed alike, hold equal values in memory of their own."""

    decay = 1.0

    def __init__(self, device: str) -> None:
        self.device = device
        self.values = [torch.ones(3, device=device) for _ in range(3)]
        self.table = {"a": torch.ones(3, device=device), "b": torch.ones(3, device=device)}
        self.parameters = [nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.125, momentum=0.5)
        self.gain, self.flag = 1.0, True
        self.total = torch.zeros(3, device=device)

    def update(self, extra: list[Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Accumulate and step; returns the new total and a gradient."""
        weight = 0.5
        for tensor in [*self.values, *extra]:
            self.total.mul_(0.5).add_(tensor, alpha=weight * self.gain * scale * self.decay)
            weight = -weight
        for name, tensor in self.table.items():
            self.total.add_(tensor, alpha=0.25 if name < "c" else 0.125)
        if self.flag:
            self.optimizer.step()
        return self.total * 2, self.parameters[0].grad

    def everything(self) -> list[Tensor | None]:
        states = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        gradients = [parameter.grad for parameter in self.parameters]
        parameters = [parameter.detach() for parameter in self.parameters]
        return [self.total, *self.values, *self.table.values(), *parameters, *gradients, *states]


def _fill(tensor: Tensor | None, value: float) -> None:
    if tensor is not None:
        tensor.fill_(value)


def _replace(tensors: list, index: int, device: str, value: float) -> None:
    tensors[index % len(tensors)] = torch.full((3,), value, device=device)


# Each takes a world, a number and a value; applied to both worlds.
CHANGES: list[Callable[[World, int, float], object]] = [
    lambda w, i, v: w.values[i % len(w.values)].fill_(v),
    lambda w, i, v: _replace(w.values, i, w.device, v),
    lambda w, i, v: w.values.append(torch.full((3,), v, device=w.device)) if len(w.values) < 5 else w.values.pop(),
    lambda w, i, v: w.values.reverse(),
    lambda w, i, v: w.values.__setitem__(0, w.values[-1]),
    lambda w, i, v: setattr(w, "values", list(w.values)),
    lambda w, i, v: w.table.update(a=w.table.pop("a")),
    lambda w, i, v: w.table.update({"c": w.table.pop("b")} if "b" in w.table else {"b": w.table.pop("c")}),
    lambda w, i, v: setattr(w, "gain", float(i % 3)),
    lambda w, i, v: setattr(w, "decay", 0.5 if w.decay == 1.0 else 1.0),
    lambda w, i, v: setattr(w, "flag", not w.flag),
    lambda w, i, v: setattr(w.parameters[i % 3], "grad", torch.full((3,), v, device=w.device)),
    lambda w, i, v: setattr(w.parameters[i % 3], "grad", None),
    lambda w, i, v: _fill(w.parameters[i % 3].grad, v),
    lambda w, i, v: w.parameters[i % 3].data.fill_(v),
    lambda w, i, v: setattr(w.parameters[i % 3], "data", torch.full((3,), v, device=w.device)),
    lambda w, i, v: w.optimizer.param_groups[0].update(lr=0.25 if w.optimizer.param_groups[0]["lr"] < 0.2 else 0.125),
    lambda w, i, v: w.optimizer.state.clear() if i % 7 == 0 else None,
    lambda w, i, v: w.optimizer.load_state_dict(w.optimizer.state_dict()) if i % 7 == 0 else None,
    lambda w, i, v: setattr(w, "total", w.total.clone()) if i % 5 == 0 else w.total.zero_(),
]


@pytest.mark.parametrize("on_mismatch", ["capture", "eager"])
@pytest.mark.parametrize("number", range(2))
def test_any_order_of_calls_and_changes_equals_eager(device: str, number: int, on_mismatch: str) -> None:
    chance = random.Random(number)
    worlds = [World(device), World(device)]
    update = graphed(worlds[0].update, on_mismatch=on_mismatch)
    extras = [[torch.ones(3, device=device) for _ in range(2)] for _ in worlds]
    with torch.no_grad():
        for _ in range(STEPS):
            # Several calls in a row, so that what was changed is captured and replayed, too.
            for _ in range(chance.choice([1, 2, 2, 3])):
                scale = chance.choice([1.0, 1.0, 1.0, 2.0])
                count = chance.choice([2, 2, 1])
                results = [
                    call(extra[:count], scale) for call, extra in zip((update, worlds[1].update), extras, strict=True)
                ]
                assert_bitwise_equal(results[0], results[1])
                assert_bitwise_equal(worlds[0].everything(), worlds[1].everything())
            if chance.random() < 0.6:
                change, index, value = chance.choice(CHANGES), chance.randrange(21), chance.random()
                for world in worlds:
                    change(world, index, value)
    info = update.info()
    assert info["forward_replays"] > (STEPS // 5 if on_mismatch == "capture" else 0), info
