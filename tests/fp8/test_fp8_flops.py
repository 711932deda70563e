"""torch's counter of FLOPs counts the products of FP8 layers as those of plain ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from fp8_references import E4M3
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import te_graph as tg

CURRENT = tg.Float8CurrentScaling()
LATE = """
import sys
import torch
import te_graph as tg

layer = tg.Linear(32, 48)
with tg.fp8_autocast():
    layer(torch.randn(3, 32))
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode

one = torch.ones(1)
a, b = torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(16, 32).to(torch.float8_e4m3fn)
with FlopCounterMode(display=False) as counter:
    {call}
assert counter.get_total_flops() == {count}, counter.get_total_flops()
"""
CALLS = {
    "tg.fp8_gemm(a, b, one, one)": 2 * 4 * 16 * 32,
    "with tg.fp8_autocast(): layer(torch.randn(3, 32))": 2 * 3 * 32 * 48,
}


def count_of(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", ["nothing", "the weight", "the input"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
def test_a_layer_counts_as_a_plain_one(device: str, frozen: str, shape: tuple[int, ...]) -> None:
    plain = nn.Sequential(nn.Linear(32, 48, device=device), nn.ReLU(), nn.Linear(48, 64, device=device))
    x = torch.randn(*shape, 32, device=device, requires_grad=frozen != "the input")
    if frozen == "the weight":
        plain[0].weight.requires_grad_(False)
    expected = count_of(lambda: plain(x).sum().backward())
    tg.convert_to_fp8(plain, min_features=16)

    def train() -> None:
        with tg.fp8_autocast(recipe=CURRENT):
            y = plain(x)
        y.sum().backward()

    for _ in range(2):
        assert count_of(train) == expected
    tokens = torch.Size(shape).numel()
    assert expected == 2 * tokens * (32 * 48 * (3 - (frozen != "nothing")) + 48 * 64 * 3)


def test_products_of_matrices_are_counted(device: str) -> None:
    a, b = (torch.ones(size, 32, device=device).to(E4M3) for size in (4, 16))
    one, out = torch.ones(1, device=device), torch.zeros(4, 16, device=device)
    for call in (lambda: tg.fp8_gemm(a, b, one, one), lambda: tg.fp8_gemm_out(out, a, b, one, one)):
        assert count_of(call) == 2 * 4 * 16 * 32


@pytest.mark.parametrize("call", CALLS)
def test_the_counter_is_not_imported_and_may_come_late(call: str) -> None:
    code = LATE.format(call=call, count=CALLS[call])
    subprocess.run([sys.executable, "-c", code], check=True)
