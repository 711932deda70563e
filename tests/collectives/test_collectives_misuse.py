"""Misuse of groups beside failures and mismatches: what happens is in the table of docs/design/collectives.md.

What a failure looks like is in failed_groups.py. Where misuse is not seen, the numbers that come of it are those
of the operations that met.
"""

import contextlib
import time
from collections.abc import Iterator
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from collective_ranks import capture, open_group, reference_reduce
from failed_groups import SEVERAL, TIMEOUT, assert_aborted, draw, error_of, finish, is_cpu, is_last, short_lived
from ranks import Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=SEVERAL)


@contextlib.contextmanager
def own_process_group(rank: Rank) -> Iterator[dist.ProcessGroup | None]:
    """On CPUs one that no other test uses, for gloo closes connections that were late."""
    own = dist.new_group() if is_cpu(rank) else None
    yield own
    dist.barrier()
    if own is not None:
        dist.destroy_process_group(own)


def all_at_once(rank: Rank, group: tg.PeerGroup) -> None:
    """An operation that is over on all ranks when this returns."""
    all_ranks = draw(rank, 100)
    assert same_bits(tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks))
    dist.barrier()
    finish(rank)


def scenario_raises(rank: Rank) -> None:
    """The last rank leaves the group by an error of its own, while the others wait for it."""
    x = torch.ones(100, device=rank.device)
    with own_process_group(rank) as own:
        if is_last(rank):
            with pytest.raises(ZeroDivisionError), open_group(rank, process_group=own, timeout=TIMEOUT) as group:
                all_at_once(rank, group)
                raise ZeroDivisionError
            return
        with open_group(rank, process_group=own, timeout=TIMEOUT) as group:
            all_at_once(rank, group)
            error = error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert f"on rank {rank.rank} in operation 2, all_reduce (sum) of 100 Float" in error
            assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_closed_on_one_rank(rank: Rank) -> None:
    x = torch.ones(100, device=rank.device)
    with own_process_group(rank) as own:
        group = open_group(rank, process_group=own, timeout=TIMEOUT)
        all_at_once(rank, group)
        if not is_last(rank):
            error = error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert f"on rank {rank.rank} in operation 2, all_reduce (sum) of 100 Float" in error
        group.close()


def scenario_nothing(rank: Rank) -> None:
    """The last rank has no elements: on a GPU it does not take part, so the others wait in vain."""
    with short_lived(rank) as group:
        x = torch.ones(0 if is_last(rank) else 100, device=rank.device)
        if is_cpu(rank) or not is_last(rank):
            error = error_of(rank, group, lambda: tg.all_reduce(x, group))
            assert f"on rank {rank.rank} in operation 1, all_reduce (sum) of {x.numel()} Float: " in error
            assert ("but rank " if is_cpu(rank) else f"no data from rank {rank.world - 1}") in error
        else:
            assert tg.all_reduce(x, group).numel() == 0
        dist.barrier()
        if not is_cpu(rank) and is_last(rank):
            error_of(rank, group, lambda: tg.all_reduce(torch.ones(100, device=rank.device), group))
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_two_groups(rank: Rank) -> None:
    """Rank 0 takes two groups over one process group in another order than the others. On GPUs the one that waits
    longest may find the others at last."""
    x = torch.ones(100, device=rank.device)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(own_process_group(rank))
        pair = [stack.enter_context(open_group(rank, process_group=own, timeout=TIMEOUT)) for _ in range(2)]
        errors = []
        for group in pair if rank.rank == 0 else reversed(pair):
            try:
                got = tg.all_reduce(x, group)
                finish(rank)
                group.check()
            except RuntimeError as error:
                assert f"group {group.name} was aborted on rank {rank.rank} in operation 1" in str(error)
                errors.append(str(error))
            else:
                assert (got == rank.world).all()
        assert len(errors) == 2 if is_cpu(rank) else errors
        assert all(("of another group of this process group" in error) == is_cpu(rank) for error in errors)
        dist.barrier()


def scenario_replays_of_unlike_operations(rank: Rank) -> None:
    """Graphs that rank 0 replays in another order than the others."""
    with short_lived(rank) as group:
        numbers = [draw(rank, numel)[rank.rank] for numel in (100, 200)]
        graphs = [capture(rank, lambda x=x: tg.all_reduce(x, group))[0] for x in numbers]
        finish(rank)
        first = graphs[0 if rank.rank == 0 else 1]
        assert f"was aborted on rank {rank.rank} in operation " in error_of(rank, group, first.replay)
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_replays_of_alike_operations(rank: Rank) -> None:
    """Not seen: graphs that are replayed together are added."""
    with short_lived(rank) as group:
        numbers = [draw(rank, 100) for _ in range(2)]
        captured = [capture(rank, lambda x=x: tg.all_reduce(x[rank.rank], group)) for x in numbers]
        finish(rank)
        orders = [(0, 1) if one == 0 else (1, 0) for one in range(rank.world)]
        for which in orders[rank.rank]:
            captured[which][0].replay()
        finish(rank)
        group.check()
        for turn, which in enumerate(orders[rank.rank]):
            met = torch.stack([numbers[orders[one][turn]][one] for one in range(rank.world)])
            assert same_bits(captured[which][1], reference_reduce(met))


