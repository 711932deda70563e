"""fp8_autocast: nesting, exceptions, names, threads; and the recipes."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg
from te_graph.common.fp8_calls import take_excuse
from te_graph.fp8 import autocast
from te_graph.fp8.autocast import current_region
from te_graph.fp8.recipes import Recipe
from te_graph.fp8.region_numbers import RegionNumbers

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
DELAYED, CURRENT = tg.DelayedScaling(amax_history_len=2), tg.Float8CurrentScaling()


def computes_in_fp8(layer: tg.Linear, x: Tensor) -> bool:
    """Whether ``layer`` does, for x [n, in]."""
    with torch.no_grad():
        return not same_bits(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.fixture
def layer(device: str) -> tg.Linear:
    return tg.Linear(32, 32, device=device, dtype=torch.bfloat16)


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.randn(5, 32, device=device, dtype=torch.bfloat16)


def test_the_inner_region_counts(layer: tg.Linear, x: Tensor) -> None:
    assert not computes_in_fp8(layer, x)
    with tg.fp8_autocast():
        assert computes_in_fp8(layer, x)
        with tg.fp8_autocast(enabled=False):
            assert not computes_in_fp8(layer, x)
            with tg.fp8_autocast(recipe=CURRENT):
                assert computes_in_fp8(layer, x)
                assert current_region().recipe is CURRENT
            assert not computes_in_fp8(layer, x)
        assert computes_in_fp8(layer, x)
    assert not computes_in_fp8(layer, x)
    assert current_region() is None


def test_an_exception_leaves_the_region(layer: tg.Linear, x: Tensor) -> None:
    with contextlib.suppress(KeyError), tg.fp8_autocast(), tg.fp8_autocast(recipe=CURRENT):
        raise KeyError
    assert current_region() is None
    assert not computes_in_fp8(layer, x)


def test_a_region_may_be_entered_again_also_in_itself(layer: tg.Linear, x: Tensor) -> None:
    region = tg.fp8_autocast(recipe=CURRENT)
    for _ in range(2):
        with region:
            with region:
                assert computes_in_fp8(layer, x)
            assert computes_in_fp8(layer, x)
        assert not computes_in_fp8(layer, x)


def entering(region: tg.fp8_autocast) -> Iterator[None]:
    with region:
        yield


def test_a_region_that_is_left_before_an_inner_one_takes_no_other_along(layer: tg.Linear, x: Tensor) -> None:
    """``torch.autocast`` would put back what was there when the generator entered its own."""
    outer, within = (entering(tg.fp8_autocast(recipe=CURRENT)) for _ in range(2))
    next(outer)
    with tg.fp8_autocast(enabled=False):
        next(within)
        assert computes_in_fp8(layer, x)
        outer.close()
        assert computes_in_fp8(layer, x)
        within.close()
        assert not computes_in_fp8(layer, x)
    assert current_region() is None
    assert not computes_in_fp8(layer, x)


def test_a_region_is_left_where_it_was_entered(layer: tg.Linear, x: Tensor) -> None:
    region, raised = tg.fp8_autocast(recipe=CURRENT), []

    def leave() -> None:
        with tg.fp8_autocast(recipe=DELAYED):
            try:
                region.__exit__(None)
            except RuntimeError as error:
                raised.append(str(error))
            assert current_region().recipe is DELAYED

    with region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert computes_in_fp8(layer, x)
    (message,) = raised
    assert message.startswith("fp8_autocast: expected a region to be left once, by the thread that entered it, got one")
    with pytest.raises(RuntimeError, match="got one that this thread is not in"):
        region.__exit__(None)


def test_a_region_is_a_decorator(layer: tg.Linear, x: Tensor) -> None:
    @tg.fp8_autocast(recipe=CURRENT)
    def call() -> bool:
        return computes_in_fp8(layer, x)

    assert call()
    assert call()
    assert not computes_in_fp8(layer, x)


def test_a_thread_has_regions_of_its_own(layer: tg.Linear, x: Tensor) -> None:
    found: list[bool] = []

    def work() -> None:
        found.append(computes_in_fp8(layer, x))
        with tg.fp8_autocast(enabled=False):
            found.append(computes_in_fp8(layer, x))

    with tg.fp8_autocast(recipe=CURRENT):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert computes_in_fp8(layer, x)
    assert found == [False, False]


def test_scales_are_updated_when_the_outermost_region_is_left(layer: tg.Linear, x: Tensor) -> None:
    scale = torch.tensor(448.0) / x.float().abs().max().cpu()
    with tg.fp8_autocast(recipe=DELAYED):
        with tg.fp8_autocast(recipe=DELAYED):
            layer(x)
        assert layer.get_extra_state()[0, 2] == 1
    assert layer.get_extra_state()[0, 2] == scale


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_loop_in_one_region_trains_as_with_a_region_in_each_step(device: str, microbatches: int) -> None:
    results = []
    for is_whole in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(tg.Linear(32, 32, device=device), tg.Linear(32, 32, device=device))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        with tg.fp8_autocast(recipe=DELAYED) if is_whole else contextlib.nullcontext():
            for step in range(4 * microbatches):
                with contextlib.nullcontext() if is_whole else tg.fp8_autocast(recipe=DELAYED):
                    loss = model(torch.randn(5, 32).to(device) * (step + 1)).square().mean()
                loss.backward()
                losses.append(loss.detach())
                if step % microbatches == microbatches - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([*losses, *model.parameters()])
    assert all(map(same_bits, *results))


def test_old_and_new_names() -> None:
    assert tg.fp8_autocast(True, False, CURRENT).recipe is CURRENT
    assert tg.fp8_autocast(fp8_recipe=CURRENT).recipe is CURRENT
    assert tg.fp8_autocast().recipe == tg.DelayedScaling()
    with pytest.raises(TypeError, match="expected recipe by one of its names, got both"):
        tg.fp8_autocast(recipe=CURRENT, fp8_recipe=CURRENT)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tg.fp8_autocast(recipe="delayed"), TypeError, "expected recipe to be a te_graph.DelayedScaling or"),
        (lambda: tg.fp8_autocast(fp8_recipe=0), TypeError, "expected recipe to be a te_graph.DelayedScaling or"),
        (lambda: tg.fp8_autocast(recipe=tg.DelayedScaling), TypeError, "got type"),
        (lambda: tg.fp8_autocast(recipe=Recipe()), TypeError, "got Recipe"),
        (
            lambda: tg.fp8_autocast(CURRENT),
            TypeError,
            "expected enabled to be a bool, got Float8CurrentScaling: give it by",
        ),
        (
            lambda: tg.fp8_autocast(True, DELAYED),
            TypeError,
            "expected calibrating to be a bool, got DelayedScaling: give",
        ),
        (lambda: tg.fp8_autocast(1), TypeError, "expected enabled to be a bool, got int"),
        (lambda: tg.fp8_autocast(enabled=None), TypeError, "expected enabled to be a bool, got NoneType"),
        (lambda: tg.fp8_autocast(calibrating="no"), TypeError, "expected calibrating to be a bool, got str"),
        (lambda: tg.fp8_autocast(fp8_group="world"), TypeError, "to be a torch.distributed.ProcessGroup, got str"),
        (lambda: tg.DelayedScaling(margin="1"), ValueError, "expected margin to be a finite number, got '1'"),
        (lambda: tg.DelayedScaling(margin=float("inf")), ValueError, "expected margin to be a finite number, got inf"),
        (lambda: tg.DelayedScaling(margin=160), ValueError, "DelayedScaling: expected margin to be from -110 to 29, "),
        (lambda: tg.DelayedScaling(margin=-110.5), ValueError, "scales become 0 or infinite, got -110.5"),
        (lambda: tg.DelayedScaling(amax_history_len=0), ValueError, "expected amax_history_len to be a positive int"),
        (lambda: tg.DelayedScaling(amax_compute_algo="mean"), ValueError, "to be 'max' or 'most_recent', got 'mean'"),
        (
            lambda: tg.DelayedScaling(fp8_format="e4m3"),
            TypeError,
            "expected fp8_format to be a te_graph.Format, got str",
        ),
        (lambda: tg.Float8CurrentScaling(fp8_format=1), TypeError, "Float8CurrentScaling: expected fp8_format"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_recipes_are_compared_by_value() -> None:
    assert tg.DelayedScaling(margin=1) == tg.DelayedScaling(margin=1) != tg.DelayedScaling()
    assert len({tg.Float8CurrentScaling(), tg.Float8CurrentScaling(), tg.DelayedScaling()}) == 2
    assert tg.DelayedScaling(1, tg.Format.E4M3, 8, "most_recent", False).amax_history_len == 8


class InRegion(nn.Module):
    """A layer whose calls enter the region that the module holds."""

    def __init__(self, layer: tg.Linear, region: tg.fp8_autocast) -> None:
        super().__init__()
        self.layer, self.region = layer, region

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in]."""
        with self.region:
            return self.layer(x)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_module_that_holds_a_region_is_copied_with_it(
    layer: tg.Linear, x: Tensor, copied: Any, is_used: bool
) -> None:
    model = InRegion(layer, tg.fp8_autocast(recipe=CURRENT))
    model.region.name = "of the user's"
    if is_used:
        model(x)
    twin, region = copied(model), copied(model.region)
    for one in {twin.region, region} - {model.region}:
        assert one.recipe == CURRENT and one.enabled and not one.calibrating and one.group is None
        assert one.number == model.region.number and one.name == "of the user's"
    assert same_bits(twin(x), model(x))
    with region:
        assert computes_in_fp8(layer, x)
    assert not computes_in_fp8(layer, x)


