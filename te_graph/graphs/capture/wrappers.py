"""Modules that wrap others and do more than a forward: a replay would leave out what they add.

They are known by name: torch.distributed and torch._dynamo need not be there, and looking for them imports nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from te_graph import _C
from te_graph.common.opaque import opaque
from te_graph.graphs.capture.fp8_regions import refuse_fp8_before

_SHARDED = (
    "gathers its parameters for each call and frees them after it, and a graph's addresses are fixed: leave it eager, "
    "or put DistributedDataParallel around graphed layers"
)
# The name of a class, what the name of its module begins with, and why it is refused.
_REFUSED = (
    (
        "DistributedDataParallel",
        "",
        "reduces gradients over the ranks, which a replay would not do: graph ddp.module or its layers and keep the "
        "wrapper",
    ),
    ("DDP", "torch.distributed._composable", "reduces gradients over the ranks: graph its layers, not the whole of it"),
    ("ReplicateModule", "torch.distributed", "reduces gradients over the ranks: graph its layers, not the whole of it"),
    ("FullyShardedDataParallel", "", _SHARDED),
    ("FSDPModule", "torch.distributed", _SHARDED),
    (
        "DataParallel",
        "torch.nn.parallel",
        "copies its module to several GPUs at each call: put DistributedDataParallel around graphed layers, with one "
        "process for each GPU",
    ),
    (
        "ScriptModule",
        "torch.jit",
        "keeps its parameters where a guard cannot follow them: give the module that it was made of, or graph what is "
        "around it",
    ),
)
_COMPILED = "OptimizedModule"
_COMPILER = "torch._dynamo.eval_frame"


def _names(kind: type) -> list[tuple[str, str]]:
    return [(base.__name__, base.__module__) for base in kind.__mro__]


def reason_to_refuse_module(module: nn.Module) -> str | None:
    """What ``module``, apart from those inside, does that a graph cannot hold, and what to do then; None: nothing."""
    names = _names(type(module))
    for refused, package, reason in _REFUSED:
        if any(name == refused and owner.startswith(package) for name, owner in names):
            return f"{refused} {reason}"
    tensors = (*module._parameters.items(), *module._buffers.items())
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and _is_dtensor(type(tensor)):
            return (
                f"its {name} is a DTensor, whose operations communicate as its placement says: leave it eager, or "
                "capture a module of the local tensors"
            )
    return None


def _is_dtensor(kind: type) -> bool:
    return any(name == "DTensor" and owner.startswith("torch.distributed") for name, owner in _names(kind))


def without_compiler(target: Any) -> Any:
    """The module that was given to ``torch.compile``, where ``target`` is what came back; else ``target``."""
    while isinstance(target, nn.Module) and (_COMPILED, _COMPILER) in _names(type(target)):
        target = target._modules["_orig_mod"]
    return target


def without_wrappers(model: nn.Module) -> nn.Module:
    """The module inside ``model``, where that is what ``torch.compile`` or DistributedDataParallel made of it."""
    while True:
        inner = without_compiler(model)
        if any(name == "DistributedDataParallel" for name, _ in _names(type(inner))):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def bypass_compiler(wrapper: nn.Module) -> None:
    """Let ``wrapper``, which ``torch.compile`` made, call its original for as long as that is graphed: a compiler that
    must not break its graph (``fullgraph=True``) would refuse to call it."""
    original, compiled = without_compiler(wrapper), vars(wrapper)["forward"]
    if getattr(compiled, "_te_graph_original", None) is original:
        return

    @opaque
    def forward(*args: Any, **kwargs: Any) -> Any:
        is_graphed = vars(original).get("te_graph") is not None
        return (original if is_graphed else compiled)(*args, **kwargs)

    forward._te_graph_original = original
    vars(wrapper)["forward"] = forward


@contextlib.contextmanager
def watching_wrappers() -> Iterator[None]:
    """Around warm-ups and captures on this thread: a module that is called there and that no graph can hold is refused,
    however the callable got hold of it, and one that torch.compile made runs what it was made of.

    Raises:
        TypeError: a module was called that no graph can hold.
        RuntimeError: a module of TransformerEngine was called in FP8.
    """
    watch = register_module_forward_pre_hook(_refuse)
    try:
        with _compiled_modules_run_their_originals:
            yield
    finally:
        watch.remove()


class _Originals:
    """Context in which modules that torch.compile made call what they were made of, on threads that capture."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._patched: tuple[type, Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            compiled = getattr(sys.modules.get(_COMPILER), _COMPILED, None)
            if self._patched is None and compiled is not None:
                self._patched = compiled, compiled.__call__
                compiled.__call__ = _calling_the_original(compiled.__call__)

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._users -= 1
            if self._patched is not None and not self._users:
                compiled, call = self._patched
                compiled.__call__ = call
                self._patched = None


_compiled_modules_run_their_originals = _Originals()


def _calling_the_original(call: Any) -> Any:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return without_compiler(self)(*args, **kwargs) if _C.in_session() else call(self, *args, **kwargs)

    return __call__


def _refuse(module: nn.Module, args: tuple) -> None:
    if not _C.in_session():
        return
    refuse_fp8_before(type(module).__name__, module)
    if (reason := reason_to_refuse_module(module)) is not None:
        raise TypeError(f"make_graphed_callables: the callable calls a {type(module).__name__}: {reason}")
