"""What torch.compile has to leave alone: it breaks its graph around it and traces nothing below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable)


def opaque(function: _Function) -> _Function:
    """Decorator: neither ``function`` nor what it calls is compiled, and code that calls it breaks its graph there.

    What ``torch.compiler.disable`` does, without the import of torch._dynamo, and without a wrapper, which would cost
    microseconds at each call.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = (
        "te_graph replays a graph there, captures one, computes in FP8, or makes views of a flat parameter: compile "
        "what is around it, without fullgraph=True"
    )
    return function
