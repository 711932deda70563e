"""First calls of graphed() that meet on several threads. Programs run in processes of their own: what happens once in a
process, such as the look of torch for what Python calls for an operator, is to happen while threads meet."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]

_MEETING = """
    import contextlib, faulthandler, sys, threading, time
    import torch
    import te_graph as tg

    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)

    def let_others_in(frame, event, given):
        is_look = event == "call" and frame.f_code.co_name == "__getattr__"
        if is_look and frame.f_code.co_filename.endswith(("torch/_ops.py", "torch/backends/__init__.py")):
            time.sleep(0.01)

    def meet(*works):
        barrier, errors = threading.Barrier(len(works)), []
        def run(work):
            sys.setprofile(let_others_in)
            barrier.wait()
            try:
                work()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
"""


def run_program(program: str) -> None:
    """Run ``program`` after what ``_MEETING`` has."""
    source = textwrap.dedent(_MEETING) + textwrap.dedent(program)
    command = [sys.executable, "-X", "faulthandler", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_settings_that_are_variables_of_modules() -> None:
    run_program("""
        meet(*(lambda: tg._C.Settings(torch.device("cpu")) for _ in range(2)))
    """)
