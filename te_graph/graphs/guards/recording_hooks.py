"""Hooks that do something only while a context variable is set: they record results for a call that asks for them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from te_graph.graphs.arguments.attributes import instance_dict
from te_graph.graphs.tracing.code_names import globals_of

REMOVAL_OF_RECORDING = (
    "Hugging Face's stay after the first forward with output_hidden_states=True or output_attentions=True: "
    "for m in model.modules(): m._forward_hooks.clear(); m._output_capturing_hooks_installed = False"
)


def is_recording_hook(hook: Any) -> bool:
    """Whether the code of ``hook`` names a context variable, or an object that has one."""
    hook = inspect.unwrap(hook.func if isinstance(hook, functools.partial) else hook)
    function = hook.__func__ if isinstance(hook, types.MethodType) else hook
    if not isinstance(function, types.FunctionType):
        return False
    return any(isinstance(one, contextvars.ContextVar) for one in _named_by(function))


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """What ``function`` names as variables, and the attributes of those."""
    scope = function.__globals__
    named = [scope[name] for name in globals_of(function.__code__) if name in scope]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            named.append(cell.cell_contents)
    for one in named:
        yield one
        if not isinstance(one, types.ModuleType | type | types.FunctionType):
            yield from (instance_dict(one) or {}).values()
