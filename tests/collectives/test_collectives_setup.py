"""Opening and closing groups: all ranks open one, or all raise the same error; names, options, fallbacks.

Failures are injected on one rank alone. What all ranks must agree on, texts and results, is compared between ranks.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ranks import TIMEOUT, WORLDS, open_group, reference_reduce
from ranks import Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg
from te_graph import _C

BY_SIZE = {world.id: world for world in WORLDS}
ranks = pytest.fixture(ranks_of, scope="module", params=[w for w in WORLDS if w.id != "gloo-3"])
several_ranks = pytest.fixture(ranks_of, scope="module", params=[BY_SIZE["gloo-3"], BY_SIZE["nccl-2"]])
peers = pytest.fixture(ranks_of, scope="module", params=[BY_SIZE["nccl-2"]])
PROMPT = 10.0  # seconds: no rank may wait for another one's set-up until its timeout ends


def is_last(rank: Rank) -> bool:
    return rank.rank == rank.world - 1


def draw(rank: Rank, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has."""
    return torch.randn(rank.world, *shape, device=rank.device)


def assert_works(rank: Rank, group: tg.PeerGroup) -> None:
    all_ranks = draw(rank, 1000)
    assert same_bits(tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks))


def gather_texts(rank: Rank, own: Any) -> list[Any]:
    """What each rank has, by rank."""
    found: list[Any] = [None] * rank.world
    dist.all_gather_object(found, own)
    return found


