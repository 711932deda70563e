"""Parameters and gradients as views of flat buffers, which are reduced over ranks once a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.gradient_parts import GradientParts, OwnGradients
from te_graph.common.gradient_state import gradient_state
from te_graph.common.set_once import SetOnce
from te_graph.common.uncopyable import Uncopyable
from te_graph.flat.checks import (
    check_grad_dtype,
    check_mesh,
    check_overlap_param_gather,
    check_parameters,
    check_reduce_dtype,
    check_shard,
    check_tp_group,
    described,
    named_parameters,
    other_tensors,
)
from te_graph.flat.flat_buffer import FlatBuffer, buffers_of
from te_graph.flat.foreign_functions import include_main_grads
from te_graph.flat.foreign_optimizers import refuse_foreign_optimizers
from te_graph.flat.frozen_parameters import FrozenParameters
from te_graph.flat.groups import Groups, tensor_parallel_group
from te_graph.flat.joint_steps import JointSteps
from te_graph.flat.optimizer import FlatOptimizer
from te_graph.flat.own_ranges import OwnRanges
from te_graph.flat.parameter_gather import ParameterGather
from te_graph.flat.reducer import Reducer
from te_graph.flat.reduction import Reduction
from te_graph.flat.side_stream import SideStream
from te_graph.graphs.capture.exports import move_exported_results

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

BUCKET_BYTES = 128 << 20
OVERLAPPED_SMS = 64  # multiprocessors that reductions take from the backward beside them


class FlatParameters(Uncopyable, SetOnce, GradientParts):
    """Makes parameters and their gradients views of flat buffers, and reduces gradients over ranks once a step.

    One buffer for the parameters of each dtype, one for their gradients. Parameters stay the objects that they are,
    with their names, ties, hooks and places in optimizers; only their memory is another. A gradient is written where it
    is reduced, by graphed callables, FP8 products and autograd alike: stored by the first micro-batch, added to by
    others. So there is no concat, no copy into buckets, no memset, and the collectives run once, at the end of the last
    backward of the step::

        flat = te_graph.FlatParameters(model)  # before the optimizer and before captures
        optimizer = flat.optimizer(torch.optim.AdamW, fused=True)
        for microbatches in loader:
            with flat.no_sync():
                for batch in microbatches[:-1]:
                    loss(model(batch)).backward()
            loss(model(microbatches[-1])).backward()  # reduces
            optimizer.step()
            optimizer.zero_grad()

    Gradients are averaged over the ranks, as by DistributedDataParallel: divide the loss by the number of
    micro-batches. Each backward outside of ``no_sync`` reduces what has come since the last reduction.

    A parameter without a gradient contributes zeros, and has the mean of the ranks' afterwards; on one rank it stays
    without. ``.grad`` of a parameter is an ordinary tensor over the buffer: dropped by ``zero_grad()``, replaced by
    ``p.grad = other`` (which is then copied in and out where it is reduced; sharded, one that is set where none was has
    to be, by ``reduce_gradients()``), kept (whoever holds an earlier one keeps its values).

    Args:
        module_or_params: a module, parameters, or names and parameters [...] each; those that require no gradient are
            left where they are, and must not require one later. All of one device, dense, of floating-point dtypes that
            ``grad_dtype`` can hold. Mutated: ``.data``, ``.grad``, ``main_grad``.
        process_group: over which gradients are reduced; the default one if None, none where torch.distributed is not
            initialized. On all of its ranks the parameters get the values of the first one's; of a module its frozen
            ones and its buffers, too, that are dense and on the same device.
        peer_group: a ``PeerGroup`` over the same ranks to reduce by; one of its own if None, of 64 multiprocessors at
            most with ``overlap_grad_reduce``.
        mesh: in place of ``process_group``. Of one dimension: its group. Of two, replicas and shards: gradients are
            reduced over the last dimension by the peer group, whose ranks divide buckets, and these parts over the
            first one by its process group. What is sharded is so over the last dimension, and the same in all replicas.
        grad_dtype: of gradients. Those of parameters of this dtype are ``.grad``, of others ``main_grad``.
        reduce_dtype: torch.bfloat16 for gradients of float32: ranks send them rounded to it, half the bytes, and sum in
            float32; where all ranks have all gradients the means are rounded to it, too. ``grad_dtype`` if None. What
            is accumulated, what is sent over the first dimension of a mesh, and on one rank all, is not rounded.
        bucket_bytes: of gradients, from which on a bucket is full; a bucket is reduced by one collective.
        shard: "none", all ranks have all gradients; "optimizer", each rank has those of its parts of the buckets alone,
            for ``optimizer``.
        gradient_scale: a factor that reductions multiply gradients by, beside the mean over ranks.
        overlap_grad_reduce: reduce each bucket during the last backward, as soon as its gradients are complete. Begins
            with the second backward that reduces, since the first one shows how often each gradient is accumulated; one
            more than ever before is an error. A parameter that has never had a gradient holds back its bucket, and all
            buckets behind it, until the end of the backward.
        overlap_param_gather: modules, in the order in which the forward calls them, such as the layers of a model.
            Their parameters, which other ranks have stepped, are gathered while the caller goes on, and each module
            waits for its own when it is called, saved or loaded. Nothing else does, so these are read in their forwards
            alone, or after ``wait_for_parameters()``. Those of no module here are there when ``step()`` returns.
        tp_group: a ``PeerGroup`` or a process group over whose ranks parameters are split that are marked so, as
            Megatron-LM, TransformerEngine and ``te_graph.Linear`` do it: ``parameter.tensor_model_parallel = True``.
            Norms of gradients are taken over it; what is not marked, which all its ranks have, counts once. Parameters
            marked ``shared``, copies of those of another pipeline stage, are counted there. Marks are read here, not
            later.

    Attributes:
        process_group, peer_group, grad_dtype, reduce_dtype, shard, gradient_scale, overlap_grad_reduce: as given, or
            made; of a mesh the group of its last dimension.
        replica_group: the process group of the first dimension of a mesh of two, or None.
        tp_group: the process group, or None.
        buffers: one ``FlatBuffer`` for each dtype of parameters.
        gather, reducer: what gathers parameters that are sharded, and what reduces gradients.
        parameters: [...] each, in the order of the model.
        frozen: what else was given, which requires no gradient.

    Raises:
        ValueError, TypeError: an argument, or a parameter, is none of the above; nothing has been changed. On the other
            ranks, which are told, a RuntimeError, unless it is one of the groups.
        RuntimeError: the ranks' models differ, or one has not come within two minutes; the same on all ranks. In a
            backward: a parameter has moved since (``.to()``, ``p.data =``, ``load_state_dict(assign=True)``), was
            frozen, or the FlatParameters is gone; one that was frozen before requires a gradient now.

    Stream and capture: construction allocates, synchronizes, and must not be captured. Reductions run on the stream of
        the caller of ``backward()``, do not synchronize, and allocate nothing unless a backward follows a reduction
        without ``zero_grad()`` in between.

    Source of the semantics: Megatron-LM's ParamAndGradBuffer, torch's DistributedDataParallel (``no_sync``, the mean).
    """

    copy_advice = "keep it outside of the module, copy that, and make one from the copy"
    settings = frozenset({"grad_dtype", "reduce_dtype", "shard", "gradient_scale", "overlap_grad_reduce"})

    def __init__(
        self,
        module_or_params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        process_group: ProcessGroup | None = None,
        peer_group: PeerGroup | None = None,
        mesh: DeviceMesh | None = None,
        grad_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        shard: str = "none",
        gradient_scale: float = 1.0,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: Iterable[nn.Module] = (),
        tp_group: PeerGroup | ProcessGroup | None = None,
    ) -> None:
        groups = Groups.of(process_group, peer_group, mesh)
        self.process_group, self.replica_group, self.peer_group = groups
        self._owns_group = peer_group is None
        steps = JointSteps(groups.reduced_over)

        def check() -> tuple[list[tuple[str, Tensor]], dict[str, nn.Module]]:
            named, frozen = named_parameters(module_or_params)
            self.frozen = FrozenParameters(frozen)
            self.parameters = [parameter for _, parameter in named]
            check_shard(shard)
            modules = check_overlap_param_gather(overlap_param_gather, shard, named)
            check_grad_dtype(grad_dtype, self.process_group)
            check_parameters(named, grad_dtype)
            check_reduce_dtype(reduce_dtype, grad_dtype)
            check_mesh(mesh, named[0][1].device)
            self.tp_group = tensor_parallel_group(tp_group)
            check_tp_group(named, self.tp_group, groups.reduced_over)
            self.grad_dtype, self.shard, self.gradient_scale = grad_dtype, shard, float(gradient_scale)
            self.reduce_dtype = grad_dtype if reduce_dtype is None else reduce_dtype
            self.overlap_grad_reduce = bool(overlap_grad_reduce)
            return named, modules

        named, modules = steps.run("checking arguments", check)
        settings = (
            f"grad_dtype {grad_dtype}, reduce_dtype {self.reduce_dtype}, bucket_bytes {bucket_bytes}, shard {shard}, "
            f"overlap_grad_reduce {self.overlap_grad_reduce}, gradient_scale {gradient_scale}"
        )
        others = other_tensors(module_or_params, named)
        steps.expect_alike("model", [settings, *described(named), *described(others), *modules])
        device = named[0][1].device
        try:
            steps.run("making a PeerGroup", lambda: self._make_peer_group(device))
            ranks = 1 if self.peer_group is None else self.peer_group.world_size
            self.buffers = steps.run("allocating buffers", lambda: buffers_of(named, grad_dtype, bucket_bytes, ranks))
        except Exception:
            self._close_group()  # on all ranks, for all raise
            raise
        refuse_foreign_optimizers()
        if shard != "none" or gradient_scale != 1.0 or any(buffer.has_main_grads for buffer in self.buffers):
            include_main_grads()
        move_exported_results()
        self._reduction = Reduction(
            self.peer_group, self.replica_group, shard != "none", self.gradient_scale, self.reduce_dtype
        )
        side = SideStream(device)
        self.gather = ParameterGather(self.buffers, self._reduction, [*modules.values()], module_or_params, side)
        self.reducer = Reducer(self.buffers, self.frozen, self._reduction, self.gather, side, self.overlap_grad_reduce)
        self._own_ranges = OwnRanges(self.buffers, list(map(self.own_parts, self.buffers)), self.tp_group)
        first = 0
        for buffer in self.buffers:
            buffer.attach(self.reducer.backwards, first)
            first += len(buffer.parameters)
            for parameter in buffer.parameters:
                gradient_state(parameter).flat = weakref.ref(self)
            self._reduction.broadcast_(buffer.data)
            buffer.all_gradients.note_parameters_written()
        for _, tensor in others:
            self._reduction.broadcast_(tensor)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around the backwards of all micro-batches but the last one, which add to the gradients and no more: nothing
        is reduced before the next backward outside of it. What counts is where ``backward()`` is called, not the
        forward.

        Stream and capture: launches nothing.
        """
        return self.reducer.no_sync()

    def reduce_gradients(self) -> None:
        """Reduce what has come since the last reduction, as a backward outside of ``no_sync`` does at its end: where no
        last backward is known beforehand, as in pipeline schedules. Nothing has: gradients stay as they are.

        Raises:
            RuntimeError: a parameter has moved, or was frozen. In a function that ``graphed`` captures or replays:
                gradients that have been reduced are there, sharded or with a ``gradient_scale``.

        Stream and capture: as of the class; may be captured by ``graphed``.
        """
        self.reducer.reduce()

    def zero_grad(self) -> None:
        """Drop all gradients: the next backward stores. ``optimizer.zero_grad()`` does that for ``.grad`` alone.

        Stream and capture: launches nothing, unless the last backward has failed: then as of the class.
        """
        self.reducer.finish_failed_backward()
        for buffer in self.buffers:
            buffer.all_gradients.drop()

    def optimizer(
        self, cls: type[Optimizer], params: Iterable[Any] | None = None, *, elementwise: bool = False, **defaults: Any
    ) -> FlatOptimizer:
        """An optimizer of class ``cls`` over the parts of the parameters that this rank has: all, or with
        shard="optimizer" a share of each bucket, whose state and float32 masters no other rank has.

        Args:
            cls: of torch.optim, one that treats each element by itself: AdamW, SGD, ...
            params: parameters or groups, as for ``cls``, frozen ones among them, which are passed over; all of these
                if None.
            elementwise: that ``cls``, of another library, does so.
            defaults: further arguments of ``cls``.

        Returns:
            A ``torch.optim.Optimizer`` with the groups as they are given. Its ``step`` reads ``main_grad`` where
            gradients are there, which no other optimizer does, and gathers parameters over the ranks.

        Raises:
            ValueError, TypeError: ``cls`` is none of these, or a parameter is neither flat nor one of ``frozen``.

        Stream and capture: allocates masters.
        """
        return FlatOptimizer(self, cls, params, defaults, elementwise)

    @contextlib.contextmanager
    def gradient_parts(self) -> Iterator[OwnGradients]:
        """For ``clip_grad_norm_(flat, ...)``: the gradients of this rank.

        Stream and capture: as of the class.
        """
        with self.reducer.lock, torch.no_grad(), contextlib.ExitStack() as stack:
            self.reducer.check_gradients("clip_grad_norm_")
            for buffer in self.buffers:
                stack.enter_context(buffer.gathered(None, adopts=False))
            yield OwnGradients(self._own_ranges.filled(), self._own_ranges.counted(), self.parting_groups)

    @property
    def sharding_group(self) -> ProcessGroup | None:
        """Over whose ranks parts are divided; None: each has all."""
        return self.process_group if self._reduction.is_sharded else None

    @property
    def parting_groups(self) -> list[ProcessGroup]:
        """Over whose ranks gradients of one model are divided."""
        return [group for group in (self.sharding_group, self.tp_group) if group is not None]

    def max_over_parts_(self, values: Tensor) -> None:
        """Make ``values`` the largest of all ranks over which gradients of one model are divided, which all call this.

        Args:
            values: [...], float32, on the device of the parameters. Mutated.

        Raises:
            RuntimeError: the group was aborted, or ranks call different operations.

        Stream and capture: a collective over each group, on the current stream.
        """
        self._reduction.max_(values)
        if self.tp_group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, self.tp_group)

    def own_parts(self, buffer: FlatBuffer) -> list[tuple[int, int]]:
        """What this rank has of ``buffer``.

        Args:
            buffer: one of ``buffers``.

        Returns:
            Begins and ends, in elements, ascending.
        """
        return self._reduction.own_parts(buffer)

    def meet(self, op: str) -> None:
        """Wait for all ranks over which parts are divided, before ``op`` has collectives over these.

        Args:
            op: for messages: what all of them call.

        Raises:
            RuntimeError: one of them does not call ``op``, in the time that operations of the group have.

        Stream and capture: waits for these ranks on the host.
        """
        if self._reduction.is_sharded:
            self._reduction.calls.meet(op)

    def wait_for_parameters(self) -> None:
        """Let what comes on the current stream wait for parameters that are being gathered: before those of modules in
        ``overlap_param_gather`` are read elsewhere than in their forwards.

        Raises:
            RuntimeError: other code than ``graphed`` captures: its replays would not wait.

        Stream and capture: does not synchronize; in a capture by ``graphed``, each replay waits before it begins.
        """
        self.gather.wait()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters [...], in the order in which they lie: the reverse of the model's."""
        for buffer in self.buffers:
            yield from zip(buffer.names, buffer.parameters, strict=True)

    def close(self) -> None:
        """Leave parameters and gradients where they are, as tensors like any others, but make a ``.grad`` of each
        ``main_grad``, rounded to the parameter's dtype; reductions end. What has come since the last one is left
        together with what was reduced.

        All ranks call it, for it closes a ``peer_group`` of its own. A second time does nothing: parameters may be in
        another one by then.
        """
        if self.reducer.is_closed:
            return
        self.gather.close()
        self.reducer.close()
        for buffer in self.buffers:
            buffer.detach()
            for parameter in buffer.parameters:
                gradient_state(parameter).flat = None
        self._close_group()

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{len(one.parameters)} of {one.data.dtype} in {len(one.layout.buckets)} buckets" for one in self.buffers
        )
        return f"FlatParameters({counts}; gradients {self.grad_dtype}, shard {self.shard!r}, {self.peer_group})"

    def _make_peer_group(self, device: torch.device) -> None:
        if self.peer_group is None and self.process_group is not None and self.process_group.size() > 1:
            max_sms = OVERLAPPED_SMS if self.overlap_grad_reduce else None
            self.peer_group = PeerGroup(self.process_group, device=device, max_sms=max_sms)

    def _close_group(self) -> None:
        if self._owns_group and self.peer_group is not None:
            self.peer_group.close()
