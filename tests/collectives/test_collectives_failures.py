"""Groups that fail while they work: ranks that wait end with an error that names rank, operation and number.

Failures are described in failed_groups.py; ranks that run different operations are in
test_collectives_mismatches.py.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ranks import capture, open_group, reference_reduce
from failed_groups import (
    SEVERAL,
    SLACK,
    TIMEOUT,
    assert_aborted,
    draw,
    error_of,
    finish,
    gather_texts,
    is_cpu,
    is_last,
    short_lived,
)
from ranks import WORLDS, Rank, device_of_rank, process_group, ranks_of, servers
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg
from te_graph.collectives import peer_group

ranks = pytest.fixture(ranks_of, scope="module", params=SEVERAL)
alone = pytest.fixture(ranks_of, scope="module", params=[w for w in WORLDS if w.values[0][1] == 1])
gpu_ranks = pytest.fixture(ranks_of, scope="module", params=[w for w in SEVERAL if w.values[0][0] == "cuda"])


def scenario_late(rank: Rank) -> None:
    late = 1.0 if is_cpu(rank) else 3.0
    with open_group(rank) as group:
        all_ranks = draw(rank, 5000)
        began = time.monotonic()
        if is_last(rank):
            time.sleep(late)
        got = tg.all_reduce(all_ranks[rank.rank], group)
        finish(rank)
        assert time.monotonic() - began > late * 0.9
        assert same_bits(got, reference_reduce(all_ranks))
        group.check()


def scenario_never(rank: Rank) -> None:
    """The last rank does not come to the second operation."""
    with short_lived(rank) as group:
        x = torch.ones(1000, device=rank.device)
        tg.all_reduce(x, group)
        if not is_last(rank):
            got: list[Tensor] = []
            error = error_of(rank, group, lambda: got.append(tg.all_reduce(x, group)))
            words = rf"was aborted on rank {rank.rank} in operation 2, all_reduce \(sum\) of 1000 Float: "
            assert f"on rank {rank.rank} in operation 2, all_reduce (sum) of 1000 Float" in error
            assert_aborted(rank, group, words)
            if not is_cpu(rank):
                assert f"no data from rank {rank.world - 1} within {TIMEOUT:g} s" in error
                assert got[0].isnan().any() and group.found_inf.item() == 1
        dist.barrier()
        if is_last(rank):
            assert f"on rank {rank.rank}" in error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


class Summing(torch.nn.Linear):
    """[n, 3] -> [n, 3], with a collective inside."""

    def __init__(self, group: tg.PeerGroup) -> None:
        super().__init__(3, 3)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:  # [n, 3]
        return tg.all_reduce(super().forward(x), self.group)


def scenario_late_at_a_capture_without_samples(rank: Rank) -> None:
    with open_group(rank) as group:
        torch.manual_seed(0)
        layer = Summing(group).to(rank.device)
        x = draw(rank, 2, 3)[rank.rank]
        expected = layer(x).detach()
        tg.make_graphed_callables(layer)
        if is_last(rank):
            time.sleep(0.5)
        for _ in range(2):
            assert same_bits(layer(x).detach(), expected)
        assert layer.te_graph.info()["forward_replays"] == 2
        finish(rank)


def scenario_never_at_a_capture_without_samples(rank: Rank) -> None:
    """The last rank does not make the call that captures."""
    with short_lived(rank) as group:
        layer = tg.make_graphed_callables(Summing(group).to(rank.device))
        x = torch.ones(2, 3, device=rank.device)
        tg.all_reduce(x, group)
        if not is_last(rank):
            error = error_of(rank, group, lambda: layer(x))
            assert f"on rank {rank.rank} in operation 2, all_reduce (sum) of 6 Float" in error
        dist.barrier()
        if is_last(rank):
            assert f"on rank {rank.rank}" in error_of(rank, group, lambda: layer(x))


def scenario_abort(rank: Rank) -> None:
    with short_lived(rank) as group:
        x = torch.ones(10, device=rank.device)
        if rank.rank == 0:
            group.abort()
            assert_aborted(rank, group, "abort")
        dist.barrier()
        if rank.rank != 0:
            assert f"on rank {rank.rank}" in error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_abort_alone(rank: Rank) -> None:
    with open_group(rank) as group:
        tg.all_reduce(torch.ones(10, device=rank.device), group)
        group.abort()
        assert_aborted(rank, group, "was aborted on rank 0: abort")


def scenario_graphed_callables(rank: Rank) -> None:
    """Replays do not go on with what a group left that was aborted; once it is closed, they do."""
    x = torch.randn(2, 3, device=rank.device)
    layer = tg.make_graphed_callables(torch.nn.Linear(3, 3, device=rank.device), (x,))
    expected = layer(x).detach().clone()
    with open_group(rank) as group:
        group.abort()
        with pytest.raises(RuntimeError, match=rf"group {group.name} was aborted"):
            group.check()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"Linear.*group {group.name} was aborted"):
                layer(x)
    assert torch.equal(layer(x), expected)


def scenario_abort_while_waiting(rank: Rank) -> None:
    """Kernels that wait for a peer end long before their timeout, and outputs are NaN."""
    with short_lived(rank, timeout=60.0) as group:
        x = torch.ones(1000, device=rank.device)
        began = time.monotonic()
        if rank.rank == 0:
            got = tg.all_reduce(x, group)
            time.sleep(0.2)
            assert not torch.cuda.current_stream().query()
            group.abort()
            finish(rank)
            assert got.isnan().any() and group.found_inf.item() == 1
        dist.barrier()
        assert time.monotonic() - began < 10
        if rank.rank != 0:
            assert "rank 0" in error_of(rank, group, lambda: tg.all_reduce(x, group))


def scenario_set_timeout(rank: Rank) -> None:
    """A shorter time is obeyed; on a GPU also by what waits already, from any thread."""
    with short_lived(rank, timeout=60.0) as group:
        x = torch.ones(10, device=rank.device)
        tg.all_reduce(x, group)
        with pytest.raises(ValueError, match="timeout in seconds above 0, got 0"):
            group.set_timeout(0)
        if not is_last(rank):
            if is_cpu(rank):
                group.set_timeout(TIMEOUT)
            else:
                threading.Timer(0.2, group.set_timeout, [TIMEOUT]).start()
            assert "in operation 2" in error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert group.timeout == TIMEOUT
        dist.barrier()


def scenario_calls_inside_captures(rank: Rank) -> None:
    """A time-out set, or an abort, while the caller captures takes effect at once, and the capture goes on."""
    with short_lived(rank, timeout=60.0) as group:
        all_ranks = draw(rank, 100)

        def summed() -> Tensor:
            group.set_timeout(TIMEOUT)
            return tg.all_reduce(all_ranks[rank.rank], group)

        graph, result = capture(rank, summed)
        graph.replay()
        finish(rank)
        assert group.timeout == TIMEOUT and same_bits(result, reference_reduce(all_ranks))
        dist.barrier()
        capture(rank, lambda: (all_ranks.add_(1), group.abort()))
        dist.barrier()
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_two_eager_streams(rank: Rank) -> None:
    """The group orders its operations, whatever streams they are on."""
    with open_group(rank) as group:
        streams = [torch.cuda.Stream() for _ in range(2)]
        all_ranks = [draw(rank, numel) for numel in (100, 1 << 20, 7, 1 << 22)]
        finish(rank)
        found = []
        for turn in range(40):
            with torch.cuda.stream(streams[turn % 2]):
                found.append((turn % 4, tg.all_reduce(all_ranks[turn % 4][rank.rank], group)))
        finish(rank)
        group.check()
        for which, got in found:
            assert same_bits(got, reference_reduce(all_ranks[which]))


def scenario_two_replays_at_once(rank: Rank) -> None:
    """Right results or the named error, and never a hang."""
    with open_group(rank, timeout=5.0) as group:
        all_ranks = draw(rank, 1 << 20)
        expected = reference_reduce(all_ranks)
        graphs = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = [tg.all_reduce(all_ranks[rank.rank], group) for _ in range(50)]
            graphs.append((graph, outputs, torch.cuda.Stream()))
        finish(rank)
        began = time.monotonic()
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        finish(rank)
        assert time.monotonic() - began < 5.0 + SLACK
        try:
            group.check()
            answer = ""
        except RuntimeError as error:
            answer = str(error)
        answers = gather_texts(rank, answer)
        if any(answers):
            assert any("two operations of the group ran on one GPU at the same time" in text for text in answers)
        else:
            assert all(same_bits(got, expected) for _, outputs, _ in graphs for got in outputs)


# Processes that end. They are not shared with other tests.


@contextlib.contextmanager
def processes(device: str, folder: Path, job: Callable[..., None]) -> Iterator[list[tuple[Any, Connection]]]:
    """Two ranks that run job(rank, pipe) with a process group; those that are left are killed."""
    found = []
    for number in range(2):
        rank = Rank(number, 2, device_of_rank(device, number))
        ours, theirs = servers.Pipe()
        process = servers.Process(target=in_process_group, args=(rank, folder, theirs, job), daemon=True)
        process.start()
        theirs.close()
        found.append((process, ours))
    try:
        yield found
    finally:
        for process, pipe in found:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def in_process_group(rank: Rank, folder: Path, pipe: Connection, job: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    errors = os.open(folder / f"stderr of rank {rank.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    with process_group(rank, folder / "rendezvous"):
        job(rank, pipe)


def receive(pipe: Connection, timeout: float = 60.0) -> Any:
    assert pipe.poll(timeout), "a rank gave no answer"
    return pipe.recv()


def job_killed(rank: Rank, pipe: Connection) -> None:
    """Rank 1 waits to be killed; rank 0 tells its error, when it came, and how long closing took."""
    group = open_group(rank, timeout=TIMEOUT)
    x = torch.ones(1000, device=rank.device)
    tg.all_reduce(x, group)
    finish(rank)
    pipe.send("ready")
    if rank.rank == 1:
        time.sleep(600)
    pipe.recv()
    try:
        tg.all_reduce(x, group)
        finish(rank)
        group.check()
    except RuntimeError as error:
        pipe.send((time.time(), str(error)))
    began = time.monotonic()
    group.close()
    pipe.send(time.monotonic() - began)


def job_unwatched(rank: Rank, pipe: Connection) -> None:
    """Rank 0 waits in vain, and does not look at it."""
    group = open_group(rank, timeout=TIMEOUT, watchdog=2.0)
    pipe.send("ready")
    if rank.rank == 0:
        tg.all_reduce(torch.ones(1000, device=rank.device), group)
    time.sleep(600)


def job_trapped(rank: Rank, pipe: Connection) -> None:
    """Rank 0 waits in vain, which ends its context."""
    group = open_group(rank, timeout=TIMEOUT, on_timeout="trap", watchdog=0.0)
    if rank.rank == 1:
        pipe.recv()
        os._exit(0)
    texts = []
    try:
        tg.all_reduce(torch.ones(1000, device=rank.device), group)
        finish(rank)
    except RuntimeError as error:
        texts.append(str(error))
    try:
        group.check()
    except RuntimeError as error:
        texts.append(str(error))
    pipe.send(texts)
    os._exit(0)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]


@pytest.mark.parametrize("kind", DEVICES)
def test_others_end_with_a_named_error_when_a_rank_is_killed(tmp_path, kind):
    with processes(kind, tmp_path, job_killed) as ((waiting, answers), (victim, signs)):
        assert (receive(answers), receive(signs)) == ("ready", "ready")
        victim.kill()
        victim.join()
        killed = time.time()
        answers.send("go")
        came, error = receive(answers)
        assert came - killed < TIMEOUT + SLACK
        assert "was aborted on rank 0 in operation 2, all_reduce (sum) of 1000 Float: " in error
        timeout = peer_group.ABORTED_TIMEOUT + SLACK
        assert receive(answers) < timeout, "closing waited for a rank that is gone"
        waiting.join(20)
        assert waiting.exitcode == 0


@pytest.mark.multi_gpu
def test_a_process_that_does_not_look_at_a_failure_is_ended(tmp_path):
    with processes("cuda", tmp_path, job_unwatched) as ((waiting, answers), (other, signs)):
        assert (receive(answers), receive(signs)) == ("ready", "ready")
        waiting.join(TIMEOUT + 2.0 + SLACK + 3.0)
        assert waiting.exitcode == 1
        assert "was aborted on rank 0 in operation 1" in (tmp_path / "stderr of rank 0").read_text()
        other.kill()


@pytest.mark.multi_gpu
def test_a_group_that_traps_ends_the_context_and_still_says_why(tmp_path):
    with processes("cuda", tmp_path, job_trapped) as ((_, answers), (_, signs)):
        texts = receive(answers)
        signs.send("go")
        assert len(texts) == 2, texts
        assert "no data from rank 1 within 1 s" in texts[1]


def test_others_wait_for_a_late_rank(ranks, seed):
    ranks.run(scenario_late, seed)


def test_a_rank_that_never_comes_is_a_named_error(ranks, seed):
    ranks.run(scenario_never, seed)


def test_a_capture_at_the_first_call_waits_for_a_late_rank(ranks, seed):
    ranks.run(scenario_late_at_a_capture_without_samples, seed)


def test_a_rank_that_does_not_capture_is_a_named_error(ranks, seed):
    ranks.run(scenario_never_at_a_capture_without_samples, seed)


def test_a_group_that_was_aborted_is_aborted_on_all_ranks(ranks, seed):
    ranks.run(scenario_abort, seed)


def test_a_group_of_one_rank_can_be_aborted(alone, seed):
    alone.run(scenario_abort_alone, seed)


def test_graphed_callables_raise_while_a_group_is_aborted(ranks, seed):
    ranks.run(scenario_graphed_callables, seed)


def test_graphed_callables_raise_while_a_group_of_one_rank_is_aborted(alone, seed):
    alone.run(scenario_graphed_callables, seed)


def test_abort_ends_kernels_that_wait(gpu_ranks, seed):
    gpu_ranks.run(scenario_abort_while_waiting, seed)


def test_a_timeout_that_was_changed_is_obeyed(ranks, seed):
    ranks.run(scenario_set_timeout, seed)


def test_timeouts_and_aborts_reach_groups_inside_captures(ranks, seed):
    ranks.run(scenario_calls_inside_captures, seed)


def test_operations_on_two_eager_streams_are_ordered(gpu_ranks, seed):
    gpu_ranks.run(scenario_two_eager_streams, seed)


def test_two_replays_at_once_end(gpu_ranks, seed):
    gpu_ranks.run(scenario_two_replays_at_once, seed)
