"""graphed(): what calls do, how often effects happen, what is a change. The reference is the function itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from sequences import called, captures, counts, reference_norm, tensors
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from te_graph import Recorder, graphed, info, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def test_same_tensors(device: str) -> None:
    """The first address case: values change in place, and replays see them."""
    norm = graphed(norm_of)
    grads = tensors(device)
    for _ in range(5):
        for grad in grads:
            grad.copy_(torch.randn_like(grad))
        assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
    assert counts(norm) == (1, 4, 0, 1)


def test_other_tensors_of_the_same_shapes(device: str) -> None:
    """The second: a graph that goes by the function's name would give the norm of the first list."""
    norm = graphed(norm_of)
    first, second = tensors(device), tensors(device)
    for grads in (first, first, first, second, second, second):
        assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
    assert counts(norm) == (2, 4, 1, 2)


def test_a_list_that_grew(device: str) -> None:
    """The third: a graph of the shorter list would leave out what came later."""
    norm = graphed(norm_of)
    grads = tensors(device)
    for count in range(3, 6):
        for _ in range(3):
            assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
        assert len(grads) == count
        grads.append(torch.randn(7, device=device))
    assert counts(norm) == (3, 6, 2, 3)


def test_every_call_adds_exactly_once(device: str) -> None:
    total, gradient, runs = torch.zeros(4, device=device), torch.ones(4, device=device), []

    def accumulate() -> None:
        total.add_(gradient)

    def tell() -> None:
        runs.append(len(runs))

    accumulated = graphed(accumulate)
    for call in range(1, 7):
        tell()
        assert accumulated() is None
        assert_bitwise_equal(total, torch.full((4,), float(call), device=device))
    assert counts(accumulated) == (1, 5, 0, 1)


def test_random_numbers_are_those_of_eager_calls(device: str) -> None:
    values = torch.zeros(64, device=device)

    def draw() -> None:
        values.add_(torch.rand_like(values))

    def five(function: object) -> Tensor:
        values.zero_()
        torch.manual_seed(5)
        for _ in range(5):
            function()
        return values.clone()

    eager = five(draw)
    assert_bitwise_equal(five(graphed(draw)), eager)


def test_results_are_over_the_same_memory_at_every_replay(device: str) -> None:
    x = torch.zeros(3, device=device)
    plus = graphed(lambda t: (t + 1, {"twice": t * 2, "name": "x"}))
    called(plus, 2, x)
    first, more = plus(x)
    x.fill_(4)
    second, _ = plus(x)
    assert first.data_ptr() == second.data_ptr()
    assert_bitwise_equal((first, more), (torch.full_like(x, 5), {"twice": torch.full_like(x, 8), "name": "x"}))


def test_results_that_are_arguments_are_found_anew(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    double = graphed(lambda t: (t.mul_(2), t[1], t.sum()))
    for _ in range(4):
        before = x.clone()
        whole, row, total = double(x)
        assert whole is x
        assert row.data_ptr() == x[1].data_ptr()
        assert_bitwise_equal((x, row, total), (before * 2, before[1] * 2, (before * 2).sum()))


def test_eager_on_mismatch_runs_as_it_is_and_goes_on_replaying_the_first(device: str) -> None:
    norm = graphed(norm_of, on_mismatch="eager")
    first, second = tensors(device), tensors(device)
    called(norm, 3, first)
    for grads in (second, second, second, first):
        assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
    assert counts(norm) == (1, 3, 3, 4)


def test_alternating_sets_of_tensors_do_not_capture_for_ever(device: str) -> None:
    norm = graphed(norm_of)
    sets = [tensors(device) for _ in range(8)]
    for _ in range(6):
        for grads in sets:
            assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
    assert captures(norm) == 8
    assert norm.info()["forward_replays"] == 5 * 8


def test_results_of_one_set_survive_replays_for_another(device: str) -> None:
    norm = graphed(norm_of)
    first, second = tensors(device), tensors(device)
    for _ in range(2):
        one, other = norm(first), norm(second)
    norm(second)
    assert one.item() == pytest.approx(reference_norm(first), rel=1e-5)
    assert other.item() == pytest.approx(reference_norm(second), rel=1e-5)


def test_two_functions_of_one_name_keep_apart(device: str) -> None:
    def make(target: Tensor, step: float) -> object:
        def bump() -> None:
            target.add_(step)

        return graphed(bump)

    targets = [torch.zeros(2, device=device) for _ in range(2)]
    up, down = make(targets[0], 1.0), make(targets[1], -1.0)
    for _ in range(5):
        up(), down()
    assert_bitwise_equal(targets, [torch.full_like(targets[0], 5), torch.full_like(targets[1], -5)])
    assert counts(up) == counts(down) == (1, 4, 0, 1)


class Averager:
    def __init__(self, device: str) -> None:
        self.mean = torch.zeros(3, device=device)
        self.rate = 0.5

    @graphed
    def update(self, value: Tensor) -> None:
        self.mean.lerp_(value, self.rate)


def test_a_decorated_method_serves_each_instance(device: str) -> None:
    one, other, value = Averager(device), Averager(device), torch.ones(3, device=device)
    other.rate = 0.25
    for _ in range(3):
        one.update(value), other.update(value)
    assert_bitwise_equal(one.mean, torch.full_like(value, 0.875))
    assert_bitwise_equal(other.mean, torch.full_like(value, 1 - 0.75**3))
    one.rate = 1.0
    one.update(value)
    assert_bitwise_equal(one.mean, value)
    Averager.update.reset()


def test_the_decorator_takes_options(device: str) -> None:
    @graphed(on_mismatch="raise")
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2, device=device)
    assert_bitwise_equal(called(double, 3, x), x * 2)
    with pytest.raises(RuntimeError, match="argument 0 moved"):
        double(x.clone())


