"""Every op of torch.ops.te_graph passes torch.library.opcheck, on both backends and for empty lists.

The ops are those that are found registered: one without a call among the samples fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import fp8_samples
import multi_tensor_samples
import pytest
import torch
from collective_ranks import calls, open_group
from fp8_references import FP8_DTYPES
from ranks import Rank, Ranks
from tensor_lists import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import te_graph as tg

ops = torch.ops.te_graph
FACES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def registered() -> list[torch._ops.OpOverload]:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("te_graph::")]
    return [getattr(getattr(ops, s.name.partition("::")[2]), s.overload_name or "default") for s in schemas]


class Samples:
    """Calls of each op but the collectives, and what their tables name."""

    def __init__(self, device: str) -> None:
        destinations, sources = multi_tensor_samples.lists(device)
        weights = tg.Fp8Weights(fp8_samples.some_weights(device), counts=True)
        self._alive = [destinations, sources, weights]
        plan = tg.MultiTensorPlan(destinations, sources)
        self.calls: dict[torch._ops.OpOverload, dict[str, Call]] = defaultdict(dict)
        for samples in (
            multi_tensor_samples.list_op_samples(device),
            multi_tensor_samples.table_op_samples(plan, device),
            fp8_samples.samples(device, weights),
        ):
            for name, (overload, args, kwargs) in samples.items():
                self.calls[overload][name] = args, kwargs
        overload, (table, tiles, state, *_), _ = fp8_samples.table_call(weights)
        self.calls[overload]["empty table"] = (table[:0], tiles[:0], state.clone(), []), {}


def is_fp8(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in FP8_DTYPES


def as_bytes(nest: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.view(torch.uint8) if is_fp8(leaf) else leaf, nest)


def check_schema_by_bytes(overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, str]:
    """Torch's look at the schema, through an op of the same schema whose FP8 operands are given as bytes.

    Torch compares arguments with allclose, which multiplies them; there is no product of FP8 numbers.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    dtypes = [leaf.dtype if is_fp8(leaf) else None for leaf in leaves]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = spec.flatten_up_to((args, kwargs))
        given = [leaf if dtype is None else leaf.view(dtype) for leaf, dtype in zip(given, dtypes, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return as_bytes(overload(*args, **kwargs))

    schema = str(overload._schema).removeprefix("te_graph::")
    with torch.library._scoped_library("te_graph_bytes", "DEF") as library:
        library.define(schema)
        library.impl(schema.partition("(")[0], call, "CompositeExplicitAutograd")
        packet = getattr(torch.ops.te_graph_bytes, overload._schema.name.partition("::")[2])
        return torch.library.opcheck(
            getattr(packet, overload._overloadname), *as_bytes((args, kwargs)), test_utils=FACES[:1]
        )


def check(overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    results: dict[str, str] = {}
    faces = FACES
    if any(map(is_fp8, pytree.tree_leaves((args, kwargs)))):
        results = check_schema_by_bytes(overload, args, kwargs)
        faces = FACES[1:]
    results |= torch.library.opcheck(overload, args, kwargs, test_utils=faces)
    assert results == dict.fromkeys(FACES, "SUCCESS")


def scenario_collective(rank: Rank, overload: torch._ops.OpOverload) -> None:
    with open_group(rank) as group:
        found = [arguments for op, arguments in calls(torch.randn(2, 3, 2), group.name, 1) if op is overload]
        assert found, f"{overload} has no sample"
        for arguments in found:
            check(overload, pytree.tree_map_only(Tensor, lambda x: x.to(rank.device), arguments), {})


@pytest.mark.parametrize("overload", registered(), ids=str)
def test_every_op_passes_opcheck(overload, device, seed, tmp_path):
    if "str group" in str(overload._schema):
        Ranks(device, 1, tmp_path).run(scenario_collective, seed, overload)
        return
    samples = Samples(device)
    assert samples.calls[overload], f"{overload} has no sample"
    for args, kwargs in samples.calls[overload].values():
        check(overload, args, kwargs)


OF_NOTHING = [
    (overload, name)
    for overload, found in Samples("cpu").calls.items()
    for name in found
    if "[] " in str(overload._schema) and name.endswith("of nothing")
]


def test_a_sample_without_elements_is_there_for_each_op_on_lists():
    of_lists = {one for one in registered() if "multi_tensor" in str(one) and "[] " in str(one._schema)}
    assert {overload for overload, _ in OF_NOTHING} == of_lists and len(of_lists) > 9


@pytest.mark.parametrize(("overload", "name"), OF_NOTHING, ids=str)
def test_fakes_of_empty_lists_have_the_facts_of_real_results(overload, name, device):
    args, kwargs = Samples(device).calls[overload][name]
    real = overload(*args, **kwargs)
    with FakeTensorMode() as mode:
        fake = overload(*pytree.tree_map_only(Tensor, mode.from_tensor, args))
    if real is None:
        assert fake is None
    else:
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_documented_limit_torchscript_leaves_out_what_is_written_into_lists_or_by_plans(device):
    tensor = torch.ones(5, device=device)
    plan = tg.MultiTensorPlan([tensor])

    def function(x: Tensor) -> Tensor:
        y = x * 2
        ops.multi_tensor_scale_([y], 3.0)
        plan.scale_(torch.full((), 2.0, device=device))
        return y

    x = torch.randn(5, device=device)
    traced = torch.jit.trace(function, x, check_trace=False)
    assert tensor.unique().item() == 2
    assert torch.equal(traced(x), x * 2) and tensor.unique().item() == 2
    compiled = torch.compile(function, backend="aot_eager")  # which keeps both
    assert torch.equal(compiled(x), x * 2 * 3) and tensor.unique().item() == 4


def norms_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    partial = ops.multi_tensor_norm_partial(tensors)
    found = ops.multi_tensor_norm(tensors), ops.multi_tensor_norms(tensors), ops.multi_tensor_clip_norm_(tensors, 1.0)
    return *found, ops.multi_tensor_norm_finish(partial)


@pytest.mark.parametrize("count", [0, 2])
def test_compiled_norms_of_empty_and_other_lists_are_the_eager_ones(count, device):
    tensors = [torch.randn(5, device=device) for _ in range(count)]
    twins = [tensor.clone() for tensor in tensors]
    compiled: Callable[..., Any] = torch.compile(norms_of, fullgraph=True, backend="aot_eager")
    got = compiled(tensors)
    assert all(map(same_bits, got, norms_of(twins))) and all(map(same_bits, tensors, twins))
    torch._dynamo.reset()


def test_an_empty_list_of_weights_is_the_same_error_for_fakes(device):
    vectors = [torch.ones(0, device=device) for _ in range(3)]
    with pytest.raises(ValueError, match="fp8_cast_weights_: expected at least one weight, got an empty list"):
        ops.fp8_cast_weights_([], [], [], *vectors)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="expected at least one weight, got an empty list"):
        ops.fp8_cast_weights_([], [], [], *map(mode.from_tensor, vectors))
