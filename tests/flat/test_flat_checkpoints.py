"""What is saved of flat parameters and their optimizers resumes with the same bits, in whatever form it is saved."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from flat_models import Mixed, assert_equal, count_as_reduced
from ranks import Rank, ranks_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import te_graph as tg
from te_graph.flat.optimizer import FlatOptimizer
from te_graph.flat.tensor_part import boxes_of
from te_graph.testing import same_bits

# The ranks of smaller worlds are the first ones of these.
ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 4), id="gloo-4")])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

BF16 = torch.bfloat16
KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


def grads_of(model: Mixed, step: int, is_late: bool) -> None:
    """Give each parameter a gradient: the same on all ranks, whoever has reduced them."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (is_late or name != "late"):
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(grad)


def train(model: Mixed, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        grads_of(model, step, is_late=step >= 3)
        if isinstance(optimizer, FlatOptimizer):
            count_as_reduced(optimizer.flat)
        optimizer.step()
        optimizer.zero_grad()


def make(name: str, low: torch.dtype = BF16, seed: int = 0, scale: int = 1, **options: Any) -> tuple[Any, Mixed, Any]:
    torch.manual_seed(seed)
    model = Mixed(low, scale)
    flat = tg.FlatParameters(model, **options)
    cls, settings = KINDS[name]
    groups = [
        {"params": [one for one in model.parameters() if one.requires_grad and one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.requires_grad and one.dim() <= 1]},
    ]
    return flat, model, flat.optimizer(cls, groups, **settings)


def assert_same_states(model: Mixed, optimizer: Any, expected: Mixed, expected_optimizer: Any) -> None:
    assert_equal(model.state_dict(), expected.state_dict())
    assert_equal(optimizer.state_dict(), expected_optimizer.state_dict())


def by_file(model: Mixed, optimizer: Any, fresh: Mixed, fresh_optimizer: Any, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "file.pt")
    loaded = torch.load(path / "file.pt", weights_only=True)
    fresh.load_state_dict(loaded["model"])
    fresh_optimizer.load_state_dict(loaded["optimizer"])


def by_parts(model: Mixed, optimizer: Any, fresh: Mixed, fresh_optimizer: Any, path: Path, **options: Any) -> None:
    dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=path / "parts", **options)
    dcp.load({"model": fresh, "optimizer": fresh_optimizer.sharded()}, checkpoint_id=path / "parts", **options)


def by_background(model: Mixed, optimizer: Any, fresh: Mixed, fresh_optimizer: Any, path: Path) -> None:
    states = {"model": model, "optimizer": optimizer.sharded()}
    dcp.async_save(states, checkpoint_id=path / "later", no_dist=True).result()
    dcp.load({"model": fresh, "optimizer": fresh_optimizer.sharded()}, checkpoint_id=path / "later", no_dist=True)


def by_names(model: Mixed, optimizer: Any, fresh: Mixed, fresh_optimizer: Any, path: Path, **options: Any) -> None:
    """As pages of torch tell it."""
    for flattened in (False, True):
        settings = StateDictOptions(flatten_optimizer_state_dict=flattened, strict=False)
        keys = ("model", "optimizer")
        saved = dict(zip(keys, get_state_dict(model, optimizer, options=settings), strict=True))
        folder = path / f"names {flattened}"
        dcp.save(saved, checkpoint_id=folder, **options)
        loaded = dict(zip(keys, get_state_dict(fresh, fresh_optimizer, options=settings), strict=True))
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(loaded, checkpoint_id=folder, planner=planner, **options)
        set_state_dict(
            fresh,
            fresh_optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=settings,
        )


