"""Functions of torch that drop or clip gradients, which know ``.grad`` alone: ``main_grad`` is dropped with it, or they
are refused."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import Rank, ranks_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as bound_before
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

import te_graph as tg
from te_graph.flat import foreign_functions
from te_graph.testing import same_bits

BF16 = torch.bfloat16
ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 2), id="gloo-2")])


class Held(nn.Module):
    """A model inside of another, as DistributedDataParallel and torch.compile hold it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def mixed() -> nn.Sequential:
    """Gradients of the first layer lie in main_grad, those of the second in ``.grad``."""
    return nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.Linear(4, 4))


def backward(model: nn.Sequential, x: Tensor) -> None:  # [..., 4]
    model[1](model[0](x.to(BF16)).float()).square().sum().backward()


def gradients(model: nn.Sequential) -> list[Tensor]:
    return [one.main_grad if one.dtype == BF16 else one.grad for one in model.parameters()]


@pytest.mark.parametrize("holder", [lambda one: one, Held, torch.compile], ids=["model", "wrapper", "compiled"])
def test_zero_grad_of_a_module_drops_main_grads(holder: Callable[[nn.Module], nn.Module]) -> None:
    model, x = mixed(), torch.randn(3, 4)
    flat = tg.FlatParameters(model)
    backward(model, x)
    expected = [one.clone() for one in gradients(model)]
    holder(model).zero_grad()
    backward(model, x)
    assert all(same_bits(one, other) for one, other in zip(gradients(model), expected, strict=True))
    backward(model, x)
    assert same_bits(model[0].weight.main_grad, 2 * expected[0])
    flat.close()


def test_zero_grad_of_a_module_concerns_its_own_parameters_alone() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4, dtype=BF16) for _ in range(2))), torch.randn(3, 4, dtype=BF16)
    flat = tg.FlatParameters(model)
    model(x).sum().backward()
    kept = model[0].weight.main_grad.clone()
    model[1].zero_grad()
    optimizer = flat.optimizer(torch.optim.SGD, lr=1.0, weight_decay=1.0)
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.step()
    changed = [not same_bits(one.detach(), other) for one, other in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False] and same_bits(model[0].weight.main_grad, kept)
    flat.close()


def test_zero_grad_of_a_module_sets_main_grads_to_zero() -> None:
    """They are there then, and weight decay acts, as with ``.grad``; those that are missing stay so."""
    model, x = mixed(), torch.randn(3, 4)
    flat = tg.FlatParameters(model)
    model.zero_grad(set_to_none=False)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.5, weight_decay=1.0)
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.step()
    assert all(same_bits(one.detach(), other) for one, other in zip(model.parameters(), before, strict=True))
    backward(model, x)
    model.zero_grad(set_to_none=False)
    optimizer.step()
    for one, other in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(one.detach(), other / 2)
    flat.close()


def test_zero_grad_inside_a_graphed_step() -> None:
    model, x = nn.Linear(4, 4, dtype=BF16), torch.randn(3, 4, dtype=BF16)
    eager = copy.deepcopy(model)
    flats = [tg.FlatParameters(one) for one in (model, eager)]
    optimizers = [one.optimizer(torch.optim.SGD, lr=0.1) for one in flats]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        model.zero_grad()

    graphed = tg.graphed(step)
    for _ in range(5):
        for one, optimizer, run in zip((model, eager), optimizers, (graphed, step), strict=True):
            one(x).float().square().sum().backward()
            run(one, optimizer)
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert same_bits(one.detach(), other.detach())
            assert same_bits(one.main_grad, other.main_grad)
    assert graphed.info()["forward_replays"] > 0, graphed.info()
    for one in flats:
        one.close()


