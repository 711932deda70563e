"""torch.autograd.grad with respect to parameters of graphed callables, which accumulate their gradients themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def test_gradients_of_parameters_that_go_through_autograd(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), autograd_params=model.parameters())
    x = batch(device)
    grads = [torch.autograd.grad(one(x).sum(), [x, *one.parameters()]) for one in (model, twin)]
    assert_bitwise_equal(*grads)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_parameters_that_eager_code_has_used_since_are_refused_together_with_an_input(device):
    """Autograd finds the parameter by that other use, and would give its gradient alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    make_graphed_callables(model, (batch(device),))
    for _ in range(2):
        x = batch(device)
        result = model(x).sum()
        penalty = model[0].weight.square().sum()
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad is asked for .* weight of 0.*autograd_params="):
            torch.autograd.grad(result + penalty, [x, model[0].weight])
        del result, penalty
    x = batch(device)
    (grad,) = torch.autograd.grad(model(x).sum(), [x])
    assert grad.shape == x.shape
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_parameters_that_eager_code_used_before_go_through_autograd(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x, grads = batch(device), []
    for one in (model, twin):
        penalty = one[0].weight.square().sum()
        grads.append(torch.autograd.grad(one(x).sum() + penalty, [x, one[0].weight]))
    assert_bitwise_equal(*grads)


def test_gradients_of_other_parameters_alone_are_not_found_which_is_a_documented_limit(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    make_graphed_callables(model, (batch(device),))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(batch(device)).sum(), list(model.parameters()))
    x = batch(device)
    for inputs in (list(model.parameters()), [*model.parameters(), x]):
        grads = torch.autograd.grad(model(x).sum(), inputs, allow_unused=True)
        assert grads[:2] == (None, None)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [3, 4] -> [3, 4], [3, 4]
        return torch.tanh(self.one(x)), torch.exp(self.two(x))


@pytest.mark.parametrize("changed", ["one", "two"])
def test_a_weight_changed_for_a_result_without_gradient_is_an_error_which_is_a_documented_limit(device, changed):
    model = TwoHeads().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    raised = []
    for module in (model, twin):
        first, _ = module(batch(device))
        with torch.no_grad():
            getattr(module, changed).weight.add_(1)
        try:
            first.sum().backward()
        except RuntimeError as error:
            raised.append(("graphed" if module is model else "eager", "modified by an inplace operation" in str(error)))
    assert ("graphed", True) in raised
    assert (("eager", True) in raised) is (changed == "one")


def test_a_batch_of_gradients_is_refused_by_name(device):
    graphed = make_graphed_callables(lambda x: x * 2, (batch(device),))
    x = batch(device)
    y = graphed(x)
    grads = torch.randn(2, 3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"does not support a batch of gradients .* one by one"):
        torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    assert_bitwise_equal(one_by_one, [grad * 2 for grad in grads])


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("has_input", [False, True])
def test_backward_for_chosen_parameters_needs_them_in_autograd_params(device, has_input, is_listed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), autograd_params=model.parameters() if is_listed else ())
    x = batch(device)
    inputs = [x.detach().requires_grad_() for _ in range(2)]
    losses = [one(own).square().sum() for one, own in zip((model, twin), inputs, strict=True)]
    chosen = [[*([own] if has_input else []), one[0].weight] for one, own in zip((model, twin), inputs, strict=True)]
    if has_input and not is_listed:
        with pytest.raises(RuntimeError, match=r"such as weight of 0, which .* capture with it in autograd_params="):
            losses[0].backward(inputs=chosen[0])
        return
    for loss, leaves in zip(losses, chosen, strict=True):
        loss.backward(inputs=leaves)
    assert_bitwise_equal(*(own.grad for own in inputs))
    expected = twin[0].weight.grad if is_listed else None
    assert_bitwise_equal(model[0].weight.grad, expected)
    assert model[0].bias.grad is None
