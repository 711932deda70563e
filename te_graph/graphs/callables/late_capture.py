"""Captures that wait for the first call that trains, whose arguments are the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.capture_lock import is_watched_elsewhere
from te_graph.common.dispatch import has_subclass
from te_graph.common.fp8_calls import REPEATS, repeats_fp8_calls
from te_graph.common.gradient_state import main_grad_of
from te_graph.graphs.arguments.nest import flatten
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.options import Options
from te_graph.graphs.capture.request import common_device

WATCHED_ELSEWHERE = "called while another thread is watched"


class LateCaptures:
    """What callables share that one ``make_graphed_callables`` is given without samples.

    Args:
        options: as the user gave them.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._group: CaptureGroup | None = None

    def reason_to_wait(self, target: nn.Module | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why a call of ``target`` is not captured yet and runs eagerly, if so."""
        if isinstance(target, nn.Module) and not target.training:
            return "called in eval mode, not captured yet"
        if not torch.is_grad_enabled():
            return "called under no_grad, not captured yet"
        if _C.is_observed() or torch.compiler.is_compiling():
            return "called where operations are watched or captured, not captured yet"
        if repeats_fp8_calls():
            return f"{REPEATS}, not captured yet"
        if is_watched_elsewhere():
            return f"{WATCHED_ELSEWHERE}, not captured yet"
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if isinstance(target, nn.Module):
            tensors += [*target.parameters(), *target.buffers()]
        if any(tensor.is_meta or has_subclass([type(tensor)]) for tensor in tensors):
            return "called with tensors without memory or of a subclass, not captured yet"
        return None

    def group_for(self, label: str, target: nn.Module | Callable[..., Any], samples: list[Tensor]) -> CaptureGroup:
        """The group in which ``target``, which messages call ``label``, is captured with ``samples``, [...] each.

        Raises:
            ValueError: they are on a device without graphs, or on another one than the callables captured before.
        """
        device = common_device((label,), (target,), [samples])
        if self._group is None:
            self._group = CaptureGroup(device, self.options)
        if self._group.device != device:
            raise ValueError(
                f"{label}: expected tensors on {self._group.device}, as of the callable that was captured first, got "
                f"{device}: give callables of each device to a make_graphed_callables of their own"
            )
        return self._group

    def has_main_grads(self, target: nn.Module | Callable[..., Any]) -> bool:
        """Whether gradients of ``target`` would go to a ``main_grad``."""
        if self.options.grad_dtype is not None:
            return True
        return isinstance(target, nn.Module) and any(main_grad_of(p) is not None for p in target.parameters())
