"""Calls of the multi-tensor ops that show each argument, empty lists among them."""

from typing import Any

import torch
from tensor_lists import CHUNK, random_list

from te_graph import MultiTensorPlan

ops = torch.ops.te_graph
MIXED = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (3, 0, CHUNK + 1, 20)


def lists(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Destinations in fp32 and sources of all dtypes that may be added into them."""
    return random_list(SIZES, [torch.float32], device), random_list(SIZES, MIXED, device)


Arguments = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def list_op_samples(device: str) -> dict[str, Arguments]:
    destinations, sources = lists(device)
    scale, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    partial = ops.multi_tensor_norm_partial(sources)
    extras = {"store": True, "zero_source": True, "scale": scale, "sum_squares": partial.clone(), "found_inf": flag}
    return {
        "norm": (ops.multi_tensor_norm.default, (sources,), {}),
        "norm of fp64": (ops.multi_tensor_norm.default, (random_list(SIZES, [torch.float64], device), 1.0), {}),
        "norms": (ops.multi_tensor_norms.default, (sources, 3.0), {}),
        "partial": (ops.multi_tensor_norm_partial.default, (sources, 0.0), {}),
        "finish": (ops.multi_tensor_norm_finish.default, (partial, 2.0, torch.float64), {}),
        "clip": (ops.multi_tensor_clip_.default, (sources, scale * 4, 1.0), {}),
        "clip with a flag": (ops.multi_tensor_clip_.default, (sources, scale * 4, 1.0), {"found_inf": flag}),
        "clip norm": (ops.multi_tensor_clip_norm_.default, (sources, 1.0), {}),
        "clip norm with all": (ops.multi_tensor_clip_norm_.default, (sources, 1.0, 3.0), {"found_inf": flag}),
        "scale": (ops.multi_tensor_scale_.default, (sources, scale), {"found_inf": flag}),
        "scale by a number": (ops.multi_tensor_scale_.Scalar, (sources, 0.5), {}),
        "zero": (ops.multi_tensor_zero_.default, (sources,), {}),
        "copy": (ops.multi_tensor_copy_.default, (destinations, sources), {"scale": scale, "found_inf": flag}),
        "accumulate": (ops.multi_tensor_accumulate_.default, (destinations, sources), {}),
        "accumulate with all": (
            ops.multi_tensor_accumulate_.default,
            (destinations, sources),
            {**extras, "noop": torch.zeros((), device=device)},
        ),
        "norm of nothing": (ops.multi_tensor_norm.default, ([],), {}),
        "norms of nothing": (ops.multi_tensor_norms.default, ([],), {}),
        "partial of nothing": (ops.multi_tensor_norm_partial.default, ([],), {}),
        "clip of nothing": (ops.multi_tensor_clip_.default, ([], scale, 1.0), {"found_inf": flag}),
        "clip norm of nothing": (ops.multi_tensor_clip_norm_.default, ([], 1.0), {}),
        "scale of nothing": (ops.multi_tensor_scale_.default, ([], scale), {}),
        "scale by a number of nothing": (ops.multi_tensor_scale_.Scalar, ([], 0.5), {}),
        "zero of nothing": (ops.multi_tensor_zero_.default, ([],), {}),
        "copy of nothing": (ops.multi_tensor_copy_.default, ([], []), {}),
        "accumulate of nothing": (ops.multi_tensor_accumulate_.default, ([], []), {"zero_source": True}),
    }


def table_op_samples(plan: MultiTensorPlan, device: str) -> dict[str, Arguments]:
    """Calls on the table of ``plan``, which must have sources and live as long as these, and on tables of nothing."""
    table = plan._plan.table, plan._plan.chunks
    nothing = table[0][:0], table[1][:0]
    scale, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    return {
        "norm of nothing": (ops.multi_tensor_norm_table.default, (*nothing, plan._plan.partial.clone()), {}),
        "clip of nothing": (ops.multi_tensor_clip_table_.default, (*nothing, scale, 1.0), {}),
        "scale of nothing": (ops.multi_tensor_scale_table_.default, (*nothing, scale), {}),
        "zero of nothing": (ops.multi_tensor_zero_table_.default, nothing, {}),
        "accumulate of nothing": (ops.multi_tensor_accumulate_table_.default, nothing, {"found_inf": flag}),
        "norm": (ops.multi_tensor_norm_table.default, (*table, plan._plan.partial), {}),
        "clip": (ops.multi_tensor_clip_table_.default, (*table, scale * 4, 1.0), {"found_inf": flag}),
        "scale": (ops.multi_tensor_scale_table_.default, (*table, scale), {"found_inf": flag}),
        "zero": (ops.multi_tensor_zero_table_.default, table, {}),
        "accumulate": (ops.multi_tensor_accumulate_table_.default, table, {}),
        "accumulate with all": (
            ops.multi_tensor_accumulate_table_.default,
            table,
            {"store": False, "zero_source": True, "scale": scale, "found_inf": flag},
        ),
    }