def test_a_region_of_another_process_has_a_number_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [tg.fp8_autocast(recipe=tg.DelayedScaling(margin=margin)) for margin in (11, 12, 13)]
    pickled = [pickle.dumps(region) for region in regions]
    monkeypatch.setattr(autocast, "region_numbers", RegionNumbers())  # as another process has them
    there = [pickle.loads(one) for one in reversed(pickled)]
    equal = [tg.fp8_autocast(recipe=one.recipe).number for one in regions]
    assert [one.number for one in reversed(there)] == equal == [3, 2, 1]


def shared_scales(rank: Rank) -> None:
    """Ranks with other data find the scales of the largest amaxes of all, in both directions, bit for bit."""
    torch.manual_seed(0)
    layer = tg.Linear(32, 32, dtype=torch.bfloat16, device=rank.device)
    recipe = tg.DelayedScaling(amax_history_len=2)
    alone = tg.DelayedScaling(amax_history_len=2, reduce_amax=False)
    for step in range(4):
        everyone = [
            torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(rank.world)
        ]
        x = everyone[rank.rank].to(rank.device, torch.bfloat16).requires_grad_()
        with tg.fp8_autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = layer(x)
        y.float().square().sum().backward()
        largest = max(each.to(torch.bfloat16).float().abs().max() for each in everyone)
        newest = layer.get_extra_state()[0, 8 + 1]
        assert newest == largest, f"step {step}"
    layer.fp8.update_if_due()
    state = layer.get_extra_state().contiguous()
    states = [torch.empty_like(state) for _ in range(rank.world)]
    dist.all_gather(states, state)
    assert all(same_bits(each, state) for each in states)
    part = tg.Linear(32, 32, bias=False, dtype=torch.bfloat16, device=rank.device)
    largest = part.weight.detach().abs().max().float() * 2 ** (rank.world - 1)
    with torch.no_grad():
        part.weight.mul_(2**rank.rank)
    with tg.fp8_autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
        part(x)
    assert part.get_extra_state()[1, 3] == tg.fp8_scale(largest)  # of the first cast, too
    own = tg.Linear(32, 32, dtype=torch.bfloat16, device=rank.device)
    with tg.fp8_autocast(recipe=alone, amax_reduction_group=dist.group.WORLD):
        own(x)
    assert own.get_extra_state()[0, 8 + 1] == x.detach().float().abs().max()


