"""Processes that measure together, one for each rank: whatever happens to one of them, all have ended afterwards."""

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.harness import fresh_processes

# NVLink multicast stays off, in NCCL and in torch's symmetric memory alike.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
OPERATION_TIMEOUT = 60  # seconds that an operation on the device waits for another rank
CONTROL_TIMEOUT = 150  # longer, so that ranks whose operation failed in the end still tell each other
FAREWELL = 20  # seconds for a process to end after it has said that it is done


@dataclass(frozen=True)
class Rank:
    """Where a function runs.

    Attributes:
        device: "cpu", or the rank's own "cuda:N".
        control: gloo group of all ranks, for what does not concern the device.
        emit: sends something that can be pickled to the process that started the ranks.
    """

    rank: int
    world: int
    device: str
    control: dist.ProcessGroup
    emit: Callable[[Any], None]

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


@contextlib.contextmanager
def joined(number: int, world: int, device: str, rendezvous: Path, emit: Callable[[Any], None]) -> Iterator[Rank]:
    """This process as a rank of a process group, over NCCL if `device` is "cuda", else over gloo.

    The group is left behind where something was raised: leaving it in order would wait for ranks that do not come.
    """
    place: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        device = f"cuda:{number}"
        torch.cuda.set_device(device)
        place = {"backend": "nccl", "device_id": torch.device(device)}
    timeout, more = (timedelta(seconds=seconds) for seconds in (OPERATION_TIMEOUT, CONTROL_TIMEOUT))
    dist.init_process_group(init_method=rendezvous.as_uri(), rank=number, world_size=world, timeout=timeout, **place)
    yield Rank(number, world, device, dist.new_group(backend="gloo", timeout=more), emit)
    dist.destroy_process_group()


def run_on_ranks(
    function: Callable[..., None],
    world: int,
    device: str,
    arguments: tuple[Any, ...],
    receive: Callable[[Any], None],
    time_limit: float,
) -> None:
    """Run `function(rank, *arguments)` in a process for each rank, in ENVIRONMENT.

    Args:
        function: of a module; it is given a `Rank`.
        world: number of ranks.
        device: "cuda", one GPU for each rank, or "cpu".
        arguments: can be pickled.
        receive: is called with what ranks emit, as it comes.
        time_limit: seconds for all of it.

    Raises:
        RuntimeError: it raised on a rank, or the rank died. The others are ended.
        TimeoutError: it took too long. All are ended.
    """
    context = fresh_processes()
    processes: list[Any] = []
    ranks: dict[Connection, int] = {}
    deadline = time.monotonic() + time_limit
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(world):
                ours, theirs = context.Pipe(duplex=False)
                what = (function, number, world, device, Path(folder) / "rendezvous", theirs, arguments)
                processes.append(context.Process(target=_serve, args=what, daemon=True))
                processes[-1].start()
                theirs.close()
                ranks[ours] = number
            _listen(ranks, receive, deadline, time_limit)
            for process in processes:
                process.join(FAREWELL)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in ranks:
                pipe.close()


def _listen(ranks: dict[Connection, int], receive: Callable[[Any], None], deadline: float, time_limit: float) -> None:
    waiting = dict(ranks)
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(map(str, sorted(waiting.values())))
            raise TimeoutError(f"expected all ranks to end within {time_limit:g} s, got no end of {names}")
        for pipe in ready:
            try:
                kind, what = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {waiting[pipe]} died") from None
            if kind == "error":
                raise RuntimeError(f"rank {waiting[pipe]}: {what}")
            if kind == "message":
                receive(what)
            else:
                del waiting[pipe]


def _serve(
    function: Callable[..., None],
    number: int,
    world: int,
    device: str,
    rendezvous: Path,
    pipe: Connection,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(ENVIRONMENT)  # read when groups are made
    torch.set_num_threads(1)
    try:
        with joined(number, world, device, rendezvous, lambda what: pipe.send(("message", what))) as rank:
            function(rank, *arguments)
        pipe.send(("end", None))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        # Leaving in order could wait for the other ranks.
        os._exit(1)
