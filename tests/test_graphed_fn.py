"""graphed(): what calls do, how often effects happen, what is a change. The reference is the function itself."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import twins
from sequences import called, counts, reference_norm, tensors
from torch import Tensor, nn
from twins import assert_bitwise_equal, deterministic

from te_graph import Recorder, graphed, make_graphed_callables

repeatable = pytest.fixture(deterministic, autouse=True)


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def test_same_tensors(device: str) -> None:
    """The first address case of problem 002: values change in place, and replays see them."""
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


@dataclass
class Batch:
    tensors: list[Tensor]
    weight: float


def test_containers_may_be_built_anew_for_each_call(device: str) -> None:
    a, b, c = tensors(device)

    def mix(batch: Batch, pairs: dict[str, tuple[Tensor, float]], *, last: list[Tensor]) -> Tensor:
        total = sum(batch.tensors) * batch.weight
        for tensor, factor in pairs.values():
            total = total + tensor * factor
        return total + last[-1]

    mixed = graphed(mix)
    for _ in range(4):
        got = mixed(Batch([a, b], 0.5), {"x": (c, 2.0)}, last=[a, c])
        assert_bitwise_equal(got.clone(), mix(Batch([a, b], 0.5), {"x": (c, 2.0)}, last=[a, c]))
    assert counts(mixed) == (1, 3, 0, 1)
    assert_bitwise_equal(
        mixed(Batch([a, b], 0.25), {"x": (c, 2.0)}, last=[a, c]),
        mix(Batch([a, b], 0.25), {"x": (c, 2.0)}, last=[a, c]),
    )
    assert counts(mixed) == (1, 3, 1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["ts"].reverse(), r"argument 0\[0\] moved"),
        (lambda d: d["ts"].append(d["ts"][0]), "length of argument 0 changed"),
        (lambda d: d["ts"].pop(), "length of argument 0 changed"),
        (lambda d: d["ts"].__setitem__(2, d["ts"][2].clone()), r"argument 0\[2\] moved"),
        (lambda d: d["ts"].__setitem__(0, d["ts"][0][:2]), r"argument 0\[0\] changed shape from \[5\] to \[2\]"),
        (lambda d: d["ts"].__setitem__(0, d["ts"][0].view(torch.int32)), r"argument 0\[0\] changed dtype"),
        (lambda d: d["ts"].__setitem__(0, None), r"argument 0\[0\] is no longer a tensor"),
        (lambda d: d.update(p=3.0), "argument p changed from 2.0 to 3.0"),
        (lambda d: d.update(p=2), "argument p changed from 2.0 to 2"),
        (lambda d: d.update(p=True), "argument p changed from 2.0 to True"),
        (lambda d: d.update(q=None), "number of keyword arguments changed"),
    ],
)
def test_a_change_of_arguments_is_named_and_raised_if_asked(device: str, change: object, words: str) -> None:
    given = {"ts": tensors(device), "p": 2.0}

    def power(ts: list[Tensor], p: float, **rest: object) -> Tensor:
        return sum((t.float() ** p).sum() for t in ts if t is not None)

    power_of = graphed(power, on_change="raise")

    def call() -> Tensor:
        return power_of(given["ts"], **{key: value for key, value in given.items() if key != "ts"})

    called(call, 3)
    change(given)
    with pytest.raises(RuntimeError, match=rf"power: {words}.* since capture"):
        call()
    assert counts(power_of) == (1, 2, 1, 1)


def test_what_the_function_does_not_use_may_move_but_not_change_shape(device: str) -> None:
    x, unused = torch.ones(3, device=device), torch.ones(4, device=device)
    scale = graphed(lambda t, other: t / len(other), on_change="raise")
    called(scale, 3, x, unused)
    keep = unused
    unused = torch.ones(4, device=device)
    assert unused.data_ptr() != keep.data_ptr()
    assert_bitwise_equal(scale(x, unused), x / 4)
    with pytest.raises(RuntimeError, match="argument 1 changed shape"):
        scale(x, torch.ones(5, device=device))


def test_eager_on_change_runs_as_it_is_and_goes_on_replaying_the_first(device: str) -> None:
    norm = graphed(norm_of, on_change="eager")
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
    assert norm.stats()["captures"] == 8
    assert norm.stats()["replays"] == 5 * 8


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
    Averager.update.release()


def test_the_decorator_takes_options(device: str) -> None:
    @graphed(on_change="raise")
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2, device=device)
    assert_bitwise_equal(called(double, 3, x), x * 2)
    with pytest.raises(RuntimeError, match="argument 0 moved"):
        double(x.clone())


def test_attributes_defaults_closures_and_globals_are_part_of_the_signature(device: str) -> None:
    x, factor, module = torch.ones(2, device=device), 2.0, nn.Dropout(0.5)

    def scale(t: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006 (its change is what is tested)
        return t * factor * by[0] * (3.0 if module.training else 1.0)

    scaled = graphed(scale, on_change="raise")
    assert_bitwise_equal(called(scaled, 3, x), x * 6)
    module.eval()
    with pytest.raises(RuntimeError, match="training of closure variable module changed from True to False"):
        scaled(x)
    module.train()
    scale.__defaults__[0][0] = 4.0
    with pytest.raises(RuntimeError, match=r"default of scale\[0\]\[0\] changed from 1.0 to 4.0"):
        scaled(x)
    scale.__defaults__[0][0] = 1.0
    factor = 5.0
    with pytest.raises(RuntimeError, match=r"closure variable factor changed from 2\.0 to 5\.0"):
        scaled(x)
    factor = 2.0
    assert_bitwise_equal(scaled(x), x * 6)


def test_settings_and_modes_are_part_of_the_signature(device: str) -> None:
    x = torch.ones(2, device=device)
    double = graphed(lambda t: t * 2, on_change="raise")
    called(double, 2, x)
    with pytest.raises(RuntimeError, match="the grad mode changed from True to False"), torch.no_grad():
        double(x)
    with pytest.raises(RuntimeError, match="autocast is now on"), torch.autocast(device):
        double(x)
    assert counts(double) == (1, 1, 2, 1)


def test_a_gradient_that_appears_is_a_change(device: str) -> None:
    """DeepSpeed's graph left such a parameter out for good."""
    parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    parameters[0].grad = torch.ones(2, device=device)
    main = [torch.zeros(2, device=device) for _ in range(2)]

    def accumulate() -> None:
        for parameter, target in zip(parameters, main, strict=True):
            if parameter.grad is not None:
                target.add_(parameter.grad)

    accumulated = graphed(accumulate)
    called(accumulated, 3)
    parameters[1].grad = torch.ones(2, device=device)
    called(accumulated, 3)
    parameters[0].grad = None
    called(accumulated, 3)
    assert_bitwise_equal([t[0].item() for t in main], [6.0, 6.0])
    assert counts(accumulated) == (3, 6, 2, 3)


