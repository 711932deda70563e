"""vLLM's all-reduce, driven as vLLM does: on the tensors themselves in a graph, behind a copy eagerly."""

from typing import Any

import torch
import torch.distributed as dist
from lib.rank_processes import Rank
from torch import Tensor

RANK_DATA_BYTES = 2**23  # what vLLM reserves for the addresses of captured tensors


class VllmAllReduce:
    """vLLM's kernels and the memory that they need. All ranks construct it together.

    It stays until the process ends: other ranks have its memory mapped.

    Args:
        rank: This one.
        nbytes: of the largest tensor.

    Attributes:
        x: [nbytes] bytes to take inputs from. vLLM maps the whole allocation of each captured input on all ranks, so
            inputs come from one.
    """

    def __init__(self, rank: Rank, nbytes: int) -> None:
        from vllm import _custom_ops as ops

        self._ops, self._rank, self._nbytes = ops, rank, nbytes
        self.x = torch.empty(nbytes, dtype=torch.uint8, device=rank.device)
        # Sums of the first of two stages follow the signals.
        signals, self._staging = self._shared(ops.meta_size() + nbytes), self._shared(nbytes)
        self._rank_data = torch.empty(RANK_DATA_BYTES, dtype=torch.uint8, device=rank.device)
        self._handle = ops.init_custom_ar(signals, self._rank_data, rank.rank, True)
        ops.register_buffer(self._handle, self._staging)

    def reduce(self, out: Tensor, x: Tensor) -> None:
        """Sum `x` of all ranks.

        Args:
            out: [n] the sum; written.
            x: [n] of `self.x`.
        """
        if torch.cuda.is_current_stream_capturing():
            self._ops.all_reduce(self._handle, x, out, 0, 0)
        else:
            self._ops.all_reduce(self._handle, x, out, self._staging[self._rank.rank], self._nbytes)

    def map_captured(self) -> None:
        """Tell all ranks where the inputs are that were captured since the last time. All ranks come here together,
        before the graph is replayed."""
        handles, offsets = zip(*self._gathered(self._ops.get_graph_buffer_ipc_meta(self._handle)), strict=True)
        self._ops.register_graph_buffers(self._handle, list(handles), list(offsets))

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self._rank.world
        dist.all_gather_object(found, mine, group=self._rank.control)
        return found

    def _shared(self, nbytes: int) -> list[int]:
        """Addresses, here, of new memory of all ranks, of so many bytes each."""
        mine, handle = self._ops.allocate_shared_buffer_and_handle(nbytes)
        return [
            mine if number == self._rank.rank else self._ops.open_mem_handle(peer)
            for number, peer in enumerate(self._gathered(handle))
        ]
