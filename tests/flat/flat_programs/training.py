"""What a program's steps do, on both sides."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.common.gradient_state import main_grad_of

from . import backwards
from .backwards import FlatSide
from .comparisons import expect_same
from .model import TOKENS, Failure
from .reference import Reference
from .sides import LENGTH, Sides


class Training(Sides):
    """Steps are its public methods. All ranks take them alike; tokens, and what is used, differ."""

    def backward(
        self,
        way: str = "plain",
        syncs: bool = True,
        uses: Sequence[Sequence[bool]] = ((True, True),),  # of each rank
        checkpoints: Sequence[str] = (),
        fails: str = "",
    ) -> None:
        options = {"uses": uses[self._rank.rank % len(uses)], "checkpoints": checkpoints, "fails": fails}
        if way == "at_once":  # only the first two gradients have one sum, of float32
            if self._reference.late:
                return
            self.drop("flat")
        tokens = [torch.randint(TOKENS, (1, LENGTH), generator=self._tokens) for _ in range(2)]
        for side in (self._reference, self._side):
            loss = functools.partial(self._loss, side, iter(tokens), options)
            raises = contextlib.suppress(Failure) if fails else contextlib.nullcontext()
            with raises, contextlib.nullcontext() if syncs else side.no_sync():
                getattr(backwards, way)(side, loss)

    def reduce_gradients(self) -> None:
        self._flat.reduce_gradients()
        self._reference.begin()
        self._reference.reduce()

    def drop(self, by: str, number: int | None = None) -> None:
        """``by``: who sets gradients to None; the user ``.grad`` of one parameter, or of all."""
        if by != "user":
            {"flat": self._flat, "optimizer": self._optimizer, "module": self._side.model}[by].zero_grad()
            self._drop_reference(frozen=by != "flat")
            return
        for one, other in self._pairs() if number is None else [self._pair(number)]:
            if not self._reference.has_main(other):
                one.grad = None
                self._reference.drop([other])

    def zero(self, by: str = "optimizer") -> None:
        """``by``: who sets gradients to zero; "block", the first one; "user", a loop; "foreach", a call."""
        reference, model = self._reference, self._side.model
        if by == "block":
            model.blocks[0].zero_grad(set_to_none=False)
            reference.zero(reference.model.blocks[0].parameters())
            return
        is_own = by in ("user", "foreach")
        if is_own:
            if reference.aside and reference.has_failed:  # not seen
                return
            grads = _all_grads([*self._side.parameters, *self._side.frozen])
            with torch.no_grad():
                for grad in grads if by == "user" else ():
                    grad.zero_()
                if by == "foreach" and grads:
                    torch._foreach_zero_(grads)
        else:
            {"optimizer": self._optimizer, "module": model}[by].zero_grad(set_to_none=False)
        reference.zero(reference.model.parameters(), is_own)

    def replace(self, number: int) -> None:
        """The user sets ``.grad`` of a parameter."""
        one, other = self._pair(number)
        if other in self._reference.aside and (self._reference.has_failed or self._reference.has_main(other)):
            return  # not seen, or added to what has come since
        grad = torch.randn(other.shape, generator=self._numbers).to(other.dtype)
        one.grad = torch.empty_like(one).copy_(grad)
        self._reference.replace(other, torch.empty_like(other).copy_(grad))

    def set_alone(self, number: int, by: str) -> None:
        """Once gradients are dropped the user sets ``.grad`` of a parameter, to other values on each rank.

        Args:
            by: who drops them.
        """
        self.drop(by)
        one, other = self._pair(number)
        grad = torch.randn(other.shape, generator=self._tokens).to(other.dtype)
        one.grad = torch.empty_like(one).copy_(grad)
        self._reference.replace(other, torch.empty_like(other).copy_(grad))
        if self._is_parted:
            self._expect_refused()

    def keep(self) -> None:
        """Gradients, and arrays over them, are held while the next ones come."""
        for one in self._side.parameters:
            if one.grad is not None:
                held = one.grad.detach()
                self._held.append((one.grad, held.clone()))
                if held.dtype != torch.bfloat16:
                    self._held.append((held.numpy(), held.numpy().copy()))
        self._held = self._held[-20:]
        self.drop("flat")

    def hook(self, kind: str, number: int) -> None:
        one, other = self._pair(number)
        if kind != "tensor":
            self._reference.late.add(other)
        for parameter in (one, other):
            if kind == "tensor":
                self._hooks.append(parameter.register_hook(lambda grad: grad * 2))
            elif kind == "after":
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_halve))
            else:
                node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                self._nodes.append((node, node.register_prehook(lambda grads: (grads[0] * 2,))))

    def unhook(self) -> None:
        """All but the hooks on nodes of autograd."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def write(self, number: int) -> None:
        for parameter in self._pair(number):
            parameter.mul_(0.75)

    def clip(self, max_norm: float, poisoned: int | None = None, by: str = "te_graph") -> None:
        """
        Args:
            poisoned: a parameter whose gradient becomes NaN before.
            by: "torch": its function, of all parameters of the model.
        """
        self._see_all_gradients()
        if poisoned is not None:
            self._fill(poisoned, float("nan"))
        grads = self._reference.grads()
        if by == "te_graph":
            norm = tg.clip_grad_norm_(self._flat, max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(self._side.model.parameters(), max_norm)
            if not (self._is_parted or self._setup.has_main_grads):
                expected = nn.utils.clip_grad_norm_(self._reference.model.parameters(), max_norm)
                expect_same("norm", norm, expected)
                return
            grads += [one.grad for one in self._reference.frozen if one.grad is not None]
        expected = torch.stack([torch.zeros(()), *(grad.float().norm() for grad in grads)]).norm()
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-7, equal_nan=True)
        factor = torch.ones(()) / (norm + torch.tensor(1e-6)) * torch.tensor(max_norm)
        for grad in grads if not factor >= 1 else ():
            grad.copy_((grad.float() * factor).to(grad.dtype))

    def step(self, max_norm: float | None = None, overflows: int | None = None, clips: str = "te_graph") -> None:
        """
        Args:
            overflows: a parameter whose gradient becomes infinite before, where losses are scaled.
            clips: who does.
        """
        self._see_all_gradients()
        if not self._setup.scaled:
            if max_norm is not None:
                self.clip(max_norm, by=clips)
            self._optimizer.step()
            self._reference_optimizer.step()
            return
        if not self._reference.grads():
            return
        if overflows is not None:
            self._fill(overflows, float("inf"))
        self._scaler.unscale_(self._optimizer)
        self._reference_scaler.unscale_(self._reference.grads())
        if max_norm is not None and not self._reference_scaler.found_inf:
            self.clip(max_norm, by=clips)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._reference_scaler.step(self._reference_optimizer.step)
        assert self._scaler.get_scale() == self._reference_scaler.factor

    def save_and_load(self) -> None:
        """The optimizer's state goes into a new one."""
        state = self._saved_state()
        self._optimizer = self._new_optimizer()
        self._optimizer.load_state_dict(state)

    def flatten_again(self, way: str, sets_to_none: bool | None = None) -> None:
        """
        Args:
            way: "close"; "file", the model comes from one; "forget", without close().
            sets_to_none: of a ``zero_grad`` of the optimizer behind close(); None: there is none.
        """
        if way != "close":
            self._see_all_gradients()
        state = self._saved_state()
        if way == "file" or self._is_parted:
            self.drop("flat")
        if way == "file":
            self._drop_hooks()
            self._drop_reference(frozen=True)
        model = self._side.model
        file = io.BytesIO()
        torch.save(model, file)
        if way != "forget":
            self._flat.close()
            self._reference.close()
            if sets_to_none is not None:
                self._optimizer.zero_grad(set_to_none=sets_to_none)
                if sets_to_none:
                    self._drop_reference(frozen=True)
                else:
                    self._reference.zero(self._reference.model.parameters())
        if way == "file":
            model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        del self._flat, self._side, self._optimizer
        gc.collect()  # errors that were raised may hold them
        self._flatten(model)
        self._optimizer.load_state_dict(state)
        self._reference.reduced.clear()

    def _drop_reference(self, frozen: bool) -> None:
        """``frozen``: also what is left of frozen ones."""
        self._reference.drop(self._reference.parameters)
        for one in self._reference.frozen if frozen else ():
            one.grad = None

    def _drop_hooks(self) -> None:
        self.unhook()
        for _, hook in self._nodes:
            hook.remove()
        self._nodes.clear()
        self._reference.late.clear()

    def _see_all_gradients(self) -> None:
        """What comes next reads gradients, which must have been reduced; others are refused."""
        if self._reference.aside:
            self._expect_refused()
        if self._reference.must_reduce:
            self.reduce_gradients()

    def _expect_refused(self) -> None:
        """By whatever reads gradients, until they are reduced."""
        parameters = [*self._side.model.parameters()]
        clips = (lambda: tg.clip_grad_norm_(self._flat, 1.0), lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
        for read in (*clips, self._optimizer.step):
            with pytest.raises(RuntimeError, match="expected gradients of flat parameters that have been reduced"):
                read()

    @torch.no_grad()
    def _fill(self, number: int, value: float) -> None:
        """The gradient of a parameter, if it has one."""
        one, other = self._pair(number)
        self._reference.settle()
        expected = self._reference.grad(other)
        if expected is not None:
            expected.fill_(value)
            if one.grad is not None:
                one.grad.fill_(value)
            elif self._reference.has_main(other):
                one.main_grad.fill_(value)

    def _loss(self, side: FlatSide | Reference, tokens: Iterator[Tensor], options: dict[str, Any]) -> Tensor:
        """Of the next of ``tokens`` [batch, length] each -> []."""
        loss = side.model(next(tokens), **options)
        scaler = self._scaler if side is self._side else self._reference_scaler
        return scaler.scale(loss) if self._setup.scaled else loss


def _all_grads(parameters: Iterable[Tensor]) -> list[Tensor]:  # [...] each
    """What a user finds of ``.grad`` and ``main_grad``, without graphs."""
    grads = [grad for one in parameters for grad in (one.grad, main_grad_of(one)) if grad is not None]
    for grad in grads:
        grad.detach_()
    return grads


def _halve(parameter: Tensor) -> None:  # [...]
    with torch.no_grad():
        parameter.grad.mul_(0.5)
