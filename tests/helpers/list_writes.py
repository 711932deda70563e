"""Operators that write lists of tensors, and one without a kernel for versions: these tell the kernel below to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("te_graph_list_writes", "DEF")
_LIBRARY.define("halve(Tensor(a!)[] tensors) -> ()")
_LIBRARY.define("halve_one(Tensor(a!) tensor) -> ()")


def _halve(tensors: list[Tensor]) -> None:  # [...] each
    for tensor in tensors:
        tensor.mul_(0.5)


def _halve_one(tensor: Tensor) -> None:  # [...]
    tensor.mul_(0.5)


_LIBRARY.impl("halve", _halve, "CompositeExplicitAutograd")
_LIBRARY.impl("halve_one", _halve_one, "CompositeExplicitAutograd")


@torch.library.custom_op("te_graph_list_writes::double", mutates_args=["tensors"])
def double(tensors: list[Tensor]) -> None:  # [...] each
    for tensor in tensors:
        tensor.mul_(2)


WRITES: dict[str, Callable[[list[Tensor]], None]] = {  # of two tensors, [4] each
    "foreach with a number": lambda tensors: torch._foreach_mul_(tensors, 0.5),
    "foreach with tensors": lambda tensors: torch._foreach_copy_(tensors, [t.sin() for t in tensors]),
    "foreach without operands": lambda tensors: torch._foreach_abs_(tensors),
    "out=": lambda tensors: torch.unbind_copy(torch.stack(tensors) * 2, out=tensors),
    "one after the other": lambda tensors: [t.mul_(0.5) for t in tensors],
    "of a library": lambda tensors: torch.ops.te_graph_list_writes.halve(tensors),
    "of a library, one tensor": lambda tensors: torch.ops.te_graph_list_writes.halve_one(tensors[0]),
    "with a kernel for versions": lambda tensors: double(tensors),
}
