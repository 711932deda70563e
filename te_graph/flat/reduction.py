"""How the gradients of a bucket become the mean of all ranks'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph.collectives.ops import all_gather_out, all_reduce_, all_reduce_out, reduce_scatter_out
from te_graph.collectives.peer_group import PeerGroup
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.joint_calls import JointCalls

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Reduction:
    """Reduces buckets over the ranks of a group, and over replicas of it; or not at all on one rank.

    Sums are taken in the order of the ranks of the group, then over replicas in the order of their process group's
    all_reduce.

    Attributes:
        group: of ranks; None: there is one.
        calls: those of all ranks of the group.
        replicas: of the ranks that have the same part of each bucket; None: there is one.
        is_sharded: each rank keeps its part of a bucket alone.
        reduces_scatter: ``_sum_`` is a reduce-scatter, behind which a rank has its part of the bucket alone; replicas
            exchange only that part.
        scale: by which gradients are multiplied, the mean over ranks included.
        wire_dtype: that gradients are rounded to where ranks of ``group`` send them; None: their own.
    """

    def __init__(
        self,
        group: PeerGroup | None,
        replicas: ProcessGroup | None,
        shards: bool,
        gradient_scale: float,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.group = group if group is not None and group.world_size > 1 else None
        self.replicas = replicas if replicas is not None and replicas.size() > 1 else None
        self.calls = None if self.group is None else JointCalls(self.group)
        self.is_sharded = shards and self.group is not None
        self.reduces_scatter = self.group is not None and (shards or self.replicas is not None)
        self.gradient_scale, self.wire_dtype = gradient_scale, wire_dtype
        ranks = 1 if self.group is None else self.group.world_size
        self.scale = gradient_scale / (ranks if self.replicas is None else ranks * self.replicas.size())

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks have gradients of the same parameters."""
        return self.group is not None or self.replicas is not None

    @property
    def is_idempotent(self) -> bool:
        """Whether reducing reduced gradients again leaves them as they are: the mean of values that are equal on all
        ranks does, a sharded reduction or a ``gradient_scale`` does not."""
        return not self.is_sharded and self.gradient_scale == 1.0

    def own_parts(self, buffer: FlatBuffer) -> list[tuple[int, int]]:
        """Begin and end of what is whole on this rank, ascending."""
        if not self.is_sharded:
            return [(0, buffer.layout.numel)]
        return [bucket.part(self.group.rank, self.group.world_size) for bucket in buffer.layout.buckets]

    def gather_(self, buffer: FlatBuffer, number: int) -> None:
        """Get from each rank its part of the parameters in bucket ``number`` of ``buffer``."""
        if self.is_sharded:
            bucket = buffer.layout.buckets[number]
            self._gather_bucket_(buffer.data[bucket.begin : bucket.end])

    def broadcast_(self, data: Tensor) -> None:
        """Give ``data`` [...], which is dense, the values that it has on the first rank of the first replica."""
        with torch.no_grad():
            memory = data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)  # any dtype, in its own order
        for group in (self.replicas, None if self.group is None else self.group.process_group):
            if group is not None:
                dist.broadcast(memory, dist.get_global_rank(group, 0), group=group)
                torch.autograd.graph.increment_version(data)

    def max_(self, values: Tensor) -> None:
        """Make ``values`` [...], float32, the largest of all ranks that have other parts than this one."""
        if self.is_sharded:
            with self.calls.explained():
                all_reduce_(values, self.group, "max")

    def run_(self, buffer: FlatBuffer, number: int, carried: Tensor | None, adopts: bool) -> None:
        """Reduce bucket ``number`` of ``buffer``.

        Args:
            carried: [end - begin], what is added to the result; None: nothing.
            adopts: gradients that are missing here, and may not be on other ranks, are there afterwards.
        """
        bucket = buffer.layout.buckets[number]
        if not self.is_distributed and self.scale == 1.0 and carried is None:
            return
        with buffer.gathered(number, adopts=adopts and self.is_distributed):
            grads = buffer.grads[bucket.begin : bucket.end]
            self._sum_(grads)
            if self.replicas is not None:
                dist.all_reduce(self._own_part(grads), group=self.replicas)
                if self.reduces_scatter and not self.is_sharded:
                    self._gather_bucket_(grads)
            if carried is not None:
                grads.add_(carried)

    def _own_part(self, values: Tensor) -> Tensor:
        """Of ``values`` [n] of a bucket, what belongs to this rank."""
        return values if self.group is None else values.chunk(self.group.world_size)[self.group.rank]

    def _gather_bucket_(self, values: Tensor) -> None:
        """Get from each rank its part of ``values`` [n]."""
        with self.calls.explained():
            all_gather_out(values, self._own_part(values), self.group)

    def _sum_(self, grads: Tensor) -> None:
        if self.group is None:
            if self.scale != 1.0:
                grads.mul_(self.scale)
            return
        with self.calls.explained():
            if self.reduces_scatter:
                part = self._own_part(grads)
                reduce_scatter_out(part, grads, self.group, scale=self.scale, wire_dtype=self.wire_dtype)
            else:
                all_reduce_out(grads, grads, self.group, scale=self.scale, wire_dtype=self.wire_dtype)
