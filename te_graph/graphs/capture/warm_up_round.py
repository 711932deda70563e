"""The iterations of a warm-up, in order. There is a second round where the first one meets what no name leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from te_graph.graphs.capture.capture_checks import check_host_work
from te_graph.graphs.capture.first_call import FirstCallWatch
from te_graph.graphs.capture.host_work import HostWork
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import TensorWatch


@dataclass
class WarmUpRound:
    """What has seen them.

    Attributes:
        last: the last iteration.
        firsts: those before it that are watched.
    """

    last: WarmUpWatch
    firsts: list[FirstCallWatch] = field(default_factory=list)

    @property
    def watches(self) -> list[TensorWatch]:
        """All of them, the last one last."""
        return [*self.firsts, self.last]

    def watch_first(self, samples: Sequence[Tensor]) -> FirstCallWatch:
        """The watch for an iteration that is not the last one, with ``samples`` [...]."""
        self.firsts.append(FirstCallWatch(samples))
        return self.firsts[-1]

    def check(self, label: str, obstacle: str | None, sources: Sequence[Source], work: HostWork) -> None:
        """Refuse what they did and a replay would not do.

        Args:
            label: of the callable.
            obstacle: why the code cannot be compared at calls.
            sources: of the callable.
            work: what they did in Python.

        Raises:
            RuntimeError: names it, with the ``label`` of the callable.
        """
        check_host_work(label, obstacle, work.changed, work.drawn)
        first, *others = self.firsts
        second = next(iter(others), None) if work.kept_at_first is not None else None
        first.check(label, sources, work, second, self.last)
