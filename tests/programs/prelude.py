"""What programs call besides torch: their data, and small deeds. Printed programs bear the source of what they use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIDE = 4  # all that pieces take is [4, 4], so that any of them may follow any other, transposed or not


def ints(*shape: int) -> Tensor:
    """Small whole numbers of ``shape``: their sums are exact in whatever order they are added."""
    return torch.randint(-1, 3, shape, device=torch.get_default_device()).to(torch.float64)


def data(seed: int, device: str, *shape: int) -> Tensor:
    """The numbers that ``seed`` stands for: float64 of ``shape``, [4, 4] where none is given."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape or (4, 4), generator=generator).to(torch.float64).to(device)


def leaf(seed: int, device: str) -> Tensor:
    """``data`` [4, 4] that requires a gradient."""
    return data(seed, device).requires_grad_()


def whole(owner: nn.Module) -> None:
    """Give dense parameters [...] of ``owner`` whole numbers."""
    for p in owner.parameters():
        p.data.copy_(ints(*p.shape))


def params(owner: Any) -> list[Tensor]:
    """The parameters of a module, [...] each; of anything else none."""
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


def add_into_main_grad(p: Tensor) -> None:
    """Let eager execution do for ``p`` [...] what graphed callables do: gradients go to ``p.main_grad``."""

    def move(parameter: Tensor) -> None:
        parameter.main_grad.add_(parameter.grad.reshape(parameter.main_grad.shape))
        parameter.grad = None

    p.register_post_accumulate_grad_hook(move)


def in_threads(*works: Callable[[], None]) -> None:
    """Run ``works`` at the same time, each in a thread of its own; the first error is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
