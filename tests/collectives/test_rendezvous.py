"""What ranks exchange while a group is set up: JSON that is checked; attempts that fail leave the next ones in step.

Ranks are threads with one store. What others write there, by fault or on purpose, is drawn at random.
"""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from te_graph.collectives import rendezvous
from te_graph.collectives.peer_facts import parse_facts
from te_graph.collectives.rendezvous import MAX_BYTES, Rendezvous

RENDEZVOUS_TIMEOUT = 20.0


class World:
    """Ranks over one store, in this process."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.store = size, dist.HashStore()
        monkeypatch.setattr(rendezvous.c10d, "_get_process_group_store", lambda group: self.store)

    def attempt(self, rank: int, timeout: float = RENDEZVOUS_TIMEOUT) -> Rendezvous:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: self.size)
        return Rendezvous(group, "topic", timeout)

    def run(self, *actions: Callable[[], Any] | None) -> list[Any]:
        """What each action returns or raises, one thread each; None for those that are None."""
        found: list[Any] = [None] * len(actions)

        def work(number: int, action: Callable[[], Any]) -> None:
            try:
                found[number] = action()
            except BaseException as error:
                found[number] = error

        threads = [
            threading.Thread(target=work, args=(number, action)) for number, action in enumerate(actions) if action
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(3, monkeypatch)


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def texts_of(errors: list[Any]) -> list[str]:
    assert all(type(error) is RuntimeError for error in errors), errors
    return [str(error) for error in errors]


def test_all_ranks_find_what_each_one_answers(world: World) -> None:
    def both_steps(rank: int) -> Any:
        attempt = world.attempt(rank)
        return attempt.step("counting", lambda: rank), attempt.step("naming", lambda: f"rank {rank}")

    found = world.run(*(lambda rank=rank: both_steps(rank) for rank in range(3)))
    assert found == [([0, 1, 2], ["rank 0", "rank 1", "rank 2"])] * 3


@pytest.mark.parametrize("at_step", [1, 2])
def test_an_error_of_one_rank_is_that_of_all_and_the_next_attempt_meets(world: World, at_step: int) -> None:
    def work(rank: int, culprit: int | None) -> Any:
        attempt = world.attempt(rank)
        for step in range(1, 4):
            is_culprit = rank == culprit and step == at_step
            values = attempt.step("trying", raising(OSError("injected")) if is_culprit else lambda: rank)
        return values

    errors = world.run(*(lambda rank=rank: work(rank, 2) for rank in range(3)))
    assert texts_of(errors) == ["PeerGroup: rank 2 failed while trying: OSError: injected"] * 3
    assert isinstance(errors[2].__cause__, OSError)
    assert world.run(*(lambda rank=rank: work(rank, None) for rank in range(3))) == [[0, 1, 2]] * 3


def test_a_rank_that_fails_before_the_first_step_does_not_wait_and_the_others_are_notified(world: World) -> None:
    attempt = world.attempt(1)
    attempt.fail(ValueError("of its own"))  # returns: no other rank has arrived yet
    errors = world.run(lambda: world.attempt(0).wait("meeting"), None, lambda: world.attempt(2).wait("meeting"))
    assert texts_of([errors[0], errors[2]]) == ["PeerGroup: rank 1 failed while meeting: ValueError: of its own"] * 2
    found = world.run(*(lambda rank=rank: world.attempt(rank).step("meeting", lambda: rank) for rank in range(3)))
    assert found == [[0, 1, 2]] * 3


def test_an_interrupted_rank_notifies_the_others(world: World) -> None:
    def work(rank: int) -> Any:
        return world.attempt(rank).step("waiting", raising(KeyboardInterrupt()) if rank == 0 else lambda: None)

    errors = world.run(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert isinstance(errors[0], KeyboardInterrupt)
    assert texts_of(errors[1:]) == ["PeerGroup: rank 0 failed while waiting: KeyboardInterrupt: "] * 2


def test_a_late_rank_joins_the_next_attempt(world: World) -> None:
    errors = world.run(*(lambda rank=rank: world.attempt(rank, 0.5).wait("meeting") for rank in range(2)))
    texts = texts_of(errors)
    assert any(text == "PeerGroup: rank 2 did not arrive within 0.5 s while meeting" for text in texts)
    assert all("rank 2 did not arrive within 0.5 s while meeting" in text for text in texts)
    found = world.run(*(lambda rank=rank: world.attempt(rank).step("meeting", lambda: rank) for rank in range(3)))
    assert found == [[0, 1, 2]] * 3


def test_a_file_for_a_store_is_waited_for_as_long(world: World, tmp_path, monkeypatch) -> None:
    """FileStore says by another error than the others that time is over."""
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.05)
    world.store = dist.FileStore(str(tmp_path / "store"), world.size)

    def work(rank: int) -> Any:
        time.sleep(0.5 if rank == 2 else 0)
        return world.attempt(rank).step("meeting", lambda: rank)

    assert world.run(*(lambda rank=rank: work(rank) for rank in range(3))) == [[0, 1, 2]] * 3
    errors = world.run(*(lambda rank=rank: world.attempt(rank, 0.5).wait("meeting") for rank in range(2)))
    assert all("rank 2 did not arrive within 0.5 s while meeting" in text for text in texts_of(errors))
    assert world.run(*(lambda rank=rank: work(rank) for rank in range(3))) == [[0, 1, 2]] * 3


def test_a_rank_left_in_the_middle_is_told_that_the_attempt_was_abandoned(world: World, monkeypatch) -> None:
    """Rank 2 sleeps in the first step for longer than the others wait."""
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.05)

    def work(rank: int) -> None:
        attempt = world.attempt(rank, RENDEZVOUS_TIMEOUT if rank == 2 else 0.3)
        attempt.step("sleeping", lambda: time.sleep(0.8) if rank == 2 else None)
        attempt.wait("going on")

    began = time.monotonic()
    errors = world.run(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert "rank 2 did not arrive within 0.3 s while sleeping" in texts_of(errors)[0]
    assert texts_of(errors)[2].startswith("PeerGroup: other ranks have abandoned this attempt: rank 2 did not arrive")
    assert time.monotonic() - began < RENDEZVOUS_TIMEOUT / 2


def test_an_answer_that_is_too_long_or_no_json_is_the_senders_failure(world: World) -> None:
    for answer, words in [("x" * MAX_BYTES, "expected an answer of at most 65536 bytes"), ({1, 2}, "not JSON seriali")]:
        errors = world.run(
            *(lambda rank=rank, answer=answer: world.attempt(rank).step("telling", lambda: answer) for rank in range(3))
        )
        assert all("rank 0 failed while telling: " in text and words in text for text in texts_of(errors))


class Trap:
    """What pickle would run."""

    sprung = False

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> None:
    Trap.sprung = True


def message(**changes: Any) -> bytes:
    members = {"version": 1, "nonce": "0" * 32, "is_fine": True, "value": None} | changes
    return json.dumps(members).encode()


BAD_MESSAGES = {
    "pickle": pickle.dumps(Trap()),
    "empty": b"",
    "nested": b"[" * 50_000,
    "long": message(value="x" * MAX_BYTES),
    "NaN": message(value=float("nan")),
    "digits": b'{"version": 1, "nonce": ' + b"1" * 6000 + b"}",
    "not UTF-8": b"\xff\xfe",
    "no object": b"[1, 2]",
    "a version to come": message(version=2),
    "no version": json.dumps({"nonce": "0" * 32, "is_fine": True, "value": None}).encode(),
    "too many members": message(more=1),
    "no nonce": message(nonce=None),
    "a bad nonce": message(nonce="../../x"),
    "no reason": message(is_fine=False, value=3),
    "neither": message(is_fine=1),
}


@pytest.mark.parametrize("kind", BAD_MESSAGES)
def test_what_is_no_message_is_an_error_that_all_ranks_raise(world: World, kind: str) -> None:
    world.store.set("te_graph/topic/1/1/1", BAD_MESSAGES[kind])
    errors = world.run(lambda: world.attempt(0).wait("meeting"), None, lambda: world.attempt(2).wait("meeting"))
    texts = texts_of([errors[0], errors[2]])
    assert texts[0] == texts[1] and texts[0].startswith("PeerGroup: rank 1 sent no message of te_graph while meeting: ")
    assert not Trap.sprung


def test_a_message_of_more_than_64_kib_is_refused_though_it_is_one(world: World) -> None:
    attempt = world.attempt(0)
    with pytest.raises(ValueError, match=f"expected at most {MAX_BYTES} bytes, got "):
        attempt._read(message(value="x" * MAX_BYTES))


def test_messages_of_another_attempt_are_refused(world: World) -> None:
    world.store.set("te_graph/topic/1/2/1", message())

    def work(rank: int) -> None:
        attempt = world.attempt(rank)
        attempt.wait("meeting")
        if rank != 1:
            attempt.wait("going on")

    errors = world.run(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert errors[1] is None
    assert all("rank 1 sent no message" in text and "another attempt" in text for text in texts_of(errors[::2]))


def facts() -> dict[str, Any]:
    words = {name: "a" for name in ("on_timeout", "device", "name", "host")}
    return words | {"wants_peers": True, "needs_tuning": False, "buffer_bytes": 1, "max_sms": None, "gpu": None}


def test_answers_of_another_kind_are_named(world: World) -> None:
    assert parse_facts(facts()) == facts()
    odd = [*({**facts(), name: value} for name in facts() for value in ([], 1.5, {}) if name), {}, [], None, "facts"]
    for value in odd:
        with pytest.raises(ValueError, match="expected"):
            parse_facts(value)
    errors = world.run(
        *(
            lambda rank=rank: world.attempt(rank).step("telling", lambda: "zz" if rank else "00", bytes.fromhex)
            for rank in range(3)
        )
    )
    assert all("rank 1 sent no message of te_graph while telling: ValueError" in text for text in texts_of(errors))


def test_random_bytes_are_named_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that were true ones until some of their bytes changed, and bytes that never were."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance, refused = random.Random(seed), 0
    for _ in range(2000):
        world = World(2, monkeypatch)
        data = bytearray(message(value=facts()))
        for _ in range(chance.randrange(1, 4)):
            position = chance.randrange(len(data))
            data[position : position + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        given = bytes(data) if chance.random() < 0.8 else chance.randbytes(chance.randrange(200))
        world.store.set("te_graph/topic/1/1/1", given)
        try:
            found = world.attempt(0).step("telling", facts, parse_facts)
        except RuntimeError as error:
            assert str(error).startswith("PeerGroup: rank 1 "), given
            refused += 1
        else:
            assert parse_facts(json.loads(given)["value"]) == found[1]
    assert refused > 500
