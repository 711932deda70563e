"""A flat parameter whose parts are made by `split` in each forward, and put together by a concat in each backward."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import te_graph as tg


class SplitParameters(nn.Module):
    """Calls a module whose parameters are views of one flat parameter, as FlattenParamsWrapper of fairscale makes them.

    Attributes:
        flat: the flat parameter, [n].
        main_grad: float32, to which a hook adds the gradient of each backward, [n].
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        places = [(owner, name) for owner in module.modules() for name in owner._parameters if name]
        self._places = [(owner, name) for owner, name in places if owner._parameters[name] is not None]
        parameters = [owner._parameters[name] for owner, name in self._places]
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self.flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
        self.main_grad = torch.zeros_like(self.flat, dtype=torch.float32)
        for owner, name in self._places:
            del owner._parameters[name]
        self.module = module
        self.flat.register_post_accumulate_grad_hook(self._add)

    def forward(self, x: Tensor) -> Tensor:
        """The module of x [...]."""
        parts = self.flat.split(self._sizes)
        for (owner, name), part, shape in zip(self._places, parts, self._shapes, strict=True):
            setattr(owner, name, part.view(shape))
        return self.module(x)

    def _add(self, flat: Tensor) -> None:
        """After a backward, of the flat parameter [n]."""
        self.main_grad.add_(flat.grad)
        flat.grad = None


def reduce_main_grads(layers: Sequence[SplitParameters], group: tg.PeerGroup) -> None:
    """Make each `main_grad` the mean of all ranks'."""
    for layer in layers:
        tg.all_reduce_(layer.main_grad, group)
        layer.main_grad.mul_(1 / group.world_size)
