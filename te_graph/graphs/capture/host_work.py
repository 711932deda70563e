"""What the iterations of a warm-up do in Python, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from te_graph import _C
from te_graph.graphs.guards.effects.random_generators import HostRandom
from te_graph.graphs.guards.effects.side_effects import SideEffects
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.code_watch import CodeWatch


class HostWork:
    """What changes at the sources of a callable or in torch's settings, and which random generators are drawn from.

    The first iteration may make what the callable keeps. A second iteration that changes nothing leaves the state as it
    found it, so all later ones repeat it; a change means a counter or work of a later call.

    Args:
        device: where they compute.
        walker: learns what the iterations run.
        explore: where the code can get to, by what the walker knows.
        sources: that, before the first iteration.

    Attributes:
        sources: that, after the last iteration.
        changed_at_first: the first thing that the first iteration changed, in words; None: nothing.
        kept_at_first: likewise, where another tensor or module, their flags and torch's settings count.
        drawn_at_first: the first generator that it drew from; None: none.
        changed: likewise, of all later iterations.
        drawn: likewise.
        is_settled: the last iteration changed nothing.
    """

    def __init__(
        self,
        device: torch.device,
        walker: SourceWalker,
        explore: Callable[[], list[Source]],
        sources: list[Source],
    ) -> None:
        self._device = device
        self._walker = walker
        self._explore = explore
        self._is_first = True
        self.sources = sources
        self._begin()
        self.changed_at_first: str | None = None
        self.kept_at_first: str | None = None
        self.drawn_at_first: str | None = None
        self.changed: str | None = None
        self.drawn: str | None = None
        self.is_settled = False

    def _begin(self) -> None:
        self._effects, self._generators = SideEffects(self.sources), HostRandom(self.sources)
        self._settings = _C.Settings(self._device, with_modes=True)

    def _first_change(self, sources: list[Source]) -> str | None:
        """What the iteration has changed, of ``sources`` after it and of torch's settings."""
        changed = self._effects.first(sources, with_tensors=self._is_first)
        setting = self._settings.change() if changed is None else ""
        return f"a setting of torch ({setting})" if setting else changed

    def note(self, *watches: CodeWatch, is_last: bool) -> None:
        """An iteration has ended, in which ``watches`` have seen code run."""
        known = self._walker.known
        if self.is_settled and not is_last:  # what it may have changed is seen after the last one
            self._learn(watches)
            if self._walker.known != known:
                self.sources = self._explore()
                self._begin()
            return
        # What stands where the code can get to as far as was known before that iteration; then what it ran besides.
        sources = self._explore()
        set_ = self._generators.set_by(*(watch.states for watch in watches))
        changed = self._first_change(sources) if set_ is None else f"the state of {set_}"
        drawn = self._generators.drawn_from() or next((watch.drawn for watch in watches if watch.drawn), None)
        self.is_settled = changed is None
        if self._is_first:
            self.kept_at_first, self.drawn_at_first = changed, drawn
            self.changed_at_first = changed and self._effects.first(sources, with_flags=False)
        else:
            self.changed, self.drawn = self.changed or changed, self.drawn or drawn
        self._is_first = False
        self._learn(watches)
        is_known = self._walker.known == known
        self.sources = sources if is_known else self._explore()
        if not is_last and not (is_known and self.is_settled):
            self._begin()

    def _learn(self, watches: Sequence[CodeWatch]) -> None:
        for watch in watches:
            self._walker.note(watch, beside=watches)
