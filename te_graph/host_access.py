"""Sees what a region does to tensors on the host, without a function mode.

While a function mode is on, ``torch.overrides.has_torch_function`` says yes to everybody. Code that asks, such as the
fast path of ``torch.nn.TransformerEncoderLayer``, would take another branch in a capture than in eager execution. So
the methods of ``torch.Tensor`` are exchanged for as long as somebody captures.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from te_graph.refusals import Refusals, refuse_host_access

_NAMES = ("tolist", "numpy", "__array__", "__repr__", "cpu", "cuda", "to")
_of_thread = threading.local()  # refusals: those of the captures under way, innermost last


def _refuse(func: Callable, args: tuple, kwargs: dict) -> None:
    refusals = getattr(_of_thread, "refusals", None)
    if refusals and not torch._C._is_torch_function_all_disabled():
        refuse_host_access(refusals[-1], func, args, kwargs)


def _checked(func: Callable) -> Callable:
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse(func, args, kwargs)
        return func(*args, **kwargs)

    return checked


class _Methods:
    """The methods of ``torch.Tensor``, shared by all threads: exchanged by the first capture, put back by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own: dict[str, Any] = {}

    def exchange(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._own = {name: vars(torch.Tensor)[name] for name in _NAMES if name in vars(torch.Tensor)}
                for name in _NAMES:
                    setattr(torch.Tensor, name, _checked(getattr(torch.Tensor, name)))
                data = torch.Tensor.data
                torch.Tensor.data = property(data.__get__, _checked(data.__set__))

    def put_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for name in (*_NAMES, "data"):
                    if name in self._own:
                        setattr(torch.Tensor, name, self._own[name])
                    else:
                        delattr(torch.Tensor, name)


_methods = _Methods()


class HostAccessWatch:
    """Context that refuses, on this thread, what ``HostAccessMode`` refuses."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def __enter__(self) -> None:
        _of_thread.refusals = [*getattr(_of_thread, "refusals", ()), self._refusals]
        _methods.exchange()

    def __exit__(self, *failure: object) -> None:
        _methods.put_back()
        _of_thread.refusals = _of_thread.refusals[:-1]