def test_zero_grad_of_other_modules_is_that_of_torch() -> None:
    flat = tg.FlatParameters(nn.Linear(2, 2, dtype=BF16))
    plain = nn.Linear(2, 2)
    plain.weight.main_grad = torch.ones(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    plain.zero_grad()
    assert plain.weight.grad is None and plain.weight.main_grad.eq(1).all()
    assert nn.Module.zero_grad.__name__ == "zero_grad"
    pickle.loads(pickle.dumps(plain)).zero_grad()
    plain = nn.Linear(2, 2)

    @torch.compile(backend="eager", fullgraph=True)
    def drop(x: Tensor) -> Tensor:
        plain.zero_grad()
        return x + 1

    drop(torch.ones(1))
    flat.close()


# Made before the first FlatParameters.
partials = [
    functools.partial(bound_before, max_norm=0.1),
    functools.partial(clip_grad_value_, clip_value=0.1),
    functools.partial(clip_grads_with_norm_, max_norm=0.1),
]


class Counting(nn.Linear):
    walks = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.walks += 1
        return super().parameters(recurse)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_a_module_goes_through_it_once(set_to_none: bool) -> None:
    """Which is what it costs; flat parameters are told from others on the way."""
    model, plain, x = Counting(4, 4, dtype=BF16), Counting(4, 4), torch.ones(3, 4)
    flat = tg.FlatParameters(model)
    for one in (model, plain):
        one(x.to(one.weight.dtype)).sum().backward()
        one.walks = 0
        one.zero_grad(set_to_none)
        assert one.walks == 1
    assert plain.weight.grad is None if set_to_none else plain.weight.grad.eq(0).all()
    model(x.to(BF16)).sum().backward()
    assert model.weight.main_grad.eq(3).all()
    plain._is_replica = True
    with pytest.warns(UserWarning, match="module created with nn.DataParallel"):
        plain.zero_grad(set_to_none)
    flat.close()


def test_a_zero_grad_that_another_library_has_put_there_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(nn.Module, "zero_grad", lambda self, set_to_none=True: seen.append(self))
    for name in ("_clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_"):
        monkeypatch.setattr(nn.utils.clip_grad, name, lambda parameters: None)
    foreign_functions.include_main_grads.__wrapped__()
    model = nn.Linear(4, 4, dtype=BF16)
    flat = tg.FlatParameters(model)
    for _ in range(2):
        model(torch.ones(3, 4, dtype=BF16)).sum().backward()
        assert model.weight.main_grad.eq(3).all()
        model.zero_grad()
    assert seen == [model, model]
    flat.close()


CLIPS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
    "clip_grad_norm_ bound before": lambda params: bound_before(parameters=params, max_norm=0.1),
    "clip_grad_norm_ in a partial": partials[0],
    "clip_grads_with_norm_": lambda params: torch.nn.utils.clip_grads_with_norm_(params, 0.1, torch.ones(())),
    "clip_grad_value_": lambda params: torch.nn.utils.clip_grad_value_(params, 0.1),
}
BY_NORM = [name for name in CLIPS if name.startswith("clip_grad_norm_")]


@pytest.mark.parametrize("name", CLIPS)
def test_clips_of_torch_do_not_pass_over_main_grads(name: str) -> None:
    """What they are given is a part of a FlatParameters, or, by value or a norm that is known, other gradients, too."""
    model, plain, x = mixed(), nn.Linear(4, 4), torch.ones(3, 4)
    flat = tg.FlatParameters(model)
    backward(model, x)
    plain(x).sum().backward()
    op = name.split()[0]
    message = rf"torch.nn.utils.{op}: gradients of flat parameters lie in main_grad.*te_graph.clip_grad_norm_\(flat"
    everything = () if op == "clip_grad_norm_" else (nn.ModuleList((model, plain)).parameters(),)
    for given in (model[0].parameters(), nn.ModuleList((model[0], plain)).parameters(), *everything):
        with pytest.raises(RuntimeError, match=message):
            CLIPS[name](given)
    for given in (model[1].parameters(), plain.weight):  # whose gradients are in .grad
        CLIPS[name](given)
    assert plain.weight.grad.abs().max() < 1
    flat.close()


@pytest.mark.parametrize("name", BY_NORM)
def test_clips_of_all_parameters_are_those_of_te_graph(name: str) -> None:
    """Also with frozen ones, and without those that have no gradient."""
    model, x = mixed(), torch.randn(3, 4)
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    flats = [tg.FlatParameters(one) for one in (model, twin)]
    for one in (model, twin):
        backward(one, x)
        one[1].bias.grad = None
    norm = CLIPS[name](one for one in model.parameters() if one is not model[1].bias)
    assert norm > 0.1 and same_bits(norm, tg.clip_grad_norm_(flats[1], 0.1))
    assert same_bits(model[0].weight.main_grad, twin[0].weight.main_grad)
    assert same_bits(model[1].weight.grad, twin[1].weight.grad) and model[1].bias.grad is None
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), norm_type=1.0) > 0
    for one in flats:
        one.zero_grad()
        one.close()


