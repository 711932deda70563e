"""graph_layers: what it captures trains as eager execution does, bit for bit, in whatever way a batch is given."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from blocks import Block, InTurn, Masked, Reading, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import eager_copy, gradients_of

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")

Loss = Callable[[nn.Module, int], Tensor]
MADE: SimpleQueue[weakref.ref[Tensor]] = SimpleQueue()  # which no guard looks at


def graphed_and_twin(model: nn.Module, *batch: Any, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    twin = eager_copy(model)
    return model, twin, tg.graph_layers(model, *batch, **options)


def assert_train_alike(model: nn.Module, twin: nn.Module, loss: Loss, steps: int = 3) -> None:
    """Losses, gradients and weights of both are the same in each step."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for step in range(steps):
        seen = []
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            torch.manual_seed(step)
            value = loss(one, step)
            value.backward()
            seen.append([value.detach(), gradients_of([*one.parameters()])])
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise_equal(*seen)
    assert_bitwise_equal(dict(model.state_dict()), dict(twin.state_dict()))


def replays(model: nn.Module, names: tuple[str, ...]) -> list[int]:
    return [model.get_submodule(name).te_graph.info()["forward_replays"] for name in names]


GIVEN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "tensor": lambda model, x: x,
    "tuple": lambda model, x: (x,),
    "dictionary": lambda model, x: {"x": x},
    "mapping": lambda model, x: collections.UserDict(x=x),
    "forward": lambda model, x: lambda: model(x).square().mean(),
    "forward and backward": lambda model, x: lambda: model(x).square().mean().backward(),
}


@pytest.mark.parametrize("way", GIVEN)
def test_a_batch_is_given_as_it_says(device: str, way: str) -> None:
    model = InTurn(Block(), Block(), Block()).to(device)
    model, twin, report = graphed_and_twin(model, GIVEN[way](model, batch(device)))
    assert report.layers == ("layers.0", "layers.1", "layers.2")
    assert report.chains == (report.layers,)
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())
    assert replays(model, report.layers) == [3, 3, 3]


def test_other_lengths_and_masks_are_captured_as_they_come_and_evaluation_is_eager(device: str) -> None:
    def inputs(rows: int) -> dict[str, Any]:
        return {"x": batch(device, rows), "mask": torch.rand(rows, 1, device=device) < 0.3}

    model, twin, report = graphed_and_twin(InTurn(Masked(), Masked()).to(device), inputs(5))
    assert_train_alike(model, twin, lambda one, step: one(**inputs(5 - step % 2), scale=1.0).square().mean())
    asked = inputs(5)
    with torch.no_grad():
        assert_bitwise_equal(*(one.eval()(**asked) for one in (model, twin)))
    infos = [model.get_submodule(name).te_graph.info() for name in report.layers]
    assert [info["recaptures"] for info in infos] == [1, 1]
    assert [info["eager_calls"] for info in infos] == 2 * [{"called in eval mode, captured in training mode": 1}]


class Autocast(InTurn):
    """A part of it under autocast, one layer not."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.layers[1](self.layers[0](self.first(x)))
            with torch.autocast(x.device.type, enabled=False):
                x = self.layers[2](x.float())
            return self.last(self.layers[3](x))


@pytest.mark.parametrize("caches", [True, False])
def test_each_layer_is_captured_under_the_autocast_of_its_call(device: str, caches: bool) -> None:
    def loss(model: nn.Module, _: int) -> Tensor:
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16, cache_enabled=caches):
            return model(batch(device)).float().square().mean()

    model = Autocast(*(Block() for _ in range(4))).to(device)
    model, twin, report = graphed_and_twin(model, lambda: loss(model, 0))
    assert len(report.layers) == 4
    assert_train_alike(model, twin, loss)
    assert replays(model, report.layers) == [3, 3, 3, 3]
    assert not torch.is_autocast_enabled(device)


class Parts(InTurn):
    """One layer under no_grad, one in a checkpoint, one twice, one not at all."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        with torch.no_grad():
            x = self.layers[0](x)
        x = self.layers[1](self.first(x))
        x = checkpoint(self.layers[2], x, use_reentrant=False)
        x = self.layers[3](self.layers[3](x))
        return self.last(self.layers[4](x))


def test_what_cannot_be_captured_stays_eager_and_the_report_says_why(device: str) -> None:
    model = Parts(Block(), Block(), Block(), Block(), Reading(), Block()).to(device)
    layers = (Block, Reading)
    model, twin, report = graphed_and_twin(model, lambda: model(batch(device)).sum().backward(), layers=layers)
    assert report.layers == ("layers.0", "layers.1")
    assert report.graphs == 3  # without gradients there is no backward
    assert report.bytes > 0
    assert report.seconds > 0
    reasons = report.left_out
    assert "activation checkpoint around it" in reasons["layers.2"]
    assert reasons["layers.3"] == "the step calls it 2 times"
    assert ".item()" in reasons["layers.4"]
    assert reasons["layers.5"] == "the step does not call it"
    assert len(reasons) == 4
    for text in (str(report), repr(report)):
        assert text.startswith("2 layers graphed: 3 graphs, ")
        assert "eager: layers.3: the step calls it 2 times" in text
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())
    report.reset()
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean(), steps=1)


