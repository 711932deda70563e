"""Autograd's histories from outside a function, which a backward inside it must not go on through."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor

from te_graph.common.dispatch import has_lost_history
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource
from te_graph.graphs.tracing.refusals import CaptureError

_OTHER_STREAM = "would make the legacy stream depend on a capturing"


class OuterHistories:
    """Context of a capture in which a backward is refused that runs on through what tensors were computed from before.

    A guard could compare none of that at each call: operations, their hooks and what they saved. A GPU refuses it by
    itself where those operations were on its default stream, also if the backward ends with such a tensor.

    Args:
        label: of the function.
        sources: where it finds tensors. Their histories begin in none but these.
    """

    def __init__(self, label: str, sources: Iterable[GuardedSource]) -> None:
        self._label = label
        # A tensor that a history begins with is met under its first name.
        known = (source for source in sources if isinstance(source.obj, Tensor) and not has_lost_history(source.obj))
        computed = (source for source in known if source.obj.grad_fn is not None)
        self._first = {source.obj.grad_fn: source.name for source in reversed([*computed])}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [node.register_prehook(self._refusing(name)) for node, name in self._first.items()]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        if self._first and error is not None and _OTHER_STREAM in str(error):
            raise self._refusal(" or ".join(self._first.values())) from error

    def _refusal(self, name: str) -> CaptureError:
        return CaptureError(
            f"{self._label}: a backward goes on through what {name} was computed from before the call, which may be "
            f"other operations at each call: compute it inside, or let the backward end there ({name}.detach())"
        )

    def _refusing(self, name: str) -> Any:
        def refuse(gradients: tuple[Tensor | None, ...]) -> None:  # [...] each
            raise self._refusal(name)

        return refuse