def test_a_gradient_made_anew_at_the_same_address_is_the_same(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    memory = torch.ones(2, device=device)
    total = torch.zeros(2, device=device)

    def accumulate() -> None:
        total.add_(parameter.grad)

    accumulated = graphed(accumulate, on_change="raise")
    for _ in range(4):
        parameter.grad = memory.detach()
        accumulated()
        parameter.grad = None
    assert_bitwise_equal(total, torch.full_like(total, 4))
    assert counts(accumulated) == (1, 3, 0, 1)


def test_writes_are_told_to_version_counters(device: str) -> None:
    """Who keeps a copy of weights by their version (autograd, FP8 casts) must see that a replay wrote them."""
    weight, other = torch.zeros(2, device=device), torch.zeros(2, device=device)
    bump = graphed(lambda w, o: w.add_(o))
    called(bump, 2, weight, other)
    versions = weight._version, other._version
    bump(weight, other)
    assert (weight._version, other._version) == (versions[0] + 1, versions[1])


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
    assert double.stats()["captures"] == 0


def test_a_graphed_function_inside_another_is_part_of_it(device: str) -> None:
    total = torch.zeros(2, device=device)
    inner = graphed(lambda: total.add_(1))

    def twice() -> None:
        inner(), inner()

    outer = graphed(twice)
    called(outer, 5)
    assert_bitwise_equal(total, torch.full_like(total, 10))
    assert counts(outer) == (1, 4, 0, 1)
    assert inner.stats()["captures"] == 0
    called(inner, 3)
    assert_bitwise_equal(total, torch.full_like(total, 13))


def test_release_frees_and_starts_anew(device: str) -> None:
    x = torch.ones(1000, device=device)
    double = graphed(lambda t: t * 2)
    held = called(double, 3, x)
    assert double.stats()["bytes"] >= x.nbytes
    double.release()
    assert double.stats()["bytes"] == 0
    assert_bitwise_equal(held, x * 2)
    freed = weakref.ref(held)
    del held
    assert freed() is None
    assert_bitwise_equal(called(double, 3, x), x * 2)
    assert counts(double) == (2, 4, 0, 2)
    double.release()
    double.release()


def test_dropping_the_object_frees_it_without_the_garbage_collector(device: str) -> None:
    module = nn.Linear(3, 3, device=device)
    x = torch.ones(2, 3, device=device)

    def apply(t: Tensor) -> Tensor:
        with torch.no_grad():
            return module(t)

    gc.collect()
    gc.disable()
    try:
        sequence = graphed(apply)
        result = weakref.ref(called(sequence, 3, x))
        watched = weakref.ref(sequence)
        assert result() is not None
        del sequence
        assert watched() is None
        assert result() is None
    finally:
        gc.enable()


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


class Schedule:
    """What its instances have of it changes for all, until one gets its own."""

    rate = 0.5
    table = torch.arange(3.0)

    def at(self, x: Tensor, which: int) -> Tensor:
        return x * self.rate + self.table[which] * 0


def test_class_attributes_are_part_of_the_signature(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "table", torch.arange(3.0, device=device))
    schedule, x = Schedule(), torch.ones(2, device=device)
    at = graphed(schedule.at)
    assert_bitwise_equal(called(at, 3, x, 1), x * 0.5)
    monkeypatch.setattr(Schedule, "rate", 0.25)
    assert_bitwise_equal(called(at, 3, x, 1), x * 0.25)
    schedule.rate = 2.0
    assert_bitwise_equal(called(at, 3, x, 1), x * 2)
    assert counts(at) == (3, 6, 2, 3)


def test_what_the_code_names_of_a_module_of_functions_is_part_of_the_signature(device: str) -> None:
    x = torch.ones(2, device=device)
    tripled = graphed(lambda t: twins.scaled(t))
    twins.scaled, twins.SCALE, twins.UNUSED = scaled, 3.0, 0
    try:
        scaled.__globals__["SCALE"] = 3.0
        assert_bitwise_equal(called(tripled, 3, x), x * 3)
        twins.UNUSED = 1
        tripled(x)
        assert counts(tripled) == (1, 3, 0, 1)
        scaled.__globals__["SCALE"] = 4.0
        assert_bitwise_equal(tripled(x), x * 4)
        twins.scaled = lambda t: t * 5
        assert_bitwise_equal(tripled(x), x * 5)
    finally:
        del twins.scaled, twins.SCALE, twins.UNUSED


SCALE = 3.0


def scaled(t: Tensor) -> Tensor:
    return t * SCALE


def test_attributes_of_tensors_are_found(device: str) -> None:
    parameter, x = nn.Parameter(torch.ones(2, device=device)), torch.ones(2, device=device)
    parameter.grad = torch.ones(2, device=device)

    def accumulate(p: nn.Parameter) -> None:
        target = p.main_grad if hasattr(p, "main_grad") else p.grad
        target.add_(x)

    accumulated = graphed(accumulate)
    called(accumulated, 3, parameter)
    parameter.main_grad = torch.zeros(2, device=device)
    called(accumulated, 3, parameter)
    assert_bitwise_equal((parameter.grad, parameter.main_grad), (x * 4, x * 3))
    parameter.main_grad = torch.zeros(2, device=device)
    called(accumulated, 3, parameter)
    assert_bitwise_equal(parameter.main_grad, x * 3)


def test_flags_of_tensors_that_are_not_used_count(device: str) -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    total = graphed(lambda ps: sum(p.detach().sum() for p in ps if p.requires_grad), on_change="raise")
    assert called(total, 3, parameters).item() == 2
    parameters[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"argument 0\[1\] changed requires_grad from False"):
        total(parameters)


class Engine:
    """A trainer as people write them: most of its attributes are no business of the function."""

    def __init__(self, device: str) -> None:
        self.total = torch.zeros(2, device=device)
        self.factor = 2.0
        self.global_step = 0
        self.batches: list[int] = []

    def accumulate(self, x: Tensor) -> None:
        self.total.add_(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain

    @property
    def gain(self) -> float:
        return self.factor + 1

    def advance(self) -> None:
        self.global_step += 1
        self.batches.append(self.global_step)


def test_attributes_that_the_code_does_not_name_may_change(device: str) -> None:
    engine, x = Engine(device), torch.ones(2, device=device)
    accumulate = graphed(engine.accumulate)
    for _ in range(5):
        accumulate(x)
        engine.advance()
    assert counts(accumulate) == (1, 4, 0, 1)
    engine.factor = 4.0  # named by a property, of a method, of the function
    for _ in range(2):
        accumulate(x)
    assert_bitwise_equal(engine.total, torch.full_like(x, 5 * 3.0 + 2 * 5.0))
    assert counts(accumulate) == (2, 5, 1, 2)


def test_attributes_that_are_read_without_a_name_are_all_compared(device: str) -> None:
    engine, x = Engine(device), torch.ones(2, device=device)
    scale = graphed(lambda owner, t: t * sum(v for v in vars(owner).values() if isinstance(v, float)))
    assert_bitwise_equal(called(scale, 3, engine, x), x * 2)
    engine.factor = 5.0
    assert_bitwise_equal(scale(engine, x), x * 5)
    name = "".join(["to", "tal"])
    read = graphed(lambda owner, t: t + getattr(owner, name))
    assert_bitwise_equal(called(read, 3, engine, x), x)
    engine.total = torch.ones(2, device=device)
    assert_bitwise_equal(read(engine, x), x + 1)
