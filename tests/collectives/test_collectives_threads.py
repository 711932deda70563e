"""Threads that use one group: they take turns, and each operation has its values."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from collective_ranks import WORLDS, open_group
from ranks import Rank, ranks_of

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
gloo_ranks = pytest.fixture(ranks_of, scope="module", params=[w for w in WORLDS if w.id in ("gloo-2", "gloo-3")])
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


def scenario_two_groups(rank: Rank) -> None:
    """Each thread has a group of its own over one process group, which cannot tell whose turn it is: an error names
    the other group, and what comes before is right."""
    errors: list[str] = []
    found: list[bool] = []

    def work(group: tg.PeerGroup, factor: float) -> None:
        own = torch.full((16,), factor * (rank.rank + 1))
        total = factor * (rank.world * (rank.world + 1) // 2)
        try:
            for _ in range(TIMES):
                found.append(bool((tg.all_reduce(own, group) == total).all()))
        except RuntimeError as error:
            errors.append(str(error))

    own = dist.new_group()
    with open_group(rank, process_group=own) as first, open_group(rank, process_group=own) as second:
        # In another order on each rank, so that they meet at least once.
        pair = [(first, 1.0), (second, 100.0)]
        threads = [threading.Thread(target=work, args=one) for one in (pair if rank.rank == 0 else reversed(pair))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()
    assert all(found)
    assert all("of another group of this process group" in error for error in errors), errors
    dist.destroy_process_group(own)


def test_threads_take_turns(ranks, seed):
    ranks.run(scenario_threads, seed)


def test_threads_of_two_groups_over_one_process_group_never_mix_them(gloo_ranks, seed):
    gloo_ranks.run(scenario_two_groups, seed)


ASK_WHILE_IT_IS_CLOSED = """
import threading
import time

import torch

from te_graph import _C

is_over = False


def opened(number):
    return _C.GroupHandle.local(f"group {number}", torch.device("cpu"))


def ask():
    while not is_over:
        try:
            while True:
                group.check("check")
        except RuntimeError as error:
            assert "one that was closed" in str(error), error


group = opened(0)
threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(1, 1500):
    last, group = group, opened(number)
    last.close()
    time.sleep(2e-5)
is_over = True
group.close()
for thread in threads:
    thread.join()
print("asked")
"""


def test_threads_ask_a_group_that_another_one_closes():
    """In a process of its own, which may crash; memory that was freed is overwritten there."""
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-c", ASK_WHILE_IT_IS_CLOSED]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (child.returncode, child.stdout) == (0, "asked\n"), child.stderr
