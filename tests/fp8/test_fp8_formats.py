"""Changes of the FP8 format of a recipe: scales are to the largest number of their format, e5m2's or e4m3's."""

from __future__ import annotations

import copy

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32


def loss_of(layer: nn.Module, recipe: tg.DelayedScaling, x: Tensor) -> Tensor:  # [n, WIDTH] -> []
    with tg.fp8_autocast(recipe=recipe):
        return layer(x).square().mean()


@pytest.mark.parametrize("formats", [(tg.Format.HYBRID, tg.Format.E4M3), (tg.Format.E4M3, tg.Format.HYBRID)], ids=str)
@pytest.mark.parametrize("is_updated", [False, True])
def test_a_change_of_format_keeps_gradients_in_range_and_resumes_alike(
    device: str, formats: tuple, is_updated: bool
) -> None:
    first, second = (tg.DelayedScaling(amax_history_len=4, fp8_format=one) for one in formats)
    xs, gradients = [torch.randn(16, WIDTH, device=device) for _ in range(6)], []
    for is_resumed in (False, True):
        torch.manual_seed(1)
        layer = tg.Linear(WIDTH, WIDTH, device=device)
        for x in xs[:5]:
            loss_of(layer, first, x).backward()
        if is_updated:
            layer.fp8.update_if_due()
        if is_resumed:
            state = copy.deepcopy(layer.state_dict())
            layer = tg.Linear(WIDTH, WIDTH, device=device)
            layer.load_state_dict(state)
        plain = nn.Linear(WIDTH, WIDTH, device=device)
        plain.load_state_dict({name: layer.state_dict()[name] for name in ("weight", "bias")})
        plain(xs[5]).square().mean().backward()
        layer.zero_grad()
        loss_of(layer, second, xs[5]).backward()
        assert (layer.weight.grad - plain.weight.grad).norm() < 0.2 * plain.weight.grad.norm()
        gradients.append(layer.weight.grad)
    assert same_bits(*gradients)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(
    ("amaxes", "factor"),
    [([448.0], 128), ([448.0, float("inf")], 128), ([float("inf")], 1), ([float("inf"), 0.0], 1), ([], 1)],
    ids=str,
)
def test_a_scale_of_one_follows_the_format_if_an_amax_has_given_it(
    device: str, algorithm: str, amaxes: list[float], factor: float
) -> None:
    """One of 448 does, infinite ones do not."""
    first, second = (
        tg.DelayedScaling(amax_history_len=4, fp8_format=one, amax_compute_algo=algorithm)
        for one in (tg.Format.E4M3, tg.Format.HYBRID)
    )
    layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    loss_of(layer, first, x)
    for amax in amaxes:
        with tg.fp8_autocast(recipe=first):
            y = layer(x)
        y.backward(torch.full_like(y, amax))
        layer.fp8.update_if_due()
    assert layer.get_extra_state()[2, 2] == 1
    loss_of(layer, second, x)
    assert layer.get_extra_state()[2, 2] == factor
