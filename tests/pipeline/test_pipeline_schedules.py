"""Graphed stages under each schedule of torch.distributed.pipelining: losses and gradients equal eager ones."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.pipelining.schedules as schedules
from ranks import Rank, ranks_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.nn.parallel import DistributedDataParallel

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 2), id="gloo-2")])
WHOLE = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WIDTH, ROWS, BATCHES = 16, 2, 6


class Block(nn.Module):
    """x + linear(tanh(linear(x))), [rows, WIDTH] -> [rows, WIDTH]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stage_of(number: int, count: int, graphs: str) -> PipelineStage:
    """Stage ``number`` of ``count``; ``graphs``: of nothing, of its layers in a chain, or of all of it."""
    module = nn.Sequential(Block(2 * number), Block(2 * number + 1))
    samples = [torch.randn(ROWS, WIDTH, requires_grad=number > 0 or layer > 0) for layer in range(2)]
    if graphs == "layers":
        layers = tuple(module)
        tg.make_graphed_callables(layers, tuple((x,) for x in samples), chain=True, max_in_flight=BATCHES)
    elif graphs == "stage":
        tg.make_graphed_callables(module, (samples[0],), max_in_flight=BATCHES)
    return PipelineStage(module, number, count, torch.device("cpu"))


@contextlib.contextmanager
def without_first_contact(is_v: bool) -> Iterator[None]:
    """V schedules have neighbours on one rank, and gloo has no link from a rank to itself."""
    name = "torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops"
    with mock.patch(name, lambda self: []) if is_v else contextlib.nullcontext():
        yield


def trained(rank: Rank, name: str, graphs: str, prepare: bool = True) -> tuple[list[Any], list[PipelineStage]]:
    """The losses and gradients of two steps, and the stages."""
    is_v, several = name in ("ZBVZeroBubble", "DualPipeV"), name not in ("GPipe", "1F1B")
    count = rank.world * (1 + several)
    numbers = generate_rank_to_stage_mapping(rank.world, count, "v" if is_v else "loop")[rank.rank]
    stages = [stage_of(number, count, graphs) for number in numbers]
    if graphs and prepare:
        stages = [tg.pipeline.prepare_stage(stage) for stage in stages]
    kind = getattr(schedules, "Schedule" + name)
    schedule = kind(stages if several else stages[0], BATCHES, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(7)
    kept: list[Any] = []
    with without_first_contact(is_v):
        for _ in range(2):
            x, target = torch.randn(2, BATCHES * ROWS, WIDTH)
            losses: list[Tensor] = []
            is_last = count - 1 in numbers
            given = {"target": target, "losses": losses} if is_last else {}
            schedule.step(*([x] if 0 in numbers else []), **given)
            kept.append([loss.detach() for loss in losses])
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    return [*kept, *(parameter.grad for parameter in parameters)], stages


def scenario_schedule(rank: Rank, name: str) -> None:
    expected, _ = trained(rank, name, "")
    for graphs in ("layers", "stage"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*te_graph.*")
            got, stages = trained(rank, name, graphs)
        assert_bitwise_equal(got, expected)
        for stage in stages:
            handles = [module.te_graph for module in stage.submod.modules() if hasattr(module, "te_graph")]
            assert [handle.info()["backward_replays"] for handle in handles] == [2 * BATCHES] * len(handles)
            assert len(handles) == (2 if graphs == "layers" else 1)


def scenario_unprepared(rank: Rank, name: str) -> None:
    """Gradients are missing, and a warning names the callable."""
    words = (
        r"callable \d \(Block\): an earlier backward was for inputs.*splits .* misses .*te_graph.pipeline.prepare_stage"
    )
    with pytest.warns(UserWarning, match=words) if rank.rank else contextlib.nullcontext():
        got, _ = trained(rank, name, "layers", prepare=False)
    assert rank.rank == 0 or any(gradient is None for gradient in got[2:]) or name == "DualPipeV"


def scenario_refusals(rank: Rank) -> None:
    stage = stage_of(0, rank.world, "")
    with pytest.raises(TypeError, match="expected a PipelineStage, got Sequential"):
        tg.pipeline.prepare_stage(stage.submod)
    stage.submod = nn.Sequential(DistributedDataParallel(stage.submod))
    with pytest.raises(ValueError, match="0 is a DistributedDataParallel"):
        tg.pipeline.prepare_stage(stage)
    assert stage.dw_builder is None
    other = PipelineStage(Block(0), 0, rank.world, torch.device("cpu"), dw_builder=lambda: lambda: None)
    with pytest.raises(ValueError, match="without a dw_builder of its own"):
        tg.pipeline.prepare_stage(other)


@pytest.mark.parametrize("name", [*WHOLE, *SPLIT])
@pytest.mark.one_of(2)
def test_graphed_stages_have_the_losses_and_gradients_of_eager_ones(ranks, seed, name):
    ranks.run(scenario_schedule, seed, name)


@pytest.mark.parametrize("name", SPLIT)
def test_a_stage_that_is_not_prepared_is_told_of(ranks, seed, name):
    ranks.run(scenario_unprepared, seed, name)


def test_what_cannot_be_prepared_is_refused_by_name(ranks, seed):
    ranks.run(scenario_refusals, seed)


def test_gradients_of_inputs_alone_make_no_warning_where_nothing_was_to_follow():
    """A gradient penalty, and a first look at input gradients before the whole backward."""
    block = Block(0)
    tg.make_graphed_callables(block, (torch.randn(ROWS, WIDTH, requires_grad=True),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for retain in (False, True):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            loss = block(x).sum()
            torch.autograd.grad(loss, x, retain_graph=retain)
            if retain:
                loss.backward()
            del loss
            block(x)
