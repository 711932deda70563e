"""Threads that use one group: they take turns, and each operation has its values."""

import threading

import pytest
import torch
from collective_ranks import WORLDS, open_group
from ranks import Rank, ranks_of

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
THREADS, TIMES, NUMEL = 3, 40, 20_000


def scenario_threads(rank: Rank) -> None:
    """Ranks meet in whatever order threads come in: all give the same, so that any two fit together."""
    own = torch.full((NUMEL,), float(rank.rank + 1), device=rank.device)
    total = float(rank.world * (rank.world + 1) // 2)
    found: list[bool | str] = []

    def work() -> None:
        try:
            for _ in range(TIMES):
                got = tg.all_reduce(own, group)
                found.append(bool((got == total).all()))
        except RuntimeError as error:
            found.append(str(error))

    with open_group(rank) as group:
        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.check()
    assert found == [True] * (THREADS * TIMES)


def test_threads_take_turns(ranks, seed):
    ranks.run(scenario_threads, seed)
