"""A linear layer that multiplies in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.opaque import opaque
from te_graph.fp8.engine_checkpoint import EXTRA_STATE, drop_extra_state_
from te_graph.fp8.fp8_layer import FP8Layer
from te_graph.fp8.layer_state import load_state_, state_of
from te_graph.fp8.loaded_state import loaded_modules
from te_graph.fp8.parallel import Shard
from te_graph.fp8.product import product_in_fp8
from te_graph.fp8.tensor_arguments import check_tensors
from te_graph.fp8.weight_mark import plain_weight


class Linear(nn.Linear, FP8Layer):
    """``y = x W^T + b``, as ``torch.nn.Linear``; inside ``fp8_autocast`` all three products of forward and backward are
    made of FP8 operands.

    Inputs, weights and gradients are cast by the region's recipe; products are added up in float32 and rounded once.
    Weights are cast when they have changed, all of a scope in one launch. Any number of tokens will do. Where 16 does
    not divide both numbers of features, the layer computes in high precision, and says so once. On the CPU, and on
    GPUs without FP8, products are made in float32 of the same FP8 operands.

    What computes the gradients of weight and bias adds them to ``.grad`` by itself, with the bits of an addition by
    autograd: of several uses in one backward one after the other, where autograd would add their sum. Gradients go
    through autograd where the parameter has hooks, where ``torch.autograd.grad`` or ``backward(inputs=)`` asks, and
    where its ``.grad`` is of another layout or dtype.

    Without a recorded gradient nothing is noted of the scales: an evaluation changes no state, by whatever recipe.
    Activation checkpointing by ``torch.utils.checkpoint`` repeats the scales of the first call, and notes nothing;
    functions of other libraries that run a forward without gradients make it an evaluation. Values beyond the largest
    number of a format saturate, infinite ones too.

    With ``parallel_mode`` the layer is one rank's part of a layer. It draws the values of the whole one, as one process
    would, and keeps its own. "column" has some of the output features, and of the bias; the input is the same on all
    ranks, or, with ``sequence_parallel``, they have its rows (dimension 0) between them, and gather them. "row" has
    some of the input features, which are those of the ranks' inputs; the ranks' results are summed, or, with
    ``sequence_parallel``, each gets its rows of the sum; then the bias is added, whose gradients are summed over the
    rows of all ranks. Parameters of which ranks have parts are marked ``tensor_model_parallel``, as Megatron-LM's.

    Args:
        in_features, out_features: of the whole layer.
        bias, device, dtype: as of ``torch.nn.Linear``.
        params_dtype: another name of ``dtype``.
        return_bias: return (y without the bias, bias).
        fuse_wgrad_accumulation: the product adds the weight's gradient to ``weight.main_grad``, which is the caller's,
            instead, and ``weight.grad`` stays None; ``te_graph.reset_main_grads`` lets the next one overwrite it. It
            may be set later, too; graphs go on as captured. What goes through autograd, or is computed outside of
            regions, ends in ``weight.grad``.
        parallel_mode: "column", "row" or None.
        tp_group: a ``te_graph.PeerGroup`` of the ranks that share the layer.
        sequence_parallel: see above.
        stride: the features that are split are so many blocks, one behind the other, of each of which a rank has a
            part: 2 of a gate and what it is multiplied with.

    Attributes:
        in_features, out_features: of this rank's part. ``weight`` is [out, in], ``bias`` [out], with "row" that of the
            whole layer.

    Raises:
        TypeError: both ``dtype`` and ``params_dtype``; a group that is none. In a call: an input that is no tensor;
            inside a region one that is not of the weight's dtype, without ``torch.autocast``; a weight that is of
            float64, parametrized, or sharded by others.
        ValueError: a ``parallel_mode`` of another name, or without a group; features that the group's size does not
            divide. In a call, inside a region: a weight on another device than the input; float16 under
            ``torch.autocast``. In a backward: a ``main_grad`` that is not contiguous, of the weight's shape and device,
            and of float32, bfloat16 or float16.
        RuntimeError: inside a region a call in a transform of ``torch.func``. In a backward with
            ``fuse_wgrad_accumulation``, no ``main_grad``; that backward inside a function that ``te_graph.graphed``
            captures.

    Stream and capture: a call launches one cast and one product, a backward a cast and two products, on the current
        stream; allocates what they write. Under current scaling a memset and a kernel that finds the scale come before
        each cast. Under delayed scaling an update of the scales of gradients comes before a backward where one has
        been cast since the last one; one of the others before a call where a module is called twice without one
        between. Casts of weights come first where some have changed. Collectives as ``te_graph.tensor_parallel`` has
        them. Before each replay the host does what a call would do, see ``fp8_autocast``; outside of an equal region a
        replay is a mismatch.
    """

    __constants__ = (*nn.Linear.__constants__, "return_bias")
    return_bias = False
    shard: Shard | None = None
    __getstate__, _apply = FP8Layer.__getstate__, FP8Layer._apply

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        parallel_mode: str | None = None,
        tp_group: PeerGroup | None = None,
        sequence_parallel: bool = False,
        stride: int = 1,
    ) -> None:
        if dtype is not None and params_dtype is not None:
            raise TypeError("te_graph.Linear: expected dtype or params_dtype, which mean the same, got both")
        shard = Shard.of(parallel_mode, tp_group, sequence_parallel, stride, in_features, out_features)
        nn.Module.__init__(self)
        self.shard = shard
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        own_in, own_out = (in_features, out_features) if shard is None else shard.own(in_features, out_features)
        self.in_features, self.out_features = own_in, own_out
        options = {"device": device, "dtype": dtype if params_dtype is None else params_dtype}
        self.weight = nn.Parameter(torch.empty(own_out, own_in, **options))
        if bias:
            rows = out_features if shard is not None and shard.is_row else own_out
            self.bias = nn.Parameter(torch.empty(rows, **options))
        else:
            self.register_parameter("bias", None)
        self._mark_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, as ``torch.nn.Linear`` does; of a part, those of the whole layer."""
        if self.shard is None or self.weight.is_meta:
            super().reset_parameters()
            return
        whole = nn.Linear(
            *self.shard.whole(self.in_features, self.out_features),
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        with torch.no_grad():
            self.weight.copy_(self.shard.part(whole.weight))
            if self.bias is not None:
                self.bias.copy_(whole.bias if self.shard.is_row else self.shard.part(whole.bias))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose parameters come without their attributes."""
        FP8Layer.__setstate__(self, state)
        self._mark_parameters()

    def extra_repr(self) -> str:
        """As of ``torch.nn.Linear``, and how it is split."""
        return super().extra_repr() + ("" if self.shard is None else f", {self.shard}")

    @opaque  # what is kept from call to call, of this layer and of others, is none of a trace's business
    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """``y = x W^T + b``.

        Args:
            input: [..., in], of the weight's dtype, or any that ``torch.autocast`` casts; of a part of a layer see the
                class. Not mutated.

        Returns:
            [..., out], new, of the dtype of ``input`` or of ``torch.autocast``; with ``return_bias`` (y without the
            bias, bias [out]).

        Raises:
            TypeError, ValueError, RuntimeError: as the class says.

        Stream and capture: as the class says.
        """
        try:
            bias, shard = self.bias, self.shard
            if shard is None:
                y = self._product(input, None if self.return_bias else bias)
            elif shard.is_row:
                y = shard.leave(self._product(input, None))
                bias = shard.whole_bias(bias)
                if bias is not None and not self.return_bias:
                    y = y + bias.to(y.dtype)
            else:
                y = self._product(shard.enter(input), None if self.return_bias else bias)
            return (y, bias) if self.return_bias else y
        except (TypeError, AttributeError):
            check_tensors("te_graph.Linear", input=input)
            raise

    def _mark_parameters(self) -> None:
        if self.shard is not None:
            self.shard.mark(self._parameters.get("weight"), self._parameters.get("bias"))

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product for x [..., in], with bias [out] or without."""
        weight = self.weight  # read once: a property may draw another one each time
        y = product_in_fp8(self, x, weight, bias)
        return F.linear(x, weight, bias) if y is None else y

    def get_extra_state(self) -> Tensor:
        """The scales and histories, as ``te_graph.fp8_state_dict`` has them.

        Returns:
            [3, n] fp32, a copy.

        Stream and capture: small copies on the current stream; not inside a capture.
        """
        return state_of(self)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what ``get_extra_state`` returned, here or elsewhere.

        Args:
            state: [3, n] fp32. Copied.

        Raises:
            ValueError: it is of another form, dtype (a cast one) or has scales that are none.

        Stream and capture: small copies, which are waited for; not inside a capture.
        """
        load_state_(self, state)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """A checkpoint of ``torch.nn.Linear``, or of TransformerEngine's, has all that is needed."""
        drop_extra_state_(state_dict, prefix)
        with loaded_modules().marks_kept_over_copy(plain_weight(self), state_dict.get(f"{prefix}weight")):
            super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        with contextlib.suppress(ValueError):
            missing.remove(f"{prefix}{EXTRA_STATE}")
