"""te_graph: CUDA graphs for the whole training step, with the numbers of eager execution bit for bit."""

from te_graph._build import build_info, load_extension

load_extension()

from te_graph.collectives import effects
from te_graph.multi_tensor import fake_ops

effects.register()
fake_ops.register()

from te_graph import pipeline, tensor_parallel, testing
from te_graph.collectives.ops import (
    all_gather,
    all_gather_out,
    all_reduce,
    all_reduce_,
    all_reduce_out,
    reduce_scatter,
    reduce_scatter_out,
)
from te_graph.collectives.peer_group import PeerGroup
from te_graph.flat.flat_grad_scaler import FlatGradScaler
from te_graph.flat.flat_parameters import FlatParameters
from te_graph.flat.flatten_params_wrapper import FlattenParamsWrapper
from te_graph.fp8.autocast import fp8_autocast
from te_graph.fp8.casts import (
    fp8_cast,
    fp8_cast_out,
    fp8_cast_transpose,
    fp8_cast_transpose_dbias,
    fp8_cast_transpose_out,
    fp8_cast_weights_,
    fp8_dequantize,
    fp8_dequantize_out,
)
from te_graph.fp8.conversion_report import ConversionReport
from te_graph.fp8.convert import convert_to_fp8, fp8_state_dict, load_fp8_state_dict, unconvert
from te_graph.fp8.gemm import fp8_gemm, fp8_gemm_out, fp8_plans
from te_graph.fp8.layer_norm_linear import LayerNormLinear
from te_graph.fp8.layer_norm_mlp import LayerNormMLP
from te_graph.fp8.linear import Linear
from te_graph.fp8.recipes import DelayedScaling, Float8CurrentScaling, Format
from te_graph.fp8.rotary import RotaryPositionEmbedding
from te_graph.fp8.scales import amax_and_scale_update_inplace, fp8_current_scale, fp8_scale
from te_graph.fp8.transformer_layer import TransformerLayer
from te_graph.fp8.weights import Fp8Weights
from te_graph.graphs.callables.make_graphed_callables import make_graphed_callables
from te_graph.graphs.capture.main_grads import reset_main_grads
from te_graph.graphs.functions.graphed import graphed
from te_graph.graphs.kernel_node import KernelNode
from te_graph.graphs.layers.graph_layers import graph_layers
from te_graph.graphs.manual import capture_to_graph, create_graph, replay_graph
from te_graph.graphs.step_state import StepState
from te_graph.graphs.tracing.recorder import Recorder
from te_graph.graphs.tracing.refusals import CaptureError
from te_graph.multi_tensor.clip import clip_grad_norm_, clip_grads_with_norm_
from te_graph.multi_tensor.hp_grads import clip_tensors_by_global_norm, get_global_norm_of_tensors, update_hp_grads
from te_graph.multi_tensor.norms import get_total_norm, multi_tensor_norms, new_sum_squares, norm_of_sum_squares
from te_graph.multi_tensor.plan import MultiTensorPlan
from te_graph.report import info

__all__ = [
    "CaptureError",
    "ConversionReport",
    "DelayedScaling",
    "FlatGradScaler",
    "FlatParameters",
    "FlattenParamsWrapper",
    "Float8CurrentScaling",
    "Format",
    "Fp8Weights",
    "KernelNode",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiTensorPlan",
    "PeerGroup",
    "Recorder",
    "RotaryPositionEmbedding",
    "StepState",
    "TransformerLayer",
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
    "convert_to_fp8",
    "create_graph",
    "fp8_autocast",
    "fp8_cast",
    "fp8_cast_out",
    "fp8_cast_transpose",
    "fp8_cast_transpose_dbias",
    "fp8_cast_transpose_out",
    "fp8_cast_weights_",
    "fp8_current_scale",
    "fp8_dequantize",
    "fp8_dequantize_out",
    "fp8_gemm",
    "fp8_gemm_out",
    "fp8_plans",
    "fp8_scale",
    "fp8_state_dict",
    "get_global_norm_of_tensors",
    "get_total_norm",
    "graph_layers",
    "graphed",
    "info",
    "load_fp8_state_dict",
    "make_graphed_callables",
    "multi_tensor_norms",
    "new_sum_squares",
    "norm_of_sum_squares",
    "pipeline",
    "reduce_scatter",
    "reduce_scatter_out",
    "replay_graph",
    "reset_main_grads",
    "tensor_parallel",
    "testing",
    "unconvert",
    "update_hp_grads",
]


def __dir__() -> list[str]:
    """What is public, without the modules that importing it loads."""
    return sorted(__all__)
