"""Captures under autocast, whose cache of cast weights is of the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from te_graph.common.dispatch import bypass_modes


@contextlib.contextmanager
def own_casts() -> Iterator[None]:
    """Around one run of what is captured: with a cache of its own where autocast caches.

    A weight that is used twice inside is cast once, as in eager execution, where gradients of the two uses are then
    summed in the lower precision. Casts that were there before are lost, which costs their next use a cast: they
    belong to autograd graphs that a capture must not lead to, and those of the capture to memory of its graph.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def cast_at_each_use(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Autocast does not keep its casts of ``inputs`` [...] inside: their gradients are summed in full precision.

    That is what it does with tensors that other operations computed. Static inputs are leaves, whose casts it keeps.
    """
    ours = [tensor for tensor in inputs if not torch._C._is_cached_tensor(tensor)]
    # Whether that was enabled before is unknown. It costs a look-up in each cast.
    torch._C._set_cached_tensors_enabled(True)
    for tensor in ours:
        torch._C._add_cached_tensor(tensor)
    try:
        yield
    finally:
        for tensor in ours:
            torch._C._remove_cached_tensor(tensor)


def casts_of(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[int]:
    """How often each of ``inputs`` [...] is cast on the way to ``results`` [...], as autograd sees it."""
    numbers = {_node_of(tensor): number for number, tensor in enumerate(inputs) if tensor.requires_grad}
    counts = [0] * len(inputs)
    nodes = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for following in {each for each, _ in node.next_functions if each is not None}:
            if following in numbers and node.name() == "ToCopyBackward0":
                counts[numbers[following]] += 1
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return counts


def _node_of(tensor: Tensor) -> torch.autograd.graph.Node:
    """The node that edges to ``tensor`` [...] lead to."""
    with bypass_modes():
        return torch.autograd.graph.get_gradient_edge(tensor).node
