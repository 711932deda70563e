"""The ways to train a model on all ranks that are compared, each ready to run micro-batches and steps."""

import contextlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lib import variants
from lib.rank_processes import OPERATION_TIMEOUT, Rank
from torch import Tensor, nn

import te_graph as tg
from cases.flat.masters import Masters, adamw
from cases.flat.split_cat import SplitParameters, reduce_main_grads
from cases.flat.stacks import Model
from te_graph.flat.flat_parameters import OVERLAPPED_SMS
from te_graph.flat.reduction import Reduction


@dataclass(frozen=True)
class Trained:
    """A model in training.

    Attributes:
        model: maps [1, tokens, hidden] to the same shape.
        microbatch: what forward and backward of a micro-batch run in; whether it is the last one, which reduces.
        step: of the optimizer.
        zero_grad: behind it.
        after_last: what reduces behind the last backward, where nothing in it does.
        held: tensors that stay between steps, by what they are; None where that is not listed.
        gradients: float32 memory in which gradients are summed, [n] each, or None where it is not known.
        is_countable: whether operators can be watched; graphs would run eagerly then.
        last_bucket, all_buckets: reduce gradients that are there, all ranks together.
        check: raises RuntimeError if a step was not what it is named for.
        close: at the end, on all ranks.
    """

    model: Callable[[Tensor], Tensor]
    microbatch: Callable[[bool], AbstractContextManager[Any]]
    step: Callable[[], Any]
    zero_grad: Callable[[], Any]
    after_last: Callable[[], Any] = lambda: None
    held: Callable[[], dict[str, list[Tensor]]] | None = None
    gradients: list[Tensor] | None = None
    is_countable: bool = True
    last_bucket: Callable[[], Any] | None = None
    all_buckets: Callable[[], Any] | None = None
    check: Callable[[], Any] = lambda: None
    close: Callable[[], Any] = lambda: None


def _group(rank: Rank, max_sms: int | None = None) -> tg.PeerGroup:
    return tg.PeerGroup(timeout=OPERATION_TIMEOUT, device=torch.device(rank.device), max_sms=max_sms)


def te_graph(
    shard: str,
    mode: str,
    overlap: bool,
    reduce_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype = torch.float32,
) -> Callable[[Rank, Model, Tensor], Trained]:
    """FlatParameters with their optimizer, layers eager or graphed; with `overlap` what is sharded is gathered beside
    the next forward."""

    def build(rank: Rank, model: Model, x: Tensor) -> Trained:
        """x: [1, tokens, hidden], like an input."""
        group = _group(rank, OVERLAPPED_SMS if overlap else None)
        gathered = model.layers if overlap and shard == "optimizer" else ()
        flat = tg.FlatParameters(
            model,
            peer_group=group,
            shard=shard,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gathered,
            grad_dtype=grad_dtype,
            reduce_dtype=reduce_dtype,
        )
        if mode == "graphed":
            samples = ((x,), *((x.clone().requires_grad_(),) for _ in model.layers[1:]))
            tg.make_graphed_callables(tuple(model.layers), samples, chain=True)
        optimizer = flat.optimizer(torch.optim.AdamW, lr=adamw(list(model.parameters())).defaults["lr"], fused=True)
        buffer = flat.buffers[-1]
        buckets, reduction = len(buffer.layout.buckets), Reduction(group, None, shard != "none", 1.0, reduce_dtype)

        def held() -> dict[str, list[Tensor]]:
            masters = [one for segments in optimizer.segments for one in segments if one.is_copied]
            states = [value for state in optimizer.inner.state.values() for value in state.values()]
            return {
                "parameters": [one.data for one in flat.buffers],
                "gradients": [one.grads for one in flat.buffers],
                "masters": [one.master for one in masters],
                "states": states,
            }

        def check() -> None:
            group.check()
            if mode == "graphed":
                require_replays(model)

        return Trained(
            model,
            lambda is_last: contextlib.nullcontext() if is_last else flat.no_sync(),
            optimizer.step,
            optimizer.zero_grad,
            held=held,
            gradients=[one.grads for one in flat.buffers] if grad_dtype == torch.float32 else None,
            is_countable=mode == "eager",
            last_bucket=lambda: reduction.run_(buffer, buckets - 1, None, True),
            all_buckets=lambda: [reduction.run_(buffer, number, None, True) for number in range(buckets)],
            check=check,
            close=lambda: (flat.close(), group.close()),
        )

    return build


