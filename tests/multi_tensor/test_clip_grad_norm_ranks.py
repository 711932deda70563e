"""Norm and clip of gradients that several ranks share: process groups, DTensor, FSDP2.

All ranks draw the same numbers, so each knows the whole list: its norm and its clipped values, computed in one piece,
are the reference. Where parts begin at multiples of a chunk, not a bit may differ.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, ranks_of
from references import clipped_to
from tensor_lists import CHUNK, all_same_bits, copies, no_sync, random_list, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan
SIZES = (1, 7, CHUNK + 1, 0, 2 * CHUNK + 5, 300)
MIXED = (torch.float32, torch.bfloat16, torch.float16)
POWERS = (0.0, 1.0, 2.0, 3.0, INF)


def kind(rank: Rank) -> str:
    return rank.device.partition(":")[0]


def parameters_of(gradients: list[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


# Process groups.


def scenario_lists(rank: Rank) -> None:
    """Each rank has some of the tensors, one rank may have more than the other."""
    whole = random_list(SIZES, MIXED, rank.device)
    mine = whole[rank.rank :: rank.world]
    for p in POWERS:
        parameters = parameters_of(mine)
        with no_sync(kind(rank)):
            norm = tg.clip_grad_norm_(parameters, 1.0, p, process_groups=[dist.group.WORLD])
            total = tg.get_total_norm(mine, p, process_groups=(dist.group.WORLD,))
            other = tg.get_global_norm_of_tensors(mine, p, process_groups=(dist.group.WORLD,))
        expected = ops.multi_tensor_norm(whole, p)
        assert same_bits(norm, expected) and same_bits(total, expected) and same_bits(other, expected), p
        wanted = clipped_to(whole, 1.0, p)[rank.rank :: rank.world]
        assert all_same_bits([parameter.grad for parameter in parameters], wanted), p
    tensors = copies(mine)
    norm = tg.clip_tensors_by_global_norm(tensors, 1.0, process_groups=(dist.group.WORLD,))
    assert same_bits(norm, ops.multi_tensor_norm(whole))
    assert all_same_bits(tensors, clipped_to(whole, 1.0)[rank.rank :: rank.world])


def scenario_slices(rank: Rank) -> None:
    """Each rank has a part of every tensor, which begins at a chunk's border."""
    whole = [torch.randn(4 * CHUNK, device=rank.device), torch.randn(2 * CHUNK + 3, device=rank.device).bfloat16()]
    mine = [tensor.split(2 * CHUNK if rank.world == 2 else tensor.numel())[rank.rank] for tensor in whole]
    for p in POWERS:
        norm = tg.get_total_norm(mine, p, process_groups=[dist.group.WORLD])
        assert same_bits(norm, ops.multi_tensor_norm(whole, p)), p


def scenario_fp64(rank: Rank) -> None:
    whole = [t * 1e60 for t in random_list(SIZES, [torch.float64], rank.device)]
    mine = whole[rank.rank :: rank.world]
    assert same_bits(tg.get_total_norm(mine, process_groups=[dist.group.WORLD]), ops.multi_tensor_norm(whole))


def scenario_several_groups(rank: Rank) -> None:
    """A group that holds every rank alone, and the group of all: reductions one after the other."""
    alone = [dist.new_group([index]) for index in range(rank.world)][rank.rank]
    whole = random_list(SIZES, MIXED, rank.device)
    mine = whole[rank.rank :: rank.world]
    for p in POWERS:
        for groups in ([alone, dist.group.WORLD], [dist.group.WORLD, alone]):
            assert same_bits(tg.get_total_norm(mine, p, process_groups=groups), ops.multi_tensor_norm(whole, p)), p
        assert same_bits(tg.get_total_norm(mine, p, process_groups=[alone]), ops.multi_tensor_norm(mine, p)), p