def same_error(rank: Rank, call: Callable[[], Any]) -> str:
    """The error that all ranks get from ``call``, soon."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    assert time.monotonic() - began < PROMPT
    texts = gather_texts(rank, str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def explode(*_: Any, **__: Any) -> None:
    raise OSError("injected")


def steps_of(rank: Rank) -> dict[str, tuple[Any, str]]:
    """By what errors call a step: what has to fail on a rank. On CPUs, and where there is one rank, steps are fewer."""
    if rank.world == 1:
        return {"looking for peers": (tg.PeerGroup, "_facts")}
    if rank.device == "cpu":
        return {
            "looking for peers": (tg.PeerGroup, "_facts"),
            "opening the group": (tg.PeerGroup, "_open_on_process_group"),
        }
    return {
        "looking for peers": (tg.PeerGroup, "_facts"),
        "allocating the symmetric buffer": (tg.PeerGroup, "_allocate"),
        "mapping the buffers of peers": (tg.PeerGroup, "_map"),
        "writing to peers": (tg.PeerGroup, "_write_to_peers"),
        "reading what peers wrote": (tg.PeerGroup, "_read_from_peers"),
        "opening the group": (tg.PeerGroup, "_open_on_peers"),
    }


def scenario_failing_step(rank: Rank) -> None:
    for step, (owner, name) in steps_of(rank).items():
        for culprit in range(rank.world):
            with pytest.MonkeyPatch.context() as patch:
                if rank.rank == culprit:
                    patch.setattr(owner, name, explode)
                error = same_error(rank, lambda: open_group(rank, name="tried twice"))
            assert error == f"PeerGroup: rank {culprit} failed while {step}: OSError: injected"
            # Nothing is left of what failed, not even its name.
            with open_group(rank, name="tried twice") as group:
                assert_works(rank, group)


def scenario_failing_measurement(rank: Rank) -> None:
    """Thresholds that cannot be measured, as here where there are no peers, leave no group behind."""
    set_up = tg.PeerGroup._set_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.PeerGroup, "_set_up", lambda self, tune: (set_up(self, False)[0], True))
        patch.setattr(tg.PeerGroup, "uses_peers", False)
        with pytest.raises(RuntimeError, match="tune: expected a group of peers"):
            open_group(rank, name="measured twice")
    with open_group(rank, name="measured twice") as group:
        assert_works(rank, group)


def scenario_taken_name(rank: Rank) -> None:
    """A name that one rank has in use already: an error on all."""
    with open_group(rank, name="taken") as group:
        with pytest.raises((ValueError, RuntimeError), match="expected a new name, got 'taken'"):
            open_group(rank, name="taken")
        assert_works(rank, group)
    # On one rank alone the name is taken.
    if rank.world > 1:
        blocker = _C.GroupHandle.local("half taken", torch.device(rank.device)) if is_last(rank) else None
        error = same_error(rank, lambda: open_group(rank, name="half taken"))
        assert f"rank {rank.world - 1} failed while opening the group" in error and "expected a new name" in error
        if blocker is not None:
            blocker.close()
        with open_group(rank, name="half taken") as group:
            assert_works(rank, group)


def scenario_unlike_options(rank: Rank) -> None:
    unlike: list[tuple[dict[str, Any], str]] = [
        ({"buffer_bytes": (4 if is_last(rank) else 2) << 20}, "buffer_bytes"),
        ({"on_timeout": "trap" if is_last(rank) else "raise"}, "on_timeout"),
        ({"max_sms": 8 if is_last(rank) else None}, "max_sms"),
        ({"name": "one" if is_last(rank) else "other"}, "name"),
    ]
    for options, what in unlike:
        error = same_error(rank, lambda options=options: open_group(rank, **options))
        assert f"expected the same {what} on all ranks, got " in error and f"on rank {rank.world - 1}" in error
    with open_group(rank) as group:
        assert_works(rank, group)


def scenario_many_groups(rank: Rank, times: int) -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    # All in all twice what the GPU has: were it not given back, there would be none. Others may use the GPU, too.
    buffer_bytes = 2 << 20
    if rank.device != "cpu":
        buffer_bytes *= torch.cuda.mem_get_info()[1] // times // (1 << 20)
    seen = []
    for turn in range(times):
        with open_group(rank, name="again", buffer_bytes=buffer_bytes) as group:
            assert_works(rank, group)
            assert group.name == "again"
        if turn >= 5:
            seen.append(resources())
    assert seen[-1] == seen[0], seen


def scenario_late_closing(rank: Rank) -> None:
    group = open_group(rank)
    assert_works(rank, group)
    began = time.monotonic()
    if is_last(rank):
        time.sleep(1.0)
    group.close()
    group.close()
    assert time.monotonic() - began > 0.9, "memory was given back before all ranks were done with it"
    with pytest.raises(ValueError, match=r"expected the name of a te_graph.PeerGroup"):
        tg.all_reduce(torch.ones(1, device=rank.device), group)


def scenario_names(rank: Rank) -> None:
    """Two groups over one process group, used in turn, have two names and keep apart."""
    own = dist.new_group()
    with open_group(rank, process_group=own) as first, open_group(rank, process_group=own) as second:
        assert (first.name, second.name) == (own.group_name, f"{own.group_name}.2")
        assert (first.rank, first.world_size) == (rank.rank, rank.world)
        for turn in range(6):
            assert_works(rank, first if turn % 3 else second)
        first.close()
        assert_works(rank, second)
    # Closed by an error, too.
    with contextlib.suppress(ZeroDivisionError), open_group(rank, name="by error"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), open_group(rank, name="by error") as group:
        group.close()
        raise ZeroDivisionError
    with open_group(rank, name="by error") as group:
        assert_works(rank, group)


def scenario_unwanted_peers(rank: Rank) -> None:
    """One rank alone does without peers: all do, and find the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        if is_last(rank):
            patch.setenv("TE_GRAPH_PEER", "0")
        with tg.PeerGroup(timeout=TIMEOUT) as group:
            assert gather_texts(rank, group.uses_peers) == [False] * rank.world
            assert_fallback(rank, group)


def scenario_failing_probe(rank: Rank) -> None:
    """Memory that one rank cannot map, or writes that do not come: all do without peers."""
    for name in ("_map", "_read_from_peers"):
        with pytest.MonkeyPatch.context() as patch:
            if is_last(rank):
                patch.setattr(tg.PeerGroup, name, lambda *_: "injected trouble")
            with tg.PeerGroup(timeout=TIMEOUT) as group:
                assert gather_texts(rank, group.uses_peers) == [False] * rank.world
                assert_fallback(rank, group)
    with open_group(rank) as group:
        assert_works(rank, group)


