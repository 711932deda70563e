"""From a public function to the launch of its kernel at most four functions are passed, the dispatcher and what hands
a lambda on (``run_on``, ``write_to``, ``with_kind``) not counted. Each is called by the one before, under one name."""

from __future__ import annotations

import itertools

import pytest
from launch_paths import body_of, is_called, is_launch

import te_graph as tg

MOST = 4
WITHOUT_KERNELS = {"fp8_autocast", "fp8_plans", "fp8_state_dict"}


def collective(name: str, protocol: str, function: str | None = None) -> tuple[str, ...]:
    op, run = f"csrc/collectives/ops.cpp:{function or name}", "csrc/collectives/peer_transport.cpp:run"
    return f"te_graph/collectives/ops.py:{name}", op, run, f"csrc/collectives/{protocol}.cu:launch_{protocol}"


def fp8(name: str, ops: str, function: str, launcher: str) -> tuple[str, ...]:
    module = "scales" if ops == "scale_ops" else "casts"
    return f"te_graph/fp8/{module}.py:{name}", f"csrc/fp8/{ops}.cpp:{function}", f"csrc/fp8/{launcher}"


def gemm(name: str, function: str) -> tuple[str, ...]:
    multiply = "csrc/fp8/gemm_ops.cpp:multiply"
    return f"te_graph/fp8/gemm.py:{name}", f"csrc/fp8/gemm_ops.cpp:{function}", multiply, "csrc/fp8/gemm.cu:launch_gemm"


REDUCE_ROWS = ("csrc/collectives/process_group_transport.cpp:run", "csrc/collectives/reduce_rows.cu:launch_reduce_rows")
UPDATE = ("csrc/fp8/scale_ops.cpp:run_update", "csrc/fp8/scale.cu:launch_amax_and_scale_update")
# file:function, one for each station.
PATHS = [
    *(collective("all_reduce", protocol) for protocol in ("ll128", "lamport")),
    *(collective("all_reduce_", protocol, "all_reduce_inplace") for protocol in ("ll128", "lamport")),
    *(collective("all_reduce_out", protocol) for protocol in ("ll128", "lamport", "lamport_bf16")),
    *(collective("reduce_scatter", protocol) for protocol in ("ll128", "lamport")),
    *(collective("reduce_scatter_out", protocol) for protocol in ("ll128", "lamport", "lamport_bf16")),
    *(collective("all_gather", protocol) for protocol in ("ll128", "simple")),
    *(collective("all_gather_out", protocol) for protocol in ("ll128", "simple")),
    ("te_graph/collectives/ops.py:all_reduce", "csrc/collectives/ops.cpp:all_reduce", *REDUCE_ROWS),
    ("te_graph/collectives/ops.py:reduce_scatter", "csrc/collectives/ops.cpp:reduce_scatter", *REDUCE_ROWS),
    fp8("fp8_cast", "cast_ops", "cast", "cast.cu:launch_cast"),
    fp8("fp8_cast_out", "cast_ops", "cast_out", "cast.cu:launch_cast"),
    fp8("fp8_cast_transpose", "cast_ops", "cast_transpose", "cast_transpose.cu:launch_cast_transpose"),
    fp8("fp8_cast_transpose_dbias", "cast_ops", "cast_transpose_dbias", "cast_transpose.cu:launch_cast_transpose"),
    fp8("fp8_cast_transpose_out", "cast_ops", "cast_transpose_out", "cast_transpose.cu:launch_cast_transpose"),
    fp8("fp8_cast_weights_", "weights_ops", "cast_weights", "cast_transpose.cu:launch_cast_weights"),
    fp8("fp8_dequantize", "cast_ops", "dequantize", "cast.cu:launch_dequantize"),
    fp8("fp8_dequantize_out", "cast_ops", "dequantize_out", "cast.cu:launch_dequantize"),
    fp8("fp8_current_scale", "scale_ops", "current_scale", "scale.cu:launch_current_scale"),
    fp8("fp8_scale", "scale_ops", "scale_of_amax", "scale.cu:launch_scale"),
    ("te_graph/fp8/scales.py:amax_and_scale_update_inplace", "csrc/fp8/scale_ops.cpp:update_by_tensor", *UPDATE),
    ("te_graph/fp8/scales.py:amax_and_scale_update_inplace", "csrc/fp8/scale_ops.cpp:update_by_number", *UPDATE),
    gemm("fp8_gemm", "gemm"),
    gemm("fp8_gemm_out", "gemm_out"),
    (
        "te_graph/fp8/weights.py:cast_",
        "csrc/fp8/weight_table.cpp:cast",
        "csrc/fp8/weights_ops.cpp:cast_weights_table",
        "csrc/fp8/cast_transpose.cu:launch_cast_weights_table",
    ),
    (
        "te_graph/multi_tensor/clip.py:clip_grad_norm_",
        "csrc/multi_tensor/bindings.cpp:clip_plain_gradients",
        "csrc/multi_tensor/ops.cpp:clip_norm",
        "csrc/multi_tensor/norm.cu:launch_norm",
    ),
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path[0].split(':')[1]}-{path[-1].split(':')[1]}")
def test_a_launch_is_at_most_four_functions_away(path: tuple[str, ...]) -> None:
    stations = [tuple(station.split(":")) for station in path]
    assert len(stations) <= MOST
    for one, following in itertools.pairwise(stations):
        assert is_called(body_of(*one), *following), f"{one[1]} does not call {following[1]}"
    assert [is_launch(body_of(*station)) for station in stations] == [False] * (len(stations) - 1) + [True]


def test_the_paths_are_those_of_the_public_collectives_and_casts() -> None:
    ours = {name for name in tg.__all__ if name.startswith(("all_", "reduce_", "fp8_", "amax_"))}
    ours -= WITHOUT_KERNELS
    assert ours == {name for path in PATHS for name in [path[0].split(":")[1]] if name in ours}


def test_a_call_that_is_gone_is_found() -> None:
    body = body_of("te_graph/collectives/ops.py", "all_reduce_")
    assert is_called(body, "csrc/collectives/ops.cpp", "all_reduce_inplace")
    assert not is_called(body, "csrc/collectives/ops.cpp", "all_reduce")
    assert not is_called(
        body_of("csrc/fp8/cast_ops.cpp", "cast"), "csrc/fp8/cast_transpose.cu", "launch_cast_transpose"
    )
