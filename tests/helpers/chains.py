"""What the tests of chains share: captures, eager twins, and the comparison of both after the same scenario."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from chain_layers import Nets, batch, parameters_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from twins import eager_copy, gradients_of, leaf_copy

from te_graph import _C, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

Scenario = Callable[[Nets, Tensor], Any]


def chain(layers: Nets, *samples: Any, **options: Any) -> list[nn.Module]:
    """Capture ``layers`` as a chain, by the sample of the first if there are no others; returns their eager twins."""
    twins = list(eager_copy(nn.ModuleList(layers)))
    make_graphed_callables(tuple(layers), samples, chain=True, **options)
    return twins


def assert_same(layers: Nets, twins: Nets, scenario: Scenario, x: Tensor) -> None:
    """Run ``scenario`` on both with copies of ``x`` [n, 6] and one generator state; compare all that there is to see.

    That is what it returns, or the kind of error that it raises, and the gradients of ``x`` and of all parameters.
    """
    seed = int(torch.randint(2**31, ()))
    seen = []
    for nets in (twins, layers):
        leaf = leaf_copy(x)
        torch.manual_seed(seed)
        result = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), scenario(nets, leaf))
        seen.append([result, gradients_of([leaf, *parameters_of(nets)])])
    assert_bitwise_equal(seen[1], seen[0])


def assert_same_steps(
    layers: Nets,
    twins: Nets,
    scenario: Scenario,
    device: str,
    micro_batches: int = 2,
) -> None:
    """``assert_same`` for two steps, one for each kind of ``zero_grad``."""
    for set_to_none in (True, False):
        for net in (*layers, *twins):
            net.zero_grad(set_to_none)
        for _ in range(micro_batches):
            assert_same(layers, twins, scenario, batch(device))


def counts(layers: Nets, fact: str) -> list[Any]:
    """One fact of ``te_graph.info()`` for each layer."""
    return [layer.te_graph.info()[fact] for layer in layers]


def eager_calls(layers: Nets) -> list[int]:
    return [sum(reasons.values()) for reasons in counts(layers, "eager_calls")]


def watched_slots(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each slot of the captures to come reads and writes, filled at capture: addresses of its static tensors."""
    slots: list[dict[str, Any]] = []
    add_slot = _C.GraphedCallable.add_slot

    def watched(graphed: Any, **slot: Any) -> None:
        add_slot(graphed, **slot)
        slots.append(
            {
                "inputs": [tensor.data_ptr() for tensor in slot["inputs"]],
                "outputs": [tensor.data_ptr() for tensor in slot["outputs"]],
                "grad_outputs": [staging.tensor.data_ptr() for staging in slot["grad_outputs"]],
                "grad_inputs": [None if grad is None else grad.data_ptr() for grad in slot["grad_inputs"]],
            }
        )

    monkeypatch.setattr(_C.GraphedCallable, "add_slot", watched)
    return slots


def nodes_below(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The nodes of graphed callables that the backward from ``tensor`` [...] runs."""
    seen, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("GraphedBackward"):
            yield node
        stack += [following for following, _ in node.next_functions]
