"""Ranks in two dimensions: tensor parallelism beside data parallelism, and replicas of shards."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch
import torch.distributed as dist
from flat_models import Model, assert_in_buffers, count_as_reduced, gradients_of, trained
from ranks import Rank, ranks_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_graph as tg
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 4), id="gloo-2x2"),
    pytest.param(("cuda", 4), id="nccl-2x2", marks=pytest.mark.multi_gpu(4)),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
SHARDS = ["none", "optimizer"]


class Parallel(nn.Module):
    """Layers of which ranks have parts, and what all have: norms, a bias, a head that is tied, a scalar."""

    def __init__(self, group: tg.PeerGroup, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 96, device=device)
        self.mlp = tg.LayerNormMLP(96, 302, device=device, set_parallel_mode=True, tp_group=group)
        self.own = nn.Parameter(torch.empty(3, 8191, device=device))
        self.own.tensor_model_parallel = True  # as Megatron-LM marks its own
        self.scalar = nn.Parameter(torch.zeros((), device=device))
        self.head = nn.Linear(96, 97, device=device)
        self.head.weight = self.embedding.weight


SPLIT = {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "own"}


def whole_gradient(name: str, shape: torch.Size, part: int) -> Tensor:  # [...]
    """Of part ``part`` of what is split, and the same for all parts of what is not."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + part)
    return torch.randn(shape, generator=generator)


