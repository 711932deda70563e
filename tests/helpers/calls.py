"""What tests share that tell calls of graphed modules that replay at once from those that go through Python."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from torch import Tensor, nn
from twins import eager_copy, mlp, sample

from te_graph import make_graphed_callables
from te_graph.graphs.callables.handle import Handle


class Counter:
    """Counts the calls that went through Python, where no guard looks: captures run what counts them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()

    def count(self) -> None:
        self._calls.put(None)

    def taken(self) -> int:
        """Since the last question."""
        return sum(self._calls.get() is None for _ in range(self._calls.qsize()))


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """For ``slow = pytest.fixture(counted_calls)``."""
    counter, call = Counter(), Handle.call

    def counted(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        counter.count()
        return call(handle, *args, **kwargs)

    monkeypatch.setattr(Handle, "call", counted)
    return counter


def batch(device: str) -> Tensor:  # [3, 7]
    return sample(device, requires_grad=True)


def graphed_and_twin(device: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = mlp(device)
    twin = eager_copy(model)
    return make_graphed_callables(model, (batch(device),), **options), twin


def graphed_linear(device: str) -> tuple[nn.Linear, nn.Linear]:
    """One module without submodules, so that hooks of all modules fire as often as in eager execution."""
    model = nn.Linear(7, 5).to(device)
    twin = eager_copy(model)
    return make_graphed_callables(model, (batch(device),)), twin


def replays(module: nn.Module) -> int:
    return module.te_graph.info()["forward_replays"]


def outcome(call: Callable[[], Any]) -> tuple:
    """What a call returns or raises, comparable."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    return "result", result.detach().clone()


def run_alone(code: str) -> str:
    """What ``code`` prints in a process of its own, which may crash."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout
