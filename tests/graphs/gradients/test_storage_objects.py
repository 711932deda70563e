"""Python objects of storages: torch keeps one, once made, with the memory. It counts while Python code holds it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.fixture
def layer(device: str) -> nn.Linear:
    made = nn.Linear(8, 8, device=device)
    make_graphed_callables(made, (torch.randn(4, 8, device=device),))
    return made


def gradient(layer: nn.Linear) -> Tensor:  # -> [8, 8]
    layer.zero_grad()
    layer(torch.randn(4, 8, device=layer.weight.device)).sum().backward()
    return layer.weight.grad


def test_memory_of_a_gradient_is_used_again(layer: nn.Linear) -> None:
    addresses = {gradient(layer).untyped_storage().data_ptr() for _ in range(4)}
    assert len(addresses) == 1


def test_memory_of_a_gradient_whose_storage_is_held_is_not(layer: nn.Linear) -> None:
    held = gradient(layer).untyped_storage()
    before = held.clone()
    assert gradient(layer).data_ptr() != held.data_ptr()
    assert_bitwise_equal(torch.tensor(held.tolist()), torch.tensor(before.tolist()))


def test_a_result_whose_storage_is_held_keeps_its_values(layer: nn.Linear, device: str) -> None:
    held = layer(torch.randn(4, 8, device=device)).untyped_storage()
    before = held.clone()
    layer(torch.randn(4, 8, device=device))
    assert_bitwise_equal(torch.tensor(held.tolist()), torch.tensor(before.tolist()))


@pytest.mark.parametrize("is_held", [False, True])
def test_a_result_that_another_thread_has_had(device: str, is_held: bool) -> None:
    layer, held = nn.Linear(8, 8, device=device), []
    x = torch.randn(4, 8, device=device)
    with torch.no_grad():
        make_graphed_callables(layer, (x,))

        def use() -> None:
            with torch.no_grad():
                storage = layer(x).untyped_storage()
                if is_held:
                    held.append(storage)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        if is_held:
            with pytest.raises(RuntimeError, match="other threads hold results"):
                layer(x)
        else:
            assert_bitwise_equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
