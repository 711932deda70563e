"""AdamW in float32 beside parameters in bf16, for those who bring none of their own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

RATE = 1e-4


def adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    """That of all variants, over parameters [...]."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


class Masters:
    """Steps float32 copies of parameters [...] by fused AdamW, and writes the parameters.

    Args:
        gradients: where those of each parameter are, [...] each; they are read when `step` is called.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]
        self._gradients = gradients
        self._masters = [nn.Parameter(parameter.float()) for parameter in self._parameters]
        self._optimizer = adamw(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        for master, gradient in zip(self._masters, self._gradients(), strict=True):
            master.grad = gradient.float()
        self._optimizer.step()
        torch._foreach_copy_(self._parameters, self._masters)
        for master in self._masters:
            master.grad = None