class Making(Reading):
    """Cannot be captured, and tells what it has computed."""

    def __init__(self, in_checkpoint: bool) -> None:
        super().__init__()
        self.in_checkpoint = in_checkpoint

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        inner = x + 1
        MADE.put(weakref.ref(inner))
        if not self.in_checkpoint:
            return super().forward(inner)
        return checkpoint(super().forward, inner, use_reentrant=False)


@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_what_cannot_be_captured_leaves_nothing_behind(device: str, in_checkpoint: bool, chain: bool) -> None:
    """Not what its code computed, nor a checkpoint's hooks, which would see what the next step saves."""
    model = InTurn(Block(), Block(), Making(in_checkpoint), Making(in_checkpoint)).to(device)
    gc.disable()
    try:
        model, twin, report = graphed_and_twin(model, batch(device), layers="layers.*", chain=chain)
        assert MADE.qsize() > 2 and all(MADE.get()() is None for _ in range(MADE.qsize()))
    finally:
        gc.enable()
    assert [*report.left_out] == ["layers.2", "layers.3"]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())
    while not MADE.empty():
        MADE.get()


def test_a_bad_layer_in_a_chain_loses_itself_alone(device: str) -> None:
    layers = [Block(), Block(), Reading(), Block(), Block()]
    model, twin, report = graphed_and_twin(InTurn(*layers).to(device), batch(device), layers="layers.*")
    assert report.chains == (("layers.0", "layers.1"), ("layers.3", "layers.4"))
    assert [*report.left_out] == ["layers.2"]
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())


def test_when_all_of_a_kind_are_bad_the_first_few_speak_for_them(device: str) -> None:
    model = InTurn(*(Reading() for _ in range(6))).to(device)
    with pytest.raises(RuntimeError, match=r"could not capture a layer: layers\.\d and 5 more: .*\.item\(\)"):
        tg.graph_layers(model, batch(device))
    assert not any(hasattr(module, "te_graph") for module in model.modules())


class Tied(InTurn):
    """Weights of the first layer are used outside, too."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        x = self.layers[1](self.layers[0](x))
        return nn.functional.linear(x, self.layers[0].up.weight)


def test_a_weight_that_is_used_outside_gets_its_gradient_from_autograd(device: str) -> None:
    model = Tied(Block(), Block()).to(device)
    model, twin, _ = graphed_and_twin(model, batch(device))
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())


def test_a_weight_that_autocast_casts_once_for_inside_and_outside_leaves_its_layer_eager(device: str) -> None:
    def loss(model: nn.Module, _: int) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(batch(device)).float().square().mean()

    model = Tied(Block(), Block()).to(device)
    model, twin, report = graphed_and_twin(model, lambda: loss(model, 0))
    assert report.layers == ("layers.1",)
    assert "up.weight is used outside as well, and autocast casts it once" in report.left_out["layers.0"]
    assert_train_alike(model, twin, loss)


class Uses(InTurn):
    """A weight twice inside."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return self.layers[1](self.layers[0](x))


class Double(Block):
    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return super().forward(super().forward(x))


def test_gradients_of_several_uses_inside_and_of_one_outside_leave_the_layer_eager(device: str) -> None:
    def loss(model: nn.Module, _: int) -> Tensor:
        return model(batch(device)).square().mean() + sum(p.square().sum() for p in model.layers[0].parameters())

    model = Uses(Double(), Double()).to(device)
    model, twin, report = graphed_and_twin(model, lambda: loss(model, 0))
    assert report.layers == ("layers.1",)
    assert "up.weight is used several times inside, and outside as well" in report.left_out["layers.0"]
    assert_train_alike(model, twin, loss)


class Odd(InTurn):
    """One tensor twice, a nest of results, positions, a mask of its own for each."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, x, {"at": torch.arange(len(x), device=x.device) % (number + 1)})
            x = x + kept["square"].mean()
        return self.last(x)


class Nested(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 6)

    def forward(self, x: Tensor, same: Tensor, where: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        y = super().forward(x) * same + self.table(where["at"])
        return y, {"square": y.square(), "is_same": torch.full((), float(x is same), device=x.device)}


def test_arguments_and_results_are_nests_and_values_of_integers_are_kept(device: str) -> None:
    model, twin, report = graphed_and_twin(Odd(Nested(), Nested()).to(device), batch(device))
    assert report.layers == ("layers.0", "layers.1")
    assert report.chains == ()
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())
    assert replays(model, report.layers) == [3, 3]


def test_wrappers_are_seen_through_and_go_on(device: str) -> None:
    model = InTurn(Block(), Block()).to(device)
    twin = eager_copy(model)
    compiled = torch.compile(model, backend="eager")
    assert tg.graph_layers(compiled, batch(device)).layers == ("layers.0", "layers.1")
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean())


def test_with_te_graph_disabled_nothing_is_captured_and_all_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    model, twin, report = graphed_and_twin(InTurn(Block(), Block()).to(device), batch(device))
    assert (report.layers, report.graphs) == (("layers.0", "layers.1"), 0)
    assert_train_alike(model, twin, lambda one, _: one(batch(device)).square().mean(), steps=1)
