"""Which hooks a replay runs (hooks=), and which gradients go through autograd (autograd_params=).

The reference is eager execution of a copy of the same module with the same hooks on the same inputs.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, snapshot

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch(device: str, dtype: torch.dtype = torch.float32) -> Tensor:  # [4, 6]
    return torch.randn(4, 6, device=device, dtype=dtype, requires_grad=True)


def net(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """[n, 6] -> [n, 6]; the hooks go on ``net[0][1]``."""
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6)).to(device, dtype)


# Hooks.


REGISTER: dict[str, Callable[[nn.Module, Callable], Any]] = {
    "forward hooks": lambda module, note: module.register_forward_hook(lambda _, args, y: note(y)),
    "forward pre-hooks": lambda module, note: module.register_forward_pre_hook(lambda _, args: (note(args[0]),)),
    "backward hooks": lambda module, note: module.register_full_backward_hook(lambda _, gave, got: (note(gave[0]),)),
    "backward pre-hooks": lambda module, note: module.register_full_backward_pre_hook(lambda _, got: (note(got[0]),)),
}


class Hooked:
    """Puts one kind of hook on a module, which scales what passes and counts its runs."""

    def __init__(self, kind: str, module: nn.Module, factor: float = 1.5) -> None:
        self.runs, self.factor = 0, factor
        self.handle = REGISTER[kind](module, self._note)

    def _note(self, tensor: Tensor) -> Tensor:  # [...] -> [...]
        self.runs += 1
        return tensor * self.factor


each_kind = pytest.mark.parametrize("kind", REGISTER)


def compare(model: nn.Module, twin: nn.Module, device: str) -> None:
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


class Collector:
    def __init__(self) -> None:
        self.variable = contextvars.ContextVar("collected", default=None)

    def get(self) -> list | None:
        return self.variable.get()


COLLECTED, COLLECTOR = contextvars.ContextVar("collected", default=None), Collector()


def note_in_variable(module: nn.Module, args: tuple, y: Tensor) -> None:  # [...]
    if (collected := COLLECTED.get()) is not None:
        collected.append(y)


def note_in_collector(module: nn.Module, args: tuple, y: Tensor) -> None:  # [...]
    if (collected := COLLECTOR.get()) is not None:
        collected.append(y)


def note_in_closure() -> Callable:
    collected = COLLECTED
    return lambda module, args, y: None if collected.get() is None else collected.get().append(y)


@pytest.mark.parametrize("hook", [note_in_variable, note_in_collector, note_in_closure()])
def test_a_hook_that_records_while_a_variable_is_set_is_never_frozen_and_lost(device, hook):
    model = net(device)
    model[0][1].register_forward_hook(hook)
    for hooks in ("refuse", "captured"):
        with pytest.raises(RuntimeError, match=r"0\.1 has forward hooks that do something only while") as caught:
            make_graphed_callables(model, (batch(device),), hooks=hooks)
        assert hook.__qualname__ in str(caught.value)
        assert 'hooks="captured"' not in str(caught.value)


def test_a_hook_that_records_and_comes_later_makes_calls_eager_and_records(device):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), hooks="captured", on_mismatch="capture")
    for one in (model, twin):
        one[0][1].register_forward_hook(note_in_variable)
    collected: list[Tensor] = []
    token = COLLECTED.set(collected)
    for _ in range(2):
        compare(model, twin, device)
    COLLECTED.reset(token)
    assert len(collected) == 4
    assert_bitwise_equal(collected[::2], collected[1::2])


@each_kind
def test_a_hook_of_a_submodule_is_refused_with_its_name_and_what_to_do(device, kind):
    model = net(device)
    hook = Hooked(kind, model[0][1])
    x = batch(device)
    before = snapshot(model)
    for options in ({}, {"hooks": "refuse"}):
        with pytest.raises(RuntimeError, match=rf'Sequential: 0\.1 has {kind}, .*hooks="captured"'):
            make_graphed_callables(model, (x,), **options)
    assert_bitwise_equal(snapshot(model), before)
    hook.handle.remove()
    twin = eager_copy(model)
    make_graphed_callables(model, (x,))
    compare(model, twin, device)


@each_kind
def test_what_a_hook_computes_is_frozen_in_and_its_python_effects_are_not_repeated(device, kind):
    model = net(device)
    twin, plain = eager_copy(model), eager_copy(model)
    hook, twins_hook = Hooked(kind, model[0][1]), Hooked(kind, twin[0][1])
    make_graphed_callables(model, (batch(device),), hooks="captured")
    runs = hook.runs
    for number in range(3):
        compare(model, twin, device)
        assert (hook.runs, twins_hook.runs) == (runs, number + 1)
    # A Python value is frozen as any other.
    hook.factor = 7.0
    compare(model, twin, device)
    x = batch(device)
    model.zero_grad()
    assert_differs(run(model, x), run(plain, x), gradients_of([model[0][0].weight, plain[0][0].weight]))
    info = model.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (5, 5, {})


def assert_differs(seen: Any, other: Any, weight_grads: list[Tensor]) -> None:
    """The hooks of the test do something, to results or to gradients."""
    with pytest.raises(AssertionError):
        assert_bitwise_equal([seen, weight_grads[0]], [other, weight_grads[1]])


def test_hooks_of_all_kinds_on_nested_modules_are_frozen_in_together(device):
    model = net(device)
    twin = eager_copy(model)
    for top in (model, twin):
        for number, kind in enumerate(REGISTER):
            Hooked(kind, top[0], 1.0 + number)
            Hooked(kind, top[0][1], 0.5 + number)
            Hooked(kind, top[1], 2.0 - number)
    make_graphed_callables(model, (batch(device),), hooks="captured", max_in_flight=2)
    for _ in range(3):
        compare(model, twin, device)
    assert model.te_graph.info()["backward_replays"] == 3


@each_kind
@pytest.mark.parametrize("edit", ["added", "removed", "exchanged"])
def test_a_hook_added_or_removed_after_capture_is_refused_by_name(device, kind, edit):
    model = net(device)
    twin = eager_copy(model)
    hook = None
    if edit != "added":
        hook = Hooked(kind, model[0][1])
        Hooked(kind, twin[0][1])
    make_graphed_callables(model, (batch(device),), hooks="captured")
    compare(model, twin, device)
    if hook is not None:
        hook.handle.remove()
    if edit != "removed":
        hook = Hooked(kind, model[0][1], factor=3.0)
    x = batch(device)
    before = snapshot(model)
    words = rf"Sequential: {kind} of 0\.1 (changed|is gone|was replaced).* since capture; call \.te_graph\.reset\(\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            model(x)
    assert_bitwise_equal(snapshot(model), before)
    if edit == "added":
        hook.handle.remove()
        compare(model, twin, device)
    else:
        model.te_graph.reset()
        model.zero_grad()
        twin = eager_copy(model)
        make_graphed_callables(model, (batch(device),), hooks="captured")
        compare(model, twin, device)


@each_kind
def test_hooks_of_the_graphed_module_itself_run_at_every_call_beside_frozen_ones(device, kind):
    model = net(device)
    twin = eager_copy(model)
    Hooked(kind, model[0][1])
    Hooked(kind, twin[0][1])
    top, twins_top = Hooked(kind, model, 0.5), Hooked(kind, twin, 0.5)
    make_graphed_callables(model, (batch(device),), hooks="captured")
    assert top.runs == 0
    for factor in (0.5, 2.0, 3.0):
        top.factor = twins_top.factor = factor
        compare(model, twin, device)
    assert (top.runs, twins_top.runs) == (3, 3)
    top.handle.remove()
    twins_top.handle.remove()
    compare(model, twin, device)
    assert model.te_graph.info()["forward_replays"] == 4


def test_hooks_of_a_module_that_a_function_calls_are_frozen_in(device):
    model = net(device)
    twin = eager_copy(model)
    hooks = [Hooked("forward hooks", one) for one in (model, twin, model[1], twin[1])]
    graphed = make_graphed_callables(lambda x: model(x), (batch(device),), hooks="captured")
    runs = hooks[0].runs
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(graphed, x), run(twin, x))
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))
    assert hooks[0].runs == runs
    hooks[0].handle.remove()
    with pytest.raises(RuntimeError, match="forward hooks of closure variable model "):
        graphed(batch(device))


# Parameters whose gradients go through autograd.


WIDE = 512  # so that the order of additions shows in some bits


class Shared(nn.Module):
    """A part of a model that uses weights which eager code uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDE)), nn.Parameter(torch.randn(WIDE))

    def forward(self, x: Tensor) -> Tensor:  # [4, WIDE] -> [4, WIDE]
        return torch.tanh(x * self.weight + self.bias)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:  # [4, WIDE] -> []
    """Uses the parameters outside of the module, too, before and after."""
    before, after = module.weight.sigmoid(), (module.weight * module.bias).square()
    return (module(x * before) * after).square().mean() * 100