@pytest.mark.parametrize("how", [by_file, by_parts], ids=lambda one: one.__name__)
@pytest.mark.parametrize("low", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", KINDS)
def test_training_resumes_with_the_same_bits(name: str, low: torch.dtype, how: Callable[..., None], tmp_path: Path):
    flat, model, optimizer = make(name, low)
    fresh_flat, fresh, fresh_optimizer = make(name, low, seed=1)
    train(fresh, fresh_optimizer, range(10, 10 + 4))  # in the way
    train(model, optimizer, range(2))
    options = {"no_dist": True} if how is by_parts else {}
    how(model, optimizer, fresh, fresh_optimizer, tmp_path, **options)
    assert_same_states(fresh, fresh_optimizer, model, optimizer)
    for one, one_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        train(one, one_optimizer, range(2, 5))
    assert_same_states(fresh, fresh_optimizer, model, optimizer)
    fresh_flat.reducer.check_places()
    flat.close()
    fresh_flat.close()


@pytest.mark.parametrize("how", [by_file, by_parts, by_background], ids=lambda one: one.__name__)
@pytest.mark.parametrize("steps", [0, 2])
def test_new_optimizers_resume(steps: int, how: Callable[..., None], tmp_path: Path):
    """What has no state yet has none afterwards, and what has not been asked for is not."""
    flat, model, optimizer = make("AdamW")
    fresh_flat, fresh, fresh_optimizer = make("AdamW", seed=1)
    train(model, optimizer, range(steps))
    options = {"no_dist": True} if how is by_parts else {}
    how(model, optimizer, fresh, fresh_optimizer, tmp_path, **options)
    for one, one_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        train(one, one_optimizer, range(steps, 5))
    assert_same_states(fresh, fresh_optimizer, model, optimizer)
    flat.close()
    fresh_flat.close()


@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_torch(name: str):
    """Of float32 they go to and fro between a FlatOptimizer and the optimizer's own class."""
    flat, model, optimizer = make(name, torch.float32)
    torch.manual_seed(0)
    plain = Mixed(torch.float32)
    groups = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    twins = dict(plain.named_parameters())
    cls, settings = KINDS[name]
    plain_optimizer = cls(
        [{**group, "params": [twins[names[id(one)]] for one in group["params"]]} for group in groups], **settings
    )
    for step in range(6):
        for one, one_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            train(one, one_optimizer, range(step, step + 1))
        assert_same_states(model, optimizer, plain, plain_optimizer)
        if step % 2 == 1:
            states = [copy.deepcopy(one.state_dict()) for one in (optimizer, plain_optimizer)]
            optimizer.load_state_dict(states[1])
            plain_optimizer.load_state_dict(states[0])
    flat.close()


def test_state_dict_hooks_are_called():
    flat, _, optimizer = make("AdamW")
    calls = []
    optimizer.register_state_dict_pre_hook(lambda one: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: calls.append(state.pop("epoch")))
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", 3, "post"]
    flat.close()


@pytest.mark.parametrize("low", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_torch_can_ask_for_the_state_of_a_new_optimizer(low: torch.dtype):
    """It steps one without a state, at a rate of 0, with zeros as gradients: a state to load into, and no more."""
    flat, model, optimizer = make("AdamW", low)
    twin_flat, twin, twin_optimizer = make("AdamW", low)
    before = copy.deepcopy(model.state_dict())
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]["matrix"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert_equal(model.state_dict(), before)
    assert all(gradient.is_missing() for buffer in flat.buffers for gradient in buffer.gradients)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    for one, one_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(one, one_optimizer, range(3))
    assert_same_states(model, optimizer, twin, twin_optimizer)
    saved = get_optimizer_state_dict(model, optimizer)
    fresh_flat, fresh, fresh_optimizer = make("AdamW", low, seed=1)
    fresh.load_state_dict(model.state_dict())
    set_optimizer_state_dict(fresh, fresh_optimizer, saved, options=StateDictOptions(strict=False))
    for one, one_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        train(one, one_optimizer, range(3, 5))
    assert_same_states(fresh, fresh_optimizer, model, optimizer)
    for one in (flat, twin_flat, fresh_flat):
        one.close()


def test_a_first_step_at_a_rate_of_0_counts():
    """As schedulers begin: the gradients are no zeros."""
    flat, model, optimizer = make("AdamW")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2))
    assert optimizer.state[model.matrix]["step"] == 2
    flat.close()


