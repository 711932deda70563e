"""Attributes that users put on objects and functions of libraries are compared where code says them."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from sequences import counts
from text_cases import refuses_changes, run_text, sees_changes
from torch import nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
OBJECTS = {
    "graphed function": "tg.graphed(lambda x: x)",
    "graphed callable": "tg.make_graphed_callables(helper, (torch.ones(3),))",
    "MultiTensorPlan": "tg.MultiTensorPlan([torch.ones(3)])",
    "StepState": "tg.StepState('cpu')",
    "Fp8Weights": "tg.Fp8Weights([nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))])",
    "Recorder": "tg.Recorder()",
    "Format": "tg.Format.HYBRID",
    "function of te_graph": "tg.clip_grad_norm_",
    "module of te_graph": "tg.testing",
    "function of torch": "nn.functional.relu",
    "Thread": "threading.Thread()",
    "Event": "threading.Event()",
    "Queue": "queue.Queue()",
    "exception": "ValueError()",
    "OrderedDict": "collections.OrderedDict()",
    "Counter": "collections.Counter('a')",
    "Random": "random.Random(0)",
}
_HEADER = "import random\nimport te_graph as tg\ndef helper(x): return x * 2\n"
CASES = {
    name: (f"{_HEADER}o = {made}\no.put_by_a_test = 2.0", "o.put_by_a_test", "o.put_by_a_test = 3.0")
    for name, made in OBJECTS.items()
}
CASES["of a function, before it is graphed"] = (
    f"{_HEADER}helper.put_by_a_test = 2.0\no = tg.graphed(helper)",
    "o.put_by_a_test",
    "o.put_by_a_test = 3.0",
)
CASES["a name that parameters of the class's methods have"] = (
    f"{_HEADER}o = tg.MultiTensorPlan([torch.ones(3)])\no.scale = 2.0",
    "o.scale",
    "o.scale = 3.0",
)
for _name, _made in {"OrderedDict": "collections.OrderedDict(a=1.0)", "Random": "random.Random(0)"}.items():
    _setup = f"{_HEADER}o = {_made}\n"
    CASES |= {
        f"attribute of {_name} in a list": (f"{_setup}o.w = 2.0\nc = [o]", "c[0].w", "o.w = 3.0"),
        f"late attribute of {_name}": (_setup, "getattr(o, 'w', 2.0)", "o.w = 3.0"),
        f"late attribute of {_name} in a list": (f"{_setup}c = [o]", "getattr(c[0], 'w', 2.0)", "o.w = 3.0"),
        f"late attribute of {_name} with another": (f"{_setup}o.v = 2.0", "getattr(o, 'w', o.v)", "o.w = 3.0"),
    }
for _name, _made in {
    "a library's member of an enumeration": "__import__('uuid').SafeUUID.safe",
    "a static method": "staticmethod(math.sin)",
}.items():
    CASES[f"late attribute of {_name}"] = (
        f"{_HEADER}o = {_made}",
        "getattr(o, 'put_by_a_test', 2.0)",
        "o.put_by_a_test = 3.0",
    )
test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


@pytest.fixture
def module(module: types.ModuleType) -> Iterator[types.ModuleType]:
    yield module
    if "put_by_a_test" in getattr(module.o, "__dict__", ()):  # of what lives longer than a test
        del module.o.put_by_a_test


@pytest.mark.parametrize("made", OBJECTS.values(), ids=OBJECTS)
def test_a_counter_is_refused(module: types.ModuleType, made: str) -> None:
    run_text(module, f"import collections, queue, threading\nimport torch\nfrom torch import nn\n{_HEADER}o = {made}")
    run_text(module, "def fn(x):\n o.put_by_a_test += 1.0\n return x * o.put_by_a_test\no.put_by_a_test = 0.0")
    with pytest.raises(RuntimeError, match=r"put_by_a_test"):
        tg.make_graphed_callables(module.fn, (torch.ones(3),))


def test_state_of_the_class_may_change() -> None:
    state = tg.StepState("cpu")

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # [3] -> [3]
            return x * len(state._flags)

    net = tg.make_graphed_callables(Net(), (torch.ones(3),))
    for is_first in (False, True):
        state.set_(is_first)
        net(torch.ones(3))
    assert net.te_graph.info()["forward_replays"] == 2


@pytest.mark.parametrize("is_module", [True, False])
def test_a_handle_takes_no_attributes(is_module: bool) -> None:
    target = nn.Linear(3, 3) if is_module else torch.tanh
    graphed = tg.make_graphed_callables(target, (torch.ones(3, requires_grad=True),))
    with pytest.raises(
        AttributeError, match=r"Handle: expected no attributes .* got 'gain', .* put it on the callable"
    ):
        graphed.te_graph.gain = 2.0
    graphed.gain = 2.0
    assert graphed.gain == 2.0


def with_gain(gain: float) -> list[OrderedDict]:
    held = OrderedDict(a=1.0)
    held.gain = gain
    return [held]


def test_equal_arguments_that_are_made_anew_are_no_change() -> None:
    replayed, x = tg.graphed(lambda x, held: x * held[0]["a"]), torch.ones(3)
    for _ in range(3):
        replayed(x, [OrderedDict(a=1.0)])
    assert counts(replayed) == (1, 2, 0, 1)


def test_an_argument_with_other_attributes_is_a_change() -> None:
    replayed, x = tg.graphed(lambda x, held: x * held[0].gain), torch.ones(3)
    for gain in (2.0, 2.0, 2.0, 3.0, 2.0):
        assert torch.equal(replayed(x, with_gain(gain)), x * gain)
    assert counts(replayed)[:3] == (1, 3, 1)


def test_attributes_of_a_function_are_those_of_what_replays_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:  # [3] -> [3]
        return x * 2

    fn.gain = 2.0
    assert tg.make_graphed_callables(fn, (torch.ones(3),)).gain == 2.0
