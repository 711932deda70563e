"""Sees what a region does to tensors on the host, without a function mode.

While a function mode is on, ``torch.overrides.has_torch_function`` is true for all. Code that asks, such as the
fast path of ``torch.nn.TransformerEncoderLayer``, would take another branch in a capture than in eager execution. So
methods of ``torch.Tensor``, and functions of torch that read a tensor, are patched for as long as a capture is under
way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_graph.common.as_written import import_compiler
from te_graph.common.dispatch import is_strided, place_of
from te_graph.graphs.tracing.patches import Patch
from te_graph.graphs.tracing.refusals import NUMBER_METHODS, READERS, Refusals, refuse_host_access

_EXPORTS = ("numpy", "__array__", "__dlpack__")
_METHODS = ("tolist", *_EXPORTS, "__repr__", "__reduce_ex__", "cpu", "cuda", "to", *NUMBER_METHODS)
_HOOKING = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_PROPERTIES = ("data", "grad")
_of_thread = threading.local()  # watches: those under way, outermost first

USES_OF_GRAD = (torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__)
_SETS_DATA = torch.Tensor.data.__set__


def _seen(func: Callable) -> Callable:
    @functools.wraps(func)
    def seen(*args: Any, **kwargs: Any) -> Any:
        watches = getattr(_of_thread, "watches", ())
        if watches and not torch._C._is_torch_function_all_disabled():
            for watch in reversed(watches):
                watch.see(func, args, kwargs)
        return func(*args, **kwargs)

    return seen


class _Methods(Patch):
    """The methods of ``torch.Tensor``, and functions that read tensors without an operator."""

    def __init__(self) -> None:
        super().__init__()
        self._members = [(torch.Tensor, name) for name in (*_METHODS, *_HOOKING, *_PROPERTIES)] + list(READERS)
        self._own: dict[tuple, Any] = {}

    def _patch(self) -> None:
        # It makes tables of the methods when it is first imported, which torch does for the first dispatch mode.
        import_compiler()
        self._own = {(owner, name): vars(owner)[name] for owner, name in self._members if name in vars(owner)}
        for owner, name in self._members:
            member = getattr(owner, name)
            if name in _PROPERTIES:
                member = property(_seen(member.__get__), _seen(member.__set__), _seen(member.__delete__))
            else:
                member = _seen(member)
            setattr(owner, name, member)

    def _restore(self) -> None:
        for owner, name in self._members:
            if (owner, name) in self._own:
                setattr(owner, name, self._own[owner, name])
            else:
                delattr(owner, name)


_methods = _Methods()


class MethodWatch:
    """Context in which ``see`` is called, on this thread, before some methods of ``torch.Tensor``."""

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        _of_thread.watches = [*getattr(_of_thread, "watches", ()), self]
        _methods.begin(self)
        return self

    def __exit__(self, *failure: object) -> None:
        _methods.end(self)
        _of_thread.watches = _of_thread.watches[:-1]


class GradWatch(MethodWatch):
    """Calls ``on_use`` with each tensor, [...], whose ``.grad`` is about to be read, set or deleted, and None, or with
    the name of the method that is about to have autograd do something with its gradient."""

    def __init__(self, on_use: Callable[[Tensor, str | None], None]) -> None:
        self._on_use = on_use

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        if func in USES_OF_GRAD:
            self._on_use(args[0], None)
        elif func.__name__ in _HOOKING:
            self._on_use(args[0], func.__name__)


class MemoryWatch(MethodWatch):
    """Sees what tensors get or give their memory without an operator.

    Args:
        on_export: called with each, [...], that NumPy or a reader of DLPack is about to get.
        on_exchange: called with each, [...], that is about to get other memory by ``tensor.data = ...``; what lies
            where the tensor does is none.
    """

    def __init__(self, on_export: Callable[[Tensor], None], on_exchange: Callable[[Tensor], None]) -> None:
        self._on_export, self._on_exchange = on_export, on_exchange

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        if func == _SETS_DATA:
            if not _lies_there(args[0], args[1]):
                self._on_exchange(args[0])
        elif func.__name__ in _EXPORTS:
            self._on_export(args[0])


def _lies_there(tensor: Tensor, data: Any) -> bool:
    """Whether ``data`` [...] has the memory of ``tensor`` [...], as where ``module.to()`` changes nothing."""
    is_plain = isinstance(data, Tensor) and all(map(is_strided, (tensor, data)))
    return is_plain and place_of(tensor) == place_of(data)


class HostAccessWatch(MethodWatch):
    """Refuses what ``HostAccessMode`` refuses."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        refuse_host_access(self._refusals, func, args, kwargs)