@pytest.mark.parametrize("low", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_captured_steps_go_on_with_what_is_loaded(low: torch.dtype):
    runs = [make("fused", low) for _ in range(2)]
    steps = [tg.graphed(runs[0][2].step), runs[1][2].step]

    def train_both(count: int) -> None:
        for _ in range(count):
            for (_, model, optimizer), step in zip(runs, steps, strict=True):
                sum(one.float().square().sum() for one in model.parameters()).backward()
                step()
                optimizer.zero_grad()

    train_both(4)
    model_state, state = (copy.deepcopy(one.state_dict()) for one in runs[0][1:])
    train_both(4)
    assert steps[0].info()["forward_replays"] >= 5
    for _, model, optimizer in runs:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
    train_both(4)
    assert_same_states(*runs[0][1:], *runs[1][1:])
    with torch.no_grad():
        for _, model, optimizer in runs:
            model.load_state_dict(model_state)
            optimizer.read_parameters()
    train_both(3)
    assert_same_states(*runs[0][1:], *runs[1][1:])
    for flat, _, _ in runs:
        flat.close()


def test_masters_follow_what_is_loaded_into_parameters():
    flat, model, optimizer = make("SGD")
    train(model, optimizer, range(2))
    masters = {name: optimizer.state[one]["master"].clone() for name, one in model.low.named_parameters()}
    other = Mixed()
    with torch.no_grad():
        other.low.bias.copy_(model.low.bias)
    model.load_state_dict(other.state_dict())
    flat.reducer.check_places()
    assert 4 not in optimizer.state_dict()["state"]  # low.weight tells its master
    model.low.weight.grad = torch.zeros_like(model.low.weight)
    model.low.bias.grad = torch.zeros_like(model.low.bias)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    assert_equal(model.state_dict(), other.state_dict())
    assert same_bits(optimizer.state[model.low.bias]["master"], masters["bias"])  # more precise than the parameter
    assert same_bits(optimizer.state[model.low.weight]["master"], other.low.weight.detach().float().view(-1))
    flat.close()


def test_files_have_names_and_no_places(tmp_path: Path):
    flat, model, optimizer = make("AdamW", scale=4)
    plain = Mixed(scale=4)
    train(model, optimizer, range(4))
    sizes = []
    for one in (model, plain):
        folder = tmp_path / str(len(sizes))
        dcp.save({"model": one}, checkpoint_id=folder, no_dist=True)
        torch.save(one.state_dict(), folder / "model.pt")
        sizes.append([file.stat().st_size for file in sorted(folder.iterdir())])
    assert all(flat_size <= 1.01 * size for flat_size, size in zip(*sizes, strict=True))
    dcp.save({"optimizer": optimizer.sharded()}, checkpoint_id=tmp_path / "parts", no_dist=True)
    parts = 3 + 1  # exp_avg, exp_avg_sq, max_exp_avg_sq, master
    expected = sum(
        4 * one.numel() * (parts if one.dtype == BF16 else parts - 1) for one in model.parameters() if one.requires_grad
    )
    size = sum(file.stat().st_size for file in (tmp_path / "parts").iterdir())
    metadata = pickle.loads((tmp_path / "parts" / ".metadata").read_bytes())
    keys = set(metadata.state_dict_metadata)
    assert expected < size < expected + 2000 * len(keys)  # of each entry torch.save writes about 1300 bytes more
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    kept = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert keys == {
        "optimizer.param_groups",
        *(f"optimizer.state.{name}.{key}" for name, key in itertools.product(names, kept)),
        *(f"optimizer.state.{name}.master" for name in names if model.get_parameter(name).dtype == BF16),
    }
    for name in ("matrix", "conv.weight", "turned"):
        (chunk,) = metadata.state_dict_metadata[f"optimizer.state.{name}.exp_avg"].chunks
        assert chunk.sizes == model.get_parameter(name).shape
    flat.close()


def test_ties_and_dtypes_in_safetensors(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    flat, model, _ = make("SGD")
    safetensors.save_model(model, tmp_path / "model.safetensors")
    own = sum(one.nbytes for one in dict(model.named_parameters()).values())
    assert (tmp_path / "model.safetensors").stat().st_size < 1.01 * own + 2000
    other_flat, other, _ = make("SGD", seed=1)
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert_equal(other.state_dict(), model.state_dict())
    other_flat.reducer.check_places()
    flat.close()
    other_flat.close()


def test_other_groups_are_refused(tmp_path: Path):
    flat, _, optimizer = make("AdamW")
    dcp.save({"optimizer": optimizer.sharded()}, checkpoint_id=tmp_path, no_dist=True)
    joined = flat.optimizer(torch.optim.AdamW, lr=1e-2, amsgrad=True)
    with pytest.raises(ValueError, match="got other weight_decay for scalar than for matrix"):
        dcp.load({"optimizer": joined.sharded()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="expected groups of as many parameters as there are here"):
        joined.load_state_dict(optimizer.state_dict())
    flat.close()


def test_parts_are_for_checkpoints_alone():
    flat, model, optimizer = make("AdamW")
    part = optimizer.sharded().state_dict()["state"]["matrix"]["exp_avg"]
    assert repr(part) == f"TensorPart({model.matrix.numel()} elements of shape [30, 97], torch.float32)"
    with pytest.raises(TypeError, match="expected tensors, got a part of one"):
        part.mul(2)
    flat.close()


def test_boxes_hold_the_elements():
    draw = random.Random(3)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        begin, end = sorted(draw.randint(0, math.prod(shape)) for _ in range(2))
        if begin == end:
            continue
        whole = torch.arange(math.prod(shape)).view(shape)
        boxes = boxes_of(shape, begin, end)
        values = []
        for offsets, sizes in boxes:
            box = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            values.append(box.reshape(-1))
        assert torch.cat(values).tolist() == list(range(begin, end))
        assert len(boxes) <= 2 * len(shape) - 1


def scenario_worlds(rank: Rank, path: str) -> None:
    """Saved at 2 ranks, then at 2 x 2, loaded at 4, 3, 2 and not sharded: the same whole states, and the same steps."""
    groups = {world: dist.new_group(list(range(world))) for world in (1, 2, 3, 4)}
    alone = [dist.new_group([one]) for one in range(rank.world)][rank.rank]
    flat, model, optimizer = make("AdamW", scale=4, process_group=alone)
    train(model, optimizer, range(2))
    if rank.rank < 2:
        shards, one, sharded = make("AdamW", scale=4, shard="optimizer", process_group=groups[2])
        train(one, sharded, range(2))
        assert_same_states(one, sharded, model, optimizer)
        written = sharded.sharded().state_dict()["state"]
        assert any(len(written[name]["exp_avg"].__create_chunk_list__()) >= 2 for name in written)
        assert sum(master.numel() for segments in sharded.segments for master in (s.master for s in segments)) < sum(
            parameter.numel() for _, parameter in shards.named_parameters()
        )
        folder = Path(path) / "two"
        dcp.save({"model": one, "optimizer": sharded.sharded()}, checkpoint_id=folder, process_group=groups[2])
        shards.close()
    dist.barrier()
    ends = []
    train(model, optimizer, range(2, 5))
    mesh = init_device_mesh("cpu", (2, 2))
    saved = "two"
    for world, shard in (("2 x 2", "optimizer"), (4, "optimizer"), (3, "optimizer"), (2, "optimizer"), (2, "none")):
        if world != "2 x 2" and rank.rank >= world:
            continue
        over = {"mesh": mesh} if world == "2 x 2" else {"process_group": groups[world]}
        shards, one, sharded = make("AdamW", seed=1, scale=4, shard=shard, **over)
        states = {"model": one, "optimizer": sharded.sharded()}
        dcp.load(states, checkpoint_id=Path(path) / saved, process_group=groups.get(world))
        if world == "2 x 2":
            saved = world
            states = {"model": one, "optimizer": sharded.sharded()}
            dcp.save(states, checkpoint_id=Path(path) / saved)
            sizes = [sum(file.stat().st_size for file in (Path(path) / name).iterdir()) for name in ("two", saved)]
            assert sizes[1] < 1.05 * sizes[0], sizes  # what replicas have is written once
        train(one, sharded, range(2, 5))
        assert_same_states(one, sharded, model, optimizer)
        shards.reducer.check_places()
        ends.append(shards)
    for one in (*ends, flat):
        one.close()


def scenario_resume(rank: Rank, path: str, how: Callable[..., None]) -> None:
    """Of the optimizer of few parameters, some ranks have none."""
    plane = {"mesh": init_device_mesh("cpu", (2, 2))}
    for low, shard, over in ((torch.float32, "optimizer", {}), (BF16, "optimizer", plane), (BF16, "none", {})):
        runs = [make("AdamW", low, seed, shard=shard, **over) for seed in (0, 1)]
        (_, model, optimizer), (_, fresh, fresh_optimizer) = runs
        train(model, optimizer, range(3, 5))
        folder = Path(path) / f"{low} {shard}" / (str(rank.rank) if how is by_file else "all")
        folder.mkdir(parents=True, exist_ok=True)
        how(model, optimizer, fresh, fresh_optimizer, folder)
        for _, one, one_optimizer in runs:
            train(one, one_optimizer, range(5, 8))
        assert_same_states(fresh, fresh_optimizer, model, optimizer)
        for flat, _, _ in runs:
            flat.close()


def test_shards(ranks, tmp_path):
    """One test, for the processes take longer to start than all of this."""
    ranks.run(scenario_worlds, 1, str(tmp_path))
    for how in (by_file, by_parts, by_names):
        ranks.run(scenario_resume, 2, str(tmp_path / how.__name__), how)
