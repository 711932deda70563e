"""First calls of graphed() that meet on several threads. Programs run in processes of their own: what happens once in a
process, such as the look of torch for what Python calls for an operator, is to happen while threads meet."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from te_graph import Recorder, graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_ROOT = Path(__file__).resolve().parents[3]

_MEETING = """
    import contextlib, faulthandler, sys, threading, time, types
    import torch
    from torch import nn
    import te_graph as tg

    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)

    def let_others_in(frame, event, given):
        is_look = event == "call" and frame.f_code.co_name in ("__getattr__", "update_wrapper")
        places = "torch/_ops.py", "torch/backends/__init__.py", "/functools.py"
        if is_look and frame.f_code.co_filename.endswith(places):
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

    def training():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        def step(x):
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()
        return step

    def called(step):
        for _ in range(6):
            step(torch.ones(4, 6))
"""


def run_program(program: str) -> None:
    """Run ``program`` after what ``_MEETING`` has."""
    source = textwrap.dedent(_MEETING) + textwrap.dedent(program)
    command = [sys.executable, "-X", "faulthandler", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_different_functions() -> None:
    """Guards read settings that are variables of modules, which are looked for once."""
    run_program("""
        meet(*(lambda: tg._C.Settings(torch.device("cpu")) for _ in range(2)))
        steps = [tg.graphed(training()) for _ in range(2)]
        meet(*(lambda step=step: called(step) for step in steps))
    """)


def test_a_function_and_what_else_watches_operators() -> None:
    run_program("""
        def both_watched(x):
            if torch._C._len_torch_dispatch_stack():
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.wait()
            return x.sin().mul(2).cos().add(1).tanh()

        class Layer(nn.Linear):
            def __init__(self):
                super().__init__(6, 6)

            def forward(self, x):
                return super().forward(both_watched(x))

        x = torch.ones(4, 6)
        for watch in (
            lambda: tg.make_graphed_callables(both_watched, (x,)),
            lambda: tg.graph_layers(nn.Sequential(Layer(), Layer()), x),
        ):
            met, step = threading.Barrier(2, timeout=1), tg.graphed(both_watched)
            meet(lambda: called(step), watch)
    """)


def test_first_callables_of_several_threads() -> None:
    """What hands out addresses of tensors is wrapped once, under all its names."""
    run_program("""
        from torch import Tensor
        names = [types.ModuleType(f"with_numpy_{number}") for number in range(200)]
        for module in names:
            module.numpy, sys.modules[module.__name__] = Tensor.numpy, module
        def capture():
            tg.make_graphed_callables(nn.Linear(4, 4), (torch.ones(2, 4),))
        meet(*[capture] * 4)
        assert not hasattr(Tensor.numpy.__wrapped__, "__wrapped__")
        assert all(module.numpy is Tensor.numpy for module in names)
    """)


def test_a_first_call_while_another_thread_records() -> None:
    twice = graphed(lambda t: t * 2)
    with Recorder().capture():
        thread = threading.Thread(target=twice, args=(torch.ones(2),))
        thread.start()
        thread.join()
    assert twice.info()["eager_calls"] == {"called while another thread captures or is watched": 1}


def test_a_first_call_waits_for_the_first_call_of_another_function() -> None:
    inner = graphed(lambda t: t + 1)

    def outer(t: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(inner(t)), daemon=True)
        thread.start()
        thread.join(30)
        return t * 2 if results else t

    assert_bitwise_equal(graphed(outer)(torch.ones(2)), torch.full((2,), 2.0))
    assert inner.info()["eager_calls"] == {"called while another thread captures or is watched": 1}
    x = torch.ones(2)
    for _ in range(3):
        assert_bitwise_equal(inner(x), x + 1)
    assert inner.info()["forward_replays"] == 2


@pytest.mark.parametrize("has_samples", [True, False], ids=["new shape", "first call"])
def test_a_first_call_waits_for_a_call_that_would_capture(has_samples: bool) -> None:
    module = nn.Linear(4, 4)
    call = make_graphed_callables(module, *([(torch.ones(3, 4),)] if has_samples else []), on_mismatch="capture")
    x = torch.ones(2, 4)

    def waits(t: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(call(x)), daemon=True)
        thread.start()
        thread.join(30)
        return t * len(results)

    assert_bitwise_equal(graphed(waits)(torch.ones(2)), torch.ones(2))
    assert call.te_graph.info()["recaptures"] == 0
    call(x).sum().backward()
    assert call.te_graph.info()["forward_replays"] == 1
