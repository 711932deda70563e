"""Checkpoints whose functions raised, which torch ends when their frames go: too late for what goes on after an error.

``torch.utils.checkpoint`` keeps its hooks on what autograd saves, and what ``context_fn`` has entered, in a generator
that only its caller's frame holds. The traceback of the exception holds that frame: code that keeps, or handles, the
exception would compute under these hooks, and others that are left in the meantime are not the innermost any more.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from te_graph import _C


def without_open_checkpoints(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``; checkpoints that an exception leaves open are ended before it goes on. What the frames that
    it has ended had in variables is let go of then; their lines are still told."""
    hooks, handled = len(_C.saved_tensor_pack_hooks()), sys.exc_info()[1]
    try:
        return function(*args)
    except BaseException as error:
        if len(_C.saved_tensor_pack_hooks()) > hooks:
            clear_frames(error, handled)
        raise


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Let go of what the frames of ``error``, and of those that it came of, have in variables, but for one that was
    ``handled`` around the call."""
    seen = {id(handled)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += one.__cause__, one.__context__