def require_replays(model: Model) -> None:
    """Raise RuntimeError if a layer ran eagerly, so that its times are not those of replays."""
    infos = [layer.te_graph.info() for layer in model.layers]
    eager = {info["name"]: info["eager_calls"] for info in infos if info["eager_calls"]}
    if eager or not all(info["backward_replays"] for info in infos):
        raise RuntimeError(f"te_graph: expected replays, got eager calls: {eager}")


def _ddp(has_masters: bool) -> Callable[[Rank, Model, Tensor], Trained]:
    def build(rank: Rank, model: Model, x: Tensor) -> Trained:
        """x: [1, tokens, hidden], like an input."""
        devices = [torch.device(rank.device)] if rank.is_gpu else None
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        parameters = list(model.parameters())
        optimizer = Masters(parameters, lambda: [p.grad for p in parameters]) if has_masters else adamw(parameters)
        return Trained(
            wrapped,
            lambda is_last: contextlib.nullcontext() if is_last else wrapped.no_sync(),
            optimizer.step,
            wrapped.zero_grad,
        )

    return build


def _fsdp2(rank: Rank, model: Model, x: Tensor) -> Trained:
    """Parameters of float32, sharded; bf16 ones stay gathered from the first forward of a step to the last backward.

    x: [1, tokens, hidden], like an input.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.float()
    mesh = init_device_mesh("cuda" if rank.is_gpu else "cpu", (rank.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = adamw(list(model.parameters()))

    @contextlib.contextmanager
    def microbatch(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        yield

    return Trained(model, microbatch, optimizer.step, optimizer.zero_grad)


def _split_cat(rank: Rank, model: Model, x: Tensor) -> Trained:
    """All else is what te_graph's variant without shards and overlap has: its collectives, the same optimizer.

    x: [1, tokens, hidden], like an input.
    """
    group = _group(rank)
    layers = [SplitParameters(layer) for layer in model.layers]
    model.layers = nn.ModuleList(layers)
    gradients = [layer.main_grad for layer in layers]
    masters = Masters([layer.flat for layer in layers], lambda: gradients)
    return Trained(
        model,
        lambda is_last: contextlib.nullcontext(),
        masters.step,
        lambda: torch._foreach_zero_(gradients),
        after_last=lambda: reduce_main_grads(layers, group),
        gradients=gradients,
        last_bucket=lambda: reduce_main_grads(layers[:1], group),
        all_buckets=lambda: reduce_main_grads(layers, group),
        check=group.check,
        close=group.close,
    )


def _flatten(optimized: bool) -> Callable[[Rank, Model, Tensor], Trained]:
    """te_graph's wrapper around each layer; its flat parameters are those of FlatParameters, without shards."""

    def build(rank: Rank, model: Model, x: Tensor) -> Trained:
        """x: [1, tokens, hidden], like an input."""
        layers = [tg.FlattenParamsWrapper(layer, optimize_backward_concat=optimized) for layer in model.layers]
        model.layers = nn.ModuleList(layers)
        made = te_graph("none", "eager", False)(rank, model, x)

        @contextlib.contextmanager
        def microbatch(is_last: bool) -> Any:
            with contextlib.ExitStack() as stack:
                if not is_last:
                    for layer in layers:
                        stack.enter_context(layer.no_sync())
                stack.enter_context(made.microbatch(is_last))
                yield

        def zero_grad() -> None:
            made.zero_grad()
            for layer in layers:
                layer.zero_grad()

        return Trained(made.model, microbatch, made.step, zero_grad, check=made.check, close=made.close)

    return build


