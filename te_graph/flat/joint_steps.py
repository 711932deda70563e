"""Steps of a construction that all ranks take together: what fails on one of them raises on all."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from te_graph.collectives.peer_group import RENDEZVOUS_TIMEOUT
from te_graph.collectives.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class JointSteps:
    """Those of one ``FlatParameters``, over the groups that this rank is in.

    Groups are asked one after the other, in the same order on all ranks, and what one of them has met is told to those
    that come later: of the rows and then the columns of a mesh, all ranks know what has failed on one.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self._groups = [
            (group, Rendezvous(group, f"flat/{group.group_name}", RENDEZVOUS_TIMEOUT, "FlatParameters"))
            for group in groups
        ]

    def run(self, what: str, action: Callable[[], T]) -> T:
        """``action()``, once it has come through on all ranks.

        Args:
            what: for messages: "allocating buffers".
            action: called on each rank.

        Raises:
            Exception: that of ``action`` on this rank; others do not wait for it then.
            RuntimeError: it failed on another rank, which the message names, or that did not arrive in time.
        """
        try:
            result = action()
        except BaseException as error:
            self._tell(0, error)
            raise
        self._with_each(lambda group, rendezvous: rendezvous.wait(what))
        return result

    def expect_alike(self, what: str, facts: Sequence[str]) -> None:
        """Raise RuntimeError on all ranks, with the first difference, unless all have the same ``facts``."""
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()

        def compare(group: ProcessGroup, rendezvous: Rendezvous) -> None:
            if len(set(rendezvous.step(f"comparing {what}", lambda: digest, str))) > 1:
                _raise_difference(what, facts, group)

        self._with_each(compare)

    def _with_each(self, step: Callable[[ProcessGroup, Rendezvous], Any]) -> None:
        for number, (group, rendezvous) in enumerate(self._groups):
            try:
                step(group, rendezvous)
            except RuntimeError as error:
                self._tell(number + 1, error)
                raise

    def _tell(self, first: int, error: BaseException) -> None:
        for _, rendezvous in self._groups[first:]:
            rendezvous.fail(error)


def _raise_difference(what: str, facts: Sequence[str], group: ProcessGroup) -> None:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, list(facts), group=group)
    rank, other = next((rank, other) for rank, other in enumerate(everyone) if other != everyone[0])
    pairs = itertools.zip_longest(everyone[0], other, fillvalue="nothing")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    ranks = dist.get_process_group_ranks(group)
    raise RuntimeError(
        f"FlatParameters: expected the same {what} on all ranks, got {first} on rank {ranks[0]} and {second} on rank "
        f"{ranks[rank]}"
    )
