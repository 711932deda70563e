"""Parameters of one dtype, and their gradients, as views of two flat buffers."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_state import IS_FLAT, gradient_state, main_grad_of
from te_graph.flat.layout import Layout


class FlatBuffer:
    """What the parameters of one dtype share.

    Attributes:
        names, parameters: [...] each, in the order in which they lie.
        data: [n], the values of the parameters.
        grads: [n], their gradients.
        memories: [...] like each parameter, its part of ``grads``.
        gradients: of each parameter, what knows whether it has a gradient and where.
        all_gradients, bucket_gradients: these together, and those of each bucket.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        grad_dtype: torch.dtype,
        bucket_bytes: int,
        ranks: int,
    ) -> None:
        """Allocates only; ``attach`` moves the parameters.

        Args:
            named: names and parameters [...], of one dtype and device, dense.
            grad_dtype: of their gradients.
            bucket_bytes: of gradients, from which on a bucket is full.
            ranks: among which buckets are divided.
        """
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        self.layout = Layout.of(
            [parameter.numel() for parameter in self.parameters],
            itemsize=min(first.dtype.itemsize, grad_dtype.itemsize),
            bucket_numel=max(1, bucket_bytes // grad_dtype.itemsize),
            ranks=ranks,
        )
        # Padding is zero: norms and optimizers pass over it.
        self.data = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.numel, dtype=grad_dtype, device=first.device)
        self._places, self.memories = (
            [
                _C.view_in_buffer(values, offset, parameter)
                for parameter, offset in zip(self.parameters, self.layout.offsets, strict=True)
            ]
            for values in (self.data, self.grads)
        )

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are ``main_grad``, of another dtype than the parameters; else they are ``.grad``."""
        return self.grads.dtype != self.data.dtype

    def attach(self, backwards: _C.Backwards, first: int) -> None:
        """Move the parameters and the gradients that they have into the buffers.

        Args:
            backwards: what is told when gradients are about to be written.
            first: number of the first one there.
        """
        self.gradients = [
            _C.FlatGradient(
                number=first + number,
                name=self.names[number],
                parameter=parameter,
                data=self._places[number],
                memory=self.memories[number],
                reset=gradient_state(parameter).main_grad_reset if self.has_main_grads else None,
                backwards=backwards,
            )
            for number, parameter in enumerate(self.parameters)
        ]
        self.all_gradients = _C.FlatGradients(self.gradients)
        self.bucket_gradients = [
            _C.FlatGradients(self.gradients[bucket.members.start : bucket.members.stop])
            for bucket in self.layout.buckets
        ]
        with torch.no_grad():
            for number, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
                place.copy_(parameter)
                parameter.data = place
                if parameter._backward_hooks is None:
                    # The first hook of the user's would else take all others, of C++, away.
                    parameter._backward_hooks = collections.OrderedDict()
                self._take_gradient(number)
                self.gradients[number].attach()

    def is_copied(self) -> bool:
        """Whether all parameters are copies of what lies here, on the same CPU: ``.to("cpu:0")`` copies what is on
        "cpu". A single one may have been given other memory on purpose."""
        return all(map(_is_copy, self.parameters, self._places))

    def put_back_(self) -> None:
        """Give parameters, which are copies, their memory here again."""
        for parameter, place in zip(self.parameters, self._places, strict=True):
            parameter.data = place

    @torch.no_grad()
    def detach(self) -> None:
        """Leave parameters and gradients where they are, as tensors like any others; what was ``main_grad`` is
        ``.grad``: nobody else would find it, drop it, or leave it out of what is saved."""
        self.settle_()
        for parameter, gradient, memory in zip(self.parameters, self.gradients, self.memories, strict=True):
            gradient.detach()
            state = gradient_state(parameter)
            if self.has_main_grads and main_grad_of(parameter) is memory:
                del parameter.main_grad
                if not state.main_grad_reset.is_pending:
                    parameter.grad = memory.to(parameter.dtype)
                state.main_grad_reset.is_pending = False
            state.flat_gradient = state.grad_memory = None

    @torch.no_grad()
    def settle_(self, bucket: int | None = None) -> None:
        """Add to each ``main_grad``, of one bucket or of all, what autograd has left in ``.grad``."""
        if not self.has_main_grads:
            return
        members = slice(None)
        if bucket is not None:
            members = slice(self.layout.buckets[bucket].members.start, self.layout.buckets[bucket].members.stop)
        for parameter, memory in zip(self.parameters[members], self.memories[members], strict=True):
            if parameter.grad is None:
                continue
            reset = gradient_state(parameter).main_grad_reset
            if reset.is_pending:
                memory.copy_(parameter.grad)
            else:
                memory.add_(parameter.grad)
            reset.is_pending, parameter.grad = False, None

    @contextlib.contextmanager
    def gathered(self, bucket: int | None, adopts: bool) -> Iterator[None]:
        """While it is open the gradients of ``bucket``, or all, are in the buffer, those that are missing as zeros;
        what is done to them there is done to each ``.grad`` that is another tensor.

        Args:
            adopts: what was missing is there afterwards.
        """
        gradients = self.all_gradients if bucket is None else self.bucket_gradients[bucket]
        first = 0 if bucket is None else self.layout.buckets[bucket].members.start
        gradients.note_read()
        self.settle_(bucket)
        missing, elsewhere = gradients.missing(), gradients.elsewhere()
        for number in missing:
            gradient = self.gradients[first + number]
            if adopts:
                gradient.adopt()
            else:
                gradient.protect()
        if missing:
            torch._foreach_zero_([self.memories[first + number] for number in missing])
        for number, grad in elsewhere:
            self.gradients[first + number].protect()
            self.memories[first + number].copy_(grad)
        yield
        for number, grad in elsewhere:
            grad.copy_(self.memories[first + number])
        gradients.note_written()

    def _take_gradient(self, number: int) -> None:
        parameter, gradient, memory = self.parameters[number], self.gradients[number], self.memories[number]
        state, before = gradient_state(parameter), parameter.grad
        if self.has_main_grads:
            before = _main_grad_that_is_there(parameter) if before is None else before
            setattr(memory, IS_FLAT, True)
            parameter.main_grad, parameter.grad = memory, None
            state.main_grad_reset.is_pending = before is None
            if before is not None:
                memory.copy_(before)
        elif before is not None:
            memory.copy_(before)
            parameter.grad = None
            gradient.adopt()
        state.flat_gradient, state.grad_memory = gradient, memory


def buffers_of(
    named: Sequence[tuple[str, Tensor]], grad_dtype: torch.dtype, bucket_bytes: int, ranks: int
) -> list[FlatBuffer]:
    """One for the ``named`` parameters [...] of each dtype, in the reverse of their order, as their gradients come."""
    of_dtypes: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, parameter in reversed(named):
        of_dtypes.setdefault(parameter.dtype, []).append((name, parameter))
    return [FlatBuffer(members, grad_dtype, bucket_bytes, ranks) for members in of_dtypes.values()]


def _main_grad_that_is_there(parameter: Tensor) -> Tensor | None:
    """The ``main_grad`` of ``parameter`` [...], if it has one and that is its gradient."""
    return None if gradient_state(parameter).main_grad_reset.is_pending else main_grad_of(parameter)


def _is_copy(parameter: Tensor, place: Tensor) -> bool:
    """Whether ``parameter`` [...] has the bits of ``place`` [...] in other memory, on a CPU and in the same order."""
    if not (parameter.is_cpu and place.is_cpu and parameter.dtype == place.dtype):
        return False
    if parameter.shape != place.shape or parameter.stride() != place.stride():
        return False
    values, expected = (one.detach().as_strided((one.numel(),), (1,)).view(torch.uint8) for one in (parameter, place))
    return parameter.numel() == 0 or (parameter.data_ptr() != place.data_ptr() and torch.equal(values, expected))


def gradient_of(parameter: Tensor) -> _C.FlatGradient:
    """That of ``parameter`` [...], which is flat."""
    return gradient_state(parameter).flat_gradient
