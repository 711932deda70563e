"""The multi-tensor ops as operators of torch: schemas and tags, fake kernels, and torch.compile around them."""

from collections.abc import Callable

import pytest
import torch
from multi_tensor_samples import MIXED, SIZES, lists
from tensor_lists import all_same_bits, copies, random_list, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.te_graph
LIST_OPS = (
    "multi_tensor_norm(Tensor[] tensors, float p=2.) -> Tensor",
    "multi_tensor_norms(Tensor[] tensors, float p=2.) -> Tensor",
    "multi_tensor_norm_partial(Tensor[] tensors, float p=2.) -> Tensor",
    "multi_tensor_norm_finish(Tensor partial, float p=2., ScalarType dtype=6) -> Tensor",
    "multi_tensor_clip_(Tensor(a!)[] tensors, Tensor total_norm, float max_norm, *, "
    "float eps=9.9999999999999995e-07, Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_clip_norm_(Tensor(a!)[] tensors, float max_norm, float p=2., *, Tensor(b!)? found_inf=None) "
    "-> Tensor",
    "multi_tensor_scale_(Tensor(a!)[] tensors, Tensor scale, *, Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_scale_.Scalar(Tensor(a!)[] tensors, float scale, *, Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_zero_(Tensor(a!)[] tensors) -> ()",
    "multi_tensor_copy_(Tensor(a!)[] destination, Tensor[] source, *, Tensor? scale=None, "
    "Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_accumulate_(Tensor(a!)[] destination, Tensor(b!)[] source, *, bool store=False, "
    "bool zero_source=False, Tensor? scale=None, Tensor(c!)? sum_squares=None, Tensor(d!)? found_inf=None, "
    "Tensor? noop=None) -> ()",
)
# What plans call: a table on the device instead of the list.
TABLE_OPS = (
    "multi_tensor_norm_table(Tensor table, Tensor chunks, Tensor(a!) partial, float p=2., ScalarType dtype=6) "
    "-> Tensor",
    "multi_tensor_clip_table_(Tensor(a!) table, Tensor chunks, Tensor total_norm, float max_norm, *, "
    "float eps=9.9999999999999995e-07, Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_scale_table_(Tensor(a!) table, Tensor chunks, Tensor scale, *, Tensor(b!)? found_inf=None) -> ()",
    "multi_tensor_zero_table_(Tensor(a!) table, Tensor chunks) -> ()",
    "multi_tensor_accumulate_table_(Tensor(a!) table, Tensor chunks, *, bool? store=None, bool zero_source=False, "
    "Tensor? scale=None, Tensor(b!)? sum_squares=None, Tensor(c!)? found_inf=None, Tensor? noop=None) -> ()",
)


def overloads() -> list[torch._ops.OpOverload]:
    schemas = [
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("te_graph::multi_tensor_")
    ]
    packets = [(getattr(ops, schema.name.partition("::")[2]), schema.overload_name) for schema in schemas]
    return [getattr(packet, name or "default") for packet, name in packets]


def test_exactly_the_ops_listed_here_are_registered_with_these_schemas():
    listed = [f"te_graph::{schema}" for schema in (*LIST_OPS, *TABLE_OPS)]
    assert sorted(str(overload._schema) for overload in overloads()) == sorted(listed)


def test_all_ops_are_ready_for_torch_compile():
    assert [set(overload.tags) for overload in overloads()] == [{torch.Tag.pt2_compliant_tag}] * len(overloads())


@pytest.mark.parametrize("dtypes", [MIXED, [torch.float64, torch.float32]], ids=str)
def test_fake_results_have_the_facts_of_real_ones(dtypes, device):
    tensors = random_list(SIZES, dtypes, device)
    calls: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
        "norm": ops.multi_tensor_norm,
        "norms": ops.multi_tensor_norms,
        "clip norm": lambda found: ops.multi_tensor_clip_norm_(found, 1.0),
        "partial": ops.multi_tensor_norm_partial,
        "finish": lambda found: ops.multi_tensor_norm_finish(ops.multi_tensor_norm_partial(found), 2.0, torch.float64),
    }
    for name, call in calls.items():
        real = call(tensors)
        with FakeTensorMode() as mode:
            fake = call([mode.from_tensor(tensor) for tensor in tensors])
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device), name


def test_a_compiled_function_does_what_the_eager_one_does(device):
    def clip(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        ops.multi_tensor_accumulate_(others, tensors, zero_source=True)
        norm = ops.multi_tensor_norm(others)
        ops.multi_tensor_clip_(others, norm, 1.0)
        return norm * 2

    destinations, sources = lists(device)
    twins, twin_sources = copies(destinations), copies(sources)
    result = torch.compile(clip, fullgraph=True, backend="aot_eager")(sources, destinations)
    assert same_bits(result, clip(twin_sources, twins))
    assert all_same_bits(destinations, twins) and all_same_bits(sources, twin_sources)


def test_no_gradient_flows_through_a_norm(device):
    tensor = torch.randn(5, device=device, requires_grad=True)
    with torch.no_grad():
        assert not ops.multi_tensor_norm([tensor]).requires_grad
    with pytest.raises(RuntimeError, match="multi_tensor_norm"):
        ops.multi_tensor_norm([tensor]).backward()
