"""Optimizers of flat parameters beside those of torch: orders, settings, several of them, what saving leaves alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat_models import assert_equal, assert_same
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import same_bits


class TwoDtypes(nn.Module):
    """Layers of bf16 and float32 in turn, all of one shape."""

    def __init__(self, device: str, width: int = 6) -> None:
        super().__init__()
        dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, device=device, dtype=one) for one in dtypes)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        model(torch.randn(8, 6, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_states_of_the_class_itself_reach_the_parameters_they_are_of(device: str) -> None:
    plain = TwoDtypes(device)
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, given, device)
    model = copy.deepcopy(plain)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.AdamW, lr=1e-2)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
    optimizer.load_state_dict(given.state_dict())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(optimizer.state[mine]["exp_avg"].flatten(), given.state[other]["exp_avg"].float().flatten())
    back = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    back.load_state_dict(optimizer.state_dict())
    for one, other in zip(back.state.values(), given.state.values(), strict=True):
        assert same_bits(one["exp_avg_sq"], other["exp_avg_sq"])


def test_states_of_other_parameters_are_refused_before_anything_is_loaded(device: str) -> None:
    model, other = (nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1)).to(device).bfloat16() for width in (4, 5))
    optimizers = [tg.FlatParameters(one).optimizer(torch.optim.AdamW, lr=1e-2) for one in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        one(torch.randn(3, 6, device=device).bfloat16()).float().sum().backward()
        optimizer.step()
    before = copy.deepcopy(optimizers[0].state_dict())
    with pytest.raises(ValueError, match=r"exp_avg of 0.weight to have the shape \[4, 6\], got \[5, 6\]"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert_equal(optimizers[0].state_dict(), before)


def test_a_master_of_another_shape_is_no_row_of_it(device: str) -> None:
    model = nn.Linear(6, 6).to(device).bfloat16()
    optimizer = tg.FlatParameters(model).optimizer(torch.optim.SGD, lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"master": torch.ones(6, device=device)}}
    with pytest.raises(ValueError, match=r"master of weight to have the shape \[6, 6\], got \[6\]"):
        optimizer.load_state_dict(state)


class Counting(torch.optim.Optimizer):
    """Divides its rate by a number that it counts up in its groups; another one that is no default is there, too."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = group.get("seen", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"] / group["seen"])


def test_what_an_optimizer_counts_in_its_groups_is_kept_and_saved(device: str) -> None:
    plain = nn.Linear(6, 6).to(device)
    model = copy.deepcopy(plain)
    flat = tg.FlatParameters(model)
    mine, given = flat.optimizer(Counting, lr=0.1, elementwise=True), Counting(plain.parameters(), 0.1)
    for one, optimizer in ((model, mine), (plain, given)):
        train(one, optimizer, device)
        assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["seen"]) == (3, 3)
    resumed = flat.optimizer(Counting, lr=0.1, elementwise=True)
    resumed.load_state_dict(mine.state_dict())
    train(model, resumed, device)
    train(plain, given, device)
    assert_same(model, plain)


@pytest.mark.parametrize("when", ["before the first step", "between steps", "before the backward"])
def test_a_copy_of_a_model_on_the_same_cpu_is_put_back(when: str) -> None:
    """``.to("cpu:0")`` copies what is on "cpu", as accelerate calls it, though nothing changes."""
    model = TwoDtypes("cpu")
    twin = copy.deepcopy(model)
    flats = [tg.FlatParameters(one) for one in (model, twin)]
    optimizers = [one.optimizer(torch.optim.AdamW, lr=1e-2) for one in flats]
    places = [one.data_ptr() for one in model.parameters()]
    for step in range(3):
        x = torch.randn(8, 6)
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            is_moved = one is model and step == (0 if when == "before the first step" else 1)
            if is_moved and when != "before the backward":
                one.to("cpu:0")
            loss = one(x).square().mean()
            if is_moved and when == "before the backward":
                one.to("cpu:0")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [one.data_ptr() for one in model.parameters()] == places
        assert_same(model, twin)
        assert_equal(*(one.state_dict() for one in optimizers))
    model.to("cpu:0")
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"weight has moved to other memory.*\.to\('cpu:0'\) copies"):
        model(torch.randn(8, 6)).sum().backward()
    for one in flats:
        one.close()