def groups_of(rank: Rank) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Of tensor parallelism, of data parallelism, and of this rank."""
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    alone = [dist.new_group([one]) for one in range(rank.world)]
    return tensor[rank.rank // 2], data[rank.rank % 2], alone[rank.rank]


def scenario_norm(rank: Rank) -> None:
    """What is split, replicated or tied counts once, with the same bits however ranks share the gradients."""
    tensor, data, alone = groups_of(rank)
    part = rank.rank % 2
    with tg.PeerGroup(tensor) as tp_group:
        first = Parallel(tp_group, rank.device)
        assert {name for name, one in first.named_parameters() if getattr(one, "tensor_model_parallel", False)} == SPLIT
        expected = {}
        for name, one in first.named_parameters():
            parts = [whole_gradient(name, one.shape, number) for number in range(2 if name in SPLIT else 1)]
            expected[name] = torch.cat([values.double().flatten() for values in parts])
        flats = []
        for group, shard in ((data, "none"), (data, "optimizer"), (alone, "none")):
            model = copy.deepcopy(first)
            model.own.tensor_model_parallel = True  # copies of parameters come without
            options = {"shard": shard, "tp_group": tensor if shard == "none" else tp_group}
            flats.append((tg.FlatParameters(model, process_group=group, bucket_bytes=40000, **options), model))
        for norm_type in (2.0, 1.0, float("inf")):
            norms = []
            for flat, model in flats:
                for name, one in model.named_parameters():
                    one.grad = whole_gradient(name, one.shape, part if name in SPLIT else 0).to(rank.device)
                count_as_reduced(flat)
                norms.append(tg.clip_grad_norm_(flat, 0.5, norm_type))
            assert all(same_bits(norms[0], norm) for norm in norms), norm_type
            total = torch.linalg.vector_norm(torch.cat(list(expected.values())), norm_type)
            torch.testing.assert_close(norms[0].cpu().double(), total, rtol=1e-6, atol=0)
            model = flats[2][1]  # which has all gradients
            scale = 0.5 / (norms[0] + 1e-6)
            for name, one in model.named_parameters():
                grad = whole_gradient(name, one.shape, part if name in SPLIT else 0).to(rank.device)
                torch.testing.assert_close(one.grad, grad * scale)
        with pytest.raises(ValueError, match=r"expected process_groups over which .* are not added anyway"):
            tg.clip_grad_norm_(flats[0][0], 1.0, process_groups=[tensor])
        for flat, _ in flats:
            flat.close()


def scenario_few(rank: Rank) -> None:
    """Ranks that count nothing; what another pipeline stage counts, too."""
    tensor, data, _ = groups_of(rank)
    model = nn.Linear(5, 3, device=rank.device)
    model.weight.shared = True
    model.bias.tensor_model_parallel = rank.rank % 2 == 0  # wrong on the other one, for the sake of the test
    with tg.PeerGroup(tensor) as tp_group:
        if rank.rank % 2 == 1:
            with pytest.raises(ValueError, match="expected parameters that are marked tensor_model_parallel with a"):
                tg.FlatParameters(model, process_group=data, tp_group=tp_group)
            model.weight.tensor_model_parallel = True  # which is a copy
        for shard in SHARDS:
            flat = tg.FlatParameters(model, process_group=data, tp_group=tp_group, shard=shard)
            model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.full_like(model.bias, 2.0)
            count_as_reduced(flat)
            assert tg.clip_grad_norm_(flat, 0.5).item() == pytest.approx(12**0.5)
            flat.close()


def scenario_refused_groups(rank: Rank) -> None:
    tensor, data, _ = groups_of(rank)
    model = nn.Linear(5, 3, device=rank.device)
    with pytest.raises(TypeError, match="expected tp_group to be a process group that this rank is in, got 3"):
        tg.FlatParameters(model, process_group=data, tp_group=3)
    model.bias.tensor_model_parallel = True
    with pytest.raises(ValueError, match="expected tp_group, since bias is marked tensor_model_parallel"):
        tg.FlatParameters(model, process_group=data)
    with pytest.raises(
        ValueError, match=r"tp_group to have one rank in common with process_group or mesh, got \[.*, .*\]"
    ):
        tg.FlatParameters(model, tp_group=tensor)


def test_tensor_parallel_norms(ranks):
    """One test, for the processes take longer to start than all of this."""
    for scenario in (scenario_norm, scenario_few, scenario_refused_groups):
        ranks.run(scenario, 1)


def plane_of(rank: Rank, *shape: int) -> DeviceMesh:
    return init_device_mesh(torch.device(rank.device).type, shape)


def scenario_sums(rank: Rank) -> None:
    """Sums in float32, in the order of the ranks of a replica, then over replicas: bit for bit, sharded or not."""
    drawn = [[torch.randn(one.shape) for one in trained(Model())] for _ in range(rank.world)]
    for shape in ((2, 2), (4, 1), (1, 4), (4,)):
        replicas, shards = (1, *shape)[-2:]
        for shard in SHARDS:
            model = Model().to(rank.device)
            flat = tg.FlatParameters(model, mesh=plane_of(rank, *shape), shard=shard, bucket_bytes=2048)
            for parameter, grad in zip(trained(model), drawn[rank.rank], strict=True):
                parameter.grad = grad.to(rank.device, copy=True)
            flat.reduce_gradients()
            expected = []
            for grads in zip(*drawn, strict=True):
                means = []
                for replica in range(replicas):
                    first, *others = grads[replica * shards : (replica + 1) * shards]
                    means.append(sum(others, start=first) * (1 / rank.world))
                expected.append(means)
            for buffer in flat.buffers:
                own = torch.zeros(buffer.layout.numel, dtype=torch.bool)
                for begin, end in flat.own_parts(buffer):
                    own[begin:end] = True
                for parameter, offset in zip(buffer.parameters, buffer.layout.offsets, strict=True):
                    number = next(n for n, one in enumerate(trained(model)) if one is parameter)
                    kept = own[offset : offset + parameter.numel()]
                    in_order = [
                        torch.empty_like(parameter).copy_(one).as_strided((one.numel(),), (1,)).detach().cpu()[kept]
                        for one in (parameter.grad, *expected[number])
                    ]
                    mine, first, *others = in_order
                    if replicas <= 2:
                        assert same_bits(mine, sum(others, start=first)), (shape, shard, number)
                    else:
                        torch.testing.assert_close(mine, sum(others, start=first))
            flat.close()


def scenario_training(rank: Rank) -> None:
    """As one process that has the batches of all: parameters are the first rank's, norms count each part once, and
    states are those of one replica, the same in all."""
    torch.manual_seed(5)
    reference = Model(96).to(rank.device)
    runs = []
    for shard in SHARDS:
        model = copy.deepcopy(reference)
        if rank.rank > 0:
            for parameter in trained(model):
                parameter.data.add_(rank.rank)
        flat = tg.FlatParameters(model, mesh=plane_of(rank, 2, 2), shard=shard, bucket_bytes=40000)
        runs.append((flat, model, flat.optimizer(torch.optim.AdamW, lr=1e-2)))
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert same_bits(one.detach(), other.detach())
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        tokens = torch.randint(7, (2, rank.world, 2, 3), device=rank.device)
        norms = []
        for flat, model, optimizer in runs:
            with flat.no_sync():
                model(tokens[0, rank.rank]).square().mean().backward()
            model(tokens[1, rank.rank]).square().mean().backward()
            norms.append(tg.clip_grad_norm_(flat, 0.5))
            if flat.shard == "none":
                assert_in_buffers(flat, model)
            optimizer.step()
            optimizer.zero_grad()
        for one in tokens.flatten(0, 1):
            (reference(one).square().mean() / rank.world).backward()
        norms.append(tg.clip_grad_norm_(reference.parameters(), 0.5))
        plain.step()
        plain.zero_grad()
        assert same_bits(*norms[:2])
        torch.testing.assert_close(norms[1], norms[2], rtol=1e-4, atol=0)
        for one, other in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
            assert same_bits(one.detach(), other.detach()), f"step {step}"
    assert all(gradient is None for gradient in gradients_of(runs[0][1]))
    parts = [segment.master.numel() for group in runs[1][2].segments for segment in group]
    everyone: list = [None] * rank.world
    states = runs[1][2].state_dict()["state"]
    dist.all_gather_object(everyone, (parts, {key: value["exp_avg"].sum().item() for key, value in states.items()}))
    for mine, other in ((0, 2), (1, 3)):
        assert everyone[mine] == everyone[other]
    assert sum(everyone[0][0]) + sum(everyone[1][0]) == sum(one.numel() for one in trained(reference))
    for flat, _, _ in runs:
        flat.close()


def scenario_refused_meshes(rank: Rank) -> None:
    model = nn.Linear(5, 3, device=rank.device)
    plane = plane_of(rank, 2, 2)
    others = plane_of(rank, 4)
    refused = [
        ({"mesh": 3}, TypeError, "expected mesh to be a DeviceMesh, got int"),
        ({"mesh": plane, "process_group": dist.group.WORLD}, ValueError, "expected mesh or process_group, got both"),
        ({"mesh": plane_of(rank, 2, 2, 1)}, ValueError, "expected mesh to have one dimension, or two, .* got 3"),
        ({"process_group": 3}, TypeError, "expected process_group to be a process group that this rank is in, got 3"),
    ]
    with tg.PeerGroup(others.get_group()) as peer_group:
        text = "expected the last dimension of mesh to be that of peer_group, got another one"
        for options, error, message in [*refused, ({"mesh": plane, "peer_group": peer_group}, ValueError, text)]:
            with pytest.raises(error, match=f"FlatParameters: {message}"):
                tg.FlatParameters(model, **options)
        flat = tg.FlatParameters(model, mesh=others, peer_group=peer_group)
        assert flat.process_group is others.get_group() and flat.replica_group is None
        flat.close()
    # Of the four ranks the last one refuses: its row and its column know of it, and the first rank by these.
    error, message = (RuntimeError, "failed while checking arguments: .*ValueError: .* got 'all'")
    if rank.rank == 3:
        error, message = ValueError, "expected shard to be one of"
    with pytest.raises(error, match=f"FlatParameters: .*{message}"):
        tg.FlatParameters(model, mesh=plane, shard="all" if rank.rank == 3 else "none")
    if rank.rank == 1:
        model = nn.Linear(5, 4, device=rank.device)
    with pytest.raises(RuntimeError, match=r"expected the same model on all ranks, got .* on rank .* and .* on rank"):
        tg.FlatParameters(model, mesh=plane)


def test_meshes(ranks):
    for scenario in (scenario_sums, scenario_training, scenario_refused_meshes):
        ranks.run(scenario, 2)
