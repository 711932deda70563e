"""te_graph: CUDA graphs for the whole training step, with the numbers of eager execution bit for bit."""

from te_graph._build import build_info, load_extension

load_extension()

from te_graph import effects, fakes  # noqa: E402 (needs the extension)

effects.register()
fakes.register()

from te_graph import pipeline, tensor_parallel  # noqa: E402 (needs the extension)
from te_graph.callables import make_graphed_callables  # noqa: E402 (needs the extension)
from te_graph.clip import clip_grad_norm_, clip_grads_with_norm_  # noqa: E402
from te_graph.collectives import (  # noqa: E402
    all_gather,
    all_gather_out,
    all_reduce,
    all_reduce_,
    all_reduce_out,
    reduce_scatter,
    reduce_scatter_out,
)
from te_graph.fp8 import (  # noqa: E402
    amax_and_scale_update_inplace,
    fp8_cast,
    fp8_cast_out,
    fp8_cast_transpose,
    fp8_cast_transpose_dbias,
    fp8_cast_transpose_out,
    fp8_cast_weights_,
    fp8_current_scale,
    fp8_dequantize,
    fp8_dequantize_out,
    fp8_scale,
)
from te_graph.fp8_weights import Fp8Weights  # noqa: E402
from te_graph.gradients import reset_main_grads  # noqa: E402
from te_graph.graphs import capture_to_graph, create_graph, replay_graph  # noqa: E402
from te_graph.hp_grads import clip_tensors_by_global_norm, get_global_norm_of_tensors, update_hp_grads  # noqa: E402
from te_graph.kernel_node import KernelNode  # noqa: E402
from te_graph.norms import get_total_norm, new_sum_squares, norm_of_sum_squares  # noqa: E402
from te_graph.peer_group import PeerGroup  # noqa: E402
from te_graph.plan import MultiTensorPlan  # noqa: E402
from te_graph.recorder import CaptureError, Recorder  # noqa: E402
from te_graph.report import info  # noqa: E402
from te_graph.sequence import graphed  # noqa: E402
from te_graph.step_state import StepState  # noqa: E402

__all__ = [
    "CaptureError",
    "Fp8Weights",
    "KernelNode",
    "MultiTensorPlan",
    "PeerGroup",
    "Recorder",
    "StepState",
    "all_gather",
    "all_gather_out",
    "all_reduce",
    "all_reduce_",
    "all_reduce_out",
    "amax_and_scale_update_inplace",
    "build_info",
    "capture_to_graph",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "clip_tensors_by_global_norm",
    "create_graph",
    "fp8_cast",
    "fp8_cast_out",
    "fp8_cast_transpose",
    "fp8_cast_transpose_dbias",
    "fp8_cast_transpose_out",
    "fp8_cast_weights_",
    "fp8_current_scale",
    "fp8_dequantize",
    "fp8_dequantize_out",
    "fp8_scale",
    "get_global_norm_of_tensors",
    "get_total_norm",
    "graphed",
    "info",
    "make_graphed_callables",
    "new_sum_squares",
    "norm_of_sum_squares",
    "pipeline",
    "reduce_scatter",
    "reduce_scatter_out",
    "replay_graph",
    "reset_main_grads",
    "tensor_parallel",
    "update_hp_grads",
]
