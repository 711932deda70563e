"""Collectives as torch.compile has to see them: effects, none of which may be left out or change its place.

Ranks meet by order alone. A compiler that takes the functional ops for pure functions swaps two of them, on one rank
and not on the other, or leaves one out whose result that rank does not use; the others then add what was meant for
another sum. As ordered effects all ops of a program run once each, in its order, forward and backward; checkpoints keep
their results. Those that write into their arguments are traced as the functional op and a copy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

# Cached code must have been compiled by the same rules. To be raised where these change.
_RULES = "te_graph.effects-2"


def register() -> None:
    """Tell torch.compile of all collectives.

    Raises:
        ImportError: this torch has no ordered effects.
    """
    try:
        from torch._library.effects import EffectType
        from torch._library.simple_registry import singleton
        from torch._library.utils import handle_dispatch_mode
        from torch._subclasses.functional_tensor import FunctionalTensorMode
        from torch.compiler import config
        from torch.fx.node import has_side_effect
    except ImportError as error:
        raise ImportError(
            f"te_graph: torch {torch.__version__} has no ordered effects as of torch 2.11, without which torch.compile "
            f"reorders collectives: {error}"
        ) from error
    ops = torch.ops.te_graph
    for functional in (ops.all_reduce.default, ops.reduce_scatter.default, ops.all_gather.default):
        singleton.find(functional._name).effect.register(EffectType.ORDERED)
        has_side_effect(functional)
        functional.py_impl(FunctionalTensorMode)(_in_order(functional, handle_dispatch_mode))
    ops.all_reduce_.default.py_impl(FunctionalTensorMode)(_into_x(ops.all_reduce.default))
    for out, functional in (
        (ops.all_reduce_out, ops.all_reduce),
        (ops.reduce_scatter_out, ops.reduce_scatter),
        (ops.all_gather_out, ops.all_gather),
    ):
        out.default.py_impl(FunctionalTensorMode)(_into_out(functional.default))
    if _RULES not in config.cache_key_tag:
        config.cache_key_tag += _RULES


def _in_order(functional: OpOverload, trace: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def traced(mode: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Loaded by inductor before it traces anything; other compilers do without.
        inductor = sys.modules.get("torch._inductor.lowering")
        if inductor is not None and functional not in inductor.lowerings:
            inductor.register_lowering(functional, type_promotion_kind=None)(_lowering(functional, inductor))
        with _saved():
            return trace(mode, functional, *args, **kwargs)

    return traced


@contextlib.contextmanager
def _saved() -> Iterator[None]:
    """What is traced here is kept for the backward, which would else call it again: in a checkpoint, or to save memory.

    No order says where it belongs among the collectives of the backward. torch does the same to its own.
    """
    before = traceback.current_meta
    traceback.current_meta = {**before, "recompute": CheckpointPolicy.MUST_SAVE}
    try:
        yield
    finally:
        traceback.current_meta = before


def _lowering(functional: OpOverload, inductor: Any) -> Callable[..., Any]:
    """How inductor runs ``functional``: by calling it, behind the effect before it.

    Inductor's own rule (torch 2.11) notes that dependency under the names of buffers and looks for it under those of
    operations, so that it holds where the two happen to be equal.
    """

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = inductor.V.graph
        effects, count = list(graph.effectful_ops.values()), len(graph.operations)
        result = inductor.ir.FallbackKernel.create(functional, *args, **kwargs)
        for operation in graph.operations[count:]:
            graph.additional_star_deps[operation.get_operation_name()].update(effect.get_name() for effect in effects)
        return inductor.TensorBox.create(result)

    return lower


def _into_x(functional: OpOverload) -> Callable[..., None]:
    def traced(mode: Any, x: Tensor, *args: Any, **kwargs: Any) -> None:  # [...]
        with mode:
            x.copy_(functional(x, *args, **kwargs))

    return traced


def _into_out(functional: OpOverload) -> Callable[..., None]:
    def traced(
        mode: Any,
        out: Tensor,  # [...]
        *args: Any,
        scale: float = 1.0,
        scale_tensor: Tensor | None = None,  # [] or [1]
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if scale != 1.0 or scale_tensor is not None or wire_dtype is not None:
            raise NotImplementedError(
                f"{functional.overloadpacket.__name__}_out: scale and wire_dtype are not traced by torch.compile: call "
                "it outside of what is compiled"
            )
        with mode:
            out.copy_(functional(*args))

    return traced
