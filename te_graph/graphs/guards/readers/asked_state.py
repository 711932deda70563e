"""State of torch and Python that no object holds: code asks a function for it, or sets it, and guards ask again."""

from __future__ import annotations

import decimal
import logging
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import deterministic
from torch.utils.data import get_worker_info

from te_graph import _C
from te_graph.common.own_objects import OwnObject
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.guards.values import np

_Kind = _C.StepKind


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _precision() -> tuple:
    """What decimal computes by: not its flags, which results set."""
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp


def _allows_tf32() -> tuple | None:
    """Of products and convolutions, also where the capture is on another device; None: set in several ways."""
    try:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _anomaly() -> tuple:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _printing() -> tuple:
    of_numpy = () if np is None else tuple((key, repr(value)) for key, value in np.get_printoptions().items())
    return tuple(vars(torch._tensor_str.PRINT_OPTS).items()), of_numpy


def _validates() -> bool | None:
    loaded = sys.modules.get("torch.distributions.distribution")
    return None if loaded is None else loaded.Distribution._validate_args


# By the names that code says, of functions that tell it and of those that set it.
_ASKED: dict[str, Callable[[], Any]] = {
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "fill_uninitialized_memory": lambda: deterministic.fill_uninitialized_memory,
    "get_swap_module_params_on_conversion": torch.__future__.get_swap_module_params_on_conversion,
    "get_overwrite_module_params_on_conversion": torch.__future__.get_overwrite_module_params_on_conversion,
    "check_sparse_tensor_invariants": torch.sparse.check_sparse_tensor_invariants.is_enabled,
    "get_worker_info": get_worker_info,
    "is_initialized": _has_group,
    "get_world_size": lambda: dist.get_world_size() if _has_group() else None,
    "get_rank": lambda: dist.get_rank() if _has_group() else None,
    "is_multithreading_enabled": torch.autograd.is_multithreading_enabled,
    "allow_tf32": _allows_tf32,
    "geterr": lambda: None if np is None else tuple(np.geterr().items()),
    "Decimal": _precision,
    "getcontext": _precision,
    "setcontext": _precision,
    "set_num_threads": torch.get_num_threads,
    "set_detect_anomaly": _anomaly,
    "set_warn_always": torch.is_warn_always_enabled,
    "set_swap_module_params_on_conversion": torch.__future__.get_swap_module_params_on_conversion,
    "set_overwrite_module_params_on_conversion": torch.__future__.get_overwrite_module_params_on_conversion,
    "set_multithreading_enabled": torch.autograd.is_multithreading_enabled,
    "set_default_validate_args": _validates,
    "set_printoptions": _printing,
    "setrecursionlimit": sys.getrecursionlimit,
    "disable": lambda: logging.root.manager.disable,
}


class AskedState(OwnObject):
    """Has what ``_ASKED`` answers as attributes, and keeps the last answers, since guards take what somebody holds."""

    def __init__(self) -> None:
        self._answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED:
            raise AttributeError(name)
        self._answers[name] = answer = _ASKED[name]()
        return answer


_STATE = AskedState()


def asked_state(root: Source, said: Set[str]) -> Iterator[Source]:
    """What the names ``said`` ask for."""
    if not said.isdisjoint(_ASKED):
        state = root.child(_STATE, "state of torch", _Kind.KNOWN)
        for name in sorted(said & _ASKED.keys()):
            what = "context of decimal" if _ASKED[name] is _precision else f"{name} of torch"
            yield state.child(getattr(_STATE, name), what, _Kind.ATTRIBUTE, name)
