"""The call of a graphed module does all that torch.nn.Module.__call__ does: hooks, replaced methods, modes.

The reference is a copy of the module that runs eagerly, treated in the same way. Whether a call took the long way is
seen by counting calls of ``Handle.call``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.modules.module as module_calls
from calls import batch, counted_calls, graphed_and_twin, graphed_linear, outcome, replays, run_alone
from torch import Tensor, nn
from twins import eager_copy, gradients_of, mlp, run, sample

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
slow = pytest.fixture(counted_calls)


# ---- What torch.nn.Module.__call__ honours ----


def noted(seen: list, factor: float) -> dict[str, tuple[Callable, Callable]]:
    """For each kind of hook its registration, and a hook that notes values and changes what it may change."""

    def note(*tensors: Tensor) -> None:
        seen.append([tensor.detach().clone() for tensor in tensors])

    def pre(module: nn.Module, args: tuple) -> tuple:
        note(*args)
        return (args[0] * factor,)

    def pre_with_kwargs(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return pre(module, args), kwargs

    def post(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        note(*args, output)
        return output * factor

    def post_with_kwargs(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        return post(module, args, output)

    def backward(module: nn.Module, grad_input: tuple, grad_output: tuple) -> tuple:
        note(*grad_input, *grad_output)
        return (grad_input[0] * factor,)

    def backward_pre(module: nn.Module, grad_output: tuple) -> tuple:
        note(*grad_output)
        return (grad_output[0] * factor,)

    return {
        "pre": (lambda m: m.register_forward_pre_hook, pre),
        "pre with kwargs": (lambda m: lambda h: m.register_forward_pre_hook(h, with_kwargs=True), pre_with_kwargs),
        "forward": (lambda m: m.register_forward_hook, post),
        "forward always": (lambda m: lambda h: m.register_forward_hook(h, always_call=True), post),
        "forward with kwargs": (lambda m: lambda h: m.register_forward_hook(h, with_kwargs=True), post_with_kwargs),
        "backward": (lambda m: m.register_full_backward_hook, backward),
        "backward pre": (lambda m: m.register_full_backward_pre_hook, backward_pre),
    }


HOOKS = list(noted([], 1.0))


@pytest.mark.parametrize("registered", ["before capture", "after capture"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_module_run_until_they_are_removed(device, slow, kind, registered):
    model = nn.Linear(7, 5).to(device)
    twin = eager_copy(model)
    seen: dict[nn.Module, list] = {model: [], twin: []}

    def add(module: nn.Module) -> Any:
        register, hook = noted(seen[module], 0.5)[kind]
        return register(module)(hook)

    handles = [add(twin)]
    if registered == "before capture":
        handles.append(add(model))
    make_graphed_callables(model, (batch(device),))
    if registered == "after capture":
        run(model, batch(device))
        model.zero_grad()
        handles.append(add(model))
    seen[model].clear()
    slow.taken()
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(model, x), run(twin, x))
    assert_bitwise_equal(gradients_of(dict(model.named_parameters())), gradients_of(dict(twin.named_parameters())))
    assert len(seen[twin]) == 2
    assert_bitwise_equal(seen[model], seen[twin])
    assert slow.taken() == 2
    for handle in handles:
        handle.remove()
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), len(seen[model])) == (0, 2)


GLOBAL_HOOKS = {
    "pre": module_calls.register_module_forward_pre_hook,
    "forward": module_calls.register_module_forward_hook,
    "forward always": lambda hook: module_calls.register_module_forward_hook(hook, always_call=True),
    "backward": module_calls.register_module_full_backward_hook,
    "backward pre": module_calls.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_hooks_of_all_modules_run_until_they_are_removed(device, slow, kind):
    model, twin = graphed_linear(device)
    seen: list = []
    _, hook = noted(seen, 0.5)[kind]
    handle = GLOBAL_HOOKS[kind](hook)
    try:
        x = batch(device)
        assert_bitwise_equal(run(model, x), run(twin, x))
    finally:
        handle.remove()
    assert len(seen) == 2
    assert_bitwise_equal(*seen)
    assert slow.taken() == 1
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), len(seen)) == (0, 2)


def test_forward_replaced_on_the_instance_is_called_until_it_is_removed(device, slow):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    model.forward = lambda x: type(model).forward(model, x) + 1
    assert torch.equal(model(x), twin(x) + 1)
    model.forward = lambda x, scale: x * scale  # other arguments than at capture
    assert torch.equal(model(x, 3.0), x * 3)
    del model.forward
    slow.taken()
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert slow.taken() == 0


def doubled(call: Callable) -> Callable:
    """``call`` wrapped by code that has to see each call: here, to double the result."""

    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs) * 2

    return wrapper


def test_call_impl_replaced_on_the_instance_is_called(device):
    model, twin = graphed_linear(device)
    x = batch(device)
    call = model._call_impl
    model._call_impl = lambda *args: call(*args) * 2
    assert torch.equal(model(x), twin(x) * 2)
    del model._call_impl
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_call_of_all_modules_is_the_one_that_runs_when_it_is_replaced(device, slow, monkeypatch, name):
    model, twin = graphed_linear(device)
    x = batch(device)
    expected = run(twin, x)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, name, doubled(getattr(nn.Module, name)))
        assert torch.equal(model(x), expected[0] * 2)
    slow.taken()
    assert_bitwise_equal(run(model, x), expected)
    assert slow.taken() == 0


class Own(nn.Linear):
    """A class whose calls can be changed without touching others."""


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("when", ["before capture", "after capture"])
def test_call_that_the_class_defines_is_the_one_that_runs(device, monkeypatch, name, when):
    kind = type("Kind", (Own,), {})
    model = kind(7, 5).to(device)
    twin = nn.Linear(7, 5).to(device)
    twin.load_state_dict(model.state_dict())
    if when == "before capture":
        setattr(kind, name, doubled(getattr(nn.Module, name)))
    make_graphed_callables(model, (batch(device),))
    if when == "after capture":
        setattr(kind, name, doubled(getattr(nn.Module, name)))
    x = batch(device)
    assert torch.equal(model(x), twin(x) * 2)
    assert replays(model) == 1


def test_call_that_the_class_gets_after_another_instance_was_captured_is_the_one_that_runs(device):
    kind = type("Kind", (Own,), {})
    make_graphed_callables(kind(7, 5).to(device), (batch(device),))
    kind.__call__ = doubled(nn.Module.__call__)
    model = kind(7, 5).to(device)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias) * 2)


def test_forward_replaced_on_the_class_of_the_graphed_module_is_called(device, monkeypatch):
    model, twin = graphed_linear(device)
    x = batch(device)
    monkeypatch.setattr(type(model), "forward", doubled(type(model).forward))
    assert torch.equal(model(x), twin(x) * 2)


def test_a_call_of_all_modules_that_was_replaced_before_the_first_capture_is_honoured():
    printed = run_alone("""
        import torch
        from torch import nn

        ordinary, seen = nn.Module.__call__, []

        def watched(self, *args, **kwargs):
            seen.append(type(self).__name__)
            return ordinary(self, *args, **kwargs)

        nn.Module.__call__ = watched
        import te_graph

        model = te_graph.make_graphed_callables(nn.Linear(7, 5), (torch.randn(3, 7, requires_grad=True),))
        seen.clear()
        model(torch.randn(3, 7, requires_grad=True))
        print(seen, model.te_graph.info()["forward_replays"])
    """)
    assert printed == "['Linear'] 1\n"


# ---- Modes ----


def test_eval_runs_eagerly_and_train_replays_without_python_again(device, slow):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    for mode, ways in ((True, 0), (False, 1), (True, 0)):
        model.train(mode), twin.train(mode)
        assert_bitwise_equal(run(model, x), run(twin, x))
        assert slow.taken() == ways
    assert replays(model) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_a_capture_with_gradients_runs_eagerly(device, slow, mode):
    model, twin = graphed_and_twin(device)
    with mode():
        x = sample(device)
        result, expected = model(x), twin(x)
    assert torch.equal(result, expected)
    assert (result.requires_grad, result.is_inference()) == (False, expected.is_inference())
    assert (slow.taken(), replays(model)) == (1, 0)
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), replays(model)) == (0, 1)


def test_autocast_is_refused_as_on_the_ordinary_way(device):
    model, twin = graphed_linear(device)
    x = batch(device)
    with torch.autocast(device, torch.bfloat16):
        refused = outcome(lambda: nn.Module.__call__(model, x))
        assert refused[0] is RuntimeError
        assert outcome(lambda: model(x)) == refused
    assert_bitwise_equal(run(model, x), run(twin, x))


def test_a_capture_under_autocast_replays_without_python_under_autocast(device, slow):
    model = mlp(device)
    twin = eager_copy(model)
    x = batch(device)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        make_graphed_callables(model, (batch(device),))
        result = model(x)
        expected = twin(x)
    assert_bitwise_equal(result.detach(), expected.detach())
    assert (slow.taken(), replays(model)) == (0, 1)


def test_a_default_device_changes_nothing(device, slow):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    with torch.device("meta"):
        result = model(x)
    assert torch.equal(result, twin(x))
    assert (slow.taken(), replays(model)) == (0, 1)


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).square().sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](torch.ones(3, 5, device=x.device))[0],
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "functional jacobian": lambda call, x: torch.autograd.functional.jacobian(call, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_give_the_eager_result_or_an_error(device, transform):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    got = outcome(lambda: TRANSFORMS[transform](model, x))
    if got[0] == "result":
        assert_bitwise_equal(got[1], TRANSFORMS[transform](twin, x).detach())
    else:
        assert issubclass(got[0], (RuntimeError, ValueError, TypeError))
    assert_bitwise_equal(run(model, x), run(twin, x))


def test_forward_mode_derivatives_are_those_of_eager_execution_or_an_error(device):
    model, twin = graphed_and_twin(device)
    x = batch(device)

    def tangent(call: Callable) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    try:
        got = tangent(model)
    except (RuntimeError, ValueError):
        return
    assert_bitwise_equal(got, tangent(twin))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_computes_what_it_would_without_graphs_or_is_refused(device):
    model = mlp(device)
    twin = eager_copy(model)
    x, other = sample(device), sample(device)
    with torch.no_grad():
        make_graphed_callables(model, (x,))
        try:
            traced = torch.jit.trace(lambda x: model(x) + x[:, :5], (x,), check_trace=False)
        except RuntimeError:
            return
        assert torch.equal(traced(other), twin(other) + other[:, :5])


def test_a_module_that_is_compiled_after_capture_gives_the_eager_result(device):
    model, twin = graphed_linear(device)
    run(model, batch(device))
    model.zero_grad()
    model.compile(backend="eager")
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(model, x), run(twin, x))


def test_a_capture_runs_graphed_modules_inside_it_eagerly(device, slow):
    inner, twin = graphed_and_twin(device)
    outer = make_graphed_callables(lambda x: inner(x).tanh(), (batch(device),))
    assert slow.taken() > 0
    assert replays(inner) == 0
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(outer, x), run(lambda x: twin(x).tanh(), x))
    assert_bitwise_equal(gradients_of(dict(inner.named_parameters())), gradients_of(dict(twin.named_parameters())))
    assert (replays(inner), replays(outer)) == (0, 2)
