"""torch.compile and the order of collectives: all of them run, in the order of the program, on ranks that differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compiled_programs import COLUMNS, ROWS, Program, Step, function_of, scenario
from ranks import ranks_of
from seeds import first_seed
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph import tensor_parallel
from te_graph.collectives import effects

two_ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 2), id="gloo-2")])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[tg.PeerGroup]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    torch._dynamo.reset()
    with tg.PeerGroup() as group:
        yield group
    dist.destroy_process_group()


def calls_of(function, *inputs: Tensor) -> list[list[str]]:
    """The collectives in what inductor makes of ``function`` and of its backward, in their order."""

    def run() -> None:
        result = torch.compile(function)(*inputs)
        if result.requires_grad:
            result.sum().backward()

    _, codes = run_and_get_code(run)
    return [
        [line.split("ops.te_graph.")[1].split(".")[0] for line in code.split("\n") if "= torch.ops.te_graph." in line]
        for code in codes
    ]


def test_random_programs_that_ranks_compile_differently(two_ranks) -> None:
    """Without inductor, which takes a minute to start where cores are few: ``python compiled_programs.py`` has it."""
    two_ranks.run(scenario, 0, first_seed("compiled programs"), 3, "aot_eager")


def test_what_is_not_used_runs_where_it_stands(group) -> None:
    """Ready from the start, and not used: inductor puts such a call first, or leaves it out."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        tg.all_gather(w.cos(), group)
        first = tg.all_reduce(x @ w, group)
        tg.reduce_scatter(w.exp(), group)
        y = tg.all_reduce((first @ w).tanh(), group)
        tg.all_gather(w.sin(), group)
        return y

    forward = ["all_gather", "all_reduce", "reduce_scatter", "all_reduce", "all_gather"]
    with torch.no_grad():
        assert calls_of(function, torch.randn(4, 4), torch.randn(4, 4)) == [forward]
    torch._dynamo.reset()
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    assert calls_of(function, x, w) == [forward, ["all_reduce", "all_reduce"]]


def test_the_order_holds_where_inductor_by_itself_changes_it(group) -> None:
    """It puts the last one of these, whose numbers are there from the start, before the third one."""
    kinds = ("apart", False), ("scattered", False), ("chained", True), ("chained", True), ("scattered", False)
    steps = (Step(kind, 1 + 10.0**n, (is_used,), (False,)) for n, (kind, is_used) in enumerate(kinds))
    function = function_of(Program(True, tuple(steps), (ROWS,), (True,)), 0, group)
    inputs = (torch.randn(rows, COLUMNS, requires_grad=True) for rows in (ROWS, ROWS, COLUMNS))
    assert calls_of(function, *inputs) == [
        ["all_reduce", "reduce_scatter", "all_reduce", "all_reduce", "reduce_scatter"],
        ["all_reduce", "all_reduce"],
    ]


def test_ops_that_write_are_traced_as_the_functional_one_and_a_copy(group) -> None:
    ops = torch.ops.te_graph

    def function(x: Tensor) -> Tensor:
        y, z, rows, out = x * 2, x * 3, x.new_empty(4, 4), torch.empty_like(x)
        ops.all_reduce_(y, group.name)
        tg.all_reduce_out(out, y, group)
        tg.reduce_scatter_out(z, x * 4, group)
        tg.all_gather_out(rows, z, group)
        return out + z + rows

    x = torch.randn(4, 4)
    assert calls_of(function, x) == [["all_reduce", "all_reduce", "reduce_scatter", "all_gather"]]
    assert torch.equal(torch.compile(function)(x), function(x))


def test_traces_keep_what_is_not_used(group) -> None:
    def function(x: Tensor) -> Tensor:
        tg.all_gather(x.cos(), group)
        tg.reduce_scatter(x.exp(), group)
        tg.all_reduce(x.sin(), group)
        return x * 2

    x = torch.randn(4)
    fx = make_fx(function)(x)
    fx.graph.eliminate_dead_code()
    assert str(fx.graph).count("torch.ops.te_graph.") == 3
    script = torch.jit.trace(function, x, check_trace=False)
    torch._C._jit_pass_dce(script.graph)
    assert str(script.graph).count("te_graph::") == 3
    exported = torch.export.export(_Module(function), (x,)).run_decompositions()
    assert str(exported.graph).count("te_graph.") == 3


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_checkpoints_keep_the_results_of_collectives(group) -> None:
    """Called again in the backward, they would stand among its own in no order that all ranks have."""

    def part(x: Tensor, w: Tensor) -> Tensor:
        return tg.all_reduce((tg.all_reduce((x @ w).tanh(), group).sin() @ w), group).cos()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(part, tg.all_reduce(x, group) * 2, w, use_reentrant=False)

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    assert calls_of(function, x, w) == [["all_reduce"] * 3] * 2
    assert_derivatives_of_eager(function, x, w)