def assert_fallback(rank: Rank, group: tg.PeerGroup) -> None:
    for numel in (3 * rank.world, 50_000 * rank.world):
        all_ranks = draw(rank, numel).bfloat16()
        mine, total = all_ranks[rank.rank], reference_reduce(all_ranks)
        assert same_bits(tg.all_reduce(mine, group), total)
        assert same_bits(tg.reduce_scatter(mine, group), total.chunk(rank.world)[rank.rank])
        assert same_bits(tg.all_gather(mine, group), all_ranks.flatten())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = tg.all_reduce(mine, group)
    graph.replay()
    assert same_bits(out, total)
    with pytest.raises(RuntimeError, match="expected a group of GPUs that are peers"):
        _ = group.found_inf


def test_gpus_that_are_hidden_or_not_linked_are_no_peers(monkeypatch):
    """Why a rank does without peers, by what it sees of GPUs."""
    group = object.__new__(tg.PeerGroup)
    group.rank, group.device = 1, torch.device("cuda", 0)
    seen = ["GPU-b", "GPU-a"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=seen[number]))
    asked = []
    monkeypatch.setattr(_C, "has_peer_link", lambda *pair: asked.append(pair), raising=False)
    assert group._map([b""] * 2, ["GPU-a", "GPU-b"]) == "no NVLink between the GPUs of ranks 1 and 0"
    assert asked == [(0, 1)]
    reason = group._map([b""] * 3, ["GPU-c", "GPU-b", "GPU-a"])
    assert reason == "rank 1 does not see the GPU of rank 0: make all GPUs visible to all ranks"


def scenario_overlapping_groups(rank: Rank, seed: int) -> None:
    """Neighbours, each rank alone, and all: ranks are members of several groups and call each at other times."""
    lists = [[r, r + 1] for r in range(rank.world - 1)] + [[r] for r in range(rank.world)] + [[*range(rank.world)]]
    process_groups = [dist.new_group(members) for members in lists]
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(open_group_of(rank, members, own)) if rank.rank in members else None
            for members, own in zip(lists, process_groups, strict=True)
        ]
        order = random.Random(seed)
        for _ in range(60):
            number = order.choice([0, 0, 0, *range(len(lists))])
            all_ranks = draw(rank, order.choice([1, 100, 40_000]))
            if (group := groups[number]) is None:
                continue
            members = lists[number]
            got = tg.all_reduce(all_ranks[rank.rank], group)
            assert same_bits(got, reference_reduce(all_ranks[members])), members
            assert same_bits(tg.all_gather(all_ranks[rank.rank], group), all_ranks[members].flatten()), members
            assert (group.rank, group.world_size) == (members.index(rank.rank), len(members))
    others = [own for members, own in zip(lists, process_groups, strict=True) if rank.rank not in members]
    for own in others:
        with pytest.raises(ValueError, match="a process_group that this rank is in"):
            tg.PeerGroup(own)


def open_group_of(rank: Rank, members: list[int], process_group: dist.ProcessGroup) -> tg.PeerGroup:
    return open_group(Rank(members.index(rank.rank), len(members), rank.device), process_group=process_group)


# Options.

BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"buffer_bytes": 0}, "buffer_bytes of at least 1048576 as an int, got 0"),
    ({"buffer_bytes": (1 << 20) - 1}, "buffer_bytes of at least 1048576 as an int, got 1048575"),
    ({"timeout": 0}, "timeout in seconds above 0, got 0"),
    ({"timeout": -1.0}, "timeout in seconds above 0, got -1"),
    ({"timeout": float("nan")}, "timeout in seconds above 0, got nan"),
    ({"timeout": float("inf")}, "timeout in seconds above 0, got inf"),
    ({"on_timeout": "ignore"}, "on_timeout 'raise' or 'trap', got 'ignore'"),
    ({"watchdog": -1}, "watchdog in seconds, 0 for none, got -1"),
    ({"device": "meta"}, "device that the process group serves .*, got meta"),
    ({"process_group": "gloo"}, "process_group that this rank is in, got 'gloo'"),
]
WRONG_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"watchdog": float("nan")}, "watchdog in seconds, 0 for none, got nan"),
    ({"max_sms": 0}, "PeerGroup: expected max_sms to be a positive int or None, got 0"),
    ({"max_sms": True}, "PeerGroup: expected max_sms to be a positive int or None, got True"),
    ({"buffer_bytes": 2.5e6}, "PeerGroup: expected buffer_bytes .*, got 2500000"),
    ({"buffer_bytes": "64M"}, "PeerGroup: expected buffer_bytes .*, got '?64M"),
    ({"timeout": "long"}, "PeerGroup: expected timeout .*, got '?long"),
    ({"watchdog": None}, "PeerGroup: expected watchdog .*, got None"),
    ({"name": 3}, "PeerGroup: expected .*name.*, got 3"),
]


