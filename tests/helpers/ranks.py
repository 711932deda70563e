"""Processes that run one scenario of a distributed test after the other."""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import shared_gpu
import torch
import torch.distributed as dist

from te_graph.testing import deterministic

PATIENCE = 120  # seconds
# Forked from a server that has imported what all of them import, which takes longer than most scenarios.
servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(["torch", "te_graph", "pytest"])
WORLDS = [
    pytest.param(("cpu", 1), id="gloo-1"),
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]


@dataclass(frozen=True)
class Rank:
    """What a scenario knows of where it runs."""

    rank: int
    world: int
    device: str


def device_of_rank(device: str, rank: int) -> str:
    if device == "cpu":
        return "cpu"
    return "cuda:0" if shared_gpu.IS_SHARED else f"cuda:{rank}"


@contextlib.contextmanager
def process_group(rank: Rank, rendezvous: Path) -> Iterator[None]:
    options: dict[str, Any] = {"backend": "gloo"}
    if rank.device.startswith("cuda"):
        torch.cuda.set_device(rank.device)
        options = {"backend": "nccl", "device_id": torch.device(rank.device)}
        if rank.world > 1 and shared_gpu.IS_SHARED:
            shared_gpu.share()
            options = {"backend": shared_gpu.BACKEND}
    dist.init_process_group(
        init_method=rendezvous.as_uri(),
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=PATIENCE / 2),
        **options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def serve(rank: Rank, rendezvous: Path, pipe: Connection) -> None:
    """Run the scenarios that come through ``pipe``; answer with None or a traceback."""
    torch.set_num_threads(1)
    with deterministic(), process_group(rank, rendezvous):
        while (job := pipe.recv()) is not None:
            scenario, seed, arguments = job
            try:
                torch.manual_seed(seed)
                scenario(rank, *arguments)
                pipe.send(None)
            except Exception:
                # The other rank waits for this one, so neither can go on.
                with contextlib.suppress(OSError):
                    pipe.send(f"rank {rank.rank}: {traceback.format_exc()}")
                os._exit(1)


class Ranks:
    """The ranks of one world: this process where it is the only one, otherwise processes that wait for scenarios."""

    def __init__(self, device: str, world: int, folder: Path) -> None:
        self._ranks = [Rank(rank, world, device_of_rank(device, rank)) for rank in range(world)]
        self._folder = folder
        self._groups = 0
        self.is_cpu = device == "cpu"
        self.is_slow = self.is_cpu or (world > 1 and shared_gpu.IS_SHARED)  # milliseconds for each operation
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []

    def run(self, scenario: Callable[..., None], seed: int, *arguments: Any) -> None:
        """Run ``scenario(rank, *arguments)`` on each rank; fail when it fails on one."""
        if len(self._ranks) == 1:
            with process_group(self._ranks[0], self._rendezvous()):
                torch.manual_seed(seed)
                scenario(self._ranks[0], *arguments)
            return
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((scenario, seed, arguments))
        trouble = self._first_trouble()
        if trouble is not None:
            self.close()
            pytest.fail(trouble, pytrace=False)

    def close(self) -> None:
        """End the processes: by asking those that wait for a scenario, else by force."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _rendezvous(self) -> Path:
        self._groups += 1
        return self._folder / str(self._groups)

    def _start(self) -> None:
        rendezvous = self._rendezvous()
        for rank in self._ranks:
            ours, theirs = servers.Pipe()
            process = servers.Process(target=serve, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _first_trouble(self) -> str | None:
        """The first traceback among the answers, or None when all ranks have come through."""
        waiting, deadline = list(self._pipes), time.monotonic() + PATIENCE
        while waiting:
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                return f"{len(waiting)} ranks gave no answer within {PATIENCE} s"
            for pipe in ready:
                waiting.remove(pipe)
                try:
                    trouble = pipe.recv()
                except EOFError:
                    trouble = f"rank {self._pipes.index(pipe)} ended without an answer"
                if trouble is not None:
                    return trouble
        return None


def ranks_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes for a module of tests: ``ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)``."""
    device, world = request.param
    group = Ranks(device, world, tmp_path_factory.mktemp("rendezvous"))
    yield group
    group.close()
