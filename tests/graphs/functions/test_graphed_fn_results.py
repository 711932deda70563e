"""graphed(): what its results are to autograd, gradients after a refusal, and copies of what is graphed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import threading
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequences import called, counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def double(x: Tensor) -> Tensor:
    return x * 2


@graphed
def triple(x: Tensor) -> Tensor:
    return x * 3


class Owner:
    factor = 4.0

    @graphed
    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_autograd_is_told_that_a_saved_result_was_overwritten(device: str) -> None:
    x, weight = torch.ones(3, device=device), torch.ones(3, device=device, requires_grad=True)
    doubled = graphed(double)
    called(doubled, 3, x)
    result = doubled(x)
    loss = (result * weight).sum()
    version = result._version
    x.fill_(100.0)
    doubled(x)
    assert result._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_among_the_results_share_their_version(device: str) -> None:
    x = torch.ones(3, device=device)
    both = graphed(lambda t: (y := t * 2, y[1:], y))
    called(both, 2, x)
    whole, rest, again = both(x)
    assert whole is again
    version = rest._version
    whole.add_(1)
    assert rest._version > version
    assert rest.data_ptr() == whole[1:].data_ptr()


def test_what_a_user_does_to_a_result_is_gone_at_the_next_call(device: str) -> None:
    x, doubled = torch.ones(3, device=device), graphed(double)
    for _ in range(5):
        result = doubled(x)
        assert not result.requires_grad and result.grad is None and not hasattr(result, "tag")
        result.tag = 1
        (result.requires_grad_() * 3).sum().backward()
        assert_bitwise_equal(result.grad, torch.full_like(x, 3))


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_refused_backward_leaves_the_gradients(device: str, is_reached: bool) -> None:
    module, x = nn.Linear(2, 2, device=device), torch.ones(1, 2, device=device)
    twin, event = copy.deepcopy(module), threading.Event()
    event.module = module  # where it is not looked for

    def step(t: Tensor) -> float:
        loss = (module if is_reached else event.module)(t).sum()
        loss.backward()
        return loss.item()  # refused

    replayed = graphed(step)
    assert replayed(x) == pytest.approx(twin(x).sum().item())
    twin(x).sum().backward()
    assert_bitwise_equal([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    before = [p.grad for p in module.parameters()]
    with pytest.raises(CaptureError):
        replayed(x)
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))
    assert_bitwise_equal(before, [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_backward_inside_a_callable_is_refused_and_leaves_the_gradients(device: str, has_grad: bool) -> None:
    module = nn.Linear(2, 2, device=device)
    if has_grad:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)

    def step(x: Tensor) -> Tensor:
        loss = module(x).sum()
        loss.backward()
        return loss.detach()

    before = [p.grad for p in module.parameters()]
    with pytest.raises(RuntimeError, match="step: "):
        make_graphed_callables(step, (torch.ones(1, 2, device=device),))
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))
    if has_grad:
        assert_bitwise_equal(before, [torch.full_like(grad, 3.0) for grad in before])


def test_what_holds_a_graphed_function_can_be_copied_and_saved() -> None:
    x = torch.ones(2)
    for function, wanted in ((graphed(double), x * 2), (triple, x * 3)):
        called(function, 3, x)
        holder = nn.Linear(2, 2)
        holder.function = function
        file = io.BytesIO()
        torch.save(holder, file)
        file.seek(0)
        for other in (
            copy.deepcopy(holder),
            copy.copy(holder),
            pickle.loads(pickle.dumps(holder)),
            torch.load(file, weights_only=False),
        ):
            assert_bitwise_equal(called(other.function, 3, x), wanted)
    made = copy.deepcopy(graphed(double, on_mismatch="raise"))
    assert counts(made) == (0, 0, 0, 0)
    called(made, 2, x)
    with pytest.raises(RuntimeError, match="argument 0 moved"):
        made(x.clone())


def test_copies_of_methods_are_of_the_copy() -> None:
    x, owner = torch.ones(2), Owner()
    owner.method = graphed(owner.__class__.scale.__wrapped__.__get__(owner))
    called(owner.method, 3, x)
    other = copy.deepcopy(owner)
    other.factor = 5.0
    assert_bitwise_equal(
        (called(other.method, 3, x), called(other.scale, 3, x), owner.method(x)), (x * 5, x * 5, x * 4)
    )
    assert_bitwise_equal(pickle.loads(pickle.dumps(owner.scale))(x), x * 4)


@dataclasses.dataclass
class Pair:
    one: Tensor
    scale: float


def test_a_result_that_is_an_argument_or_in_reach_is_that_object(device: str) -> None:
    held, config = {"a": torch.ones(3, device=device)}, Pair(torch.ones(3, device=device), 2.0)

    def step(given: dict[str, Tensor], x: Tensor) -> tuple:
        return given, [held, config], x * config.scale, given

    replayed, given, x = graphed(step), {"b": torch.ones(3, device=device)}, torch.ones(3, device=device)
    for _ in range(4):
        first, (second, third), product, again = replayed(given, x)
        assert first is given and again is given and second is held and third is config
        assert_bitwise_equal(product, x * 2)
    assert counts(replayed) == (1, 3, 0, 1)
    other = dict(given)
    assert replayed(other, x)[0] is other


def test_a_result_on_another_device_than_a_gpu_or_the_cpu_is_refused_by_name() -> None:
    replayed = graphed(lambda: torch.ones(3, device="meta"))
    assert replayed().is_meta
    with pytest.raises(CaptureError, match=r"one GPU, got some on .*meta"):
        replayed()


def test_a_new_container_twice_is_one_and_one_inside_is_itself() -> None:
    table = {"inner": [1, 2]}

    def step(x: Tensor) -> tuple:
        made = [x * 2]
        return made, made, table["inner"]

    replayed, x = graphed(step), torch.ones(2)
    called(replayed, 2, x)
    first, second, third = replayed(x)
    assert first is second
    assert third is table["inner"]


@dataclasses.dataclass
class Report:
    loss: Tensor  # []
    accuracy: Tensor  # []

    def __post_init__(self) -> None:
        self.before = 0.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Tensor  # []
    accuracy: Tensor  # []


class Table(dict):
    pass


def _with_attributes(obj: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


ORDERED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a namespace": lambda loss, accuracy: SimpleNamespace(loss=loss, accuracy=accuracy, before=0.5),
    "a dataclass": Report,
    "a frozen dataclass": Frozen,
    "a derived dictionary": lambda loss, accuracy: _with_attributes(Table(z=1, a=2), loss=loss, accuracy=accuracy),
    "a partial": lambda loss, accuracy: _with_attributes(functools.partial(double), loss=loss, accuracy=accuracy),
    "a dictionary of the user's": lambda loss, accuracy: _with_attributes(UserDict(z=1), loss=loss, accuracy=accuracy),
}


@pytest.mark.parametrize("name", ORDERED)
def test_attributes_of_results_come_in_the_order_of_eager_execution(name: str, device: str) -> None:
    def step(x: Tensor) -> Any:  # [3]
        return ORDERED[name](x.sum(), x.mean())

    replayed, x = graphed(step), torch.ones(3, device=device)
    expected = [*vars(step(x))]
    for _ in range(4):
        assert [*vars(replayed(x))] == expected
    assert counts(replayed)[1] == 3
    callable_ = make_graphed_callables(step, (x,))
    assert [*vars(callable_(x))] == expected


def test_attributes_of_arguments_may_come_in_any_order(device: str) -> None:
    x = torch.ones(3, device=device)
    callable_ = make_graphed_callables(lambda given: given.x * given.by, (SimpleNamespace(x=x, by=2.0),))
    assert_bitwise_equal(callable_(SimpleNamespace(by=2.0, x=x)), x * 2)
    assert callable_.te_graph.info()["forward_replays"] == 1