def test_frozen_parameters_are_passed_over(device: str) -> None:
    """As by torch's optimizers: they are in the groups, and have no state."""
    plain = TwoDtypes(device)
    for layer in plain.layers[:2]:
        layer.requires_grad_(False)
    model = copy.deepcopy(plain)
    flat = tg.FlatParameters(model, grad_dtype=torch.float32)
    groups = [[{"params": list(layer.parameters())} for layer in one.layers] for one in (model, plain)]
    optimizer = flat.optimizer(torch.optim.AdamW, groups[0], lr=1e-2)
    train(model, optimizer, device)
    assert [id(one) for group in optimizer.param_groups for one in group["params"]] == list(map(id, model.parameters()))
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [2, 3] and not optimizer.state[model.layers[0].weight]
    torch.optim.AdamW(groups[1], lr=1e-2).load_state_dict(state)
    resumed = flat.optimizer(torch.optim.AdamW, groups[0], lr=1e-2)
    resumed.load_state_dict(state)
    assert_equal(resumed.state_dict(), state)
    resumed.zero_grad(set_to_none=False)
    assert [group["params"] for group in optimizer.sharded().state_dict()["param_groups"]] == [
        [],
        [],
        ["layers.2.weight"],
        ["layers.3.weight"],
    ]
    flat.close()


def test_a_step_moves_on_what_it_steps_alone(device: str) -> None:
    """A backward may follow through parameters that another optimizer of the same FlatParameters steps."""
    plain = nn.ModuleDict({name: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) for name in "ab"}).to(
        device
    )
    model = copy.deepcopy(plain)
    flat = tg.FlatParameters(model)
    for one, make in ((model, flat.optimizer), (plain, lambda cls, params, **options: cls(params, **options))):
        optimizers = [make(torch.optim.Adam, list(one[name].parameters()), lr=0.01) for name in "ab"]
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            x = torch.randn(4, 6, generator=generator).to(device)
            losses = [one[name](x).square().mean() for name in "ab"]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same(model, plain)
    before = {name: one._version for name, one in model.named_parameters()}
    loss = model["a"](torch.randn(4, 6, device=device)).sum()
    loss.backward()
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
    optimizer.step()
    moved = {name for name, one in model.named_parameters() if one._version != before[name]}
    assert moved == {name for name, _ in model.named_parameters() if name.startswith("a.")}


def test_saving_leaves_masters_as_they_are(device: str) -> None:
    """Also while other values, such as averages, stand in the parameters."""

    def masters(saves: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(6, 6).to(device).bfloat16()
        optimizer = tg.FlatParameters(model).optimizer(torch.optim.AdamW, lr=1e-4)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(3, 6, generator=generator).to(device).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [one.detach().clone() for one in model.parameters()]
            with torch.no_grad():
                for one in model.parameters():
                    one.mul_(0.5)
            if saves:
                saved = optimizer.state_dict()["state"]
                assert all(same_bits(saved[n]["master"].bfloat16(), one) for n, one in enumerate(model.parameters()))
                optimizer.sharded().state_dict()
            with torch.no_grad():
                for one, values in zip(model.parameters(), kept, strict=True):
                    one.copy_(values)
        return [optimizer.state[one]["master"].clone() for one in model.parameters()]

    for found, expected in zip(masters(True), masters(False), strict=True):
        assert same_bits(found, expected)


@pytest.mark.parametrize("name", ["grad_dtype", "reduce_dtype", "shard", "gradient_scale"])
def test_settings_are_given_when_it_is_made(name: str) -> None:
    flat = tg.FlatParameters(nn.Linear(2, 2))
    with pytest.raises(
        AttributeError, match=rf"FlatParameters.{name}: expected it to be given when this is made, got 2"
    ):
        setattr(flat, name, 2.0)
    assert flat.gradient_scale == 1.0 and flat.shard == "none"


def test_a_compiled_step_is_the_step(device: str) -> None:
    plain = nn.Linear(6, 6).to(device)
    model = copy.deepcopy(plain)
    mine, given = (
        tg.FlatParameters(model).optimizer(torch.optim.AdamW, lr=0.1),
        torch.optim.AdamW(plain.parameters(), 0.1),
    )
    compiled = torch.compile(mine.step, backend="eager")
    for step in range(3):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).to(device)
        for one, optimizer, take in ((model, mine, compiled), (plain, given, given.step)):
            one(x).square().mean().backward()
            take()
            optimizer.zero_grad()
    assert_same(model, plain)


