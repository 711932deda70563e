"""Settings of torch that choose a kernel, a dtype or a rounding are part of a capture, and named when they change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import run

import te_graph
from te_graph import _C, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_T = torch._C

# getter -> how to change it from what it is, and what the message calls it.
SETTINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cudnn_enabled": (lambda old: _T._set_cudnn_enabled(not old), "torch.backends.cudnn.enabled"),
    "cudnn_benchmark": (lambda old: _T._set_cudnn_benchmark(not old), "torch.backends.cudnn.benchmark"),
    "cudnn_deterministic": (lambda old: _T._set_cudnn_deterministic(not old), "torch.backends.cudnn.deterministic"),
    "miopen_immediate": (lambda old: _T._set_miopen_immediate(not old), "torch.backends.miopen.immediate"),
    "mkldnn_enabled": (lambda old: _T._set_mkldnn_enabled(not old), "torch.backends.mkldnn.enabled"),
    "mkldnn_deterministic": (lambda old: _T._set_mkldnn_deterministic(not old), "torch.backends.mkldnn.deterministic"),
    "nnpack_enabled": (lambda old: _T._set_nnpack_enabled(not old), "torch.backends.nnpack"),
    "flash_sdp_enabled": (lambda old: _T._set_sdp_use_flash(not old), "torch.backends.cuda.enable_flash_sdp"),
    "fa3_sdp_enabled": (lambda old: _T._set_sdp_use_fa3(not old), "FlashAttention 3"),
    "mem_efficient_sdp_enabled": (
        lambda old: _T._set_sdp_use_mem_efficient(not old),
        "torch.backends.cuda.enable_mem_efficient_sdp",
    ),
    "math_sdp_enabled": (lambda old: _T._set_sdp_use_math(not old), "torch.backends.cuda.enable_math_sdp"),
    "cudnn_sdp_enabled": (lambda old: _T._set_sdp_use_cudnn(not old), "torch.backends.cuda.enable_cudnn_sdp"),
    "overrideable_sdp_enabled": (lambda old: _T._set_sdp_use_overrideable(not old), "the overrideable backend"),
    "sdp_priority_order": (lambda old: _T._set_sdp_priority_order(old[::-1]), "the priority of the backends"),
    "math_sdp_allow_fp16_bf16_reduction": (
        lambda old: _T._set_math_sdp_allow_fp16_bf16_reduction(not old),
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    ),
    "cublas_allow_fp16_reduced_precision_reduction": (
        lambda old: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    ),
    "cublas_allow_bf16_reduced_precision_reduction": (
        lambda old: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    ),
    "cublas_allow_fp16_accumulation": (
        lambda old: _T._set_cublas_allow_fp16_accumulation(not old),
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
    ),
    "sm_carveout_experimental": (lambda old: _T._set_sm_carveout_experimental(8), "sm_carveout"),
    "qengine": (
        lambda old: _T._set_qengine(next(e for e in _T._supported_qengines() if e != old)),
        "torch.backends.quantized.engine",
    ),
    "linalg_preferred_backend": (
        lambda old: _T._set_linalg_preferred_backend(_T._LinalgBackend.Magma),
        "torch.backends.cuda.preferred_linalg_library",
    ),
    "blas_preferred_backend": (
        lambda old: _T._set_blas_preferred_backend(_T._BlasBackend.Cublaslt),
        "torch.backends.cuda.preferred_blas_library",
    ),
    "rocm_fa_preferred_backend": (
        lambda old: _T._set_rocm_fa_preferred_backend(_T._ROCmFABackend.AOTriton),
        "torch.backends.cuda.preferred_rocm_fa_library",
    ),
    "deterministic_algorithms": (
        lambda old: torch.use_deterministic_algorithms(not old),
        "torch.use_deterministic_algorithms",
    ),
    "deterministic_algorithms_warn_only": (
        lambda old: torch.use_deterministic_algorithms(True, warn_only=not old),
        "warn_only of torch.use_deterministic_algorithms",
    ),
}

# torch lets these be changed only where it was built with what they would choose.
NEEDS_CUDA = {"linalg_preferred_backend", "blas_preferred_backend"}

# Chooses no kernel, dtype or rounding, or is another name of what is listed, or is no setting of the process.
EXEMPT = {
    "cpu_allow_fp16_reduced_precision_reduction": "guarded, but only CPUs with float16 arithmetic let it be changed",
    "tensor_metadata": "of one tensor",
    "thread_name": "no arithmetic",
    "torch_function_state": "of the mechanism for subclasses",
    "tracing_state": "of torch.jit.trace, under which a call runs eagerly",
    "value_trace": "of torch.jit.trace, under which a call runs eagerly",
    "deterministic_fill_uninitialized_memory": "what is not written is not read",
    "cublas_allow_tf32": "float32 precision",
    "cudnn_allow_tf32": "float32 precision",
    "onednn_allow_tf32": "float32 precision",
    "float32_matmul_precision": "float32 precision",
    "backcompat_broadcast_warn": "warns",
    "backcompat_keepdim_warn": "warns",
    "warnAlways": "warns",
    "graph_executor_optimize": "of torch.jit's executor, whose functions are not captured",
    "graph_exec_group": "of torch.compile",
    "dispatch_mode": "not a setting: a call under a mode runs eagerly",
    "autograd_fallback_mode": "of operators without a derivative: warns or raises",
    "dtensor_allow_implicit_replication": "of DTensor, which is refused",
    "privateuse1_backend_name": "of another device",
}


def pairs_of_torch() -> set[str]:
    """What torch._C has both a getter and a setter for."""
    names = dir(_T)
    setters = {name.removeprefix("_set_") for name in names if name.startswith("_set_")}
    setters |= {name.replace("sdp_use_", "") + "_sdp_enabled" for name in setters if name.startswith("sdp_use_")}
    return {name.removeprefix("_get_") for name in names if name.startswith("_get_")} & setters


def test_every_setting_of_torch_is_guarded_or_known_not_to_matter():
    assert sorted(pairs_of_torch() - SETTINGS.keys() - EXEMPT.keys()) == []
    assert sorted(set(SETTINGS) & set(EXEMPT)) == []


@contextlib.contextmanager
def restored(name: str):
    """Puts back the setting ``name``."""
    get = getattr(_T, f"_get_{name}")
    old = get()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield old
    finally:
        if name.startswith("deterministic_algorithms"):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
        elif name.endswith("_sdp_enabled"):
            getattr(_T, f"_set_sdp_use_{name.removesuffix('_sdp_enabled')}")(old)
        elif name.startswith("cublas_allow") and "reduced" in name:
            kind = name.split("_")[2]
            setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", (True, True))
        else:
            getattr(_T, f"_set_{name}")(old)
        assert get() == old


def graphed_layer(device: str) -> nn.Module:
    layer = nn.Linear(4, 4, device=device)
    make_graphed_callables(layer, (batch(device),))
    run(layer, batch(device))
    return layer


def batch(device: str) -> torch.Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def assert_refused_while_changed(device: str, change: Callable[[], Any], words: str, put_back: Callable) -> None:
    layer = graphed_layer(device)
    settings = _C.Settings(torch.device(device))
    try:
        change()
        with pytest.raises(RuntimeError, match=f"Linear: .*{words}.*changed since capture"):
            layer(batch(device))
        assert words in settings.change()
    finally:
        put_back()
    assert settings.change() == ""
    run(layer, batch(device))
    assert layer.te_graph.info()["forward_replays"] == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if name not in NEEDS_CUDA or torch.backends.cuda.is_built()]
)
def test_a_setting_is_part_of_the_capture(device, name):
    change, words = SETTINGS[name]
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(restored(name))
        assert_refused_while_changed(device, lambda: change(old), words, lambda: stack.close())


PRECISIONS = {
    "matmul": "the float32 precision of matrix products",
    "conv": "the float32 precision of convolutions",
    "rnn": "the float32 precision of recurrent networks",
}


@pytest.mark.parametrize("op", PRECISIONS)
def test_the_precision_of_float32_is_part_of_the_capture(device, op):
    backend = "cuda" if device == "cuda" else "mkldnn"
    old = _T._get_fp32_precision_getter(backend, op)
    other = "ieee" if old == "tf32" else "tf32"
    assert_refused_while_changed(
        device,
        lambda: _T._set_fp32_precision_setter(backend, op, other),
        PRECISIONS[op],
        lambda: _T._set_fp32_precision_setter(backend, op, old),
    )


VARIABLES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "torch.backends.mha.set_fastpath_enabled": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: torch.backends.mha.set_fastpath_enabled(True),
    ),
    "torch.set_default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch.backends.cudnn.benchmark_limit": (
        lambda: _T._cuda_set_cudnn_benchmark_limit(7),
        lambda: _T._cuda_set_cudnn_benchmark_limit(10),
    ),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_what_is_set_in_another_way_is_part_of_the_capture(device, name):
    change, put_back = VARIABLES[name]
    layer, settings = graphed_layer(device), _C.Settings(torch.device(device))
    try:
        change()
        with pytest.raises(RuntimeError, match=name):
            layer(batch(device).float())
        assert name in settings.change()
    finally:
        put_back()
    assert settings.change() == ""


def test_the_contraction_order_of_einsum_is_part_of_the_capture(device):
    settings, einsum = _C.Settings(torch.device(device)), torch.backends.opt_einsum
    was, variables = einsum.enabled, einsum._get_enabled.__globals__
    try:
        variables["enabled"] = not was
        assert settings.change() == "torch.backends.opt_einsum.enabled changed"
        variables["enabled"] = was
        strategy = variables["strategy"]
        variables["strategy"] = "greedy"
        assert settings.change() == "torch.backends.opt_einsum.strategy changed"
        variables["strategy"] = strategy
        assert settings.change() == ""
    finally:
        variables["enabled"] = was


def test_autocast_of_another_device_is_part_of_the_capture(device):
    """Code asks torch.is_autocast_enabled() without saying for which device."""
    layer, other = graphed_layer(device), "cuda" if device == "cpu" else "cpu"
    settings = _C.Settings(torch.device(device))
    was, dtype = torch.is_autocast_enabled(other), torch.get_autocast_dtype(other)
    torch.set_autocast_enabled(other, True)
    try:
        with pytest.raises(RuntimeError, match="autocast of other devices is now on"):
            layer(batch(device))
        settings_on = _C.Settings(torch.device(device))
        torch.set_autocast_dtype(other, torch.float16 if dtype is not torch.float16 else torch.bfloat16)
        assert settings_on.change() == "the dtype of autocast of other devices changed"
    finally:
        torch.set_autocast_dtype(other, dtype)
        torch.set_autocast_enabled(other, was)
    assert settings.change() == ""
    run(layer, batch(device))


@pytest.mark.parametrize("graphed", [True, False], ids=["a function", "a callable"])
def test_the_dtype_of_autocast_is_part_of_the_capture_where_code_enters_a_region(device, graphed):
    linear = torch.nn.Linear(4, 4, device=device)

    def enters(x: torch.Tensor) -> torch.Tensor:  # [3, 4] -> [3, 4]
        with torch.autocast(device):
            return linear(x).float().detach()

    x, dtype = batch(device).detach(), torch.get_autocast_dtype(device)
    call = te_graph.graphed(enters) if graphed else make_graphed_callables(enters, (x,), on_mismatch="eager")
    try:
        for chosen in (torch.bfloat16, torch.float16, torch.bfloat16):
            torch.set_autocast_dtype(device, chosen)
            for _ in range(3):
                assert torch.equal(call(x), enters(x))
    finally:
        torch.set_autocast_dtype(device, dtype)


def test_the_cache_of_autocast_is_part_of_the_capture_where_code_asks_for_it(device):
    def asks(x: torch.Tensor) -> torch.Tensor:  # [3, 4] -> [3, 4]
        return x * (2 if torch.is_autocast_cache_enabled() else 3)

    layers = (asks, lambda x: x * 2)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):  # as for torch.cuda.make_graphed_callables
        graphed = make_graphed_callables(layers, ((batch(device),), (batch(device),)), on_mismatch="eager")
    for keeps in (False, True) * 2:
        with torch.autocast(device, torch.bfloat16, cache_enabled=keeps):
            x = batch(device)
            for layer, one in zip(layers, graphed, strict=True):
                assert_bitwise_equal(one(x), layer(x))
    assert [one.te_graph.info()["forward_replays"] for one in graphed] == [2, 4]
    assert [*graphed[0].te_graph.info()["eager_calls"]] == [
        "the cache of autocast changed since capture; call .te_graph.reset() on the callable, "
        'or capture with on_mismatch="capture"'
    ]


def test_what_changes_and_changes_back_goes_on_replaying(device):
    layer = graphed_layer(device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        pass
    run(layer, batch(device))
    assert layer.te_graph.info()["forward_replays"] == 2
