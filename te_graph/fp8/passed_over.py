"""Converted layers that a training passes over: it reads their weights and multiplies by them itself."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_graph.common.own_objects import OwnObject

_log = logging.getLogger("te_graph")
_MAX_NAMED = 5  # layers, in a message


class _Conversion:
    """The layers of one, by their names, which are not kept alive."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {name: weakref.ref(layer) for name, layer in layers.items()}

    def layers(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Those that are still there, and converted, with their names, and whether they have computed in FP8."""
        for name, reference in self._layers.items():
            layer = reference()
            if layer is not None and hasattr(type(layer), "fp8_evaluated"):
                yield name, layer, layer.fp8 is not None or layer.fp8_evaluated is not None


class PassedOverLayers(OwnObject):
    """Tells once for each conversion, before the first step of an optimizer behind its first product in FP8, which
    layers have a gradient and have computed none. A layer that did not run, as experts do not that were not chosen, has
    none."""

    def __init__(self) -> None:
        self._conversions: list[_Conversion] = []  # of which no layer has computed before a step
        self._lock = threading.RLock()  # of that list
        self._is_hooked = False

    def watch(self, layers: Mapping[str, nn.Module]) -> None:
        """``layers`` of a model have been converted, by their names in it."""
        if not layers:
            return
        with self._lock:
            self._conversions.append(_Conversion(layers))
            if not self._is_hooked:  # for good: to remove a hook breaks a step that calls its hooks
                register_optimizer_step_pre_hook(self._report)
                self._is_hooked = True

    def _report(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._conversions:
            return
        with self._lock:
            before, self._conversions = self._conversions, []
            for conversion in before:
                layers = list(conversion.layers())
                if any(has_computed for _, _, has_computed in layers):
                    read = [name for name, layer, has_computed in layers if not has_computed and _has_gradient(layer)]
                    _warn(read, len(layers))
                elif layers:
                    self._conversions.append(conversion)


def _has_gradient(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and weight.grad is not None


def _warn(read: list[str], count: int) -> None:
    if read:
        more = ", ..." if len(read) > _MAX_NAMED else ""
        _log.warning(
            "convert_to_fp8: %d of %d layers have a gradient and have not computed in FP8 (%s%s): their weights are "
            "read by other modules",
            *(len(read), count, ", ".join(read[:_MAX_NAMED]), more),
        )


passed_over_layers = PassedOverLayers()
