"""Where regions of autocast begin and end, as trainers have it: around a micro-batch or a step, with its cache or not,
in bf16, and in fp16 with a GradScaler."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")

_MICRO_BATCHES = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:  # [5, 7] -> [5, 7]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _steps(model: nn.Module, device: str, dtype: torch.dtype, around_step: bool, **options: Any) -> list[Tensor]:
    """Two steps of three micro-batches; the backward is outside of the inner regions."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=512.0, enabled=dtype == torch.float16)
    seen: list[Tensor] = []

    def region(is_on: bool) -> contextlib.AbstractContextManager:
        return torch.autocast(device, dtype, **options) if is_on else contextlib.nullcontext()

    for _ in range(2):
        optimizer.zero_grad()
        with region(around_step):
            for _ in range(_MICRO_BATCHES):
                x = torch.randn(5, 7, device=device, requires_grad=True)
                with region(True):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                seen += [loss.detach().clone(), x.grad]
        scaler.step(optimizer)
        scaler.update()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("around_step", [False, True])
@pytest.mark.parametrize(
    ("dtype", "is_inside"), [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)]
)
@pytest.mark.one_of(5)
def test_regions_of_trainers(
    device: str, dtype: torch.dtype, is_inside: bool, around_step: bool, cache_enabled: bool
) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    twin = eager_copy(model)
    samples = tuple((torch.randn(5, 7, device=device, requires_grad=True),) for _ in model)
    with torch.autocast(device, dtype) if is_inside else contextlib.nullcontext():
        tg.make_graphed_callables(tuple(model), samples, on_mismatch="capture")
    found = _steps(model, device, dtype, around_step, cache_enabled=cache_enabled)
    assert_bitwise_equal(found, _steps(twin, device, dtype, around_step, cache_enabled=cache_enabled))
    info = model[0].te_graph.info()
    assert (info["forward_replays"], info["recaptures"]) == (2 * _MICRO_BATCHES, 0 if is_inside else 1)
