"""State of torch and Python that code asks a function for is compared.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import decimal
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from calls import replays
from sequences import counts
from text_cases import function_of_case, refuses_changes, run_text, sees_changes
from torch.utils import deterministic

from te_graph import graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_IMPORTS = "import decimal, numpy as np, torch, torch.distributed as dist\nfrom torch.utils import deterministic"
_IS = "2.0 if {} else 3.0"
CASES = {
    "threads": (
        "torch.set_num_threads(1)",
        "float(torch.get_num_threads())",
        "torch.set_num_threads(2)",
    ),
    "anomaly detection": (
        "",
        _IS.format("torch.is_anomaly_enabled()"),
        "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    ),
    "sparse tensors": (
        "",
        _IS.format("torch.sparse.check_sparse_tensor_invariants.is_enabled()"),
        "torch.sparse.check_sparse_tensor_invariants.enable()",
    ),
    "warnings": ("", _IS.format("torch.is_warn_always_enabled()"), "torch.set_warn_always(True)"),
    "memory that is filled": (
        "from torch.utils import deterministic",
        _IS.format("deterministic.fill_uninitialized_memory"),
        "deterministic.fill_uninitialized_memory = not deterministic.fill_uninitialized_memory",
    ),
    "conversion": (
        "",
        _IS.format("torch.__future__.get_swap_module_params_on_conversion()"),
        "torch.__future__.set_swap_module_params_on_conversion(True)",
    ),
    "precision of decimal": (
        "import decimal",
        "float(decimal.Decimal(1) / decimal.Decimal(3))",
        "decimal.getcontext().prec = 3",
    ),
    "a setting of the compiler": (
        "import torch._dynamo",
        _IS.format("torch._dynamo.config.verbose"),
        "torch._dynamo.config.verbose = True",
    ),
    "errors of NumPy": ("", _IS.format("np.geterr()['over'] == 'warn'"), "np.seterr(over='ignore')"),
    "TF32 of products": (
        "",
        _IS.format("torch.backends.cuda.matmul.allow_tf32"),
        "torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32",
    ),
    "threads of autograd": (
        "",
        _IS.format("torch.autograd.is_multithreading_enabled()"),
        "torch.autograd.set_multithreading_enabled(False)",
    ),
    "a group": (
        "import torch.distributed as dist",
        _IS.format("dist.is_initialized()"),
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    ),
}


@pytest.fixture
def module(module: types.ModuleType) -> Iterator[types.ModuleType]:
    threads, precision = torch.get_num_threads(), decimal.getcontext().prec
    is_filled = deterministic.fill_uninitialized_memory
    allows_tf32, errors = torch.backends.cuda.matmul.allow_tf32, np.geterr()
    yield module
    torch.backends.cuda.matmul.allow_tf32 = allows_tf32
    torch.autograd.set_multithreading_enabled(True)
    np.seterr(**errors)
    torch.set_num_threads(threads)
    decimal.getcontext().prec = precision
    torch.autograd.set_detect_anomaly(False)
    torch.set_warn_always(False)
    torch.sparse.check_sparse_tensor_invariants.disable()
    deterministic.fill_uninitialized_memory = is_filled
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch._dynamo.config.verbose = False
    if dist.is_initialized():
        dist.destroy_process_group()


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


def test_a_capture_under_anomaly_detection_sees_it(module: types.ModuleType) -> None:
    function, replayed, x = function_of_case(module, "", _IS.format("torch.is_anomaly_enabled()"))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for _ in range(4):
            assert torch.equal(replayed(x), function(x))
    assert counts(replayed)[1] > 0


def test_state_that_no_code_asks_for_may_change(module: types.ModuleType) -> None:
    net, x = make_graphed_callables(lambda x: x * 2, (torch.ones(3),)), torch.ones(3)
    net(x)
    for _, _, change in CASES.values():
        run_text(module, f"{_IMPORTS}\n{change}")
    net(x)
    assert replays(net) == 2


def test_results_of_decimal_are_no_change_of_its_context(module: types.ModuleType) -> None:
    run_text(module, "import decimal\ndef fn(x): return x * float(decimal.Decimal(1) / 4)")
    net, x = make_graphed_callables(module.fn, (torch.ones(3),)), torch.ones(3)
    net(x)
    decimal.Decimal(1) / 3  # is inexact, as the context has noted then
    net(x)
    assert replays(net) == 2


SET_INSIDE = {  # by the function, between its calls, and what tells
    "threads": ("torch.set_num_threads({})", 1, 2, "torch.get_num_threads()"),
    "anomaly detection": (
        "torch.autograd.set_detect_anomaly({}, check_nan=False)",
        True,
        False,
        "torch.is_anomaly_enabled()",
    ),
    "warnings": ("torch.set_warn_always({})", True, False, "torch.is_warn_always_enabled()"),
    "conversion": (
        "torch.__future__.set_swap_module_params_on_conversion({})",
        True,
        False,
        "torch.__future__.get_swap_module_params_on_conversion()",
    ),
    "threads of autograd": (
        "torch.autograd.set_multithreading_enabled({})",
        False,
        True,
        "torch.autograd.is_multithreading_enabled()",
    ),
    "checks of distributions": (
        "torch.distributions.Distribution.set_default_validate_args({})",
        False,
        True,
        "torch.distributions.Distribution._validate_args",
    ),
    "printing": ("torch.set_printoptions(precision={})", 3, 4, "torch._tensor_str.PRINT_OPTS.precision"),
    "printing of NumPy": ("np.set_printoptions(precision={})", 3, 8, "np.get_printoptions()['precision']"),
    "recursion": ("sys.setrecursionlimit({})", 1500, sys.getrecursionlimit(), "sys.getrecursionlimit()"),
    "records": ("logging.disable({})", 10, 0, "logging.root.manager.disable"),
    "a level": ("logging.getLogger('te_graph_test').setLevel({})", 10, 0, "logging.getLogger('te_graph_test').level"),
    "TF32": ("torch.backends.cuda.matmul.allow_tf32 = {}", True, False, "torch.backends.cuda.matmul.allow_tf32"),
}


@pytest.mark.parametrize("case", SET_INSIDE)
def test_a_setting_that_a_function_sets_is_set_by_each_call(module: types.ModuleType, case: str) -> None:
    set_, inside, between, read = SET_INSIDE[case]
    run_text(module, f"{_IMPORTS}\nimport logging, sys\ndef fn(x):\n {set_.format(inside)}\n return x * 2")
    run_text(module, f"def look(): return {read}\ndef reset(): {set_.format(between)}")
    replayed, x = graphed(module.fn), torch.ones(3)
    try:
        for step in range(6):
            replayed(x)
            assert module.look() == inside
            if step > 2:
                module.reset()
    finally:
        module.reset()
    assert counts(replayed)[1] >= 2
