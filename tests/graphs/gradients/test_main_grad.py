"""main_grad: gradients accumulated in fp32 beside parameters of another dtype, as Megatron keeps them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from twins import mlp, sample

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_main_grad_is_added_to_in_fp32_and_grad_stays_none(device: str, dtype: torch.dtype) -> None:
    module = mlp(device, dtype)
    eager = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in eager.parameters()]
    graphed = tg.make_graphed_callables(module, (sample(device, dtype),))
    for _ in range(4):
        x = sample(device, dtype)
        eager.zero_grad()
        for m in (eager, graphed):
            m(x).float().square().sum().backward()
        for total, parameter in zip(expected, eager.parameters(), strict=True):
            total.add_(parameter.grad)
        for total, parameter in zip(expected, graphed.parameters(), strict=True):
            assert parameter.grad is None
            assert torch.equal(total, parameter.main_grad)


def test_reset_main_grads_lets_the_next_backward_store(device: str) -> None:
    graphed = tg.make_graphed_callables(
        mlp(device, torch.bfloat16), (sample(device, torch.bfloat16),), grad_dtype=torch.float32
    )
    x = sample(device, torch.bfloat16)
    graphed(x).float().square().sum().backward()
    once = [p.main_grad.clone() for p in graphed.parameters()]
    assert all(g.dtype == torch.float32 and g.count_nonzero() > 0 for g in once)
    for p in graphed.parameters():
        p.main_grad.fill_(float("nan"))
    tg.reset_main_grads(graphed.parameters())
    graphed(x).float().square().sum().backward()
    assert all(torch.equal(p.main_grad, g) for p, g in zip(graphed.parameters(), once, strict=True))
    graphed(x).float().square().sum().backward()
    assert all(torch.equal(p.main_grad, 2 * g) for p, g in zip(graphed.parameters(), once, strict=True))


@pytest.mark.parametrize("chain", [False, True])
def test_a_backward_that_is_refused_leaves_a_reset_to_the_next_one(device: str, chain: bool) -> None:
    layers, x = [nn.Linear(2, 2, device=device) for _ in range(2)], torch.randn(3, 2, device=device)
    weight = layers[1].weight
    weight.main_grad = torch.zeros(2, 2, device=device)
    samples = ((x,), (x.clone().requires_grad_(),))
    tg.make_graphed_callables(tuple(layers), samples, chain=chain, max_in_flight=2)
    layers[1](layers[0](x)).sum().backward()
    once = weight.main_grad.clone()
    tg.reset_main_grads([weight])
    first, second = layers[1](layers[0](x)), layers[1](layers[0](x))
    hook = layers[1].bias.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="a hook was put on bias since the forward"):
        (first + second).sum().backward()
    hook.remove()
    del first, second
    assert torch.equal(weight.main_grad, once)
    layers[1](layers[0](x)).sum().backward()
    assert torch.equal(weight.main_grad, once)


@pytest.mark.parametrize("chain", [False, True])
def test_a_backward_that_raises_before_it_stores_leaves_a_reset_to_the_next_one(device: str, chain: bool) -> None:
    layers, x = [nn.Linear(6, 6, device=device) for _ in range(3)], torch.randn(4, 6, device=device)
    for parameter in layers[0].parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    tg.make_graphed_callables(tuple(layers), tuple((x.clone().requires_grad_(),) for _ in layers), chain=chain)

    def step() -> None:
        y = x.clone().requires_grad_()
        for layer in layers:
            y = layer(y)
        y.square().sum().backward()

    step()
    once = layers[0].weight.main_grad.clone()
    tg.reset_main_grads(list(layers[0].parameters()))
    layers[1].bias.grad = torch.zeros(1, device=device).expand(6)
    with pytest.raises(RuntimeError, match="single memory location"):
        step()
    assert torch.equal(layers[0].weight.main_grad, once)
    for layer in layers[1:]:
        layer.zero_grad()
    step()
    assert torch.equal(layers[0].weight.main_grad, once)
    step()
    assert torch.equal(layers[0].weight.main_grad, 2 * once)


def test_a_backward_that_raises_before_it_stores_by_an_op_leaves_a_reset_to_the_next_one(device: str) -> None:
    layer, x = nn.Linear(6, 6, device=device), torch.randn(4, 6, device=device)
    layer.bias.main_grad = torch.zeros(12, device=device)[::2]  # which the table does not write
    tg.make_graphed_callables(layer, (x.clone().requires_grad_(),))

    def step() -> None:
        layer(x.clone().requires_grad_()).square().sum().backward()

    step()
    once = layer.bias.main_grad.clone()
    tg.reset_main_grads([layer.bias])
    layer.weight.grad = torch.zeros(1, 1, device=device).expand(6, 6)
    with pytest.raises(RuntimeError, match="single memory location"):
        step()
    layer.weight.grad = None
    step()
    assert torch.equal(layer.bias.main_grad, once)


def test_grad_dtype_of_the_parameter_keeps_grad(device: str) -> None:
    graphed = tg.make_graphed_callables(mlp(device), (sample(device),), grad_dtype=torch.float32)
    graphed(sample(device)).sum().backward()
    assert all(p.grad is not None and not hasattr(p, "main_grad") for p in graphed.parameters())


def test_replaced_main_grad_is_an_error_that_names_it(device: str) -> None:
    graphed = tg.make_graphed_callables(
        mlp(device, torch.bfloat16), (sample(device, torch.bfloat16),), grad_dtype=torch.float32
    )
    graphed[0].weight.main_grad = torch.zeros_like(graphed[0].weight.main_grad)
    with pytest.raises(RuntimeError, match=r"main_grad of weight of 0 .*reset\(\)"):
        graphed(sample(device, torch.bfloat16))


def test_reset_main_grads_passes_over_parameters_without_one(device: str) -> None:
    layer, x = nn.Linear(6, 6, device=device), torch.randn(4, 6, device=device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    tg.make_graphed_callables(layer, (x,))
    layer(x).square().sum().backward()
    once = [layer.weight.main_grad.clone(), layer.bias.grad.clone()]
    tg.reset_main_grads(layer.parameters())
    layer(x).square().sum().backward()
    assert torch.equal(layer.weight.main_grad, once[0])
    assert torch.equal(layer.bias.grad, 2 * once[1])


def test_reset_main_grads_refuses_parameters_without_any(device: str) -> None:
    tg.reset_main_grads([])
    with pytest.raises(ValueError, match=r"expected parameters of which some have a main_grad, got 2 without one"):
        tg.reset_main_grads(nn.Linear(2, 2, device=device).parameters())
    with pytest.raises(TypeError, match=r"expected parameters to be a tensor .*, got Linear: pass its parameters\(\)$"):
        tg.reset_main_grads(nn.Linear(2, 2, device=device))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^reset_main_grads: expected parameters\[0\] to be a tensor, got str$"):
        tg.reset_main_grads(dict(nn.Linear(2, 2, device=device).named_parameters()))


def bf16_with_main_grads(device: str) -> nn.Module:
    return tg.make_graphed_callables(
        mlp(device, torch.bfloat16), (sample(device, torch.bfloat16),), grad_dtype=torch.float32
    )


def test_call_in_the_other_mode_is_an_error_where_its_gradients_would_go_to_grad(device: str) -> None:
    graphed = bf16_with_main_grads(device).eval()
    x = sample(device, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"captured in training mode; an eager call would leave gradients in .grad"):
        graphed(x)
    with torch.no_grad():
        graphed(x)
    graphed.requires_grad_(False)
    graphed(x)
    assert graphed.te_graph.info()["eager_calls"] == {"called in eval mode, captured in training mode": 2}
    graphed.requires_grad_(True).train()
    graphed(x).float().sum().backward()
    assert all(p.grad is None and p.main_grad.count_nonzero() > 0 for p in graphed.parameters())


def test_call_inside_a_recording_is_an_error_where_its_gradients_would_go_to_grad() -> None:
    graphed = bf16_with_main_grads("cpu")
    with pytest.raises(RuntimeError, match="inside another capture; an eager call would"), tg.Recorder().capture():
        graphed(sample("cpu", torch.bfloat16))


def test_capture_of_a_function_that_calls_it_adds_to_main_grad(device: str) -> None:
    graphed = bf16_with_main_grads(device)
    outer = tg.make_graphed_callables(lambda x: graphed(x) * 2, (sample(device, torch.bfloat16),))
    outer(sample(device, torch.bfloat16)).float().sum().backward()
    assert all(p.grad is None and p.main_grad.count_nonzero() > 0 for p in graphed.parameters())


@pytest.mark.parametrize("is_early", [True, False])
def test_a_hook_leaves_the_gradient_in_grad_with_a_warning(device: str, is_early: bool) -> None:
    module = nn.Linear(4, 4, dtype=torch.bfloat16, device=device)
    x = torch.ones(3, 4, dtype=torch.bfloat16, device=device, requires_grad=True)
    if is_early:
        module.bias.register_hook(lambda grad: None)
    tg.make_graphed_callables(module, (x,), grad_dtype=torch.float32)
    if not is_early:
        module.bias.register_hook(lambda grad: None)
    with pytest.warns(UserWarning, match="bias has a main_grad, and hooks .*: it is left in .grad"):
        module(x).sum().backward()
    assert module.bias.grad.eq(3).all() and module.bias.main_grad.eq(0).all()
    assert module.weight.grad is None and module.weight.main_grad.eq(3).all()


def test_a_hook_that_adds_to_main_grad_as_megatron_does(device: str) -> None:
    module = nn.Linear(4, 4, dtype=torch.bfloat16, device=device)
    x = torch.ones(3, 4, dtype=torch.bfloat16, device=device, requires_grad=True)

    def add(parameter: torch.Tensor) -> None:  # [...]
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    module.bias.register_post_accumulate_grad_hook(add)
    tg.make_graphed_callables(module, (x,), grad_dtype=torch.float32)
    with pytest.warns(UserWarning, match="unless a hook adds it there"):
        module(x).sum().backward()
    module(x).sum().backward()
    assert module.bias.grad is None and module.bias.main_grad.eq(6).all()
