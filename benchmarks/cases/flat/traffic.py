"""Bytes that a step moves, counted from the operators that it calls: between ranks, and for gradients on a device."""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVE = re.compile(r"(?:te_graph|c10d|_c10d_functional)::_?(all_?reduce|reduce_scatter|all_?gather)")
CONCAT = re.compile(r"aten::(cat|_chunk_cat|split_with_sizes_copy)$")
WRITES_ONLY = re.compile(r"aten::(_foreach_)?(copy_|zero_|fill_)$")


class Traffic(TorchDispatchMode):
    """Counts while it is entered; backwards on other threads are seen, kernels inside of graphs are not.

    Args:
        gradients: memory in which gradients are summed, [n] each.
        world: ranks.

    Attributes:
        wire: bytes that a rank sends in collectives, if they move what a ring does: 2 (N - 1) / N of what is reduced
            by an all-reduce, (N - 1) / N of the larger side of the others.
        device: bytes read and written by concats, and by whatever touches ``gradients`` and is no collective.
    """

    def __init__(self, gradients: Sequence[Tensor], world: int) -> None:
        super().__init__()
        self._ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in gradients]
        self._share = (world - 1) / world
        self.wire = 0.0
        self.device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if found := COLLECTIVE.match(name):
            sides = [_bytes_of(one) for one in (*args, result)]
            sent_as = (kwargs or {}).get("wire_dtype")
            part = 1.0 if sent_as is None else sent_as.itemsize / args[0].element_size()
            self.wire += (2 if found[1].replace("_", "") == "allreduce" else 1) * self._share * max(sides) * part
        elif CONCAT.match(name) or any(map(self._is_gradient, tree_leaves(args))):
            self.device += _moved(func._schema, args, result)
        return result

    def _is_gradient(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.numel() == 0:
            return False
        return any(begin <= value.data_ptr() < end for begin, end in self._ranges)


def _bytes_of(value: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(value) if isinstance(one, Tensor))


def _moved(schema: Any, args: Sequence[Any], result: Any) -> int:
    """Bytes that an operator reads and writes; none if it returns views."""
    returned = [one.alias_info for one in schema.returns]
    if any(alias is not None and not alias.is_write for alias in returned):
        return 0
    moved = _bytes_of(result) if None in returned else 0
    for argument, value in zip(schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and WRITES_ONLY.match(schema.name))
        moved += (is_read + is_written) * _bytes_of(value)
    return moved
