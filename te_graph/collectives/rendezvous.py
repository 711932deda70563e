"""Rendezvous of all ranks of a process group, step by step: what fails on one rank raises the same error on all.

Ranks exchange JSON through the store of the process group. Any process that reaches its port can write there: nothing
that is read is executed, and what is not a valid message is an error that all ranks raise.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")

VERSION = 1
MAX_BYTES = 64 << 10  # of a message
_MAX_REASON = 4096  # characters of an error that is sent to other ranks
_POLL_SECONDS = 1.0  # seconds between checks whether other ranks have abandoned this attempt
_NONCE = re.compile("[0-9a-f]{32}")
_MEMBERS = {"version", "nonce", "is_fine", "value"}


class Rendezvous:
    """One attempt of all ranks at a joint set-up or teardown, in steps of the same order on all ranks.

    Each rank counts its attempts, and attempts of the same number are matched. An attempt in which a rank failed or did
    not arrive is over for all ranks; the next ones are matched again.

    Args:
        process_group: of torch.distributed.
        topic: of the steps; the same on all ranks.
        timeout: seconds after which a missing rank is an error.
        subject: whose set-up it is, for messages.

    Attributes:
        number: of the attempt, from 1 on.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, topic: str, timeout: float, subject: str = "PeerGroup"
    ) -> None:
        self.rank, self.world = process_group.rank(), process_group.size()
        self.timeout, self._subject = timeout, subject
        self._store = c10d._get_process_group_store(process_group)
        self._topic = f"te_graph/{topic}"
        self._step = 0
        # Random on each rank, common to all after the first step: messages of other attempts do not have it.
        self._nonce = secrets.token_hex(16)
        while True:
            self.number = self._store.add(f"{self._topic}/{self.rank}", 1)
            if not self._store.check([self._over]):
                break

    def step(self, what: str, action: Callable[[], Any], parse: Callable[[Any], T] = lambda value: value) -> list[T]:
        """Run ``action`` on each rank, and wait for all.

        Args:
            what: for messages: "allocating the symmetric buffer".
            action: returns a value that JSON can represent.
            parse: converts a rank's answer; raises ValueError or TypeError for an invalid one.

        Returns:
            The parsed answer of each rank.

        Raises:
            RuntimeError: the action failed on a rank or its answer was invalid, with the same message on all ranks; or
                a rank did not arrive in time.
        """
        cause = None
        try:
            mine = self._message(True, action())
        except Exception as error:
            mine, cause = self._failure(error), error
        except BaseException as error:
            self.fail(error)
            raise
        answers = self._exchange(what, mine)
        nonces, values = [], []
        for rank, answer in enumerate(answers):
            try:
                is_fine, nonce, value = self._read(answer)
                values.append(parse(value) if is_fine else None)
            except (ValueError, TypeError, RecursionError) as error:
                raise RuntimeError(
                    f"{self._subject}: rank {rank} sent no message of te_graph while {what}: {_reason(error)}"
                ) from error
            if not is_fine:
                raise RuntimeError(f"{self._subject}: rank {rank} failed while {what}: {value}") from cause
            nonces.append(nonce)
        if self._step == 1:
            self._nonce = hashlib.sha256("".join(nonces).encode()).hexdigest()[:32]
        return values

    def wait(self, what: str) -> None:
        """Wait until all ranks have arrived."""
        self.step(what, lambda: None, expect_none)

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks, in place of the next step and without waiting, that this rank failed."""
        self._step += 1
        self._store.set(self._key(self.rank), self._failure(error))

    def _message(self, is_fine: bool, value: Any) -> bytes:
        members = {"version": VERSION, "nonce": self._nonce, "is_fine": is_fine, "value": value}
        message = json.dumps(members, allow_nan=False).encode()
        if len(message) > MAX_BYTES:
            raise ValueError(f"expected an answer of at most {MAX_BYTES} bytes, got {len(message)}")
        return message

    def _failure(self, error: BaseException) -> bytes:
        return self._message(False, _reason(error))

    def _read(self, message: bytes) -> tuple[bool, str, Any]:
        """Whether the sender's action succeeded, its nonce, and its answer or error."""
        if len(message) > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES} bytes, got {len(message)}")
        members = json.loads(message.decode(), parse_constant=_refuse_constant)
        if not isinstance(members, dict) or members.keys() != _MEMBERS or members["version"] != VERSION:
            raise ValueError(f"expected version {VERSION} with {', '.join(sorted(_MEMBERS))}, got {str(members)[:100]}")
        is_fine, nonce, value = members["is_fine"], members["nonce"], members["value"]
        if not isinstance(is_fine, bool) or not (is_fine or isinstance(value, str)):
            raise ValueError(f"expected an answer or a reason, got {str(value)[:100]}")
        if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce) or (self._step > 1 and nonce != self._nonce):
            raise ValueError("it belongs to another attempt")
        return is_fine, nonce, value

    def _exchange(self, what: str, mine: bytes) -> list[bytes]:
        self._step += 1
        self._store.set(self._key(self.rank), mine)
        end = time.monotonic() + self.timeout
        for rank in range(self.world):
            self._wait_for(rank, end, what)
        return [self._store.get(self._key(rank)) for rank in range(self.world)]

    def _wait_for(self, rank: int, end: float, what: str) -> None:
        while True:
            left = end - time.monotonic()
            try:
                self._store.wait([self._key(rank)], timedelta(seconds=max(0.001, min(_POLL_SECONDS, left))))
                return
            except RuntimeError as error:  # that of a FileStore is no DistStoreError
                if self._store.check([self._over]):
                    reason = self._store.get(self._over).decode(errors="replace")[:_MAX_REASON]
                    raise RuntimeError(f"{self._subject}: other ranks have abandoned this attempt: {reason}") from error
                if left <= _POLL_SECONDS:
                    reason = f"rank {rank} did not arrive within {self.timeout:g} s while {what}"
                    self._store.set(self._over, reason)
                    raise RuntimeError(f"{self._subject}: {reason}") from error

    def _key(self, rank: int) -> str:
        return f"{self._topic}/{self.number}/{self._step}/{rank}"

    @property
    def _over(self) -> str:
        """Key set by a rank that timed out: ranks that arrive later join the next attempt."""
        return f"{self._topic}/{self.number}/over"


def expect_none(value: Any) -> None:
    """Parse the answer to a step without a result."""
    if value is not None:
        raise ValueError(f"expected nothing, got {str(value)[:100]}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"expected JSON, got {name}")
