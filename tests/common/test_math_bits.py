"""Tensors whose memory is still to be conjugated or negated, as arguments of ops that write them.

The reference is the same call with tensors that have such values in their memory. torch's own way of passing such
tensors to an op takes what it copies back from the op's result, and the ops here have none.
"""

import re
from collections.abc import Callable

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg  # registers the ops

ops = torch.ops.te_graph
FP8 = torch.float8_e4m3fn
X = torch.linspace(-3, 3, 24)


def plain(values: Tensor) -> Tensor:
    return values.clone()


def negated(values: Tensor) -> Tensor:
    """[...] of the same values, by the negative bit."""
    return torch._neg_view(-values)


Make = Callable[[Tensor], Tensor]


def clip(make: Make) -> list[Tensor]:
    tensors, flag = [X.to("cpu", copy=True)], make(torch.zeros(()))
    ops.multi_tensor_clip_(tensors, make(torch.tensor(float("inf"))), 1.0, found_inf=flag)
    return [*tensors, flag]


def copy(make: Make) -> list[Tensor]:
    copies, sources = [X * 2, X * 3], [make(X), make(X * 5)]
    ops.multi_tensor_copy_(copies, sources, scale=make(torch.tensor(0.5)))
    return copies


def cast(make: Make) -> list[Tensor]:
    amax = make(torch.ones(()))
    data, scale_inv = ops.fp8_cast(make(X.view(4, 6)), make(torch.tensor(2.0)), FP8, amax=amax)
    return [data.view(torch.uint8), scale_inv, amax]


def update(make: Make) -> list[Tensor]:
    history, scale, scale_inv = make(X.abs().view(4, 6)), make(torch.ones(6)), make(torch.ones(6))
    ops.amax_and_scale_update_inplace(history, scale, scale_inv, torch.zeros(0, dtype=torch.bool), True, 448.0)
    return [history, scale, scale_inv]


@pytest.mark.parametrize("call", [clip, copy, cast, update])
def test_ops_read_and_write_the_values(call):
    for _ in range(5):
        expected, got = call(plain), call(negated)
        assert all(same_bits(a.resolve_neg(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("bit", ["Conjugate", "Negative"])
def test_all_ops_that_write_have_a_way_of_their_own(bit):
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("te_graph::") and s.is_mutable]
    assert len(schemas) > 20
    for schema in schemas:
        name = ".".join(filter(None, (schema.name, schema.overload_name)))
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, bit), name


def test_inference_tensors_are_refused():
    with torch.inference_mode():
        flag = negated(torch.ones(()))
    with pytest.raises(RuntimeError, match="expected found_inf made outside of inference mode"):
        ops.multi_tensor_clip_([X.clone()], torch.tensor(1.0), 1.0, found_inf=flag)
    assert flag == 1


def test_what_is_written_twice_is_refused_though_copies_lie_apart():
    place, x, out = torch.ones(2), X.clone(), torch.empty(24, dtype=FP8)
    written_twice: dict[str, Callable[[], object]] = {
        "fp8_cast_out": lambda: ops.fp8_cast_out(
            out, x, torch.tensor(2.0), scale_inv=torch._neg_view(place[:1]), amax=torch._neg_view(place[:1])
        ),
        "multi_tensor_clip_": lambda: ops.multi_tensor_clip_(
            [x], torch.tensor(float("inf")), 1.0, found_inf=torch._neg_view(x[3:4])
        ),
    }
    for name, call in written_twice.items():
        with pytest.raises(ValueError, match=f"^{name}: expected what it writes to be apart"):
            call()
    assert torch.equal(place, torch.ones(2)) and torch.equal(x, X)
    ops.fp8_cast_out(out, x, torch.tensor(2.0), scale_inv=torch._neg_view(place[:1]), amax=torch._neg_view(place[1:]))
    assert place.tolist() == [-0.5, -3]


def test_lists_that_are_written_are_refused():
    """Copies would hide that two of them share memory."""
    x = X.clone()
    words = re.escape("multi_tensor_scale_: expected tensors[1] that is materialized")
    with pytest.raises(ValueError, match=words):
        ops.multi_tensor_scale_([x, negated(X)], 2.0)
    assert torch.equal(x, X)
    assert tg.get_total_norm([negated(X)]) == tg.get_total_norm([X])
