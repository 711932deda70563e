"""Loggers: attributes put on them, levels and handlers where code asks for them.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import logging
import random
import types
from collections.abc import Iterator

import pytest
import torch
from calls import replays
from text_cases import outcome_of_callable, refuses_changes, run_text, sees_changes

from te_graph import CaptureError, graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_LOG = "import logging\nlog = logging.getLogger('te_graph_test.a')\n"
_OWN = "import logging\nclass L(logging.Logger): pass\nlog = L('te_graph_test.own'); log.scale = 2.0\n"
_IS_ON = "2.0 if {}.isEnabledFor(logging.INFO) else 3.0"
_OTHERS = "logging.getLogger('te_graph_test.a').setLevel(logging.ERROR)"
PUT_THERE = {
    "an attribute": (f"{_LOG}log.scale = 2.0", "log.scale", "log.scale = 3.0"),
    "an attribute that comes": (_LOG, "getattr(log, 'scale', 2.0)", "log.scale = 3.0"),
    "a list": (f"{_LOG}log.scale = [2.0]", "log.scale[0]", "log.scale[0] = 3.0"),
    "of one's own class": (_OWN, "log.scale", "log.scale = 3.0"),
    "a constant of one's own class": (f"{_OWN}L.gain = 2.0", "log.gain", "L.gain = 3.0"),
    "a slot": (
        "import logging\nclass L(logging.Logger):\n __slots__ = ('gain',)\nlog = L('own'); log.gain = 2.0",
        "log.gain",
        "log.gain = 3.0",
    ),
    "handlers": (_LOG, "2.0 + len(log.handlers)", "log.addHandler(logging.NullHandler())"),
    "hasHandlers": (f"{_LOG}log.propagate = False", "2.0 + log.hasHandlers()", "log.addHandler(logging.NullHandler())"),
    "of one that is looked up": (
        f"{_LOG}log.scale = 2.0",
        "logging.getLogger('te_graph_test.a').scale",
        "log.scale = 3.0",
    ),
}
LEVELS = {
    "looked up": (f"{_LOG}log.setLevel(logging.INFO)", _IS_ON.format("logging.getLogger('te_graph_test.a')"), _OTHERS),
    "its effective level": (
        f"{_LOG}log.setLevel(logging.INFO)",
        "float(logging.getLogger('te_graph_test.a').getEffectiveLevel())",
        _OTHERS,
    ),
    "looked up by another name": (
        f"{_LOG}log.setLevel(logging.INFO)\nfrom logging import getLogger",
        _IS_ON.format("getLogger('te_graph_test.a')"),
        _OTHERS,
    ),
    "of the module": (
        f"{_LOG}logging.getLogger(__name__).setLevel(logging.INFO)",
        _IS_ON.format("logging.getLogger(__name__)"),
        "logging.getLogger(__name__).setLevel(logging.ERROR)",
    ),
    "by another function": (
        f"{_LOG}log.setLevel(logging.INFO)\ndef find(name): return logging.getLogger(name)",
        _IS_ON.format("find('te_graph_test.a')"),
        _OTHERS,
    ),
    "of the one above": (
        f"{_LOG}log.setLevel(logging.NOTSET)\nlogging.getLogger('te_graph_test').setLevel(logging.INFO)",
        _IS_ON.format("logging.getLogger('te_graph_test.a')"),
        "logging.getLogger('te_graph_test').setLevel(logging.ERROR)",
    ),
    "of the one above all": (
        "import logging\nlogging.root.setLevel(logging.INFO)",
        _IS_ON.format("logging.getLogger()"),
        "logging.root.setLevel(logging.ERROR)",
    ),
    "through an adapter": (
        f"{_LOG}log.setLevel(logging.INFO)\nadapter = logging.LoggerAdapter(log, {{}})",
        _IS_ON.format("adapter"),
        _OTHERS,
    ),
}
CASES = {**PUT_THERE, **LEVELS}


@pytest.fixture
def module(module: types.ModuleType) -> Iterator[types.ModuleType]:
    level, handlers = logging.root.level, list(logging.root.handlers)
    yield module
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("te_graph_test")]:
        del logging.root.manager.loggerDict[name]


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


def test_a_counter_on_a_logger_is_refused(module: types.ModuleType) -> None:
    setup = f"{_LOG}log.steps = 0.0\ndef read():\n log.steps += 1.0\n return log.steps"
    with pytest.raises(RuntimeError, match=r"changes global variable log\.steps \(from"):
        outcome_of_callable(module, setup, "read()", "")


def test_a_generator_on_a_logger_is_refused(module: types.ModuleType) -> None:
    module.generator = random.Random(1)
    with pytest.raises(RuntimeError, match=r"draws from global variable log\.generator"):
        outcome_of_callable(module, f"{_LOG}log.generator = generator", "log.generator.random()", "")


def test_levels_and_handlers_that_only_decide_what_is_logged_may_change(module: types.ModuleType) -> None:
    run_text(
        module,
        f"{_LOG}def fn(x):\n log.debug('called')\n logging.getLogger('te_graph_test.b').info('called')\n return x * 2",
    )
    net, x = make_graphed_callables(module.fn, (torch.ones(2),)), torch.ones(2)
    for count, name in enumerate(("te_graph_test.a", "te_graph_test.b"), 1):
        assert torch.equal(net(x), x * 2)
        assert replays(net) == count
        logging.getLogger(name).setLevel(logging.DEBUG)
        logging.getLogger(name).addHandler(logging.NullHandler())
    net(x)
    assert replays(net) == 3


def test_what_a_logger_keeps_about_levels_may_grow(module: types.ModuleType) -> None:
    run_text(module, f"{_LOG}_cache = 1.0\ndef fn(x): return x * 2 * _cache if log.isEnabledFor(logging.ERROR) else x")
    net, x = make_graphed_callables(module.fn, (torch.ones(2),)), torch.ones(2)
    for count in (1, 2):
        assert torch.equal(net(x), x * 2)
        assert replays(net) == count
        module.log.isEnabledFor(count)


_HANDLER = """import logging
log = logging.getLogger('te_graph_test.a'); log.setLevel(logging.INFO)
class H(logging.Handler):
 rows = 0
 def emit(self, record): self.rows += 1