def test_writes_are_told_to_version_counters(device: str) -> None:
    """Copies of weights kept by version (autograd, FP8 casts) are stale once a replay wrote them."""
    weight, other = torch.zeros(2, device=device), torch.zeros(2, device=device)
    bump = graphed(lambda w, o: w.add_(o))
    called(bump, 2, weight, other)
    versions = weight._version, other._version
    bump(weight, other)
    assert (weight._version, other._version) == (versions[0] + 1, versions[1])


def test_running_statistics_are_not_told_as_in_eager_execution(device: str) -> None:
    """A forward that waits for its backward may have saved them."""
    norm, x = nn.BatchNorm1d(4).to(device), torch.randn(3, 4, device=device)
    refresh = graphed(torch.no_grad()(lambda x: norm(x)))
    refresh(x)
    before = norm(x), norm.running_mean._version
    called(refresh, 3, x)
    after = norm(x), norm.running_mean._version
    assert before[1] == after[1] and counts(refresh)[1] == 3
    (before[0].sum() + after[0].sum()).backward()


def test_inside_other_captures_the_function_runs_plainly(device: str) -> None:
    total = torch.zeros(2)
    bump = graphed(lambda: total.add_(1))
    recorder = Recorder()
    with recorder.capture():
        bump()
    recorder.replay()
    assert_bitwise_equal(total, torch.full_like(total, 2))
    assert counts(bump) == (0, 0, 0, 1)

    x = torch.ones(3, device=device)
    double = graphed(lambda t: t * 2)
    module = make_graphed_callables(lambda t: double(t) + 1, (x,))
    for _ in range(3):
        assert_bitwise_equal(module(x), x * 3)
    assert captures(double) == 0


def test_a_graphed_function_inside_another_is_part_of_it(device: str) -> None:
    total = torch.zeros(2, device=device)
    inner = graphed(lambda: total.add_(1))

    def twice() -> None:
        inner(), inner()

    outer = graphed(twice)
    called(outer, 5)
    assert_bitwise_equal(total, torch.full_like(total, 10))
    assert counts(outer) == (1, 4, 0, 1)
    assert captures(inner) == 0
    called(inner, 3)
    assert_bitwise_equal(total, torch.full_like(total, 13))


def test_release_frees_and_starts_anew(device: str) -> None:
    x = torch.ones(1000, device=device)
    double = graphed(lambda t: t * 2)
    held = called(double, 3, x)
    assert double.info()["bytes"] >= x.nbytes
    double.reset()
    assert double.info()["bytes"] == 0
    assert_bitwise_equal(held, x * 2)
    freed = StorageWeakRef(held.untyped_storage())
    del held
    assert freed.expired()
    assert_bitwise_equal(called(double, 3, x), x * 2)
    assert counts(double) == (2, 4, 0, 2)
    double.reset()
    double.reset()


def test_dropping_the_object_frees_it_without_the_garbage_collector(device: str) -> None:
    module = nn.Linear(3, 3, device=device)
    x = torch.ones(2, 3, device=device)

    def apply(t: Tensor) -> Tensor:
        with torch.no_grad():
            return module(t)

    gc.collect()
    gc.disable()
    try:
        replayed = graphed(apply)
        result = StorageWeakRef(called(replayed, 3, x).untyped_storage())
        watched = weakref.ref(replayed)
        assert not result.expired()
        del replayed
        assert watched() is None
        assert result.expired()
    finally:
        gc.enable()


