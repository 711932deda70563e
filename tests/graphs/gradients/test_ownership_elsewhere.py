"""Owners of `.grad` that are not seen by references to it: a class that wraps tensors, another process.

The reference is eager execution.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import te_graph as tg
from te_graph.testing import assert_bitwise_equal


def test_a_grad_of_a_class_that_wraps_tensors_is_added_to(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 2, device=device)
    tg.make_graphed_callables(layer, (x,))
    for one in (layer, twin):
        one.weight.grad = TwoTensor(torch.ones(2, 2, device=device), torch.zeros(2, 2, device=device))
        one(x).sum().backward()
    for part in ("a", "b"):
        assert_bitwise_equal(getattr(layer.weight.grad, part), getattr(twin.weight.grad, part))


def test_a_grad_that_was_sent_to_another_process_is_not_written_again() -> None:
    """Its memory is exchanged for one that several processes may map, and their references are not counted here."""
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    tg.make_graphed_callables(layer, (x,))
    layer(x).sum().backward()
    layer.zero_grad()
    layer(x).sum().backward()
    sent = layer.weight.grad
    there = torch.UntypedStorage._new_shared_filename_cpu(*sent.untyped_storage()._share_filename_cpu_())
    value = sent.clone()
    del sent
    layer.zero_grad()
    (layer(x) * 100).sum().backward()
    assert_bitwise_equal(torch.empty(0).set_(there)[:4].view(2, 2), value)
    assert_bitwise_equal(layer.bias.grad, torch.full((2,), 300.0))


def test_memory_of_a_grad_that_was_resized_is_not_used_again(device: str) -> None:
    linear, x = nn.Linear(3, 2, device=device), torch.randn(4, 3, device=device)
    tg.make_graphed_callables(linear, (x,))
    linear(x).sum().backward()
    linear.weight.grad.resize_(20, 20)
    linear.weight.grad = None
    linear(x).sum().backward()
    assert linear.weight.grad.untyped_storage().nbytes() == linear.weight.nbytes