def _megatron(rank: Rank, model: Model, x: Tensor) -> Trained:
    """Megatron-core's buffers of gradients and its distributed optimizer. x: [1, tokens, hidden], like an input."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    shape = TransformerConfig(num_layers=len(model.layers), hidden_size=x.shape[-1], num_attention_heads=1, bf16=True)
    buckets = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
    )
    wrapped = DistributedDataParallel(shape, buckets, model)
    settings = OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapped])

    def zero_grad() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()

    return Trained(
        wrapped,
        lambda is_last: contextlib.nullcontext() if is_last else wrapped.no_sync(),
        optimizer.step,
        zero_grad,
        after_last=wrapped.finish_grad_sync,
    )


@dataclass(frozen=True)
class Variant(variants.Variant):
    """A way to train. `build` makes it of a rank, a model, and a tensor [1, tokens, hidden] like its inputs.

    Attributes:
        available: why it cannot be built here, or None.
        eager: key of the variant whose numbers it is to have, bit for bit.
        is_ours: FlatParameters, not a peer.
    """

    build: Callable[[Rank, Model, Tensor], Trained]
    available: Callable[[], str | None] = lambda: None
    eager: str | None = None
    is_ours: bool = False

    def missing(self, device: str) -> str | None:
        """Why it cannot be measured here; None if it can."""
        return self.available() or super().missing(device)


def key_of(shard: str, mode: str, overlap: bool) -> str:
    return f"{shard}-{mode}-{'overlap' if overlap else 'end'}"


# By modes: float32 gradients that ranks send as bf16, and gradients that are bf16 as DDP's are.
SENT_BF16 = {mode: f"{key_of('optimizer', mode, True)}-bf16" for mode in ("eager", "graphed")}
SUMMED_BF16 = {mode: f"{key_of('none', mode, True)}-bf16-grads" for mode in ("eager", "graphed")}


def _ours() -> dict[str, Variant]:
    found = {}
    for shard in ("none", "optimizer"):
        for mode in ("eager", "graphed"):
            for overlap in (True, False):
                label = f"te_graph, shard {shard}, {mode}, {'overlap' if overlap else 'no overlap'}"
                eager = key_of(shard, "eager", overlap) if mode == "graphed" else None
                build = te_graph(shard, mode, overlap)
                found[key_of(shard, mode, overlap)] = Variant(label, build, eager=eager, is_ours=True)
    for keys, shard, what, dtypes in (
        (SENT_BF16, "optimizer", "bf16 sent", {"reduce_dtype": torch.bfloat16}),
        (SUMMED_BF16, "none", "bf16 gradients", {"grad_dtype": torch.bfloat16}),
    ):
        for mode, key in keys.items():
            label = f"te_graph, shard {shard}, {mode}, overlap, {what}"
            eager = keys["eager"] if mode == "graphed" else None
            found[key] = Variant(label, te_graph(shard, mode, True, **dtypes), eager=eager, is_ours=True)
    return found


def _no_wrapper() -> str | None:
    return None if hasattr(tg, "FlattenParamsWrapper") else "te_graph has none yet"


def _no_megatron() -> str | None:
    is_there = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    return None if is_there else "megatron.core is not installed"


DDP, DDP_BF16, FSDP2, SPLIT_CAT = "ddp", "ddp-bf16", "fsdp2", "split-cat"
VARIANTS = {
    **_ours(),
    DDP: Variant("torch DDP, bf16 gradients, fp32 copies", _ddp(has_masters=True)),
    DDP_BF16: Variant("torch DDP, all in bf16", _ddp(has_masters=False)),
    FSDP2: Variant("torch FSDP2, fp32 parameters and reduction", _fsdp2),
    SPLIT_CAT: Variant("split and cat, fp32 gradients and copies", _split_cat),
    "flatten": Variant("te_graph FlattenParamsWrapper", _flatten(optimized=False), available=_no_wrapper),
    "flatten-sum": Variant(
        "te_graph FlattenParamsWrapper, optimize_backward_concat", _flatten(optimized=True), available=_no_wrapper
    ),
    "megatron": Variant("Megatron-core, distributed optimizer", _megatron, needs_cuda=True, available=_no_megatron),
}
