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


def state(owner: Any) -> list[Tensor]:
    """Parameters and buffers of a module, [...] each; of anything else none."""
    return [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []


def versions(owner: Any) -> list[int]:
    """How often each tensor of ``state`` was written."""
    return [t._version for t in state(owner)]


def written_since(before: list[int], owner: Any) -> list[bool]:
    """Which tensors of ``state`` were written since ``versions`` gave ``before``."""
    return [now > then for now, then in zip(versions(owner), before, strict=False)]


def product(x: Tensor, owner: Any) -> Tensor:
    """A loss of ``x`` [4, 4] whose backward needs the ``state`` of ``owner`` as it is now; []."""
    saved = [t.detach() for t in state(owner) if t.shape == x.shape and t.dtype == x.dtype]
    return sum(((x * t).sum() for t in saved), x.sum())


def late_backward(loss: Tensor) -> str:
    """Run the backward of ``loss`` [] unless what it needs was written; what came of it."""
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error).partition(":")[0]  # how often it was written is another thing
    return "ran"


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
