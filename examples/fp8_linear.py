"""Linear layers with FP8 products, made of te_graph's ops and torch._scaled_mm, for those who want other layers than
te_graph.Linear: weights are prepared by hand, and a state of the step, which graphs read, tells the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_graph as tg

MULTIPLE = 16  # FP8 tensor cores take sizes that are multiples of it
MECHANISMS = ("flag", "node")
# Gradients need the range of e5m2, the rest the precision of e4m3.
FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2


def gemm(
    a8: Tensor,
    a_scale_inv: Tensor,
    b8: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`a @ b.T + bias` of what two FP8 matrices stand for.

    Both have the summed dimension last: Hopper's FP8 tensor cores take no other layout.

    Args:
        a8: [M, K] FP8, contiguous; on CUDA with K a multiple of 16.
        a_scale_inv: [1] fp32, what multiplies `a8` back.
        b8: [N, K] FP8, contiguous; on CUDA with N a multiple of 16. Not e5m2 where `a8` is.
        b_scale_inv: [1] fp32.
        out_dtype: fp32, fp16 or bf16.
        bias: [N] of `out_dtype`, on CUDA fp16 or bf16.
        use_fast_accum: Add up with fewer bits: faster, and good enough for a forward. Nothing on the CPU.

    Returns:
        [M, N] of `out_dtype`. On the CPU the product is taken in fp32.
    """
    if a8.is_cuda:
        scales = {"scale_a": a_scale_inv, "scale_b": b_scale_inv}
        return torch._scaled_mm(a8, b8.t(), **scales, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    product = tg.fp8_dequantize(a8, a_scale_inv) @ tg.fp8_dequantize(b8, b_scale_inv).t()
    return (product if bias is None else product + bias).to(out_dtype)


class DelayedScaling(nn.Module):
    """Scales of the tensors of one direction, each made of the largest magnitudes that it had in earlier micro-batches.

    A tensor is a column j: its cast takes `scale[j]` and leaves its largest magnitude in `history[0, j]`. One launch
    updates all columns once all casts have run.

    Args:
        is_weight: for each tensor, whether it is a weight, which is not cast in every micro-batch.
        dtype: FP8 format of the casts.
        history_length: rows of the history.
        device: where it is; not to be moved, since others hold views.

    Attributes:
        history: [history_length, n] fp32.
        scale: [n] fp32, what multiplies into FP8; 1 until there is a history.
        scale_inv: [n] fp32, that of the last update. A cast returns the one that goes with its bytes.
        non_weight_mask: [n] bool, False for weights.
    """

    def __init__(
        self, is_weight: Sequence[bool], dtype: torch.dtype, history_length: int, device: torch.device
    ) -> None:
        super().__init__()
        self.fp8_max = torch.finfo(dtype).max
        self.register_buffer("history", torch.zeros(history_length, len(is_weight), device=device))
        self.register_buffer("scale", torch.ones(len(is_weight), device=device))
        self.register_buffer("scale_inv", torch.ones(len(is_weight), device=device))
        mask = torch.tensor([not weight for weight in is_weight], device=device)
        self.register_buffer("non_weight_mask", mask, persistent=False)

    def column(self, number: int) -> tuple[Tensor, Tensor]:
        """Views of a tensor's scale and of where its cast leaves the largest magnitude, [1] fp32 each."""
        return self.scale[number : number + 1], self.history[0, number : number + 1]

    def update_(self, update_weight_scale_inv: Tensor | bool) -> None:  # [1] int32 or a bool
        tg.amax_and_scale_update_inplace(
            self.history, self.scale, self.scale_inv, self.non_weight_mask, update_weight_scale_inv, self.fp8_max
        )


class Fp8Linear(nn.Module):
    """`x @ weight.T + bias`, all three matrix products of forward and backward in FP8.

    Args:
        linear: Its bf16 parameters become those of this layer; sizes are multiples of 16.
        x: The input's scale and amax, [1] fp32 each; views.
        grad: The same of the gradient of the output.
        weight8: FP8 copy of the weight [out, in], its transpose [in, out] and its scale_inv [1]; prepared by others.
    """

    def __init__(
        self,
        linear: nn.Linear,
        x: tuple[Tensor, Tensor],
        grad: tuple[Tensor, Tensor],
        weight8: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        names = ("x_scale", "x_amax", "grad_scale", "grad_amax", "weight8", "weight8_t", "weight_scale_inv")
        for name, view in zip(names, (*x, *grad, *weight8), strict=True):
            self.register_buffer(name, view, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [n, in] bf16 -> [n, out] bf16
        return _Fp8LinearFunction.apply(x, self.weight, self.bias, self)


class _Fp8LinearFunction(torch.autograd.Function):
    """The forward of `Fp8Linear`, and its backward. Autograd cannot see through casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Fp8Linear) -> Tensor:
        # x: [n, in], weight: [out, in], bias: [out] -> [n, out]
        x8, x8_t, x_scale_inv = tg.fp8_cast_transpose(x, layer.x_scale, FORWARD_DTYPE, amax=layer.x_amax)
        ctx.save_for_backward(x8_t, x_scale_inv, layer.weight8_t, layer.weight_scale_inv)
        ctx.layer = layer
        product = (x8, x_scale_inv, layer.weight8, layer.weight_scale_inv, x.dtype)
        return gemm(*product, bias=bias, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # [n, out]
        x8_t, x_scale_inv, weight8_t, weight_scale_inv = ctx.saved_tensors
        layer, dtype = ctx.layer, grad.dtype
        grad8, grad8_t, grad_scale_inv, dbias = tg.fp8_cast_transpose_dbias(
            grad, layer.grad_scale, BACKWARD_DTYPE, amax=layer.grad_amax
        )
        # [n, in] and [out, in]
        needs_dgrad = ctx.needs_input_grad[0]
        dgrad = gemm(grad8, grad_scale_inv, weight8_t, weight_scale_inv, dtype) if needs_dgrad else None
        return dgrad, gemm(grad8_t, grad_scale_inv, x8_t, x_scale_inv, dtype), dbias, None


class _UpdateAfterBackward(torch.autograd.Function):
    """The identity. Its backward, which comes after those of all that follows, updates the scales of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaling: DelayedScaling) -> Tensor:  # [n, in] -> [n, in]
        ctx.scaling = scaling
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # [n, in]
        ctx.scaling.update_(False)
        return grad, None


class Fp8Layers(nn.Module):
    """Linear layers in FP8, GELU between them, and what they share: scales, weights prepared in one launch, flags.

    Each call casts activations, each backward gradients, and ends with one update of all scales of its direction.
    Weights are cast when a step begins, outside the graph: see `MicroBatches`.

    Args:
        linears: bf16 layers on one device, sizes multiples of 16, that feed each other; their parameters are used.
        history_length: see `DelayedScaling`.
        mechanism: How a graph learns whether it is at the first micro-batch: "flag": its kernels read a flag on the
            device; "node": the host sets the argument of the kernel that was captured (`te_graph.KernelNode`).

    Attributes:
        forward_scaling: columns: input and weight of each layer in turn.
        backward_scaling: columns: gradient of the output of each layer.
        weights, state: the prepared weights, and the flags.
        update_weight_scale_inv: what the forward's update is given, [1] int32 or a bool.
    """

    def __init__(self, linears: Sequence[nn.Linear], history_length: int = 16, mechanism: str = "flag") -> None:
        super().__init__()
        for linear in linears:
            if any(size % MULTIPLE for size in linear.weight.shape):
                raise ValueError(f"Fp8Layers: expected sizes that 16 divides, got weight {list(linear.weight.shape)}")
        count, device = len(linears), linears[0].weight.device
        self.forward_scaling = DelayedScaling([False, True] * count, FORWARD_DTYPE, history_length, device)
        self.backward_scaling = DelayedScaling([False] * count, BACKWARD_DTYPE, history_length, device)
        self.weights = tg.Fp8Weights(
            [linear.weight for linear in linears],
            dtype=FORWARD_DTYPE,
            scale=self.forward_scaling.scale[1::2],
            amax=self.forward_scaling.history[0, 1::2],
            names=[f"weight of layer {number}" for number in range(count)],
        )
        self.state = tg.StepState(weights=self.weights)
        if mechanism == "flag":
            self.register_buffer("update_weight_scale_inv", self.state.update_weight_scale_inv, persistent=False)
        else:
            self.update_weight_scale_inv = True
        scale_invs = self.weights.scale_inv.split(1)
        weights8 = zip(self.weights.data, self.weights.transposed, scale_invs, strict=True)
        self.layers = nn.ModuleList(
            Fp8Linear(linear, self.forward_scaling.column(2 * number), self.backward_scaling.column(number), weight8)
            for number, (linear, weight8) in enumerate(zip(linears, weights8, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:  # [n, first in] bf16, n a multiple of 16 -> [n, last out] bf16
        x = _UpdateAfterBackward.apply(x, self.backward_scaling)
        for number, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if number else x)
        self.forward_scaling.update_(self.update_weight_scale_inv)
        return x


class MicroBatches:
    """Calls a model for the first and the later micro-batches of steps, eagerly or from graphs.

    Args:
        model: `layers` or a module that holds them.
        layers: what is in FP8.
        sample_args: what to capture the model with; None runs it eagerly.
    """

    def __init__(self, model: nn.Module, layers: Fp8Layers, sample_args: tuple[Any, ...] | None = None) -> None:
        self.model = model
        self._layers = layers
        self._is_graphed = sample_args is not None
        self._is_flag = isinstance(layers.update_weight_scale_inv, Tensor)
        self._nodes: list[tg.KernelNode] = []
        if sample_args is not None:
            # What the host sets in the captured kernels is no longer read from the attribute.
            by_host = () if self._is_flag else ("update_weight_scale_inv",)
            tg.make_graphed_callables(model, sample_args, step_state=layers.state, ignore_attributes=by_host)
            if not self._is_flag:
                self._nodes = tg.KernelNode.find(model, "amax_and_scale_update")

    def __call__(self, *args: Any, is_first: bool) -> Any:
        """The model's result. Weights are cast before it if `is_first`, as if they had changed."""
        if not self._is_flag:
            self._layers.update_weight_scale_inv = is_first
        for node in self._nodes:
            node.set_(update_weight_scale_inv=is_first)
        if self._is_graphed:
            return self.model(*args, is_first_microbatch=is_first)
        self._layers.state.begin_(self, is_first)
        return self.model(*args)
