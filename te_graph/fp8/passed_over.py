"""Converted layers that a training passes over: it reads their weights and multiplies by them itself."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping

from torch import nn

from te_graph.common.own_objects import OwnObject

_log = logging.getLogger("te_graph")
_MAX_NAMED = 5  # layers, in a message
# One of these may call some of its modules alone, as experts are called, and is no reason to expect calls of others.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Conversion:
    """The layers of one, which are not kept alive.

    Args:
        model: in which they are.
        layers: by their names.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {name: weakref.ref(layer) for name, layer in layers.items()}
        self._lists = {name for name, module in model.named_modules() if isinstance(module, _LISTS)}

    def computing(self) -> dict[str, bool]:
        """Whether each layer that is still there, and converted, has computed in FP8."""
        there = {name: layer for name, reference in self._layers.items() if (layer := reference()) is not None}
        return {
            name: layer.fp8 is not None or layer.fp8_evaluated is not None
            for name, layer in there.items()
            if hasattr(type(layer), "fp8_evaluated")
        }

    def passed_over(self, computing: Mapping[str, bool]) -> list[str]:
        """Names of layers that have not computed, where others of the same module have, as ``computing`` says."""
        called = {path for name, has_computed in computing.items() if has_computed for path in _paths_above(name)}
        return [
            name
            for name, has_computed in computing.items()
            if not has_computed and next(path for path in _paths_above(name) if path in called) not in self._lists
        ]


class PassedOverLayers(OwnObject):
    """Tells once for each conversion which layers the first region that trains has passed over."""

    def __init__(self) -> None:
        self._conversions: list[_Conversion] = []  # of which no layer has computed in a region that trains
        self._lock = threading.RLock()  # of that list

    def watch(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """``layers`` of ``model`` have been converted, by their names in it."""
        if layers:
            with self._lock:
                self._conversions.append(_Conversion(model, layers))

    def report(self) -> None:
        """A region that trains is left."""
        if not self._conversions:
            return
        with self._lock:
            before, self._conversions = self._conversions, []
            for conversion in before:
                computing = conversion.computing()
                if any(computing.values()):
                    _warn(conversion.passed_over(computing), len(computing))
                elif computing:
                    self._conversions.append(conversion)


def _warn(passed_over: list[str], count: int) -> None:
    if passed_over:
        more = ", ..." if len(passed_over) > _MAX_NAMED else ""
        _log.warning(
            "convert_to_fp8: %d of %d layers have not computed in FP8 in the first step (%s%s): their weights are read "
            "by other modules, or they did not run",
            *(len(passed_over), count, ", ".join(passed_over[:_MAX_NAMED]), more),
        )


def _paths_above(name: str) -> Iterator[str]:
    """Of the modules that ``name`` is in, the innermost first; the last is that of the model, empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


passed_over_layers = PassedOverLayers()