def refused_on_the_last_rank(rank: Rank, group: tg.PeerGroup, numbers: Tensor) -> Tensor | None:
    """The sum of ``numbers`` [world, n]; None on the last rank, which is refused before anything is sent."""
    if not is_last(rank):
        return tg.all_reduce(numbers[rank.rank], group)
    with pytest.raises((TypeError, ValueError), match=r"^all_reduce: expected reduction"):
        tg.all_reduce(numbers[rank.rank], group, "product")
    return None


def scenario_passes_over_what_is_refused(rank: Rank) -> None:
    """Not seen: the last rank's next operation meets the present one of the others."""
    with short_lived(rank) as group:
        first, second = draw(rank, 100), draw(rank, 100)
        got = refused_on_the_last_rank(rank, group, first)
        if got is None:
            got = tg.all_reduce(second[rank.rank], group)
        finish(rank)
        group.check()
        assert same_bits(got, reference_reduce(torch.cat([first[:-1], second[-1:]])))


def scenario_aborts_after_what_is_refused(rank: Rank) -> None:
    with short_lived(rank) as group:
        numbers = draw(rank, 100)
        if is_last(rank):
            assert refused_on_the_last_rank(rank, group, numbers) is None
            group.abort()
        else:
            error_of(rank, group, lambda: refused_on_the_last_rank(rank, group, numbers))
        dist.barrier()
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_closes_in_another_order(rank: Rank) -> None:
    with own_process_group(rank) as own:
        groups = [open_group(rank, process_group=own) for _ in range(2)]
        if is_last(rank):  # waits until the others, which wait in vain, close the second group
            groups[1].close()
            groups[0].close()
            return
        groups[0]._rendezvous.timeout = 0.5
        with TestCase().assertLogs("te_graph", "WARNING") as log:
            groups[0].close()
        groups[1].close()
        assert f"PeerGroup {groups[0].name}: closed without the other ranks" in log.output[0]
        assert "did not arrive within 0.5 s while closing the group" in log.output[0]


def scenario_timeout_below_a_millisecond(rank: Rank) -> None:
    """The last rank comes late."""
    with short_lived(rank, timeout=1e-9) as group:
        if is_last(rank):
            time.sleep(0.5)
            return
        error = error_of(rank, group, lambda: tg.all_reduce(torch.ones(3, device=rank.device), group))
        assert "1ms" in error or not is_cpu(rank)


def scenario_reopened(rank: Rank) -> None:
    """After a failure another group works, on gloo over a process group whose connections are new."""
    for turn in range(3):
        with short_lived(rank) as group:
            all_at_once(rank, group)
            if rank.rank == turn % rank.world:
                group.abort()
            dist.barrier()
            error_of(rank, group, lambda group=group: tg.all_reduce(torch.ones(1, device=rank.device), group))
            dist.barrier()


def test_a_rank_that_leaves_by_an_error_is_an_error_on_the_others(ranks, seed):
    ranks.run(scenario_raises, seed)


def test_a_group_that_one_rank_has_closed_is_an_error_on_the_others(ranks, seed):
    ranks.run(scenario_closed_on_one_rank, seed)


def test_a_rank_without_elements_is_an_error(ranks, seed):
    ranks.run(scenario_nothing, seed)


def test_groups_that_ranks_take_in_another_order_are_an_error(ranks, seed):
    ranks.run(scenario_two_groups, seed)


def test_replays_in_another_order_are_an_error_where_their_operations_differ(ranks, seed):
    ranks.run(scenario_replays_of_unlike_operations, seed)


def test_replays_in_another_order_are_added_where_their_operations_are_alike(ranks, seed):
    ranks.run(scenario_replays_of_alike_operations, seed)


def test_documented_limit_a_rank_that_passes_over_what_is_refused_is_one_operation_ahead(ranks, seed):
    ranks.run(scenario_passes_over_what_is_refused, seed)


def test_a_rank_that_is_refused_ends_the_group_by_abort(ranks, seed):
    ranks.run(scenario_aborts_after_what_is_refused, seed)


def test_groups_that_ranks_close_in_another_order_are_named_in_the_log(ranks, seed):
    ranks.run(scenario_closes_in_another_order, seed)


def test_a_timeout_below_a_millisecond_is_not_none_at_all(ranks, seed):
    ranks.run(scenario_timeout_below_a_millisecond, seed)


def test_after_a_failure_another_group_works(ranks, seed):
    ranks.run(scenario_reopened, seed)
