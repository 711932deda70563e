"""What accumulates the gradient of a parameter, across the graphed callables that use it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_graph import _C
from te_graph.graphs.guards.sources import Source
from te_graph.multi_tensor.tensor_lists import as_sequence, check_members


class GradientState:
    """What graphed callables share about one parameter.

    Attributes:
        users: the handles of the callables that compute a gradient for it.
        flag: tells the next backward to overwrite ``main_grad``.
    """

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.flag = _C.StoreFlag()


# Belongs to the parameters, and would be an attribute of theirs if attributes were not saved with them by torch.save.
_states = WeakTensorKeyDictionary()


def gradient_state(parameter: Tensor) -> GradientState:
    """The state of ``parameter`` [...], made at first use."""
    if parameter not in _states:
        _states[parameter] = GradientState()
    return _states[parameter]


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The ``main_grad`` of ``parameter`` [...], or None."""
    return getattr(parameter, "main_grad", None)


def reset_main_grads(parameters: Tensor | Iterable[Tensor]) -> None:
    """Let the next graphed backward overwrite each parameter's ``main_grad`` instead of adding to it.

    Takes the place of ``main_grad.zero_()`` between optimizer steps, without a memset: until that backward has run,
    ``main_grad`` keeps its old values, and it keeps them if no backward reaches the parameter.

    Args:
        parameters: a parameter or several [...], each with a ``main_grad``.

    Raises:
        ValueError: a parameter has no ``main_grad``.
        TypeError: what is no tensor.

    Stream and capture: launches nothing.
    """
    chosen = as_sequence(parameters, "parameters")
    check_members("reset_main_grads", "parameters", chosen)
    for position, parameter in enumerate(chosen):
        if main_grad_of(parameter) is None:
            raise ValueError(
                f"reset_main_grads: expected parameters with a main_grad, got number {position} of shape "
                f"{list(parameter.shape)} without one"
            )
    for parameter in chosen:
        gradient_state(parameter).flag.set()


def create_main_grad(parameter: Tensor, dtype: torch.dtype) -> None:
    """Give ``parameter`` [...] a zero ``main_grad`` of its layout and of ``dtype``."""
    with torch.no_grad():
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)


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
    label: str, outputs: list[Tensor], targets: list[Tensor], grad_outputs: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of ``targets``, which are leaves, [...] each like its tensor, without running their hooks; None for
    those that the ``outputs`` [...] do not depend on. ``label`` is what messages call the callable.

    Autocast is off, as where backward() is usually called; the ops that forward ran keep their dtypes.
    """
    if not targets:
        return []
    isolation = _C.LeafIsolation(targets, with_accumulators=False)
    try:
        with torch.autocast(outputs[0].device.type, enabled=False):
            grads = list(torch.autograd.grad(outputs, targets, grad_outputs, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            f"{label}: reentrant activation checkpointing runs a backward inside the backward, which cannot be "
            "captured: pass use_reentrant=False to torch.utils.checkpoint"
        ) from error
    finally:
        isolation.restore()
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


def check_main_grad(name: str, parameter: Tensor) -> None:
    """Raise ValueError, calling ``parameter`` [...] ``name``, if its ``main_grad`` cannot hold its gradient."""
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return
    if not isinstance(main_grad, Tensor) or main_grad.layout != torch.strided:
        kind = f"one of layout {main_grad.layout}" if isinstance(main_grad, Tensor) else type(main_grad).__name__
        raise ValueError(f"expected main_grad of {name} to be a dense tensor, got {kind}")
    for fact in ("shape", "device"):
        expected, got = getattr(parameter, fact), getattr(main_grad, fact)
        if expected != got:
            raise ValueError(f"expected main_grad of {name} with {fact} {expected}, as the parameter, got {got}")
    if any(stride == 0 and size > 1 for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)):
        raise ValueError(f"expected main_grad of {name} with memory for each element, got an expanded tensor")
