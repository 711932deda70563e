"""weight_norm, spectral_norm and prune of old: hooks that compute a weight from parameters and buffers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from torch.nn.utils import prune, remove_weight_norm, spectral_norm, weight_norm
from twins import backward_of, eager_copy, gradients_of, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]


def pruned(module: nn.Module) -> nn.Module:
    prune.random_unstructured(module, "weight", 0.4)
    return prune.l1_unstructured(module, "weight", 0.2)


NORMS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "prune": pruned,
    "prune of two": lambda module: prune.l1_unstructured(pruned(module), "bias", 0.5),
    "weight_norm and prune": lambda module: prune.l1_unstructured(weight_norm(module), "bias", 0.5),
}


def pair(make: Callable[[], nn.Module], device: str) -> tuple[nn.Module, nn.Module]:
    """Two equal modules: those that have been called cannot be copied."""
    state = torch.get_rng_state()
    one = make().to(device)
    torch.set_rng_state(state)
    return one, make().to(device)


def steps(device: str) -> list:
    return [[(batch(device),), (batch(device),)] for _ in range(3)]


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("slots", [1, 2])
def test_hooks_below_the_callable_run_inside_the_capture(device, norm, slots):
    model, twin = pair(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), norm(nn.Linear(8, 4)), nn.Tanh()), device)
    make_graphed_callables(model, (batch(device),), max_in_flight=slots)
    batches = steps(device)
    assert_bitwise_equal(train(model, batches), train(twin, batches))
    assert model.te_graph.info()["forward_replays"] == 6


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("was_called", [False, True])
def test_hooks_of_the_callable_itself_run_around_each_replay(device, norm, was_called):
    model, twin = pair(lambda: norm(nn.Linear(4, 4)), device)
    if was_called:
        x = batch(device)
        assert_bitwise_equal(model(x).detach(), twin(x).detach())
    make_graphed_callables(model, (batch(device),))
    batches = steps(device)
    assert_bitwise_equal(train(model, batches), train(twin, batches))
    assert model.te_graph.info()["forward_replays"] == 6
    assert_bitwise_equal(model.weight.detach(), twin.weight.detach())


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_capture_after_the_hooks_have_run_leaves_their_graph_as_it_is(device, norm):
    model, twin = pair(lambda: norm(nn.Linear(4, 4)), device)
    make_graphed_callables(model, on_mismatch="capture")  # at the first call, and at one with a smaller batch
    other = torch.randn(2, 4, device=device, requires_grad=True)
    batches = [[(batch(device),), (other,)], [(batch(device),), (other,)]]
    assert_bitwise_equal(train(model, batches), train(twin, batches))
    assert model.te_graph.info()["recaptures"] == 1


def test_hooks_of_a_module_that_a_function_uses(device):
    layer, twin = pair(lambda: weight_norm(nn.Linear(4, 4)), device)
    other = weight_norm(nn.Linear(4, 4)).to(device)

    def call(x: Tensor) -> Tensor:  # [3, 4]
        return layer(x) * 2 if x.shape[0] == 3 else other(x)

    graphed = make_graphed_callables(call, (batch(device),))
    x = batch(device)
    seen = []
    for function, module in ((graphed, layer), (lambda x: twin(x) * 2, twin)):
        x.grad = None
        output = function(x)
        backward_of(output)
        seen.append([output.detach(), x.grad, gradients_of(dict(module.named_parameters()))])
    assert_bitwise_equal(*seen)
    assert isinstance(other.weight, Tensor)  # was not run


def test_what_a_replay_does_not_leave_behind_is_not_there_to_be_read(device):
    model, twin = pair(lambda: nn.Sequential(weight_norm(nn.Linear(4, 4))), device)
    make_graphed_callables(model, (batch(device),))
    words = "weight of a Linear is computed inside a graph"

    def is_unreadable() -> None:
        for read in (
            lambda: model[0].weight.norm(),
            lambda: torch.square(model[0].weight),
            lambda: model[0].weight.shape,
            lambda: nn.functional.linear(torch.ones(4, device=device), model[0].weight),
        ):
            with pytest.raises(RuntimeError, match=words):
                read()
        assert repr(model[0].weight) == "<weight of a Linear, computed inside a graph>"

    is_unreadable()
    x = batch(device)
    model.eval(), twin.eval()
    assert_bitwise_equal(model(x).detach(), twin(x).detach())  # eagerly
    assert_bitwise_equal(model[0].weight.detach(), twin[0].weight.detach())
    model.train()
    backward_of(model(x))
    is_unreadable()
    model.te_graph.reset()
    remove_weight_norm(model[0])
    remove_weight_norm(twin[0])
    assert_bitwise_equal(model.state_dict(), twin.state_dict())
    assert_bitwise_equal(model(x).detach(), twin(x).detach())


def test_a_copy_of_a_graphed_model_is_eager_and_right(device):
    model, twin = pair(lambda: nn.Sequential(weight_norm(nn.Linear(4, 4))), device)
    make_graphed_callables(model, (batch(device),))
    copy = eager_copy(model)
    x = batch(device)
    assert_bitwise_equal(copy(x).detach(), twin(x).detach())


def test_a_capture_that_fails_leaves_the_weight_there(device):
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Softmax(-1)).to(device)
    before = model[0].weight
    with pytest.raises(RuntimeError):
        make_graphed_callables(lambda x: model(x) * model(x).sum().item(), (batch(device),))
    assert model[0].weight is before


def test_hooks_that_are_exchanged_are_seen(device):
    model = nn.Sequential(pruned(nn.Linear(4, 4))).to(device)
    make_graphed_callables(model, (batch(device),))
    with pytest.raises(RuntimeError, match="computed inside a graph"):
        prune.l1_unstructured(model[0], "weight", 0.9)
    model[0]._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="forward pre-hooks of 0 changed"):
        model(batch(device))
    model.te_graph.reset()
    assert not hasattr(model[0], "weight")


SETTINGS = {
    "n_power_iterations": (spectral_norm, 4),
    "eps": (spectral_norm, 0.5),
    "dim": (weight_norm, 1),
}


def hook_of(module: nn.Module) -> Any:
    (hook,) = module._forward_pre_hooks.values()
    return hook


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_hooks_below_the_callable_are_compared(device: str, name: str) -> None:
    norm, value = SETTINGS[name]
    model = nn.Sequential(norm(nn.Linear(4, 4))).to(device)
    make_graphed_callables(model, (batch(device),))
    hook = hook_of(model[0])
    hook.note = "is read by nobody"
    model(batch(device))
    setattr(hook, name, value)
    with pytest.raises(RuntimeError, match=rf"{name} of {type(hook).__name__} of 0 changed .* since capture"):
        model(batch(device))


def test_settings_of_hooks_of_the_callable_itself_may_change(device: str) -> None:
    model, twin = pair(lambda: spectral_norm(nn.Linear(4, 4)), device)
    make_graphed_callables(model, (batch(device),))
    for count in (1, 4, 2):
        hook_of(model).n_power_iterations = hook_of(twin).n_power_iterations = count
        batches = steps(device)
        assert_bitwise_equal(train(model, batches), train(twin, batches))
    assert model.te_graph.info()["forward_replays"] == 18


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_after_a_reset_the_weight_is_what_the_hook_would_compute(device, norm):
    model, twin = pair(lambda: nn.Sequential(norm(nn.Linear(4, 4))), device)
    make_graphed_callables(model, (batch(device),))
    batches = steps(device)
    assert_bitwise_equal(train(model, batches), train(twin, batches))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.te_graph.reset()
    assert_bitwise_equal(dict(model.named_buffers()), buffers)
    model.eval(), twin.eval()  # no power iteration
    weight = model[0].weight
    twin(batch(device))
    assert_bitwise_equal(weight, twin[0].weight)


def test_pruning_goes_on_between_captures(device):
    model, twin = pair(lambda: nn.Sequential(pruned(nn.Linear(4, 4))), device)
    for share in (0.3, 0.5):
        make_graphed_callables(model, (batch(device),))
        batches = steps(device)
        assert_bitwise_equal(train(model, batches), train(twin, batches))
        model.te_graph.reset()
        twin(batch(device))
        for one in (model, twin):
            prune.l1_unstructured(one[0], "weight", share)
    for one in (model, twin):
        prune.remove(one[0], "weight")
    assert_bitwise_equal(model.state_dict(), twin.state_dict())


class Own(prune.BasePruningMethod):
    """Does more than to compute a weight."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return default_mask

    def apply_mask(self, module: nn.Module) -> Tensor:
        module.calls = getattr(module, "calls", 0) + 1
        return super().apply_mask(module)


def test_a_hook_that_may_do_more_is_refused(device):
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    Own.apply(model[0], "weight")
    with pytest.raises(RuntimeError, match="0 has forward pre-hooks"):
        make_graphed_callables(model, (batch(device),))


def test_no_module_is_kept_alive(device):
    model = nn.Sequential(weight_norm(nn.Linear(4, 4))).to(device)
    make_graphed_callables(model, (batch(device),))
    backward_of(model(batch(device)))
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
