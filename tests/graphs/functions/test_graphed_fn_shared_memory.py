"""graphed(): results that share memory with each other, or with arguments, without being the very tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sequences import called
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Marked(Tensor):
    pass


def overlapping(x: Tensor) -> tuple:
    y = x * 2
    return y[:2], y[1:]


def overlapping_argument(x: Tensor) -> tuple:
    y = x.detach()
    return y[:2], y[1:]


def view_of_hidden_view(x: Tensor) -> tuple:
    part = (x * 2)[:2]
    return part, part[0]


def with_attribute(x: Tensor) -> tuple:
    y = x * 2
    part = y[:2]
    part.tag = 1
    return y, part


def of_parameter(x: Tensor) -> tuple:
    made = nn.Parameter(x * 2, requires_grad=False)
    return made[0], made


def of_subclass(x: Tensor) -> tuple:
    made = (x * 2).as_subclass(Marked)
    return made, made[0], made[0].as_subclass(Tensor)


SHARING = [overlapping, overlapping_argument, view_of_hidden_view, with_attribute, of_parameter, of_subclass]


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("function", SHARING)
def test_what_autograd_does_to_a_result_it_does_to_those_that_share_its_memory(
    device: str, function: Callable[[Tensor], tuple], changed: int
) -> None:
    x, replayed = torch.empty(4, 3, device=device), graphed(function)
    for _ in range(4):
        value, factor = torch.randn(4, 3, device=device), torch.randn((), device=device)
        seen = []
        for call in (function, replayed):
            x.copy_(value)
            results, weight = call(x), factor.clone().requires_grad_()
            results[changed].mul_(weight)
            told = [(type(one), one.requires_grad, one._is_view(), vars(one)) for one in results]
            sum((one * one).sum() for one in results).as_subclass(Tensor).backward()
            seen.append((told, [one.detach().clone() for one in results], weight.grad))
        assert seen[0][0] == seen[1][0]
        assert_bitwise_equal(seen[1][1:], seen[0][1:])
    assert replayed.info()["forward_replays"] == 3


def tagged(x: Tensor) -> Tensor:
    part = x[:2]
    part.tag = [1]
    return part


@pytest.mark.parametrize(
    "function",
    [tagged, lambda x: nn.Parameter(x, requires_grad=False), lambda x: x[1:].as_subclass(Marked)],
    ids=["attribute", "parameter", "subclass"],
)
def test_the_class_and_attributes_of_a_result_in_the_memory_of_an_argument_are_kept(
    device: str, function: Callable[[Tensor], Tensor]
) -> None:
    x, replayed = torch.randn(4, 3, device=device), graphed(function)
    before = None
    for _ in range(4):
        wanted, result = function(x), replayed(x)
        assert type(result) is type(wanted) and vars(result) == vars(wanted) and result is not before
        assert result._base is wanted._base
        assert_bitwise_equal(result.detach().as_subclass(Tensor), wanted.detach().as_subclass(Tensor))
        if hasattr(result, "tag"):
            result.tag.append(2)
        before = result
    assert replayed.info()["forward_replays"] == 3


def test_of_several_arguments_in_one_memory_a_result_is_a_view_of_the_right_one(device: str) -> None:
    whole = torch.randn(4, device=device)
    replayed = graphed(lambda apart, part: part[1:])
    apart, part = whole.detach(), whole[1:]
    for _ in range(3):
        assert replayed(apart, part)._base is whole


@pytest.mark.parametrize(
    "function", [lambda x: nn.Parameter(x), lambda x: x.detach().requires_grad_()], ids=["parameter", "detached"]
)
def test_a_new_leaf_in_the_memory_of_an_argument_is_refused(device: str, function: Callable[[Tensor], Tensor]) -> None:
    x, replayed = torch.randn(3, device=device), graphed(function)
    assert replayed(x).requires_grad
    with pytest.raises(CaptureError, match="result 0 requires a gradient"):
        replayed(x)


@pytest.mark.filterwarnings("ignore:Named tensors")  # torch says it once for each process
def test_a_result_of_an_argument_with_names_is_refused(device: str) -> None:
    x, replayed = torch.randn(2, 3, device=device), graphed(lambda t: t.rename("a", "b"))
    assert replayed(x).names == ("a", "b")
    with pytest.raises(CaptureError, match="names of dimensions"):
        replayed(x)


@pytest.mark.parametrize("attribute", ["scale", "grad"])
def test_a_computed_tensor_in_an_attribute_of_a_result_is_refused(device: str, attribute: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        made = x * 2
        setattr(made, attribute, x * 3)
        return made

    x, replayed = torch.randn(3, device=device), graphed(scaled)
    assert_bitwise_equal(getattr(called(replayed, 1, x), attribute), x * 3)
    with pytest.raises(CaptureError, match=f"has an attribute {attribute} with a tensor that the function computed"):
        replayed(x)


def test_a_result_that_alone_is_a_view_rounds_as_one_in_a_backward(device: str) -> None:
    x, replayed = torch.empty(67, 45, device=device), graphed(lambda t: (t * 2).t())
    for _ in range(4):
        value, gradients = torch.randn(67, 45, device=device), []
        for call in (lambda t: (t * 2).t(), replayed):
            x.copy_(value)
            result, weight = call(x), torch.ones((), device=device, requires_grad=True)
            assert result._is_view()
            result.mul_(weight)
            result.pow(2).sum().backward()
            gradients.append(weight.grad)
        assert_bitwise_equal(*gradients)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 2).unbind()[0], torch.no_grad()(lambda x: (x * 2)[0])],
    ids=["one of several", "without gradients"],
)
def test_a_view_that_autograd_refuses_to_change_is_changed_after_a_replay(
    device: str, function: Callable[[Tensor], Tensor]
) -> None:
    x, replayed = torch.randn(4, 3, device=device), graphed(function)
    weight = torch.full((), 2.0, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        function(x).mul_(weight)
    assert_bitwise_equal(called(replayed, 3, x).mul_(weight).detach(), x[0] * 4)