@pytest.mark.parametrize("chosen", ["references", "names", "a generator", "accumulate_grads"])
@pytest.mark.parametrize("grad_before", ["none", "there", "kept"])
def test_gradients_of_parameters_that_eager_code_uses_too_are_summed_before_they_are_added(device, chosen, grad_before):
    module = Shared().to(device)
    if grad_before == "there":
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
    twin = eager_copy(module)
    for parameter, other in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.grad = None if other.grad is None else other.grad.clone()
    options = {
        "references": {"autograd_params": [module.bias, module.weight]},
        "names": {"autograd_params": ("weight", "bias")},
        "a generator": {"autograd_params": module.parameters()},
        "accumulate_grads": {"accumulate_grads": False},
    }[chosen]
    sample = torch.randn(4, WIDE, device=device, requires_grad=True)
    make_graphed_callables(module, (sample,), **options)
    for _ in range(3):
        x = torch.randn(4, WIDE, device=device)
        for one in (module, twin):
            if grad_before == "none":
                one.zero_grad()
            loss_of(one, leaf_copy(x.requires_grad_())).backward()
        assert_bitwise_equal([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    assert module.te_graph.info()["backward_replays"] == 3


@pytest.mark.parametrize("chosen", [["weight"], []])
def test_without_the_option_autograd_sums_what_eager_code_computed_before(device, chosen):
    """An autograd graph that leads to a parameter shows that eager code uses it, too."""
    module = Shared().to(device)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    twin = eager_copy(module)
    for parameter, other in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.grad = other.grad.clone()
    x = torch.randn(4, WIDE, device=device, requires_grad=True)
    make_graphed_callables(module, (x,), autograd_params=chosen)
    for one in (module, twin):
        loss_of(one, leaf_copy(x)).backward()
    for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_names_are_looked_up_in_all_modules_of_a_tuple_and_may_come_with_references(device):
    layers = [nn.Linear(6, 6).to(device), net(device)]
    twins = copy.deepcopy(layers)
    x = batch(device)
    weight = torch.randn(6, device=device, requires_grad=True)
    twins_weight = leaf_copy(weight)
    graphed = make_graphed_callables(
        (*layers, lambda x: x * weight), ((x,),) * 3, autograd_params=["bias", "0.0.weight", layers[1][1].bias, weight]
    )
    through_autograd = {layers[0].bias, layers[1][0][0].weight, layers[1][1].bias, weight}
    for first, second, third in (graphed, (*twins, lambda x: x * twins_weight)):
        leaf = leaf_copy(x)
        output = third(second(first(leaf)))
        # What goes through autograd alone is an edge that autograd knows.
        parameters = [*nn.ModuleList([first, second]).parameters()]
        parameters.append(weight if third is graphed[2] else twins_weight)
        for parameter in parameters:
            grad = None
            if parameter in through_autograd or third is not graphed[2]:
                (grad,) = torch.autograd.grad(output.sum(), parameter, retain_graph=True)
                assert grad.shape == parameter.shape
            else:
                with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                    torch.autograd.grad(output.sum(), parameter, retain_graph=True)
            assert parameter.grad is None
        backward_of(output)
    expected = [p.grad for twin in twins for p in twin.parameters()]
    assert_bitwise_equal([p.grad for layer in layers for p in layer.parameters()], expected)
    assert_bitwise_equal(weight.grad, twins_weight.grad)


@pytest.mark.parametrize("accumulate", [True, False])
def test_grad_dtype_makes_no_main_grad_for_them(device, accumulate):
    model = net(device, torch.bfloat16)
    twin = eager_copy(model)
    x = batch(device, torch.bfloat16)
    chosen = ["0.0.weight", "1.bias"]
    options = {"accumulate_grads": accumulate, "autograd_params": chosen}
    make_graphed_callables(model, (x,), grad_dtype=torch.float32, **options)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in twin.named_parameters()}
    for _ in range(3):
        x = batch(device, torch.bfloat16)
        run(model, x)
        kept = [p.grad for p in twin.parameters()]
        twin.zero_grad()
        run(twin, x)
        for (name, parameter), old in zip(twin.named_parameters(), kept, strict=True):
            sums[name] += parameter.grad
            if old is not None:
                parameter.grad += old
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if accumulate and name not in chosen:
            assert parameter.grad is None
            assert_bitwise_equal(parameter.main_grad, sums[name])
        else:
            assert not hasattr(parameter, "main_grad")
            assert_bitwise_equal(parameter.grad, other.grad)


def test_a_main_grad_that_is_there_is_left_alone(device):
    model = net(device)
    twin = eager_copy(model)
    model[1].weight.main_grad = torch.zeros_like(model[1].weight)
    make_graphed_callables(model, (batch(device),), autograd_params=["1.weight"])
    for _ in range(2):
        compare(model, twin, device)
    assert not model[1].weight.main_grad.any()
