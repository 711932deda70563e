"""Steps that all ranks of a process group take together: what fails on one rank raises the same error on all."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


class Agreement:
    """Exchange of small objects through the store of a process group, in steps that all ranks take in the same order.

    Args:
        process_group: of torch.distributed.
        topic: of the steps; the same on all ranks.
        patience: seconds after which a rank that does not come is an error.
    """

    def __init__(self, process_group: dist.ProcessGroup, topic: str, patience: float) -> None:
        self.rank, self.world = process_group.rank(), process_group.size()
        self.patience = patience
        self._store = c10d._get_process_group_store(process_group)
        self._topic = f"te_graph/{topic}"
        # Counts agreements of this topic: each rank finds the same number, for it comes here as often as the others.
        self.number = self._store.add(f"{self._topic}/{self.rank}", 1)
        self._step = 0

    def step(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on each rank, and wait for all.

        Args:
            what: for messages: "allocating the slab".
            action: returns something that can be pickled.

        Returns:
            What it returned on each rank.

        Raises:
            RuntimeError: it raised on some rank, the same message on all; or a rank did not come in time.
        """
        try:
            answer: tuple[bool, Any] = (True, action())
        except Exception as error:
            answer, cause = (False, f"{type(error).__name__}: {error}"), error
        else:
            cause = None
        answers = self._exchange(what, pickle.dumps(answer))
        for rank, (is_fine, value) in enumerate(answers):
            if not is_fine:
                raise RuntimeError(f"PeerGroup: rank {rank} failed while {what}: {value}") from cause
        return [value for _, value in answers]

    def wait(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.step(what, lambda: None)

    def _exchange(self, what: str, mine: bytes) -> list[Any]:
        self._step += 1
        keys = [f"{self._topic}/{self.number}/{self._step}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], mine)
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], timedelta(seconds=self.patience))
            except Exception as error:
                raise RuntimeError(
                    f"PeerGroup: rank {rank} did not come within {self.patience:g} s while {what}"
                ) from error
        return [pickle.loads(self._store.get(key)) for key in keys]
