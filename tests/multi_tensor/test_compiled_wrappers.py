"""torch.compile(fullgraph=True) of functions that clip, take norms and add gradients: the same bits as eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

SIZES = [(3, 5), (7,), (1,), (131, 127)]  # the last is more than one chunk


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of SIZES, all but the first with a gradient."""
    made = [nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in SIZES]
    for parameter in made[1:]:
        parameter.grad = torch.randn_like(parameter) * 3
    return made


def gradients(device: str) -> list[Tensor]:
    return [torch.randn(size, device=device) for size in SIZES]


def flag(device: str) -> Tensor:
    return torch.zeros(1, device=device)


def given(params: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in params if parameter.grad is not None]


def update(store: bool) -> Callable[..., Tensor]:
    def updated(params: list, hp_grads: list, squares: Tensor, found_inf: Tensor, noop: Tensor) -> Tensor:
        tg.update_hp_grads(params, hp_grads, store=store, sum_squares=squares, found_inf=found_inf, noop=noop)
        return tg.norm_of_sum_squares(squares)

    return updated


def low(device: str) -> list[nn.Parameter]:
    return parameters(device, torch.bfloat16)


CALLS: dict[str, tuple[Callable[..., Any], list[Callable[[str], Any]]]] = {
    "clip": (lambda params: tg.clip_grad_norm_(params, 1.0), [parameters]),
    "clip by the largest": (lambda params: tg.clip_grad_norm_(params, 1.0, float("inf")), [parameters]),
    "clip with found_inf": (lambda params, found: tg.clip_grad_norm_(params, 1.0, found_inf=found), [parameters, flag]),
    "clip one": (lambda params: tg.clip_grad_norm_(params[1], 1.0), [parameters]),
    "clip nothing": (lambda params: tg.clip_grad_norm_(params[:1], 1.0), [parameters]),
    "clip with a norm": (lambda params, norm: tg.clip_grads_with_norm_(params, 1.0, norm + 7), [parameters, flag]),
    "norm": (lambda params: tg.get_total_norm(given(params)), [parameters]),
    "norm of p = 1": (lambda params: tg.get_total_norm(given(params), 1.0), [parameters]),
    "norms": (lambda params: tg.multi_tensor_norms(given(params)), [parameters]),
    "update": (update(store=False), [low, gradients, tg.new_sum_squares, flag, flag]),
    "update, stored": (update(store=True), [low, gradients, tg.new_sum_squares, flag, flag]),
    "update, plain": (lambda params, hp_grads: tg.update_hp_grads(params, hp_grads), [low, gradients]),
    "clip tensors": (lambda tensors: tg.clip_tensors_by_global_norm(tensors, 0.5), [gradients]),
}


def everything(arguments: list[Any]) -> list[Any]:
    return [
        argument if isinstance(argument, Tensor) else [[tensor.detach(), tensor.grad] for tensor in argument]
        for argument in arguments
    ]


def outcome(function: Callable, makers: list[Callable], device: str) -> list[Any]:
    torch.manual_seed(3)
    arguments = [make(device) for make in makers]
    result = function(*arguments)
    return [[] if result is None else result, everything(arguments)]


@pytest.mark.parametrize(("call", "makers"), CALLS.values(), ids=CALLS)
@pytest.mark.one_of(3)
def test_a_compiled_call_has_the_bits_of_an_eager_one(device, call, makers):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(outcome(call, makers, device), outcome(compiled, makers, device))


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "makers"), CALLS.values(), ids=CALLS)
def test_what_inductor_compiles_has_the_bits_of_an_eager_call(call, makers):
    compiled = torch.compile(call, fullgraph=True)
    assert_bitwise_equal(outcome(call, makers, "cuda"), outcome(compiled, makers, "cuda"))


def test_parameters_of_a_module_are_clipped_where_it_is_compiled(device):
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(5)
        model = nn.Linear(5, 3, device=device)
        model(torch.ones(2, 5, device=device)).square().sum().backward()

        def clip(model: nn.Module) -> Tensor:
            return tg.clip_grad_norm_((parameter for parameter in model.parameters()), 0.1)

        norm = torch.compile(clip, fullgraph=True, backend="aot_eager")(model) if compiled else clip(model)
        outcomes.append([norm, [parameter.grad for parameter in model.parameters()]])
    assert_bitwise_equal(*outcomes)


def test_hp_grads_of_another_shape_are_refused(device):
    def call(params: list, hp_grads: list) -> None:
        tg.update_hp_grads(params, hp_grads)

    hp_grads = [hp_grad.T if hp_grad.dim() == 2 else hp_grad for hp_grad in gradients(device)]
    with pytest.raises(Exception, match=r"expected hp_grads\[3\] of shape \[131, 127\] or flat, got \[127, 131\]"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(low(device), hp_grads)
