"""Changes of weights, buffers, arrays and hooks that no operator makes, for code that is run and undone."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from twins import snapshot


class Held(nn.Module):
    """Lets ``change`` do something to it at each call. [n, 6] -> [n, 6]"""

    def __init__(self, change: Callable[[Held], Any]) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.host, self.numbers, self.bytes, self.more = torch.ones(2), np.zeros(2), bytearray(b"a"), array.array("i")
        self.nest = {"deep": {"er": [1, {2}]}}

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        self.change(self)
        return self.linear(x) * self.scale

    def state(self) -> list:
        """All of it, to be compared by ``assert_bitwise_equal``."""
        weight = self.linear.weight
        hooks = (self.linear._forward_hooks, weight._backward_hooks, weight._post_accumulate_grad_hooks)
        arrays = [self.numbers.copy(), bytes(self.bytes), list(self.more), repr(self.nest)]
        of_tensors = [vars(self.scale).copy(), tuple(self.scale.shape), self.host.clone()]
        return [snapshot(self), arrays, of_tensors, [len(table or ()) for table in hooks]]


def replaces_data(held: Held) -> None:
    held.linear.weight.data = held.linear.weight.data * 0.5


def replaces_memory(held: Held) -> None:
    with torch.no_grad():
        held.scale.set_(held.scale * 0.5)


def swaps(held: Held) -> None:
    torch.utils.swap_tensors(held.scale, torch.full_like(held.scale, 0.5))


def replaces_by_a_view_that_is_written(held: Held) -> None:
    held.scale.data = held.scale.data.flip(0)
    held.scale.mul_(0.5)


def writes_by_numpy(held: Held) -> None:
    held.host.numpy()[0] += 1


def writes_an_array(held: Held) -> None:
    held.numbers[0] += 1


def appends_to_arrays(held: Held) -> None:
    held.bytes.append(1)
    held.more.append(1)


def changes_a_nest(held: Held) -> None:
    held.nest["deep"]["er"].append(3)
    held.nest["deep"]["er"][1].add(4)


def adds_a_forward_hook(held: Held) -> None:
    held.linear.register_forward_hook(lambda module, args, result: result * 1.5)


def marks_a_tensor(held: Held) -> None:
    held.scale.steps = getattr(held.scale, "steps", 0) + 1


CHANGES = (
    *(replaces_data, replaces_memory, swaps, replaces_by_a_view_that_is_written, writes_by_numpy, writes_an_array),
    *(appends_to_arrays, changes_a_nest, adds_a_forward_hook, marks_a_tensor),
)
