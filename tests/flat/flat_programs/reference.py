"""What flat parameters do, in plain PyTorch: gradients in ``.grad`` or beside it, averaged in the ranks' order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .program import Setup

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


class Reference:
    """Gradients of a model as FlatParameters has them.

    Attributes:
        parameters, frozen: [...] each, those that are trained, and the others.
        reduced: those whose gradient has been, and has not been replaced since.
        aside: gradients that had been reduced when more came, which is not to be reduced with them.
        late: those whose gradients autograd leaves in ``.grad`` until the backward ends, for hooks that want them.
        zeroed: those whose gradient te_graph has set to zero since the last backward.
        is_reduced: nothing has come since the last reduction.
        has_failed: the last backward has.
    """

    def __init__(self, model: nn.Module, setup: Setup, world: int) -> None:
        self.model, self._world, self._grad_dtype = model, world, getattr(torch, setup.grad_dtype)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        self._factor = setup.gradient_scale / world
        self._reduces_again = setup.gradient_scale == 1 and (world == 1 or setup.shard == "none")
        self._overlaps = setup.overlap and world > 1
        self._sent_as = torch.bfloat16 if setup.sends_bf16 else self._grad_dtype
        self._mean_dtype = self._sent_as if setup.shard == "none" else self._grad_dtype
        self._main: dict[Tensor, Tensor] = {}
        self.reduced: set[Tensor] = set()
        self.aside: dict[Tensor, Tensor] = {}
        self.late: set[Tensor] = set()
        self.zeroed: set[Tensor] = set()
        self.syncs = self.is_reduced = True
        self.has_failed = False

    @property
    def must_reduce(self) -> bool:
        """Whether a reduction is due before gradients are read."""
        return bool(self.aside) or not (self.is_reduced or self._factor == 1 or self._is_zero_everywhere())

    def has_main(self, parameter: Tensor) -> bool:  # [...]
        return parameter.dtype != self._grad_dtype

    def grad(self, parameter: Tensor) -> Tensor | None:  # [...]
        """What has come, and has not been dropped."""
        main = self._main.get(parameter)
        if not self.has_main(parameter) or parameter.grad is None:
            return parameter.grad if main is None else main
        grad = parameter.grad.detach().to(self._grad_dtype)
        return grad if main is None else main + grad

    def close(self) -> None:
        """What was ``main_grad`` becomes ``.grad``, of the parameter's dtype, with what lies aside."""
        self.settle()
        with torch.no_grad():
            for parameter, reduced in self.aside.items():
                self.grad(parameter).detach().add_(reduced)
        self.aside.clear()
        for parameter, main in self._main.items():
            self._main[parameter] = main.to(parameter.dtype).to(main.dtype)

    def settle(self) -> None:
        """What autograd, or the user, has left in ``.grad`` becomes ``main_grad``."""
        for parameter in filter(self.has_main, self.parameters):
            self._settle(parameter)

    def grads(self) -> list[Tensor]:
        """Those that are there, settled, to be changed in place."""
        self.settle()
        return [grad.detach() for one in self.parameters if (grad := self.grad(one)) is not None]

    def backward(self, loss: Tensor, **options: Any) -> None:  # []
        self.begin()
        left = {one for one in self.parameters if one.grad is not None}
        try:
            loss.backward(**options)
        except Exception:
            self.has_failed = True
            for parameter in filter(self.has_main, self.parameters):
                if parameter not in self.late and parameter not in left:
                    self._settle(parameter)
            if self.syncs and self._overlaps:
                self.reduce()
            raise
        self.end()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    @torch.no_grad()
    def begin(self) -> None:
        """A backward begins."""
        self.is_reduced = self.has_failed = False
        self.zeroed.clear()
        reduced, self.reduced = self.reduced, set()
        if self._reduces_again:
            return
        for parameter in reduced:
            grad = self._main.get(parameter) if self.has_main(parameter) else parameter.grad
            if grad is not None:
                self.aside[parameter] = grad.detach().clone()
                grad.detach().fill_(-0.0)

    def end(self) -> None:
        """It has come through."""
        self.settle()
        if self.syncs:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        self.settle()
        if self._world > 1:
            for parameter in self.parameters:
                if self.grad(parameter) is None:
                    self._put(parameter, torch.zeros_like(parameter, dtype=self._grad_dtype))
        there = [one for one in self.parameters if self.grad(one) is not None]
        for parameter, mean in zip(there, self._means([self.grad(one).detach() for one in there]), strict=True):
            grad = self.grad(parameter).detach().copy_(mean)
            if parameter in self.aside:
                grad.add_(self.aside[parameter])
        self.reduced.update(there)
        self.aside.clear()
        self.zeroed.clear()
        self.is_reduced = True

    def replace(self, parameter: Tensor, grad: Tensor) -> None:  # [...] each
        """``.grad`` is set by the user; of one with a main_grad it is added to that."""
        parameter.grad = grad
        self.is_reduced = False
        self.zeroed.discard(parameter)
        if not self.has_main(parameter):
            self.reduced.discard(parameter)
            self.aside.pop(parameter, None)

    def drop(self, parameters: Iterable[Tensor]) -> None:  # [...] each
        """Also what lies aside."""
        for parameter in parameters:
            parameter.grad = None
            self._main.pop(parameter, None)
            self.aside.pop(parameter, None)
            self.reduced.discard(parameter)

    @torch.no_grad()
    def zero(self, parameters: Iterable[Tensor], is_own: bool = False) -> None:  # [...] each
        """As a ``zero_grad(set_to_none=False)``.

        Args:
            is_own: the user does it, by himself.
        """
        parameters = list(parameters)
        self.settle()
        for parameter in parameters:
            for grad in (parameter.grad, self._main.get(parameter)):
                if grad is not None:
                    grad.detach_().zero_()
            if not is_own and self.grad(parameter) is not None:
                self.zeroed.add(parameter)
                self.reduced.discard(parameter)  # what comes is added to the zeros
            self.aside.pop(parameter, None)

    def _is_zero_everywhere(self) -> bool:
        """Whether gradients of all ranks are those that te_graph has set to zero."""
        there = [self.grad(one) is not None for one in self.parameters]
        is_zero = all(one in self.zeroed for one, is_there in zip(self.parameters, there, strict=True) if is_there)
        if self._world == 1:
            return is_zero
        of_ranks: list[Any] = [None] * self._world
        dist.all_gather_object(of_ranks, (is_zero, there))
        return all(is_zero and one == there for is_zero, one in of_ranks)

    def _means(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Of ``grads`` [...] each, rounded once."""
        if self._world == 1:
            return [grad * self._factor for grad in grads]
        mine = torch.cat([grad.reshape(-1) for grad in grads])
        of_ranks = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(of_ranks, mine)
        total = of_ranks[0].to(self._sent_as).float()
        for other in of_ranks[1:]:
            total = total + other.to(self._sent_as).float()
        means = (total * self._factor).to(self._mean_dtype).to(mine.dtype).split([grad.numel() for grad in grads])
        return [mean.view(grad.shape) for mean, grad in zip(means, grads, strict=True)]

    def _put(self, parameter: Tensor, grad: Tensor) -> None:  # [...] each
        if self.has_main(parameter):
            self._main[parameter] = grad
        else:
            parameter.grad = grad

    def _settle(self, parameter: Tensor) -> None:  # [...]
        if parameter.grad is not None:
            self._main[parameter] = self.grad(parameter)
            parameter.grad = None


class ReferenceOptimizer:
    """Steps float32 masters of parameters of lower precision."""

    def __init__(self, reference: Reference, setup: Setup) -> None:
        cls, options = OPTIMIZERS[setup.optimizer]
        self._reference = reference
        self.masters = {
            one: one if one.dtype == torch.float32 else nn.Parameter(one.detach().float())
            for one in reference.parameters
        }
        self.inner = cls(self.masters.values(), **options)

    @torch.no_grad()
    def read_parameters(self) -> None:
        """Masters follow what has been written into parameters."""
        for parameter, master in self.masters.items():
            if parameter is not master:
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))

    @torch.no_grad()
    def step(self) -> None:
        self.read_parameters()
        self._reference.settle()
        for parameter, master in self.masters.items():
            grad = self._reference.grad(parameter)
            if parameter is not master:
                master.grad = None if grad is None else torch.empty_like(master).copy_(grad)
        self.inner.step()
        for parameter, master in self.masters.items():
            if parameter is not master:
                parameter.copy_(master)
                master.grad = None


class ReferenceScaler:
    """``torch.amp.GradScaler`` with an initial scale of 8 and a growth interval of 2."""

    def __init__(self) -> None:
        self.factor, self._steps, self.found_inf = 8.0, 0, False

    def scale(self, loss: Tensor) -> Tensor:  # []
        return loss * self.factor

    def unscale_(self, grads: Iterable[Tensor]) -> None:  # [...] each
        grads = list(grads)
        self.found_inf = not all(bool(torch.isfinite(grad).all()) for grad in grads)
        for grad in grads:
            grad.mul_(1 / self.factor)

    def step(self, step: Callable[[], None]) -> None:
        if self.found_inf:
            self.factor, self._steps = self.factor / 2, 0
            return
        step()
        self._steps += 1
        if self._steps == 2:
            self.factor, self._steps = self.factor * 2, 0
