"""What callables share that are captured together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.reasons import Reported
from te_graph.graphs.capture.layout import zeros_in_order
from te_graph.graphs.capture.options import Options
from te_graph.graphs.tracing.backends import CudaBackend, RecorderBackend


class CaptureGroup:
    """What the callables of one ``make_graphed_callables`` share, at once and in captures of later signatures.

    Args:
        device: where all their tensors are.
        options: as the user gave them.

    Attributes:
        backend: makes the graphs; see tracing/backends.py.
        replay_order: orders their replays.
        backward_pool: memory pool of all their backward graphs.
        reported: what was logged once for all of them.
        at_work: label of the callable that a capture is or was busy with: where it failed, of the one that is to blame.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device = device
        self.options = options
        self.backend: Any = (
            CudaBackend(device, options.capture_error_mode) if device.type == "cuda" else RecorderBackend()
        )
        self.replay_order = _C.ReplayOrder(device)
        self.reported = Reported()
        self.backward_pool = options.pool or self.backend.new_pool()
        self.at_work: str | None = None
        self._stagings: dict[tuple, _C.Staging] = {}

    def stagings(self, outputs: Iterable[tuple[Tensor, tuple[int, ...] | None]]) -> Iterator[_C.Staging]:
        """Where backward graphs read the gradients of ``outputs`` [...], one each, and each with the order in which the
        dimensions of its gradient lie; None: as its own.

        Every replay fills them anew and replays do not overlap, so all callables use the same ones.
        """
        uses: Counter[tuple] = Counter()
        for output, order in outputs:
            kind = (output.shape, output.stride(), output.dtype, order)
            key = (*kind, uses[kind])
            uses[kind] += 1
            if key not in self._stagings:
                self._stagings[key] = _C.Staging(zeros_in_order(output, order), is_lent=False)
            yield self._stagings[key]
