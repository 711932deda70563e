"""Which layers graph_layers chooses, and what it says of arguments that it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, InTurn, Reading, batch
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("one_thread")


class Held(nn.Module):
    """Layers in attributes, a dictionary and a nested list, with a module between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()
        self.table = nn.ModuleDict({"a": Block()})
        self.lists = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()])])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        x = self.norm(self.left(x)) - self.right(x)
        x = self.table["a"](x)
        for some in self.lists:
            x = some[0](x)
        return x


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(count)))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:  # [n, 6]
        return self.blocks(x if other is None else x + other)


class TwoStacks(nn.Module):
    """An encoder and a decoder of one class, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(2), Stack(3)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return self.decoder(x, self.encoder(x))


def linears(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def stages() -> nn.Module:
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(6, 6))


CHOICES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "any container": (Held, None, ("left", "right", "table.a", "lists.0.0", "lists.1.0")),
    "outermost first": (stages, None, ("0", "1")),
    "chains of stacks that do not feed each other": (
        TwoStacks,
        None,
        ("encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1", "decoder.blocks.2"),
    ),
    "kernels where there is nothing else": (lambda: linears(3), None, ("0", "1", "2")),
    "exact name": (Held, "left", ("left",)),
    "names": (Held, ["left", "lists.*"], ("left", "lists.0.0", "lists.1.0")),
    "a container stands for its members": (Held, "lists", ("lists.0.0", "lists.1.0")),
    "class": (
        stages,
        nn.Linear,
        ("0.0.up", "0.0.down", "0.1.up", "0.1.down", "1.0.up", "1.0.down", "1.1.up", "1.1.down", "2"),
    ),
    "function": (Held, lambda name, module: name.endswith("t") and isinstance(module, Block), ("left", "right")),
}


@pytest.mark.parametrize("what", CHOICES)
def test_layers_are_chosen(what: str) -> None:
    make, layers, names = CHOICES[what]
    assert tg.graph_layers(make(), batch("cpu"), layers=layers).layers == names


def test_runs_inside_take_the_place_of_what_cannot_be_captured(device: str) -> None:
    class Printing(Stack):
        def forward(self, x: Tensor) -> Tensor:  # [n, 6]
            return super().forward(x) * (1.0 if x.sum().item() < 1e9 else 2.0)

    model = InTurn(Printing(2), Printing(2)).to(device)
    report = tg.graph_layers(model, batch(device))
    assert report.chains == tuple((f"layers.{n}.blocks.0", f"layers.{n}.blocks.1") for n in range(2))
    assert [*report.left_out] == ["layers.0", "layers.1"]


def in_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        tg.graph_layers(model, batch("cpu"))


def given(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: tg.graph_layers(model, batch("cpu"), **options)


BAD: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "model": (
        lambda model: tg.graph_layers(model.layers[0].forward, batch("cpu")),
        TypeError,
        "to be an nn.Module, got",
    ),
    "eval": (
        lambda model: tg.graph_layers(model.eval(), batch("cpu")),
        ValueError,
        r"eval mode: call model\.train\(\)",
    ),
    "no_grad": (in_no_grad, RuntimeError, r"called under torch\.no_grad"),
    "name": (
        given(layers="layer.0"),
        ValueError,
        r"got 'layer.0': perhaps 'layers.0'",
    ),
    "nothing chosen": (
        given(layers=nn.Conv2d),
        ValueError,
        "to choose modules of the model, got none",
    ),
    "layers": (
        given(layers=[3]),
        TypeError,
        "names, classes, or a function",
    ),
    "option": (given(colour=1), TypeError, "got an option 'colour'"),
    "value": (given(hooks=1), ValueError, "expected hooks in"),
    "step state": (given(step_state=1), TypeError, "to be a StepState"),
    "lazy": (
        lambda model: tg.graph_layers(nn.Sequential(model, nn.LazyLinear(3)), batch("cpu")),
        ValueError,
        "1.weight is not initialised",
    ),
    "parallel": (
        lambda model: tg.graph_layers(nn.DataParallel(model), batch("cpu")),
        TypeError,
        "DataParallel copies its module",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_named(what: str) -> None:
    call, kind, words = BAD[what]
    with pytest.raises(kind, match=words):
        call(InTurn(Block(), Reading()))


def test_what_is_graphed_already_is_refused_as_a_model_and_left_out_as_a_layer() -> None:
    model = InTurn(Block(), Block(), Block())
    tg.make_graphed_callables(model.layers[1], (batch("cpu").requires_grad_(),))
    report = tg.graph_layers(model, batch("cpu"), layers="layers.*")
    assert report.layers == ("layers.0", "layers.2")
    assert "is graphed already" in report.left_out["layers.1"]
    report.reset()
    model.layers[1].te_graph.reset()
    tg.make_graphed_callables(model, (batch("cpu"),))
    with pytest.raises(ValueError, match=r"model is graphed already: call model\.te_graph\.reset\(\)"):
        tg.graph_layers(model, batch("cpu"))