@pytest.mark.parametrize("name", BY_NORM)
def test_clips_of_all_parameters_have_others_beside_them(name: str) -> None:
    """As torch's, which does not ask whether a parameter requires a gradient."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one(x).square().sum().backward()
        one[0].requires_grad_(False)
        one[1].weight.grad = one[1].bias.grad = None
        one[1].to(BF16)
    flat = tg.FlatParameters([*model[1].parameters()])
    for one in (model, plain):
        one[1](torch.ones(3, 4, dtype=BF16)).float().sum().backward()
    norm, expected = CLIPS[name](model.parameters()), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0.0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = one.main_grad if one.dtype == BF16 else one.grad
        torch.testing.assert_close(grad, other.grad.float(), rtol=1e-2, atol=1e-4)
    flat.close()


def scenario_sharded_beside_others(rank: Rank) -> None:
    """A gradient of another parameter, which all ranks have, counts once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one(torch.ones(3, 64)).sum().backward()
        one[0].requires_grad_(False)
    flat = tg.FlatParameters(model, shard="optimizer")
    model[1](torch.ones(3, 64)).sum().backward()
    plain[1](torch.ones(3, 64)).sum().backward()
    norm, expected = (torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, plain))
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(tg.clip_grad_norm_(flat, 1.0), torch.nn.utils.clip_grad_norm_(plain[1].parameters(), 1))
    flat.close()


def test_clips_of_sharded_parameters_have_others_beside_them(ranks: Any) -> None:
    ranks.run(scenario_sharded_beside_others, 1)


def scenario_sharded(rank: Rank) -> None:
    """The norm is that of all ranks' parts."""
    torch.manual_seed(0)
    model, plain = nn.Linear(64, 64), nn.Linear(64, 64)
    plain.load_state_dict(model.state_dict())
    flat = tg.FlatParameters(model, shard="optimizer")
    for one in (model, plain):
        one(torch.ones(3, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="clip_grad_norm_: gradients of flat parameters are reduced on this rank in"):
        torch.nn.utils.clip_grad_norm_(model.weight, 0.1)
    norm, expected = (torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, plain))
    torch.testing.assert_close(norm, expected)
    flat.close()


def test_clips_of_torch_do_not_clip_by_a_part(ranks: Any) -> None:
    ranks.run(scenario_sharded, 1)


def test_clips_of_torch_are_compiled() -> None:
    flat = tg.FlatParameters(nn.Linear(2, 2, dtype=BF16))
    plain = nn.Linear(4, 4)
    plain(torch.ones(3, 4)).sum().backward()
    compiled = torch.compile(lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), backend="eager")
    norm = compiled()
    assert norm > 0.1 and plain.weight.grad.norm() <= 0.1
    flat.close()


def test_zeros_of_a_module_forget_what_was_reduced():
    """As those of the optimizer do; gradients are .grad here."""
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    model(x).sum().backward()
    with flat.no_sync():
        model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    assert model.weight.grad.eq(0.5).all()
    flat.close()


def test_what_torch_says_of_arguments_stays_so():
    flat = tg.FlatParameters(nn.Linear(4, 4, dtype=BF16))
    model = nn.Linear(4, 4)
    exhausted = model.parameters()
    list(exhausted)
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_(exhausted, 1.0)
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'grad'"):
        nn.utils.clip_grad_norm_(model.named_parameters(), 1.0)
    flat.close()


def test_clips_of_torch_are_known_by_name() -> None:
    """As for files, and for processes that are spawned."""
    flat = tg.FlatParameters(nn.Linear(2, 2, dtype=BF16))
    for partial in partials:
        assert pickle.loads(pickle.dumps(partial)).func is partial.func
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_):
        assert pickle.loads(pickle.dumps(clip)) is clip and copy.deepcopy(clip) is clip
    flat.close()


def test_a_clip_that_another_library_has_put_there_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def clip(parameters: Any, max_norm: float) -> float:
        return max_norm

    monkeypatch.setattr(nn.utils.clip_grad, "clip_grad_norm_", clip)
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        monkeypatch.setattr(nn.utils.clip_grad, name, lambda parameters: None)
    monkeypatch.setattr(nn.Module, "zero_grad", nn.Module.zero_grad)
    foreign_functions.include_main_grads.__wrapped__()
    model = nn.Linear(2, 2, dtype=BF16)
    flat = tg.FlatParameters(model)
    backward(nn.Sequential(model, nn.Identity()), torch.ones(3, 2))
    assert nn.utils.clip_grad.clip_grad_norm_([nn.Parameter(torch.ones(2))], 0.5) == 0.5
    assert isinstance(nn.utils.clip_grad.clip_grad_norm_(model.parameters(), 0.5), Tensor)
    flat.close()