def scenario_a_rank_without_gradients(rank: Rank) -> None:
    """It takes part, and gets the norm on the group's device."""
    whole = random_list(SIZES, MIXED, rank.device)
    mine = whole if rank.rank == 0 else []
    for p in POWERS:
        norm = tg.clip_grad_norm_(parameters_of(mine), 1e9, p, process_groups=[dist.group.WORLD])
        assert same_bits(norm, ops.multi_tensor_norm(whole, p)), p
    for world in (dist.group.WORLD, None):  # torch takes None for the default group
        norm = tg.clip_grad_norm_(parameters_of(mine), 1e9, process_groups=[world])
        assert same_bits(norm, tg.get_total_norm(mine, process_groups=[world]))
        assert same_bits(norm, ops.multi_tensor_norm(whole))
        empty = tg.clip_grad_norm_([], 1.0, process_groups=[world])
        assert (empty.item(), empty.dtype, empty.device) == (0.0, torch.float32, torch.device(rank.device))


def scenario_not_finite_on_one_rank(rank: Rank) -> None:
    for value in (INF, NAN):
        gradients = random_list(SIZES, MIXED, rank.device)
        if rank.rank == rank.world - 1:
            gradients[2][5] = value
        parameters, found_inf = parameters_of(gradients), torch.zeros(1, device=rank.device)
        norm = tg.clip_grad_norm_(parameters, 1.0, process_groups=[dist.group.WORLD], found_inf=found_inf)
        assert found_inf.item() == 1 and not norm.isfinite()
        assert all_same_bits([parameter.grad for parameter in parameters], gradients)
        with pytest.raises(RuntimeError, match="non-finite"):
            tg.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, process_groups=[dist.group.WORLD])
        assert all_same_bits([parameter.grad for parameter in parameters], gradients)


# DTensor.