REGIONS = {
    "copy_to_tp": tensor_parallel.copy_to_tp,
    "reduce_from_tp": tensor_parallel.reduce_from_tp,
    "scatter_to_tp": tensor_parallel.scatter_to_tp,
    "gather_from_tp": tensor_parallel.gather_from_tp,
    "all_gather_last_dim_from_tp": tensor_parallel.all_gather_last_dim_from_tp,
    "scatter_to_sp": tensor_parallel.scatter_to_sp,
    "gather_from_sp": tensor_parallel.gather_from_sp,
    "reduce_scatter_to_sp": tensor_parallel.reduce_scatter_to_sp,
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions_have_the_derivative_of_eager_execution(group, name) -> None:
    region, x = REGIONS[name], torch.randn(4, 6, requires_grad=True)
    assert_derivatives_of_eager(lambda x: region(x, group).sin(), x)
    assert_derivatives_of_eager(lambda x: region(x.sin(), group) * region(x * 2, group), x)


def assert_derivatives_of_eager(function: Callable[..., Tensor], *leaves: Tensor) -> None:
    expected = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(function, backend="aot_eager")(*leaves).square().sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_outputs_of_another_shape_are_refused_as_without_a_compiler(group) -> None:
    """They are traced as a copy, which would take them."""
    x = torch.randn(4, 4)
    for write in (tg.all_reduce_out, tg.reduce_scatter_out, tg.all_gather_out):
        for call in (write, torch.compile(lambda *args, write=write: write(*args), backend="aot_eager")):
            with pytest.raises((ValueError, RuntimeError), match=r"expected out of shape \[4, 4\], got \[2, 4, 4\]"):
                call(torch.empty(2, 4, 4), x, group)


def test_sums_times_a_factor_and_of_another_dtype_are_refused(group) -> None:
    for options in ({"scale": 0.5}, {"scale": torch.ones(())}, {"wire_dtype": torch.bfloat16}):
        call = torch.compile(lambda x, options=options: tg.all_reduce_out(x, x, group, **options), backend="aot_eager")
        with pytest.raises(
            BackendCompilerFailed, match="NotImplementedError: all_reduce_out: scale and wire_dtype are not traced"
        ):
            call(torch.ones(4))


def test_code_that_was_cached_without_the_rules_does_not_come_back(group, tmp_path, monkeypatch) -> None:
    """As by a te_graph that did not tell torch of its collectives: its code leaves out what is not used."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def function(x: Tensor) -> Tensor:
        tg.all_reduce(x.cos(), group)
        return tg.all_reduce(x.sin(), group)

    op = torch.ops.te_graph.all_reduce.default
    registered = torch._library.simple_registry.singleton.find("te_graph::all_reduce").effect
    tag = torch.compiler.config.cache_key_tag
    assert effects._RULES in tag
    x = torch.randn(4)
    with torch.no_grad():
        rule = registered.effect
        registered.register(None)
        torch.fx.node._side_effectful_functions.discard(op)
        torch.compiler.config.cache_key_tag = tag.replace(effects._RULES, "")
        try:
            assert calls_of(function, x) == [["all_reduce"]]
        finally:
            registered.register(rule)
            torch.fx.node.has_side_effect(op)
            torch.compiler.config.cache_key_tag = tag
        torch._dynamo.reset()
        assert calls_of(function, x) == [["all_reduce", "all_reduce"]]


def test_a_torch_that_cannot_be_told_is_an_error_at_import(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._library.effects", None)
    with pytest.raises(ImportError, match=r"te_graph: torch .* has no ordered effects .* reorders collectives"):
        effects.register()
