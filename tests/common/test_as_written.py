"""The import of torch's compiler, which a first capture brings about."""

from __future__ import annotations

import pytest
from calls import run_alone

_FRAME = """
    import gc, importlib, sys, weakref
    import torch
    from te_graph.common.as_written import import_compiler

    class Held:
        pass

    def call(what):
        held = Held()
        what()
        return weakref.ref(held)

    gc.disable()
    assert "torch._dynamo" not in sys.modules
    print(call({import_it})() is None, "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("import_it", "is_free"), [("import_compiler", True), ("lambda: importlib.import_module('torch._dynamo')", False)]
)
def test_the_import_does_not_keep_what_the_frames_below_it_hold(import_it: str, is_free: bool) -> None:
    """Where the plain import does not do so either, the thread is of no use."""
    assert run_alone(_FRAME.format(import_it=import_it)).split() == [str(is_free), "True"]
