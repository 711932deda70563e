"""Ways of backwards. ``side`` is a FlatSide or a Reference, with ``model``, ``backward`` and ``no_sync``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import te_graph as tg

from .model import Model
from .reference import Reference


class FlatSide:
    """What a Reference has, of flat parameters."""

    def __init__(self, model: Model, flat: tg.FlatParameters) -> None:
        self.model, self.flat = model, flat
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.frozen = [one for one in model.parameters() if not one.requires_grad]
        self.no_sync = flat.no_sync

    def backward(self, loss: Tensor, **options: Any) -> None:  # []
        try:
            loss.backward(**options)
        except Exception:
            self.flat.reducer.finish_failed_backward()
            raise


Loss = Callable[..., Tensor]  # of the next tokens


def plain(side: Any, loss: Loss) -> None:
    side.backward(loss())


def retained(side: Any, loss: Loss) -> None:
    kept = loss()
    side.backward(kept, retain_graph=True)
    side.backward(kept)


def of_two_losses(side: Any, loss: Loss) -> None:
    side.backward(loss() + loss())


def of_one_block(side: Any, loss: Loss) -> None:
    embedded = side.model.embedding(torch.zeros(1, 2, dtype=torch.long))
    side.backward(side.model.blocks[0](embedded).float().square().sum() + loss() * 0)


def with_inputs(side: Any, loss: Loss) -> None:
    side.backward(loss(), inputs=[side.model.embedding.weight, side.model.blocks[0].linear.weight])


def create_graph(side: Any, loss: Loss) -> None:
    side.backward(loss(), create_graph=True)


def behind_grad(side: Any, loss: Loss) -> None:
    kept = loss()
    torch.autograd.grad(kept, side.parameters[:2], retain_graph=True, allow_unused=True)
    side.backward(kept)


def in_thread(side: Any, loss: Loss) -> None:
    _in_threads(lambda: side.backward(loss()))


def at_once(side: Any, loss: Loss) -> None:
    """Two, of which the gradients' sums are the same in each order."""
    losses = [loss(), loss()]
    if isinstance(side, Reference):
        with side.no_sync():
            for one in losses:
                side.backward(one)
        side.reduce()
        return
    barrier = threading.Barrier(2)

    def run(one: Tensor) -> None:  # []
        barrier.wait()
        one.backward()

    with side.no_sync():
        _in_threads(*(lambda one=one: run(one) for one in losses))
    side.flat.reduce_gradients()


WAYS = (plain, retained, of_two_losses, of_one_block, with_inputs, create_graph, behind_grad, in_thread, at_once)


def _in_threads(*functions: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for running in [pool.submit(function) for function in functions]:
            running.result()
