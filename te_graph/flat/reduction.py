"""How the gradients of a bucket become the mean of all ranks'."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from te_graph.collectives.ops import all_gather_out, all_reduce_, reduce_scatter
from te_graph.collectives.peer_group import PeerGroup
from te_graph.flat.flat_buffer import FlatBuffer


class Reduction:
    """Reduces buckets over a group, or not at all on one rank.

    Attributes:
        group: of ranks; None: there is one.
        shards: each rank gets its part of a bucket alone.
        scale: by which gradients are multiplied, the mean over ranks included.
    """

    def __init__(self, group: PeerGroup | None, shards: bool, gradient_scale: float) -> None:
        self.group = group if group is not None and group.world_size > 1 else None
        self.shards = shards and self.group is not None
        self.gradient_scale = gradient_scale
        self.scale = gradient_scale / (1 if self.group is None else self.group.world_size)

    @property
    def changes_what_is_alike(self) -> bool:
        """Whether gradients that have been reduced must not be reduced again: with the mean of what is alike on all
        ranks nothing changes."""
        return self.shards or self.gradient_scale != 1.0

    def own_parts(self, buffer: FlatBuffer) -> list[tuple[int, int]]:
        """Begin and end of what is whole on this rank, ascending."""
        if not self.shards:
            return [(0, buffer.layout.numel)]
        return [bucket.part(self.group.rank, self.group.world_size) for bucket in buffer.layout.buckets]

    def gather_(self, buffer: FlatBuffer) -> None:
        """Get from each rank its parts of the parameters in ``buffer``."""
        if self.shards:
            for bucket in buffer.layout.buckets:
                begin, end = bucket.part(self.group.rank, self.group.world_size)
                all_gather_out(buffer.data[bucket.begin : bucket.end], buffer.data[begin:end], self.group)

    def broadcast_(self, data: Tensor) -> None:
        """Give ``data`` [n] the values that it has on the first rank."""
        if self.group is not None:
            process_group = self.group.process_group
            dist.broadcast(data, dist.get_global_rank(process_group, 0), group=process_group)

    def run_(self, buffer: FlatBuffer, number: int, carried: Tensor | None) -> None:
        """Reduce bucket ``number`` of ``buffer``.

        Args:
            carried: [end - begin], what is added to the result; None: nothing.
        """
        bucket = buffer.layout.buckets[number]
        if self.group is None and self.scale == 1.0 and carried is None:
            return
        with buffer.gathered(number, adopts=self.group is not None):
            grads = buffer.grads[bucket.begin : bucket.end]
            self._sum_(grads)
            if carried is not None:
                grads.add_(carried)

    def _sum_(self, grads: Tensor) -> None:
        if self.group is None:
            if self.scale != 1.0:
                grads.mul_(self.scale)
        elif self.shards:
            part = grads.chunk(self.group.world_size)[self.group.rank]
            part.copy_(reduce_scatter(grads, self.group).mul_(self.scale))
        else:
            all_reduce_(grads, self.group)
            grads.mul_(self.scale)
