"""torch.func transforms, other parameters, inference mode: eager's results, or an error that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from twins import eager_copy

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

TRANSFORMS: dict[str, Callable[[Callable, Tensor], object]] = {  # x: [3, 4]
    "grad": lambda call, x: grad(lambda a: call(a).sum())(x),
    "vmap": lambda call, x: vmap(call)(torch.stack([x, x * 2])),
    "vmap over another": lambda call, x: vmap(lambda b: call(x) * b)(torch.arange(5.0, device=x.device)),
    "jvp": lambda call, x: jvp(call, (x,), (torch.ones_like(x),)),
    "vjp": lambda call, x: vjp(call, x)[1](torch.ones(3, 4, device=x.device)),
    "jacrev": lambda call, x: jacrev(call)(x),
    "jacfwd": lambda call, x: jacfwd(call)(x),
    "grad of a scale": lambda call, x: grad(lambda s: (call(x) * s).sum())(torch.ones((), device=x.device)),
}


def network(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)


def batch(device: str, requires_grad: bool = True) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=requires_grad)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.one_of(5)
def test_transforms_run_eagerly(device: str, name: str, on_mismatch: str, kind: str) -> None:
    module = network(device)
    twin = eager_copy(module)
    target = module if kind == "module" else lambda x: module(x)
    call = tg.make_graphed_callables(target, (batch(device),), on_mismatch=on_mismatch)
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(TRANSFORMS[name](call, x), TRANSFORMS[name](twin, x))
    info = call.te_graph.info()
    assert info["eager_calls"] == {"called under a transform of torch.func": 2}
    x = batch(device)
    assert torch.equal(call(x), twin(x))
    assert call.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize("name", ["grad", "vmap", "jvp", "vjp", "jacrev", "jacfwd"])
@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
def test_transforms_of_what_changes_its_argument_run_eagerly(device: str, name: str, on_mismatch: str) -> None:
    module, twin = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    tg.make_graphed_callables(module, (batch(device, requires_grad=False),), on_mismatch=on_mismatch)
    x = batch(device, requires_grad=False)
    results = [TRANSFORMS[name](lambda x, net=net: net(x * 2), x) for net in (module, twin)]
    assert_bitwise_equal(*results)
    assert module.te_graph.info()["eager_calls"] == {"called under a transform of torch.func": 1}


def test_other_parameters_are_noticed(device: str) -> None:
    module = network(device)
    twin = eager_copy(module)
    tg.make_graphed_callables(module, (batch(device),))
    x = batch(device)
    own = dict(module.named_parameters())
    assert torch.equal(functional_call(module, own, (x,)), twin(x))
    other = {name: parameter.detach() * 2 for name, parameter in own.items()}
    with pytest.raises(RuntimeError, match=r"weight of 0 .* since capture"):
        functional_call(module, other, (x,))

    def loss(model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    assert_bitwise_equal(grad(lambda p: loss(module, p))(other), grad(lambda p: loss(twin, p))(other))
    assert torch.equal(module(x), twin(x))
    assert module.te_graph.info()["forward_replays"] == 2


def made_in_inference_mode(device: str) -> nn.Module:
    with torch.inference_mode():
        return network(device)


def test_parameters_made_in_inference_mode_replay_without_gradients(device: str) -> None:
    module = made_in_inference_mode(device)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        tg.make_graphed_callables(module, (batch(device, False),))
        for _ in range(2):
            x = batch(device, False)
            assert torch.equal(module(x), twin(x))
    assert module.te_graph.info()["forward_replays"] == 2


def test_parameters_made_in_inference_mode_are_refused_where_eager_refuses_them(device: str) -> None:
    module = made_in_inference_mode(device)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward") as eager:
        module(batch(device))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward") as captured:
        tg.make_graphed_callables(module, (batch(device),))
    assert str(captured.value) == str(eager.value)
    assert not hasattr(module, "te_graph")


def test_buffer_made_in_inference_mode(device: str) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with torch.inference_mode():
                self.register_buffer("shift", torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:  # [3, 4]
            return self.linear(x) + self.shift

    module = Shifted().to(device)
    twin = copy.deepcopy(module)
    tg.make_graphed_callables(module, (batch(device),))
    x = batch(device)
    assert torch.equal(module(x), twin(x))
    assert module.te_graph.info()["forward_replays"] == 1


def test_an_argument_made_in_inference_mode_is_refused_where_eager_execution_refuses_it(device: str) -> None:
    module = network(device)
    tg.make_graphed_callables(module, (batch(device, False),))
    with torch.inference_mode():
        x = batch(device, False)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        eager_copy(module)(x)
    with pytest.raises(
        ValueError, match=r"args\[0\] made outside inference mode, got an inference tensor.*pass a clone"
    ):
        module(x)
    module(x.clone()).sum().backward()


@pytest.mark.parametrize("on_mismatch", ["eager", "capture"])
@pytest.mark.parametrize("samples", [None, (torch.ones(3, 4), torch.ones(4))], ids=["late", "samples"])
def test_an_argument_made_in_inference_mode_that_is_not_saved_runs_eagerly(
    device: str, on_mismatch: str, samples: tuple[Tensor, Tensor] | None
) -> None:
    def shifted(x: Tensor, shift: Tensor) -> Tensor:  # [3, 4], [4]
        return module(x) + shift

    module, x = network(device), batch(device, False)
    given = None if samples is None else tuple(sample.to(device) for sample in samples)
    call = tg.make_graphed_callables(shifted, given, on_mismatch=on_mismatch)
    with torch.inference_mode():
        shift = torch.randn(4, device=device)
    for _ in range(2):
        result = call(x, shift)
        result.sum().backward()
        assert torch.equal(result, shifted(x, shift))
    assert call(x, shift.clone()).requires_grad
    info = call.te_graph.info()
    assert sum(info["eager_calls"].values()) == 2 and info["forward_replays"] == 1


def test_a_replay_in_inference_mode_gives_tensors_that_autograd_takes(device: str) -> None:
    """As docs/limits.md says: those of eager execution are inference tensors."""
    module = network(device)
    twin = eager_copy(module)
    with torch.no_grad():
        tg.make_graphed_callables(module, (batch(device, False),))
    x = batch(device, False)
    with torch.inference_mode():
        result, expected = module(x), twin(x)
    assert torch.equal(result, expected)
    assert (result.is_inference(), expected.is_inference()) == (False, True)
    assert module.te_graph.info()["forward_replays"] == 1


_WITHOUT_HOOKS = {"grad": grad, "jacrev": jacrev, "vjp": lambda f: lambda a: vjp(f, a)[1](torch.ones(()))[0]}


@pytest.mark.parametrize("name", _WITHOUT_HOOKS)
def test_transforms_inside_that_allow_no_hooks_are_refused_by_name(name: str) -> None:
    def call(x: Tensor) -> Tensor:  # [4] -> [4]
        return x * _WITHOUT_HOOKS[name](lambda a: (a**3).sum())(x.detach())

    with pytest.raises(RuntimeError, match=r"torch\.func\.grad, .* cannot be captured inside of a callable"):
        tg.make_graphed_callables(call, (torch.ones(4, requires_grad=True),))


def test_transforms_inside_graphed_functions_are_captured() -> None:
    @tg.graphed
    def call(x: Tensor) -> Tensor:  # [4] -> [4]
        return grad(lambda a: (a**3).sum())(x)

    x = torch.full((4,), 2.0)
    for _ in range(3):
        assert_bitwise_equal(call(x).clone(), 3 * x**2)
