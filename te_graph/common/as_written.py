"""Running compiled functions as they are written: what ``torch.compile`` made hides operations from dispatch modes."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._python_dispatch import TorchDispatchMode


def import_compiler() -> None:
    """Import torch._dynamo, as torch does for the first dispatch mode and the first stance.

    On a thread of its own: what it fails to import leaves errors that refer to the frames below, which would keep their
    tensors alive until garbage is collected.
    """
    if "torch._dynamo" not in sys.modules:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(importlib.import_module, "torch._dynamo").result()


class _AsWritten:
    """Context in which compiled functions run as they are written. Several threads may be in it at once: what the first
    of them sets for the process stays until the last has left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._set: Any = None  # the stance

    def __enter__(self) -> None:
        with self._lock:
            if self._entered == 0 and get_eval_frame_callback() in (None, False):  # else it is compiled around
                import_compiler()
                self._set = torch.compiler.set_stance("force_eager")
            self._entered += 1

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0 and self._set is not None:
                if sys.modules["torch._dynamo.eval_frame"]._stance is self._set.stance:
                    self._set.__exit__(None, None, None)  # else another thread has chosen one meanwhile
                self._set = None


as_written = _AsWritten()  # one for the process, as torch's stance is


class AsWrittenMode(TorchDispatchMode):
    """A mode under which compiled functions run as they are written. Under other modes torch does that, too, but from
    then on never compiles these functions again, nor runs what it had compiled of them.

    Args:
        runs_compiled: compiled functions run as in eager calls instead; the mode does not see their operations.
    """

    def __init__(self, runs_compiled: bool = False) -> None:
        super().__init__()
        self._runs_compiled = runs_compiled

    def ignore_compile_internals(self) -> bool:
        """What torch asks of a mode before it compiles, or runs what is compiled."""
        return self._runs_compiled

    def note_plan(self, writes: Sequence[Tensor]) -> None:
        """A ``MultiTensorPlan`` is about to compute, which writes ``writes`` [...] and names none of its tensors to the
        dispatcher."""

    def __enter__(self) -> AsWrittenMode:
        if not self._runs_compiled:
            as_written.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if not self._runs_compiled:
            as_written.__exit__()