def test_a_foreign_step_with_a_closure_is_refused_by_its_gradients(device: str) -> None:
    model = nn.Linear(6, 6).to(device).bfloat16()
    flat = tg.FlatParameters(model)
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = model(torch.ones(3, 6, device=device).bfloat16()).float().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"SGD.step: gradients of flat parameters lie in main_grad"):
        foreign.step(closure)
    flat.zero_grad()


COMPILED = """
import torch, torch._dynamo.testing
import te_graph

class Teacher(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * 2

teacher, counter = Teacher(), torch._dynamo.testing.CompileCounter()
teacher.compile(backend=counter)
assert teacher(torch.ones(3)).tolist() == [2.0] * 3
print(counter.frame_count, counter.op_count)
"""


def test_code_of_torch_is_compiled_as_without_te_graph() -> None:
    """What torch.compile leaves alone is te_graph's own code, not torch's decorators around it, which all code has."""
    found = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        for program in (COMPILED, COMPILED.replace("import te_graph\n", ""))
    ]
    assert found[0] == found[1] != "0 0\n"


def test_states_that_were_loaded_before_the_first_step_are_none():
    """As accelerate loads an optimizer's own ones: torch.distributed.checkpoint has yet to make them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make() -> tuple[nn.Module, tg.FlatParameters, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        flat = tg.FlatParameters(model)
        optimizer = flat.optimizer(torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(optimizer.state_dict())
        return model, flat, optimizer

    def train(model: nn.Module, optimizer: Any) -> None:
        for number in range(2):
            model(torch.ones(3, 4) * (number + 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, flat, optimizer = make()
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    again, other, resumed = make()
    _, empty = get_state_dict(again, resumed)
    assert set(empty["state"]) == set(states["state"])
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=copy.deepcopy(states))
    train(model, optimizer), train(again, resumed)
    assert same_bits(model.weight, again.weight)
    flat.close(), other.close()


def test_a_state_dict_is_of_one_moment():
    model = nn.Linear(4, 4)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    before = copy.deepcopy(states)
    optimizer.step()
    for number, state in states["state"].items():
        for name, value in state.items():
            assert same_bits(value, before["state"][number][name]), name
    flat.close()


def test_states_of_frozen_parameters_are_kept():
    """Of a stage in which they were trained, for one in which they are again."""

    def stage(model: nn.Module, states: dict[str, Any] | None, is_flat: bool, is_frozen: bool) -> dict[str, Any]:
        model[0].requires_grad_(not is_frozen)
        flat = tg.FlatParameters(model) if is_flat else None
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=0.1)
            if flat is None
            else flat.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        )
        if states is not None:
            optimizer.load_state_dict(states)
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = copy.deepcopy(optimizer.state_dict())
        if flat is not None:
            flat.close()
        return found

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))]
    models.append(copy.deepcopy(models[0]))
    for model, is_flat in zip(models, (False, True), strict=True):
        states = None
        for is_frozen in (False, True, False):
            states = stage(model, states, is_flat, is_frozen)
    assert_same(*models)