def sharded(gradient: Tensor, mesh: object, placements: list[object]) -> nn.Parameter:
    """A DTensor parameter whose gradient [...] lies on ``mesh``."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient.clone(), mesh, placements)
    return parameter


def scenario_dtensor(rank: Rank) -> None:
    """Shards count once, replicas once, and the norm is an ordinary tensor."""
    mesh = init_device_mesh(kind(rank), (rank.world,))
    whole = [torch.randn(4, CHUNK, device=rank.device), torch.randn(2 * rank.world, 2 * CHUNK, device=rank.device)]
    whole += [torch.randn(9, device=rank.device), torch.randn(3, 5, device=rank.device)]
    placements = [[Shard(0)], [Shard(0)], [Replicate()], [Replicate()]]
    for p in POWERS:
        parameters = [sharded(grad, mesh, where) for grad, where in zip(whole, placements, strict=True)]
        norm = tg.clip_grad_norm_(parameters, 1.0, p)
        assert type(norm) is Tensor and same_bits(norm, ops.multi_tensor_norm(whole, p)), p
        for parameter, want in zip(parameters, clipped_to(whole, 1.0, p), strict=True):
            assert isinstance(parameter.grad, DTensor) and same_bits(parameter.grad.full_tensor(), want), p
        total = tg.get_total_norm([sharded(g, mesh, w).grad for g, w in zip(whole, placements, strict=True)], p)
        assert type(total) is Tensor and same_bits(total, norm), p


def scenario_uneven_dtensor(rank: Rank) -> None:
    """Shards that begin anywhere, and are empty on a rank, sum up to the norm within its tolerance."""
    mesh = init_device_mesh(kind(rank), (rank.world,))
    whole = [torch.randn(7, 1000, device=rank.device), torch.randn(1, 50, device=rank.device)]
    whole += [torch.randn(11, 13, device=rank.device)]
    parameters = [sharded(grad, mesh, [Shard(dim)]) for grad, dim in zip(whole, (0, 0, 1), strict=True)]
    norm = tg.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(norm, ops.multi_tensor_norm(whole), rtol=1e-6, atol=0)
    for parameter, want in zip(parameters, clipped_to(whole, 1.0), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), want, rtol=3e-6, atol=0)


def scenario_meshes(rank: Rank) -> None:
    """Two mesh dimensions, one of them of replicas; other meshes and plain tensors in the same list."""
    plane = init_device_mesh(kind(rank), (rank.world, 1), mesh_dim_names=("shard", "replicate"))
    line = init_device_mesh(kind(rank), (rank.world,))
    whole = [torch.randn(2 * rank.world, CHUNK, device=rank.device) for _ in range(4)]
    for p in POWERS:
        parameters = [
            sharded(whole[0], plane, [Shard(0), Replicate()]),
            sharded(whole[1], plane, [Replicate(), Shard(0)]),
            sharded(whole[2], line, [Shard(0)]),
            *parameters_of(whole[3:]),
        ]
        norm = tg.clip_grad_norm_(parameters, 1.0, p)
        assert type(norm) is Tensor and same_bits(norm, ops.multi_tensor_norm(whole, p)), p


def scenario_partial_sums(rank: Rank) -> None:
    mesh = init_device_mesh(kind(rank), (rank.world,))
    whole = torch.randn(4, 5, device=rank.device)
    parameter = sharded(whole, mesh, [Replicate()])
    parameter.grad = DTensor.from_local(whole, mesh, [Partial()])
    with pytest.raises(ValueError, match=r"[Pp]artial"):
        tg.clip_grad_norm_([parameter], 1.0)


def scenario_accumulated(rank: Rank) -> None:
    """The norm of what update_hp_grads wrote, over all ranks, without reading it again; DTensors by their shards."""
    mesh = init_device_mesh(kind(rank), (rank.world,))
    whole = [torch.randn(2 * rank.world, CHUNK, device=rank.device).bfloat16() for _ in range(3)]
    low = [sharded(gradient, mesh, [Shard(0)]) for gradient in whole]
    high = [distribute_tensor(torch.ones(grad.shape, device=rank.device), mesh, [Shard(0)]) for grad in whole]
    sum_squares = tg.new_sum_squares(rank.device)
    tg.update_hp_grads(low, high, sum_squares=sum_squares)
    expected = [1 + gradient.float() for gradient in whole]
    assert all(same_bits(h.full_tensor(), want) for h, want in zip(high, expected, strict=True))
    assert not any(parameter.grad.full_tensor().any() for parameter in low)
    norm = tg.norm_of_sum_squares(sum_squares, [dist.group.WORLD])
    assert same_bits(norm, ops.multi_tensor_norm(expected)) and same_bits(tg.get_total_norm(high), norm)


def scenario_faulty_part(rank: Rank, fault: str) -> None:
    """Of a plain tensor and a DTensor, which are scaled one after the other, the second cannot be."""
    mesh = init_device_mesh(kind(rank), (rank.world,))
    plain, total = torch.ones(4, device=rank.device), torch.tensor(9.0, device=rank.device)
    local = {
        "integers": torch.ones(4, dtype=torch.int64, device=rank.device),
        "met twice": plain,
        "has the norm": torch.full((4,), 9.0, device=rank.device),
        "overlapping elements": torch.ones(1, device=rank.device).expand(4),
    }[fault]
    tensors = [plain, DTensor.from_local(local, mesh, [Shard(0)])]
    norm = local[2] if fault == "has the norm" else total
    before = copies([plain, local])
    words = r"expected tensors\[0\]|expected total_norm|expected tensors of dtype|twice"
    with pytest.raises((TypeError, ValueError), match=f"^multi_tensor_clip_: .*({words})"):
        tg.clip_tensors_by_global_norm(tensors, 1.0, global_norm=norm)
    assert all_same_bits([plain, local], before)


def scenario_dtensor_and_groups(rank: Rank) -> None:
    """A pipeline stage of its own on each rank, whose DTensors lie on a mesh of that rank alone."""
    mesh = init_device_mesh(kind(rank), (rank.world, 1), mesh_dim_names=("pipeline", "data"))["data"]
    whole = [torch.randn(CHUNK + 3, device=rank.device) for _ in range(2 * rank.world)]
    mine = [sharded(grad, mesh, [Shard(0)]) for grad in whole[rank.rank :: rank.world]]
    norm = tg.clip_grad_norm_(mine, 1.0, process_groups=[dist.group.WORLD])
    assert type(norm) is Tensor and same_bits(norm, ops.multi_tensor_norm(whole))


def scenario_fsdp2(rank: Rank) -> None:
    """Ten steps of an MLP under fully_shard, beside a copy that each rank trains on all batches."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 33), nn.GELU(), nn.Linear(33, 1)).to(rank.device)
    replica = copy.deepcopy(model)
    mesh = init_device_mesh(kind(rank), (rank.world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, replica)]
    for step in range(10):
        batches = torch.randn(rank.world, 5, 16, device=rank.device)
        for net, batch in ((model, batches[rank.rank]), (replica, batches.flatten(0, 1))):
            net.zero_grad()
            net(batch).square().mean().mul(1000).backward()
        p = (2.0, 1.0, INF)[step % 3]
        norm = tg.clip_grad_norm_(model.parameters(), 1.0, p)
        expected = torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0, p)
        assert type(norm) is Tensor and norm.item() > 1
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
        for mine, other in zip(model.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()


def scenario_flags_without_gradients(rank: Rank) -> None:
    """The first rank alone has a gradient, which is not finite in half of the cases."""
    for value in (1.0, INF, NAN):
        gradients = [torch.full((5,), value, device=rank.device)] if rank.rank == 0 else []
        parameters = parameters_of(gradients) or [nn.Parameter(torch.zeros(3, device=rank.device))]
        found_inf = torch.zeros((), device=rank.device)
        with no_sync(kind(rank)):
            tg.clip_grad_norm_(parameters, 1.0, process_groups=[dist.group.WORLD], found_inf=found_inf)
        assert found_inf.item() == float(not math.isfinite(value))


@pytest.mark.parametrize("fault", ["integers", "met twice", "has the norm", "overlapping elements"])
def test_no_part_is_written_where_another_is_at_fault(ranks, seed, fault):
    ranks.run(scenario_faulty_part, seed, fault)


def test_each_rank_has_some_of_the_tensors(ranks, seed):
    ranks.run(scenario_lists, seed)


def test_each_rank_has_a_slice_of_every_tensor(ranks, seed):
    ranks.run(scenario_slices, seed)


def test_norms_of_fp64_are_reduced_in_their_own_range(ranks, seed):
    ranks.run(scenario_fp64, seed)


def test_groups_are_reduced_one_after_the_other(ranks, seed):
    ranks.run(scenario_several_groups, seed)


def test_a_rank_without_gradients_takes_part(ranks, seed):
    ranks.run(scenario_a_rank_without_gradients, seed)


def test_flags_of_ranks_without_gradients_are_set_as_well(ranks, seed):
    ranks.run(scenario_flags_without_gradients, seed)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite(ranks, seed):
    ranks.run(scenario_not_finite_on_one_rank, seed)


def test_dtensors_have_the_norm_of_the_whole_as_a_plain_tensor(ranks, seed):
    ranks.run(scenario_dtensor, seed)


def test_dtensors_with_uneven_and_empty_shards(ranks, seed):
    ranks.run(scenario_uneven_dtensor, seed)


def test_dtensors_of_several_meshes_and_plain_tensors_in_one_list(ranks, seed):
    ranks.run(scenario_meshes, seed)


def test_dtensors_and_process_groups_together(ranks, seed):
    ranks.run(scenario_dtensor_and_groups, seed)


def test_dtensors_that_are_partial_sums_are_refused(ranks, seed):
    ranks.run(scenario_partial_sums, seed)


def test_the_norm_of_what_was_accumulated_is_reduced_over_ranks(ranks, seed):
    ranks.run(scenario_accumulated, seed)


def test_fsdp2_trains_as_one_process_does(ranks, seed):
    ranks.run(scenario_fsdp2, seed)
