"""Ranks in two dimensions: tensor parallelism beside data parallelism."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, ranks_of
from torch import Tensor, nn

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
            assert tg.clip_grad_norm_(flat, 0.5).item() == pytest.approx(12**0.5)
            flat.close()


def scenario_refused_groups(rank: Rank) -> None:
    tensor, data, _ = groups_of(rank)
    model = nn.Linear(5, 3, device=rank.device)
    with pytest.raises(TypeError, match=r"expected tp_group to be a PeerGroup or a process group .*, got 3"):
        tg.FlatParameters(model, process_group=data, tp_group=3)
    model.bias.tensor_model_parallel = True
    with pytest.raises(ValueError, match="expected tp_group, since bias is marked tensor_model_parallel"):
        tg.FlatParameters(model, process_group=data)
    with pytest.raises(ValueError, match=r"tp_group and process_group to have one rank in common, got \[.*, .*\]"):
        tg.FlatParameters(model, tp_group=tensor)


def test_tensor_parallel_norms(ranks):
    """One test, for the processes take longer to start than all of this."""
    for scenario in (scenario_norm, scenario_few, scenario_refused_groups):
        ranks.run(scenario, 1)