def test_an_object_that_holds_its_graphed_method_can_be_collected(device: str) -> None:
    """Such an object refers to itself, through the method; the collector has to see all of the way."""

    class Trainer:
        def __init__(self) -> None:
            self.module = nn.Linear(3, 3, device=device)
            self.apply = graphed(self._apply)

        def _apply(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.module(x)

    trainer = Trainer()
    result = StorageWeakRef(called(trainer.apply, 3, torch.ones(2, 3, device=device)).untyped_storage())
    watched = weakref.ref(trainer)
    assert not result.expired()
    del trainer
    gc.collect()
    assert watched() is None
    assert result.expired()


def test_only_weak_references_to_what_the_user_has(device: str) -> None:
    class Owner:
        def __init__(self) -> None:
            self.module = nn.Linear(3, 3, device=device)

    norm = graphed(lambda owner, ts: owner.module.weight.sum() + norm_of(ts))
    owner, given = Owner(), tensors(device)
    with torch.no_grad():
        called(norm, 3, owner, given)
    kept = [weakref.ref(one) for one in (owner, owner.module, owner.module.weight, *given)]
    del owner, given
    assert [one() for one in kept] == [None] * len(kept)


def test_after_the_arguments_died_others_are_computed_anew(device: str) -> None:
    norm = graphed(norm_of)
    for _ in range(4):
        grads = tensors(device)
        for _ in range(3):
            assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
        del grads


def test_disabled_it_is_eager(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    x = torch.ones(2, device=device)
    double = graphed(lambda t: t * 2)
    assert_bitwise_equal(called(double, 5, x), x * 2)
    assert counts(double) == (0, 0, 0, 5)


def test_info_tells_of_a_graphed_function_from_its_first_call_to_its_release(device: str) -> None:
    norm, grads = graphed(norm_of), tensors(device)
    lines = info().splitlines()
    norm(grads)
    (line,) = (line for line in info().splitlines() if line not in lines)
    assert line.startswith("graphed norm_of: 0% of 1 calls replayed, 0 signatures, 0 graphs, ")
    norm(grads), norm(grads)
    (line,) = (line for line in info().splitlines() if line not in lines)
    assert line.startswith("graphed norm_of: 67% of 3 calls replayed, 1 signature, 1 graph, ")
    assert repr(norm) == line
    assert f"{norm.info()['nodes']} nodes" in line and norm.info()["nodes"] > 1
    assert line.endswith("eager: 1 x not captured yet")
    norm.reset()
    assert info().splitlines() == lines


def test_info_tells_what_keeps_a_function_from_its_capture(device: str) -> None:
    double = graphed(lambda grads: [grad * 2 for grad in grads])
    kept = [tensors(device) for _ in range(3)]
    for grads in kept:
        double(grads)
    moved = "not captured: argument 0[0] moved to other memory since the last call"
    assert double.info()["eager_calls"] == {"not captured yet": 1, moved: 2}
    double.reset()
    double(kept[0])
    assert sum(line.startswith("graphed <lambda>: 0% of 4 calls") for line in info().splitlines()) == 1


def test_old_names_warn_and_do_the_same() -> None:
    with pytest.warns(DeprecationWarning, match="on_change= is now called on_mismatch="):
        double = graphed(lambda t: t * 2, on_change="recapture")
    x = torch.randn(3)
    called(double, 3, x)
    with pytest.warns(DeprecationWarning, match=r"stats\(\) is now called info\(\)") as warned:
        stats = double.stats()
    assert stats == {"captures": 1, "replays": 2, "misses": 0, "eager_calls": 1, "bytes": double.info()["bytes"]}
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"release\(\) is now called reset\(\)"):
        double.release()
    assert double.info()["signatures"] == 0


def test_info_has_the_keys_of_a_callable_and_reasons_for_eager_calls() -> None:
    layer = torch.nn.Linear(3, 3)
    make_graphed_callables(layer, (torch.randn(2, 3),))
    double = graphed(lambda t: t * 2)
    assert double.info().keys() == layer.te_graph.info().keys()
    x = torch.randn(3)
    called(double, 2, x)
    with torch.autograd.detect_anomaly(check_nan=True):
        double(x)
    double(torch.randn(4))
    assert double.info()["eager_calls"] == {
        "not captured yet": 1,
        "called under torch.autograd.detect_anomaly": 1,
        "argument 0 changed shape from [3] to [4] since capture": 1,
    }
