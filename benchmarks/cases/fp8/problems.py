"""The tensors that FP8 ops are measured on, and what proves their results right."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lib.rotation import FEWEST_CALLS, FOOTPRINT, calls_for, slots_for
from torch import Tensor

from cases.fp8.fused_problem import FusedProblem
from cases.fp8.parts import TENSORS, Case, Part
from cases.fp8.plain_torch import (
    E4M3,
    draw_scales,
    require_cast,
    require_copy,
    require_update,
    require_zeros,
    torch_update,
)

MOST_UPDATES = 64
Found = dict[str, Tensor]  # what a call gives, by the names of plain_torch; one for each weight of a model


def make_problem(part: Part, case: Case, device: str, seed: int) -> Any:
    """The problem of a case, drawn from `seed`."""
    torch.manual_seed(seed)
    kinds = {"cast": CastProblem, "fused": FusedProblem, "weights": WeightsProblem, "update": UpdateProblem}
    return kinds[part.kind](case, device)


def found_of(result: Any) -> Any:
    """What a call returns: itself, or a function that returns it, which is not timed."""
    return result() if callable(result) else result


class CastProblem:
    """Matrices in bf16 that are cast one at a time, with a scale of which few of them saturate.

    Attributes:
        x: [M, N] for each slot; out, out_t, scale, scale_inv, amax, dbias: for each what `plain_torch` names so.
        written: What `clear` zeroes; a variant adds its own buffers.
    """

    kind, prepare = "cast", None

    def __init__(self, case: Case, device: str) -> None:
        (shape,) = case.shapes
        # Three bytes: an element is read in bf16, and written once by a cast without a transpose.
        self.device, self.shape, self.slots = device, shape, slots_for(3 * case.elements, device)
        self.x = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(self.slots)]
        self.out = [torch.zeros(shape, device=device, dtype=E4M3) for _ in self.x]
        self.out_t = [torch.zeros(shape[::-1], device=device, dtype=E4M3) for _ in self.x]
        self.dbias = [torch.zeros(shape[1], device=device, dtype=torch.bfloat16) for _ in self.x]
        self.scale = draw_scales(self.slots, device)
        self.scale_inv, self.amax = (list(torch.zeros(self.slots, 1, device=device)) for _ in range(2))
        self.written = [*self.out, *self.out_t, *self.dbias, *self.scale_inv, *self.amax]

    def calls(self, op: str) -> int:
        return calls_for(self.slots)

    def clear(self) -> None:
        zero(self.written)

    def verify(self, op: str, results: Sequence[Any]) -> None:
        for x, scale, result in zip(self.x, self.scale, results, strict=True):
            found = found_of(result)
            if isinstance(found, Tensor):  # a copy, which is timed beside casts
                require_copy(found, x)
                continue
            require_cast(op, x, scale, found)


class WeightsProblem:
    """The weights of a model in bf16, cast all of them by a call.

    Attributes:
        weights: [M_i, N_i] each. scale: [1] each. written: as for `CastProblem`.
    """

    kind, prepare, slots = "weights", None, 1

    def __init__(self, case: Case, device: str) -> None:
        self.device = device
        self.weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in case.shapes]
        self.scale = draw_scales(len(self.weights), device)
        self.written: list[Tensor] = []
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned when it was first asked for by this name: copies that several operations write."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def calls(self, op: str) -> int:
        return FEWEST_CALLS if op == "weights_skipped" else 1

    def clear(self) -> None:
        zero(self.written)

    def verify(self, op: str, results: Sequence[Any]) -> None:
        (result,) = results
        found: list[Found] = found_of(result)
        if op == "weights_skipped":
            require_zeros(f"{op}: nothing written", [tensor for weight in found for tensor in weight.values()])
            return
        for weight, scale, got in zip(self.weights, self.scale, found, strict=True):
            require_cast("cast_transpose", weight, scale, got)


class UpdateProblem:
    """Histories and scales of modules, a third of whose columns are weights'. A call changes them, so each slot is used
    once in a replay, and before it all are put back and the cache is filled with something else.

    Attributes:
        history: [H, n] for each slot. scale, scale_inv: [n] for each. mask: [n] bool, False for weights.
        drawn: [H, n], the history of all slots at first.
    """

    kind = "update"

    def __init__(self, case: Case, device: str) -> None:
        ((rows, columns),) = case.shapes
        self.device = device
        self.slots = min(MOST_UPDATES, slots_for(4 * rows * columns, device))
        self.drawn = torch.rand(rows, columns, device=device) + 0.1
        ones = torch.ones(columns, device=device)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.history = list(self.keep(self.drawn))
        self.scale, self.scale_inv = list(self.keep(ones)), list(self.keep(ones))
        self.mask = torch.arange(columns, device=device) % TENSORS != 1
        self._other = torch.empty(FOOTPRINT if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def keep(self, drawn: Tensor) -> Tensor:
        """A copy of `drawn` [...] for each slot, [slots, ...], which `clear` puts back."""
        copies = drawn.expand(self.slots, *drawn.shape).contiguous()
        self._kept.append((copies, drawn))
        return copies

    def calls(self, op: str) -> int:
        return self.slots

    def clear(self) -> None:
        for copies, drawn in self._kept:
            copies.copy_(drawn)

    def prepare(self) -> None:
        self.clear()
        self._other.fill_(1)

    def verify(self, op: str, results: Sequence[Any]) -> None:
        ones = torch.ones_like(self.drawn[0])
        wanted = {"history": self.drawn.clone(), "scale": ones, "scale_inv": ones.clone()}
        torch_update(*wanted.values(), self.mask, torch.zeros_like(ones[:1]))
        for result in results:
            require_update(found_of(result), wanted)


def zero(tensors: Sequence[Tensor]) -> None:
    """Write zeros into `tensors`, [...] of any dtype each."""
    for tensor in tensors:
        tensor.zero_()
