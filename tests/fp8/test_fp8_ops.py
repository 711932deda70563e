"""The FP8 ops as operators of torch: schemas, fake kernels, torch.compile, and captures of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_references import E5M2
from fp8_samples import fp8_buffers, samples, some_weights, tensors_in, update_arguments
from fp8_tensors import numbers
from tensor_lists import all_same_bits, capture, copies, no_sync, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import te_graph as tg

ops = torch.ops.te_graph
SCHEMAS = (
    "fp8_cast(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, Tensor(b!)? counts=None) -> "
    "(Tensor, Tensor)",
    "fp8_cast_out(Tensor(a!) out, Tensor x, Tensor scale, *, Tensor(b!)? scale_inv=None, Tensor(c!)? amax=None, "
    "Tensor(d!)? counts=None, Tensor? noop=None) -> ()",
    "fp8_cast_transpose(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, Tensor(b!)? counts=None) "
    "-> (Tensor, Tensor, Tensor)",
    "fp8_cast_transpose_dbias(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, "
    "Tensor(b!)? counts=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "fp8_cast_transpose_out(Tensor(a!) out, Tensor(b!) out_t, Tensor x, Tensor scale, *, Tensor(c!)? scale_inv=None, "
    "Tensor(d!)? amax=None, Tensor(e!)? dbias=None, Tensor(f!)? counts=None, Tensor? noop=None) -> ()",
    "fp8_dequantize(Tensor x, Tensor scale_inv, ScalarType dtype) -> Tensor",
    "fp8_dequantize_out(Tensor(a!) out, Tensor x, Tensor scale_inv) -> ()",
    "fp8_cast_weights_(Tensor(a!)[] out, Tensor(b!)[] out_t, Tensor[] weights, Tensor scale, Tensor(c!) scale_inv, "
    "Tensor(d!) amax, *, Tensor(e!)? counts=None, Tensor? noop=None) -> ()",
    "fp8_cast_weights_.List(Tensor(a!)[] out, Tensor(b!)[] out_t, Tensor[] weights, Tensor[] scale, "
    "Tensor(c!)[] scale_inv, Tensor(d!)[] amax) -> ()",
    "fp8_cast_weights_table_(Tensor table, Tensor tiles, Tensor(a!) state, Tensor(b!)[] written, *, int kind=0, "
    "Tensor? noop=None) -> ()",
    "amax_and_scale_update_inplace(Tensor(a!) amax_history, Tensor(b!) scale, Tensor(c!) scale_inv, "
    "Tensor non_weight_mask, Tensor update_weight_scale_inv, float fp8_max, float margin=0., "
    'str amax_compute_algo="max", *, bool skip_nonfinite=False) -> ()',
    "amax_and_scale_update_inplace.Scalar(Tensor(a!) amax_history, Tensor(b!) scale, Tensor(c!) scale_inv, "
    "Tensor non_weight_mask, bool update_weight_scale_inv, float fp8_max, float margin=0., "
    'str amax_compute_algo="max", *, bool skip_nonfinite=False) -> ()',
    "fp8_current_scale(Tensor x, ScalarType dtype, *, float eps=0., bool power_of_2=False) -> (Tensor, Tensor)",
    "fp8_scale(Tensor amax, ScalarType dtype, *, float margin=0., float eps=0., bool power_of_2=False) -> Tensor",
    "fp8_gemm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, ScalarType dtype, *, Tensor? bias=None, "
    "bool fast_accum=False) -> Tensor",
    "fp8_gemm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, *, Tensor? bias=None, "
    "bool fast_accum=False, bool accumulate=False) -> ()",
    "fp8_linear_forward(Tensor x, Tensor weight, Tensor weight_scale_inv, Tensor? bias, Tensor? scale, "
    "Tensor(a!)? amax, ScalarType dtype, bool with_transposed) -> (Tensor, Tensor, Tensor)",
    "fp8_linear_backward(Tensor grad, Tensor? weight_t, Tensor? weight_scale_inv, Tensor? x_t, Tensor? x_scale_inv, "
    "Tensor? scale, Tensor(a!)? amax, ScalarType grad_dtype, ScalarType x_dtype, ScalarType weight_dtype, "
    "bool[3] output_mask, *, Tensor(b!)? grad_weight=None, bool accumulate_weight=False, Tensor(c!)? grad_bias=None, "
    "bool accumulate_bias=False, bool inputs_first=False) -> (Tensor, Tensor, Tensor)",
    "fp8_activation_cast_transpose(Tensor x, str activation, ScalarType dtype, *, bool gated=False, "
    "Tensor? scale=None, Tensor(a!)? amax=None, bool with_transposed=True) -> (Tensor, Tensor, Tensor)",
    "fp8_activation_backward_cast_transpose(Tensor grad, Tensor x, str activation, ScalarType dtype, *, "
    "bool gated=False, Tensor? scale=None, Tensor(a!)? amax=None, bool with_transposed=True, bool with_sums=True, "
    "Tensor(b!)? column_sums=None, bool accumulate_sums=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "fp8_layer_norm_cast_transpose(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
    "ScalarType dtype, *, bool rms_norm=False, bool zero_centered=False, Tensor? scale=None, "
    "Tensor(a!)? amax=None, bool with_transposed=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fp8_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor? mean, Tensor rstd, *, "
    "bool zero_centered=False, ScalarType? dtype=None, Tensor? scale=None, Tensor(a!)? amax=None, "
    "bool with_transposed=True, bool[3] output_mask=[True, True, False], Tensor(b!)? grad_weight=None, "
    "bool accumulate_weight=False, Tensor(c!)? grad_bias=None, bool accumulate_bias=False, "
    "Tensor(d!)? column_sums=None, bool accumulate_sums=False) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "concat_qkv(Tensor query, Tensor key, Tensor value) -> Tensor",
    "step_state_set_(Tensor(a!) state, bool is_first_microbatch, bool update_weight_scale_inv) -> ()",
    "step_state_advance_(Tensor(a!) state) -> ()",
)
PREFIXES = ("fp8_", "amax_", "concat_qkv", "step_state_")


def overloads() -> list[torch._ops.OpOverload]:
    names = [schema.name.partition("::") for schema in torch._C._jit_get_all_schemas()]
    packets = {name for space, _, name in names if space == "te_graph" and name.startswith(PREFIXES)}
    return [getattr(getattr(ops, packet), name) for packet in packets for name in getattr(ops, packet).overloads()]


def test_exactly_the_ops_listed_here_are_registered_with_these_schemas():
    assert sorted(str(one._schema) for one in overloads()) == sorted(f"te_graph::{schema}" for schema in SCHEMAS)


def test_all_ops_are_ready_for_torch_compile():
    assert [set(overload.tags) for overload in overloads()] == [{torch.Tag.pt2_compliant_tag}] * len(SCHEMAS)


@pytest.fixture
def prepared(device: str) -> tg.Fp8Weights:
    """Whose table is among the samples; it names memory that lives as long as this."""
    return tg.Fp8Weights(some_weights(device), counts=True)


ON_CPU = tg.Fp8Weights(some_weights("cpu"), counts=True)
NAMES = list(samples("cpu", ON_CPU))


def given_and_written(overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> tuple[dict[str, Any], set[str]]:
    """The arguments by name, and names of those that the schema says are written."""
    schema = overload._schema.arguments
    written = {one.name for one in schema if one.alias_info is not None and one.alias_info.is_write}
    return {one.name: value for one, value in zip(schema, args, strict=False)} | kwargs, written


@pytest.mark.parametrize("name", NAMES)
def test_autograd_hears_of_what_is_written(name, device, prepared):
    """By version counters: a tensor saved for a backward that was written since is an error."""
    overload, args, kwargs = samples(device, prepared)[name]
    given, written = given_and_written(overload, args, kwargs)
    before = {argument: [t._version for t in tensors_in(value)] for argument, value in given.items()}
    overload(*args, **kwargs)
    for argument, value in given.items():
        for tensor, version in zip(tensors_in(value), before[argument], strict=True):
            assert (tensor._version > version) == (argument in written), argument


@pytest.mark.parametrize("name", NAMES)
def test_ops_write_what_their_schemas_say_and_return_nothing_of_it(name, device, prepared):
    overload, args, kwargs = samples(device, prepared)[name]
    given, written = given_and_written(overload, args, kwargs)
    before = {argument: copies(tensors_in(value)) for argument, value in given.items()}
    result = overload(*args, **kwargs)
    for argument, value in given.items():
        assert argument in written or all_same_bits(tensors_in(value), before[argument]), argument
    storages = {t.untyped_storage().data_ptr() for value in given.values() for t in tensors_in(value) if t.numel()}
    assert not storages & {t.untyped_storage().data_ptr() for t in tensors_in(result) if t.numel()}


def test_each_op_is_among_the_samples():
    assert {overload for overload, _, _ in samples("cpu", ON_CPU).values()} == set(overloads())


@pytest.mark.parametrize("name", NAMES)
def test_fake_results_have_the_facts_of_real_ones(name, device, prepared):
    overload, args, kwargs = samples(device, prepared)[name]
    real = overload(*args, **kwargs)
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        fake = overload(*fake_args, **fake_kwargs)
    facts = [[(t.shape, t.stride(), t.dtype, t.device) for t in tensors_in(result)] for result in (real, fake)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_op_waits_for_the_device(name, device, prepared):
    overload, args, kwargs = samples(device, prepared)[name]
    overload(*args, **kwargs)
    with no_sync(device):
        overload(*args, **kwargs)


# Functions of several ops.


def step(x: Tensor, state: list[Tensor], flag: Tensor | bool) -> tuple[Tensor, ...]:
    """Cast, update, and back: everything that delayed and current scaling do to ``x`` [M, N]."""
    history, scale, scale_inv, mask = state
    row, column, inverse, dbias = tg.fp8_cast_transpose_dbias(x, scale[0], amax=history[0, 0])
    tg.amax_and_scale_update_inplace(history, scale, scale_inv, mask, flag, 448.0)
    _, current = tg.fp8_current_scale(x, E5M2)
    other, other_inverse = tg.fp8_cast(x, current, E5M2, amax=history[0, 1])
    back = tg.fp8_dequantize(row, inverse) + tg.fp8_dequantize(other, other_inverse)
    return row.view(torch.uint8), column.view(torch.uint8), dbias, back, current


@pytest.mark.parametrize("flag", [True, "tensor"])
def test_a_compiled_function_does_what_the_eager_one_does(flag, device):
    x, state = numbers((24, 40), torch.float32, device), list(update_arguments(device))
    twin = copies(state)
    flag = torch.ones(1, device=device) if flag == "tensor" else flag
    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert all_same_bits(compiled(x, state, flag), step(x, twin, flag))
        assert all_same_bits(state, twin)


def test_a_compiled_function_casts_into_given_memory(device):
    def cast(x: Tensor, out: Tensor, out_t: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
        tg.fp8_cast_transpose_out(out, out_t, x, scale, amax=amax)
        tg.fp8_cast_weights_([out], [out_t], [x * 2], scale, torch.ones_like(scale), amax)
        return amax * 2

    x, scale = numbers((24, 40), torch.float32, device), torch.tensor([5.0], device=device)
    results = []
    for call in (cast, torch.compile(cast, fullgraph=True, backend="aot_eager")):
        buffers, amax = fp8_buffers((24, 40), (40, 24), device=device), torch.zeros(1, device=device)
        results.append([call(x, *buffers, scale, amax), amax, *buffers])
    assert all_same_bits(*results)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "state, set"])
def test_a_replay_does_what_a_call_does(name, device, prepared):
    """Each op alone, on inputs that change between replays."""
    overload, args, kwargs = samples(device, prepared)[name]
    tensors = tensors_in((args, kwargs))
    replay, result = capture(lambda: overload(*args, **kwargs), device)
    results = tensors_in(result)
    for _ in range(3):
        for tensor in tensors:
            if tensor.dtype in (torch.float32, torch.bfloat16):
                tensor.copy_(numbers(tensor.shape, tensor.dtype, device).abs())
        start = copies(tensors)
        expected = tensors_in(overload(*args, **kwargs))
        changed = copies(tensors)
        for tensor, value in zip(tensors, start, strict=True):
            tensor.copy_(value)
        replay()
        assert all_same_bits(results, expected) and all_same_bits(tensors, changed)


def test_a_captured_sequence_repeats_the_eager_one_bit_for_bit(device):
    x, state = numbers((24, 40), torch.bfloat16, device), list(update_arguments(device))
    flag = torch.ones(1, dtype=torch.int32, device=device)
    start = copies(state)
    replay, results = capture(lambda: step(x, state, flag), device)
    for tensor, value in zip(state, start, strict=True):
        tensor.copy_(value)
    twin = copies(start)
    for turn in range(6):
        x.copy_(numbers((24, 40), torch.bfloat16, device))
        flag.fill_(turn % 2)
        replay()
        assert all_same_bits(results, step(x, twin, flag)) and all_same_bits(state, twin)
    assert not same_bits(state[0], start[0])