"""
_FILTER = """import io, logging
log = logging.getLogger('te_graph_test.a'); log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(io.StringIO()))
class F(logging.Filter):
 rows = 0
 def filter(self, record): self.rows += 1; return True
"""
TAKERS = {
    "a handler": (f"{_HANDLER}log.addHandler(H())", "log.info('called')", r"H of global variable log"),
    "a handler above": (f"{_HANDLER}logging.getLogger('te_graph_test').addHandler(H())", "log.info('called')", "H of"),
    "of one that is looked up": (
        f"{_HANDLER}log.addHandler(H())",
        "logging.getLogger('te_graph_test.a').info('called')",
        r"H of logger te_graph_test\.a",
    ),
    "through an adapter": (
        f"{_HANDLER}log.addHandler(H())\nadapter = logging.LoggerAdapter(log, {{}})",
        "adapter.info('called')",
        "H of",
    ),
    "of the module": (f"{_HANDLER}logging.root.addHandler(H())", "logging.warning('called')", "H of logger root"),
    "a filter": (f"{_FILTER}log.addFilter(F())", "log.info('called')", "F of"),
    "a filter of a handler": (f"{_FILTER}log.handlers[-1].addFilter(F())", "log.info('called')", "F of"),
    "a method": (f"{_FILTER}log.addFilter(F().filter)", "log.info('called')", "method of"),
    "a partial": (
        f"{_FILTER}import functools\nlog.addFilter(functools.partial(F.filter, F()))",
        "log.info('called')",
        "partial of",
    ),
    "a partial of a method": (
        f"{_FILTER}import functools\nlog.addFilter(functools.partial(F().filter))",
        "log.info('called')",
        "partial of",
    ),
}


@pytest.mark.parametrize("case", TAKERS)
def test_a_count_of_what_is_logged_is_refused(module: types.ModuleType, case: str) -> None:
    setup, log, name = TAKERS[case]
    run_text(module, f"{setup}\ndef fn(x):\n {log}\n return x * 2")
    replayed, x = graphed(module.fn), torch.ones(2)
    with pytest.raises(CaptureError, match=f"changes the state.*{name}"):
        for _ in range(2):
            replayed(x)
    with pytest.raises(RuntimeError, match=f"changes {name}"):
        make_graphed_callables(module.fn, (torch.ones(2),))


@pytest.mark.parametrize("log", ["log.debug('called')", "logging.getLogger('te_graph_test').info('called')"])
def test_a_handler_that_gets_no_record_does_not_matter(module: types.ModuleType, log: str) -> None:
    run_text(module, f"{_HANDLER}log.addHandler(H())\ndef fn(x):\n {log}\n return x * 2")
    replayed, x = graphed(module.fn), torch.ones(2)
    for _ in range(3):
        assert torch.equal(replayed(x), x * 2)
        module.log.warning("another")
    assert replayed.info()["forward_replays"] == 2
