"""What the backward of a callable computes, and where the gradient of each parameter goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_state import main_grad_of
from te_graph.graphs.guards.sources import Source


@dataclass
class Gradients:
    """What the backward of a callable computes, as the last warm-up saw it.

    Attributes:
        parameters: leaves outside the callable that get a gradient.
        dtypes: of those gradients.
        inputs: numbers of the inputs that get a gradient.
        depends_on: for each parameter, then each input: which differentiable outputs its gradient comes from.
    """

    parameters: list[Tensor]
    dtypes: list[torch.dtype]
    inputs: list[int]
    depends_on: list[list[bool]]

    @property
    def any(self) -> bool:
        return bool(self.parameters or self.inputs)


def gradients_of(
    label: str, outputs: list[Tensor], targets: list[Tensor], grad_outputs: list[Tensor], in_flight: int = 1
) -> list[Tensor | None]:
    """Gradients of ``targets``, which are leaves, [...] each like its tensor, without running their hooks; None for
    those that the ``outputs`` [...] do not depend on. ``label`` is what messages call the callable, of which
    ``in_flight`` calls were made before.

    Autocast is off, as where backward() is usually called; the ops that forward ran keep their dtypes.
    """
    if not targets:
        return []
    isolation = _C.LeafIsolation(targets, with_accumulators=False)
    try:
        with torch.autocast(outputs[0].device.type, enabled=False):
            grads = list(torch.autograd.grad(outputs, targets, grad_outputs, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if in_flight > 1 and "modified by an inplace operation" in str(error):
            raise RuntimeError(
                f"{label}: each call changes in place what the backward of the one before it reads, so no two calls "
                f"can be in flight (in eager execution neither), and max_in_flight={in_flight} asks for that: {error}"
            ) from error
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            f"{label}: reentrant activation checkpointing runs a backward inside the backward, which cannot be "
            "captured: pass use_reentrant=False to torch.utils.checkpoint (Hugging Face: "
            'gradient_checkpointing_kwargs={"use_reentrant": False})'
        ) from error
    finally:
        isolation.restore()
    grads = [grad.clone() if grad is not None and grad._is_zerotensor() else grad for grad in grads]
    for target, grad in zip(targets, grads, strict=True):
        if grad is not None and grad.layout != torch.strided:
            raise TypeError(
                f"{label}: the gradient of a parameter of shape {list(target.shape)} is {grad.layout}, and a "
                "graph needs dense gradients (torch.nn.Embedding: sparse=False)"
            )
    return grads


def leaves_outside(
    leaves: dict[int, Tensor], before: dict[int, Tensor], sources: Callable[[], Iterable[Source]]
) -> list[Tensor]:
    """Those of ``leaves`` [...], by identity, that a callable has not made itself, as ``w.detach().requires_grad_()``
    is, over memory from outside: what it uses in each iteration, or what stands at one of its ``sources``.

    Args:
        before: leaves [...] of the iteration before, kept until now: none of the new ones is at the address of one.
    """
    if leaves.keys() - before.keys() and before:
        standing = {id(source.obj) for source in sources()}
        return [leaf for key, leaf in leaves.items() if key in before or key in standing]
    return list(leaves.values())


@dataclass(frozen=True)
class Destination:
    """Where the gradient of one parameter goes.

    Attributes:
        source_dtype: of the gradient.
        dtype: of what it is accumulated in.
        is_in_table: the backward graph can write it there.
        is_for_autograd: autograd accumulates it.
    """

    source_dtype: torch.dtype
    dtype: torch.dtype
    is_in_table: bool
    is_for_autograd: bool

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype, is_for_autograd: bool) -> Destination:
        """That of ``parameter`` [...], whose gradient has ``dtype``; ``is_for_autograd`` if the user says so."""
        main_grad = None if is_for_autograd else main_grad_of(parameter)
        target = dtype if main_grad is None else main_grad.dtype
        takes = _C.GradientTable.takes(dtype, target)
        is_written = main_grad is None or (_C.is_dense(main_grad) and not main_grad.is_complex())
        is_in_table = takes and not is_for_autograd and is_written
        if not takes:
            dtype = target = torch.float32  # of an entry without elements
        return cls(dtype, target, is_in_table, is_for_autograd or (main_grad is None and not takes))


def gradients_that_come(
    label: str, outputs: list[Tensor], inputs: list[Tensor], wanted: Gradients, reached: list[dict[int, Tensor]]
) -> Gradients:
    """Run the backward of ``outputs`` [...] once with zero gradients: those of ``wanted`` that it gives.

    Args:
        label: what messages call the callable.
        inputs: [...] each, whose numbers ``wanted`` has.
        reached: the leaves below each of ``outputs``, by identity.
    """
    targets = wanted.parameters + [inputs[i] for i in wanted.inputs]
    grads = gradients_of(label, outputs, targets, [torch.zeros_like(output) for output in outputs])
    come = {id(target): grad.dtype for target, grad in zip(targets, grads, strict=True) if grad is not None}
    parameters = [p for p in wanted.parameters if id(p) in come]
    return Gradients(
        parameters,
        [come[id(p)] for p in parameters],
        [i for i in wanted.inputs if id(inputs[i]) in come],
        [[id(target) in leaves for leaves in reached] for target in targets if id(target) in come],
    )
