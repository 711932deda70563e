"""The ends of backwards, as who writes gradients in hooks is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class BackwardEnds:
    """Tells when a backward begins to write, and when all of it has been.

    A backward inside a backward (reentrant checkpoints) ends nothing: the one around it does.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """
        Args:
            begin: called in each backward before the first write, on its thread.
            end: called at the end of each outermost backward, where the caller's streams wait for it.
        """
        self._begin, self._end = begin, end
        self._lock = threading.Lock()
        self._tasks: set[int] = set()  # of the engine, whose end is awaited

    def enter(self) -> None:
        """Called in a backward, before each write."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task in self._tasks:
                return
            self._tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._leave(task))
        self._begin()

    def _leave(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
        around = torch._C._current_autograd_node()  # the node inside of which this backward was called
        if around is None:
            self._end()
        else:
            around.register_hook(self._enter_outer)  # called when that node has run, in its own backward

    def _enter_outer(self, *_: Any) -> None:
        self.enter()
