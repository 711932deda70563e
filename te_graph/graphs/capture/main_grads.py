"""main_grad of the parameters of graphed callables: what is refused, made and reset."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from te_graph.common.before_capture import ReadyForCapture
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.graphs.guards.sources import Source, name_of
from te_graph.multi_tensor.tensor_lists import as_sequence, check_members

# Attributes of modules, of TransformerEngine and Megatron-LM: kernels of their backward add to main_grad.
_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")


def refuse_fused_main_grads(label: str, sources: Iterable[Source]) -> None:
    """Raise RuntimeError if the backward of a module at ``sources`` adds to ``main_grad`` by itself."""
    for source in sources:
        if source.again is None and isinstance(source.obj, nn.Module) and not isinstance(source.obj, ReadyForCapture):
            fused = next((name for name in _FUSED if vars(source.obj).get(name) is True), None)
            if fused and any(p.requires_grad for p in source.obj._parameters.values() if p is not None):
                raise RuntimeError(
                    f"{label}: {name_of(fused, source.name)} is True: its backward adds to main_grad with kernels of "
                    f"its own, which warm-ups would do, too, and replays add there themselves: make it with "
                    f"{fused}=False, for the same gradients, which a replay adds to main_grad in one launch"
                )


def reset_main_grads(parameters: Tensor | Iterable[Tensor]) -> None:
    """Let the next backward overwrite each parameter's ``main_grad`` instead of adding to it: that of a graphed
    callable, or of a ``te_graph.Linear`` with ``fuse_wgrad_accumulation``.

    Takes the place of ``main_grad.zero_()`` between optimizer steps, without a memset: until that backward has run,
    ``main_grad`` keeps its old values, and it keeps them if no backward reaches the parameter.

    Args:
        parameters: a parameter or several [...], such as all of a model. Those without a ``main_grad`` are passed over,
            as ``zero_grad()`` passes over those without a ``.grad``, which it alone drops.

    Raises:
        ValueError: no parameter has a ``main_grad``.
        TypeError: what is no tensor.

    Stream and capture: launches nothing.
    """
    chosen = as_sequence("reset_main_grads", "parameters", parameters)
    check_members("reset_main_grads", "parameters", chosen)
    held = [parameter for parameter in chosen if main_grad_of(parameter) is not None]
    if chosen and not held:
        raise ValueError(
            f"reset_main_grads: expected parameters of which some have a main_grad, got {len(chosen)} without one: "
            "zero_grad() drops .grad"
        )
    for parameter in held:
        gradient_state(parameter).main_grad_reset.is_pending = True


def create_main_grad(parameter: Tensor, dtype: torch.dtype) -> None:
    """Give ``parameter`` [...] a zero ``main_grad`` of its layout and of ``dtype``."""
    with torch.no_grad():
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)


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
