"""Memory pools in the symmetric buffer: outputs there are written by peers, and every value is as without them."""

import pytest
import torch
from collective_ranks import FOUR_GPUS, open_group, reference_reduce
from ranks import Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

WORLDS = [
    pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
    FOUR_GPUS,
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
NUMEL = 5 << 20  # of bf16: large enough to go by tiles


def new(group: tg.PeerGroup, numel: int, in_pool: bool) -> Tensor:
    if not in_pool:
        return torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=group.device)
    with torch.cuda.use_mem_pool(group.mem_pool()):
        return torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=group.device)


def scenario_outputs(rank: Rank, places: list[bool]) -> None:
    """``places``: which ranks have their outputs in the pool. Ops follow each other with no synchronization."""
    all_ranks = torch.randn(rank.world, NUMEL, device=rank.device).bfloat16()
    mine, total = all_ranks[rank.rank], reference_reduce(all_ranks)
    in_pool = places[rank.rank % len(places)]
    with open_group(rank, buffer_bytes=256 << 20) as group:
        whole, part, same = (new(group, n, in_pool) for n in (NUMEL * rank.world, NUMEL // rank.world, NUMEL))
        for _ in range(5):
            tg.all_gather_out(whole, mine, group)
            tg.reduce_scatter_out(part, mine, group)
            tg.all_reduce_out(same, mine, group)
            assert same_bits(whole, all_ranks.flatten())
            assert same_bits(part, total.chunk(rank.world)[rank.rank])
            assert same_bits(same, total)
        tg.all_reduce_(same.copy_(mine), group)
        assert same_bits(same, total)
        group.check()


def scenario_graph(rank: Rank) -> None:
    """The pool is that of a graph: all that the capture makes lies in the symmetric buffer."""
    all_ranks = torch.randn(rank.world, NUMEL, device=rank.device).bfloat16()
    with open_group(rank, buffer_bytes=512 << 20) as group:
        x = all_ranks[rank.rank].clone()
        graph = torch.cuda.CUDAGraph()
        pool = group.mem_pool()
        with torch.cuda.graph(graph, pool=pool.id, capture_error_mode="thread_local"):
            gathered = tg.all_gather(x * 2, group)
        for i in range(5):
            x.copy_(all_ranks[rank.rank] + i)
            graph.replay()
            assert same_bits(gathered, ((all_ranks + i) * 2).flatten())
        if group.uses_peers:
            buffer = group._buffer.memory()
            assert buffer.data_ptr() <= gathered.data_ptr() < buffer.data_ptr() + buffer.numel()


def scenario_exhausted(rank: Rank) -> None:
    with open_group(rank, buffer_bytes=64 << 20) as group:
        if not group.uses_peers:
            return
        kept = new(group, 8 << 20, True)
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"symmetric buffer of group {group.name} is exhausted: its pool has"
        ):
            new(group, 12 << 20, True)
        del kept
        again = new(group, 8 << 20, True).zero_()
        assert tg.all_reduce(again, group).count_nonzero().item() == 0


@pytest.mark.parametrize("places", [[True], [True, False], [False, True]], ids=str)
def test_outputs_in_pools_have_the_values_of_others(ranks, seed, places):
    ranks.run(scenario_outputs, seed, places)


def test_a_graph_may_have_its_memory_in_the_symmetric_buffer(ranks, seed):
    ranks.run(scenario_graph, seed)


def test_an_exhausted_buffer_is_an_error_until_memory_is_freed(ranks, seed):
    ranks.run(scenario_exhausted, seed)