def scenario_bad_options(rank: Rank, bad: list[tuple[dict[str, Any], str]]) -> None:
    """The others hear of what one rank gave, at once, and the next group opens."""
    for options, words in bad:
        began = time.monotonic()
        if is_last(rank):
            with pytest.raises(ValueError, match=words):
                tg.PeerGroup(**options)
        elif "process_group" not in options:  # there they cannot be told
            with pytest.raises(RuntimeError, match=f"rank {rank.world - 1} failed while .*: ValueError: .*{words}"):
                open_group(rank)
        assert time.monotonic() - began < PROMPT
    with open_group(rank) as group:
        assert_works(rank, group)


def scenario_devices(rank: Rank) -> None:
    """A device is the same one by all of its names."""
    for device in (None, rank.device, torch.device(rank.device), "cpu:0" if rank.device == "cpu" else "cuda"):
        with open_group(rank, device=device) as group:
            assert_works(rank, group)


def test_a_step_that_fails_on_a_rank_is_the_same_error_on_all(ranks, seed):
    ranks.run(scenario_failing_step, seed)


def test_a_group_whose_thresholds_cannot_be_measured_is_closed(ranks, seed):
    ranks.run(scenario_failing_measurement, seed)


def test_a_name_is_taken_once(ranks, seed):
    ranks.run(scenario_taken_name, seed)


def test_ranks_that_want_other_groups_get_the_same_error(several_ranks, seed):
    several_ranks.run(scenario_unlike_options, seed)


def test_groups_open_and_close_many_times(ranks, seed):
    ranks.run(scenario_many_groups, seed, 50)


def test_closing_waits_for_all_ranks(several_ranks, seed):
    several_ranks.run(scenario_late_closing, seed)


def test_two_groups_on_one_process_group_keep_apart(ranks, seed):
    ranks.run(scenario_names, seed)


@pytest.mark.gpus_apart
def test_ranks_agree_to_do_without_peers_that_one_does_not_want(peers, seed):
    peers.run(scenario_unwanted_peers, seed)


@pytest.mark.gpus_apart
def test_ranks_agree_to_do_without_peers_that_one_cannot_reach(peers, seed):
    peers.run(scenario_failing_probe, seed)


def test_groups_may_overlap(several_ranks, seed):
    several_ranks.run(scenario_overlapping_groups, seed, seed)


def test_bad_options_are_named(ranks, seed):
    ranks.run(scenario_bad_options, seed, BAD_VALUES)


def test_a_device_has_several_names(ranks, seed):
    ranks.run(scenario_devices, seed)


def test_a_group_needs_a_process_group():
    with pytest.raises(ValueError, match=r"expected torch.distributed to be initialized, or a process_group"):
        tg.PeerGroup()


def test_options_of_a_wrong_kind_are_named(ranks, seed):
    ranks.run(scenario_bad_options, seed, WRONG_KINDS)


def test_the_former_name_of_buffer_bytes_works_and_warns(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with pytest.warns(DeprecationWarning, match="slab_bytes is now called buffer_bytes") as caught:
            group = tg.PeerGroup(slab_bytes=3 << 20)
        with group:
            assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
            assert group.buffer_bytes == 3 << 20
            with pytest.warns(DeprecationWarning, match="slab_bytes is now called buffer_bytes"):
                assert group.slab_bytes == 3 << 20
        with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="expected buffer_bytes of at least"):
            tg.PeerGroup(slab_bytes=1)
    finally:
        torch.distributed.destroy_process_group()
