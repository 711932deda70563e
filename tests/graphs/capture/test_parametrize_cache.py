"""``torch.nn.utils.parametrize.cached()`` around calls: eager execution computes weights once for all."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hazards import batch
from sequences import captures
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def layer(device: str) -> nn.Module:
    """One whose weight depends on how often it has been computed."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4, device=device)), nn.Tanh())


def state_after(net: Callable[[Tensor], Tensor], owner: nn.Module, xs: list[Tensor], is_cached: bool) -> list[Tensor]:
    """Gradients and buffers [...] of ``owner`` after a backward through ``net`` of each of ``xs`` [3, 4]."""
    if is_cached:
        with parametrize.cached():
            loss = sum(net(x).square().sum() for x in xs)
    else:
        loss = sum(net(x).square().sum() for x in xs)
    owner.zero_grad()
    loss.backward()
    return [*(p.grad.clone() for p in owner.parameters()), *(buffer.clone() for buffer in owner.buffers())]


def test_a_call_with_the_cache_on_is_refused_by_name_and_goes_on_replaying_without(device):
    net = layer(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))
    for _ in range(2):
        xs = [batch(device, False)]
        assert_bitwise_equal(*(state_after(one, one, xs, False) for one in (net, twin)))
        with pytest.raises(RuntimeError, match=r"parametrize.cached\) changed from 0 to 1"):
            state_after(net, net, xs, True)
    assert net.te_graph.info()["forward_replays"] == 2


@pytest.mark.parametrize("on_mismatch", ["eager", "capture"])
def test_calls_with_the_cache_on_may_run_eagerly(device, on_mismatch):
    net = layer(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),), on_mismatch=on_mismatch)
    for is_cached in (True, False, True, False):
        xs = [batch(device, False) for _ in range(2 if is_cached else 1)]
        assert_bitwise_equal(*(state_after(one, one, xs, is_cached) for one in (net, twin)))
    assert net.te_graph.info()["forward_replays"] == 2


def test_a_capture_with_the_cache_on_is_refused_without_a_trace(device):
    net = layer(device)
    before = copy.deepcopy(net.state_dict())
    with parametrize.cached():
        with pytest.raises(RuntimeError, match=r"parametrize.cached\) is on, and shares .* parametrizations of 0"):
            make_graphed_callables(net, (batch(device, False),))
        make_graphed_callables(nn.Linear(4, 4, device=device), (batch(device, False),))
    assert_bitwise_equal(list(net.state_dict().values()), list(before.values()))


def test_a_callable_without_parametrizations_does_not_mind_the_cache(device):
    net = nn.Linear(4, 4, device=device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))
    xs = [batch(device, False)]
    assert_bitwise_equal(*(state_after(one, one, xs, True) for one in (net, twin)))
    assert net.te_graph.info()["forward_replays"] == 1


def test_a_cache_inside_the_callable_is_captured(device):
    net = layer(device)
    twin = copy.deepcopy(net)

    def twice_of(one: nn.Module) -> Callable[[Tensor], Tensor]:
        def twice(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            with parametrize.cached():
                return one(one(x))

        return twice

    replayed = make_graphed_callables(twice_of(net), (batch(device, False),))
    for _ in range(3):
        xs = [batch(device, False)]
        assert_bitwise_equal(state_after(replayed, net, xs, False), state_after(twice_of(twin), twin, xs, False))


def test_a_graphed_function_runs_eagerly_with_the_cache_on(device):
    net = layer(device)
    twin = copy.deepcopy(net)
    x = batch(device, False)

    def result_of(one: nn.Module) -> Callable[[], Tensor]:
        def result() -> Tensor:  # -> [3, 4]
            with torch.no_grad():
                return one(x)

        return result

    plain, replayed = result_of(twin), graphed(result_of(net))
    for is_cached in (False, True, False, True, False, False):
        found = []
        for one, function in ((net, replayed), (twin, plain)):
            if is_cached:
                with parametrize.cached():
                    results = [function().clone() for _ in range(3)]
            else:
                results = [function().clone() for _ in range(3)]
            found.append([*results, *(buffer.clone() for buffer in one.buffers())])
        assert_bitwise_equal(*found)
    assert captures(replayed) == 1
    assert sum(replayed.info()["eager_calls"].values()) == 1 + 2 * 3
