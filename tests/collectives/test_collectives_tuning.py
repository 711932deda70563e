"""Thresholds between algorithms: the decision on times that are given, and measuring on GPUs."""

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from collective_ranks import FOUR_GPUS, open_group, reference_reduce
from ranks import Rank, ranks_of
from tensor_lists import same_bits

import te_graph as tg
from te_graph.collectives import tuning
from te_graph.collectives.tuning import ALL, SIZES, Operation, Tuning, threshold

WORLDS = [pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu), FOUR_GPUS]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)


def reference_threshold(sizes: list[int], below: list[float], above: list[float]) -> int:
    """All choices tried, in order."""
    best, least = 0, float("inf")
    for choice in [sizes[0] - 1, *sizes[:-1], ALL]:
        taken = [b if size <= choice else a for size, b, a in zip(sizes, below, above, strict=True)]
        loss = sum(t / min(b, a) for t, b, a in zip(taken, below, above, strict=True))
        if loss < least - 1e-12:
            best, least = choice, loss
    return best


def test_the_threshold_is_where_the_other_algorithm_begins_to_win():
    sizes = [1, 2, 4, 8]
    assert threshold(sizes, [1, 2, 4, 8], [3, 3, 3, 3]) == 2
    assert threshold(sizes, [1, 1, 1, 1], [3, 3, 3, 3]) == ALL
    assert threshold(sizes, [3, 3, 3, 3], [1, 1, 1, 1]) == 0
    # One measurement that is off decides nothing.
    assert threshold(sizes, [1, 9, 1, 8], [3, 8, 3, 3]) == 4


def test_the_threshold_loses_least(rng):
    for _ in range(500):
        below, above = ([rng.uniform(1, 10) for _ in SIZES] for _ in range(2))
        assert threshold(SIZES, below, above) == reference_threshold(list(SIZES), below, above)


class ModelGroup:
    """What it is set to, and what a call takes by that on one rank. Another rank is faster, and finds the opposite."""

    def __init__(self, world_size: int, max_sms: int | None = None) -> None:
        self.world_size, self.max_sms = world_size, max_sms
        self._handle = self._rendezvous = self

    def set_tuning(self, **thresholds: int) -> None:
        self.now = Tuning(**thresholds)

    def step(
        self, what: str, act: Callable[[], list[float]], parse: Callable[[list[float]], list[float]]
    ) -> list[list[float]]:
        times = act()
        return [parse(answer) for answer in (times, [1 / time for time in times])]

    def milliseconds(self, nbytes: int, operation: Operation) -> float:
        """Lines pay by size, words and tiles at the start; so do two steps."""
        if operation is tuning._all_gather:
            return 1.25 * nbytes if nbytes <= self.now.gather_ll128_bytes else nbytes + (3 << 17)
        steps = nbytes if nbytes <= self.now.one_shot_bytes else nbytes / 2 + (3 << 19)
        return steps + (nbytes / 4 if nbytes <= self.now.ll128_bytes else 3 << 15)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_thresholds_are_those_of_what_was_measured(monkeypatch, world_size):
    group = ModelGroup(world_size)
    monkeypatch.setattr(tuning, "_measure", ModelGroup.milliseconds)
    assert tuning.tune(group) == group.now == Tuning(1 << 21, 1 << 18, 1 << 20, 128)


@pytest.mark.parametrize(("max_sms", "blocks"), [(1, 1), (16, 16), (17, 16), (127, 64), (128, 128), (10**9, 128)])
def test_measured_groups_take_no_more_multiprocessors_than_they_may(monkeypatch, max_sms, blocks):
    group = ModelGroup(2, max_sms)
    monkeypatch.setattr(tuning, "_measure", ModelGroup.milliseconds)
    assert tuning.tune(group).blocks == group.now.blocks == blocks


def scenario_few_blocks(rank: Rank) -> None:
    all_ranks = torch.randn(rank.world, 3 << 20, device=rank.device).bfloat16()
    for max_sms, blocks in ((1, 1), (5, 4)):
        with open_group(rank, max_sms=max_sms) as group:
            if group.uses_peers:
                assert group._handle.tuning()[-1] == blocks
            for numel in (1000, 1 << 20, 3 << 20):
                mine = all_ranks[rank.rank, :numel]
                assert same_bits(tg.all_reduce(mine, group), reference_reduce(all_ranks[:, :numel]))
                assert same_bits(tg.all_gather(mine, group), all_ranks[:, :numel].reshape(-1))


def test_groups_of_few_multiprocessors_have_the_same_bits(ranks, seed):
    ranks.run(scenario_few_blocks, seed)


def scenario_tune(rank: Rank) -> None:
    with open_group(rank, tune=True) as group:
        first, again = group._handle.tuning(), group.tune()
        assert group._handle.tuning() == astuple(again)
        found = group._rendezvous.step("comparing", lambda: [first, astuple(again)])
        assert all(of_rank == found[0] for of_rank in found)
        all_ranks = torch.randn(rank.world, 3 << 20, device=rank.device).bfloat16()
        for numel in (1000, 1 << 20, 3 << 20):
            got = tg.all_reduce(all_ranks[rank.rank, :numel], group)
            assert same_bits(got, reference_reduce(all_ranks[:, :numel]))


def test_measuring_leaves_all_ranks_with_the_same_thresholds(ranks, seed):
    ranks.run(scenario_tune, seed)


def test_a_group_without_peers_has_nothing_to_tune(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with tg.PeerGroup(tune=True) as group, pytest.raises(RuntimeError, match=r"tune: expected a group of peers"):
            group.tune()
    finally:
        torch.distributed.destroy_process_group()