def test_ranks_share_scales(ranks) -> None:
    ranks.run(shared_scales, 0)


def not_in_the_group(rank: Rank) -> None:
    groups = [dist.new_group([one]) for one in range(rank.world)]
    if rank.world > 1:
        with pytest.raises(ValueError, match="expected an amax_reduction_group that this rank is in"):
            tg.fp8_autocast(amax_reduction_group=groups[(rank.rank + 1) % rank.world])
    tg.fp8_autocast(amax_reduction_group=groups[rank.rank])


def test_a_group_without_this_rank_is_refused(ranks) -> None:
    ranks.run(not_in_the_group, 0)


def test_a_training_without_fp8_layers_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # layers of other tests
    take_excuse()  # what they captured
    model, x = torch.nn.Linear(32, 32), torch.randn(4, 32)

    def run(recipe: Any, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level("WARNING", "te_graph"), tg.fp8_autocast(recipe=recipe, **options):
            model(x)
        return [record.getMessage() for record in caplog.records]

    recipe = tg.DelayedScaling(margin=3)
    with torch.no_grad():
        assert run(recipe) == []
    assert run(recipe, enabled=False) == []
    (message,) = run(recipe)
    assert message.startswith(
        "fp8_autocast: nothing has computed in FP8: no te_graph.Linear whose features fit was called in it"
    )
    assert run(recipe) == []
    tg.convert_to_fp8(torch.nn.Sequential(model), min_features=16)
    assert run(tg.DelayedScaling(margin=4)) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_a_region_for_captures_that_are_not_made_in_it_is_no_training_without_fp8(
    is_late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # layers of other tests
    if not is_late:
        monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    layer, x = tg.Linear(32, 32), torch.randn(4, 32)
    recipe = tg.DelayedScaling(margin=6 + is_late)
    with caplog.at_level("WARNING", "te_graph"):
        with tg.fp8_autocast(recipe=recipe):
            tg.make_graphed_callables(layer, None if is_late else (x,))
        assert "nothing has computed in FP8" not in caplog.text
        with tg.fp8_autocast(recipe=recipe):
            pass
        assert "nothing has computed in FP8" in caplog.text
