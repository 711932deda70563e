"""Calls that all ranks make together, and user code may make on one of them alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import distributed_c10d as c10d

from te_graph.collectives.peer_group import RENDEZVOUS_TIMEOUT, PeerGroup
from te_graph.collectives.rendezvous import Rendezvous
from te_graph.common.own_objects import OwnObject


class JointCalls(OwnObject):
    """Those of the ranks of one group: they meet before the first collective of such a call.

    They meet by the store of the process group, for a collective would be matched with whatever other ranks run. It
    says which call a rank makes, also to those that wait for it in a collective meanwhile.
    """

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._topic = f"flat/calls/{group.name}"
        self._store = c10d._get_process_group_store(group.process_group)

    def meet(self, op: str) -> None:
        """Wait for all ranks to call ``op``.

        Raises:
            RuntimeError: one has not within the timeout of the group, or two minutes. The group is aborted then.
        """
        self._announce(op)
        timeout = min(RENDEZVOUS_TIMEOUT, self._group.timeout)
        try:
            Rendezvous(self._group.process_group, self._topic, timeout, op).wait("all ranks are to call it")
        except RuntimeError as error:
            self._group.abort()  # for the others, which may wait for this one
            raise RuntimeError(f"rank {self._group.rank} calls {op}, which all ranks call: {error}") from error
        self._announce("")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Around a collective of the group: where it fails, and other ranks make a call meanwhile, its error says so.

        Raises:
            RuntimeError: that.
        """
        try:
            yield
        except RuntimeError as error:
            for rank in range(self._group.world_size):
                if op := self._announced(rank):
                    raise RuntimeError(f"rank {rank} calls {op}, which all ranks call: {error}") from error
            raise

    def _announce(self, op: str) -> None:
        self._store.set(self._key(self._group.rank), op)

    def _announced(self, rank: int) -> str:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _key(self, rank: int) -> str:
        return f"te_graph/{self._topic}/of/{rank}"
