"""graphed(): what is part of a signature, and what is not."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import twins
from sequences import called, counts, tensors
from torch import Tensor, nn

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


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


class Encoding(UserDict):
    """As those of Hugging Face: with attributes besides, and items that are found as attributes."""

    def __init__(self, data: dict[str, Any], scale: float = 1.0) -> None:
        super().__init__(data)
        self.scale = scale

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: {"data": {"x": a, "n": 2}}, r"argument 0.data\['n'\] changed from 1 to 2"),
        (lambda a: {"data": {"x": a, "n": 1, "m": 1}}, "keys of argument 0.data changed"),
        (lambda a: {"data": {"x": a.clone(), "n": 1}}, r"argument 0.data\['x'\] moved"),
        (lambda a: {"data": {"x": a, "n": 1}, "scale": 2.0}, "argument 0.scale changed from 1.0 to 2.0"),
    ],
)
def test_wrapped_dictionaries_may_be_made_anew(device: str, change: Callable[[Tensor], dict], words: str) -> None:
    (a,) = tensors(device, 1)

    def scale(batch: Encoding) -> Tensor:
        return batch.x * batch["n"] * batch.scale

    scaled = graphed(scale, on_mismatch="raise")
    for _ in range(3):
        assert_bitwise_equal(scaled(Encoding({"x": a, "n": 1})).clone(), a)
    assert counts(scaled)[:2] == (1, 2)
    named = Encoding({"x": a, "n": 1})
    named.title = "the function does not read it"
    scaled(named)
    with pytest.raises(RuntimeError, match=words):
        scaled(Encoding(**change(a)))


def test_wrapped_dictionaries_of_a_place_that_stays_are_compared(device: str) -> None:
    x = torch.ones(3, device=device)
    configs = SimpleNamespace(train=UserDict(mode="eval"), val=UserDict(mode="eval"))

    def scale(x: Tensor) -> Tensor:
        configs.train["mode"] = "train"
        y = x * (2 if configs.val["mode"] == "train" else 1)
        configs.train["mode"] = "eval"
        return y

    scaled = graphed(scale, on_mismatch="raise")
    for _ in range(3):
        assert_bitwise_equal(scaled(x).clone(), x)
    configs.val = configs.train
    with pytest.raises(RuntimeError, match=r"configs\['val'\] was replaced"):
        scaled(x)


def test_a_wrapped_dictionary_and_list_that_are_left_are_those_of_each_call(device: str) -> None:
    class Trainer:
        total, row, rows = torch.zeros(3, device=device), UserDict(n=0), UserList([0])

    def step(tr: type[Trainer]) -> UserDict:
        tr.total.add_(1)
        tr.row, tr.rows = UserDict(n=0), UserList([0])
        return tr.row

    replayed, kept = graphed(step), []
    for number in range(1, 6):
        kept += [replayed(Trainer), Trainer.rows]
        assert kept[-2] is Trainer.row
        Trainer.row["n"], Trainer.rows[0] = number, number
    assert [one["n"] for one in kept[::2]] == [one[0] for one in kept[1::2]] == [1, 2, 3, 4, 5]
    assert Trainer.total.eq(5).all()


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

    power_of = graphed(power, on_mismatch="raise")

    def call() -> Tensor:
        return power_of(given["ts"], **{key: value for key, value in given.items() if key != "ts"})

    called(call, 3)
    change(given)
    with pytest.raises(RuntimeError, match=rf"power: {words}.* since capture"):
        call()
    assert counts(power_of) == (1, 2, 0, 1)


def test_what_the_function_does_not_use_may_move_but_not_change_shape(device: str) -> None:
    x, unused = torch.ones(3, device=device), torch.ones(4, device=device)
    scale = graphed(lambda t, other: t / len(other), on_mismatch="raise")
    called(scale, 3, x, unused)
    keep = unused
    unused = torch.ones(4, device=device)
    assert unused.data_ptr() != keep.data_ptr()
    assert_bitwise_equal(scale(x, unused), x / 4)
    with pytest.raises(RuntimeError, match="argument 1 changed shape"):
        scale(x, torch.ones(5, device=device))


def test_attributes_defaults_closures_and_globals_are_part_of_the_signature(device: str) -> None:
    x, factor, module = torch.ones(2, device=device), 2.0, nn.Dropout(0.5)

    def scale(t: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006 (its change is what is tested)
        return t * factor * by[0] * (3.0 if module.training else 1.0)

    scaled = graphed(scale, on_mismatch="raise")
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


def test_a_module_as_the_function_is_seen_into(device: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:  # [...]
            return x.to(torch.float32, copy=True) * self.scale

    net, x = Net(), torch.ones(3, device=device)
    call = graphed(net)
    for _ in range(3):
        assert torch.equal(call(x), net(x))
    assert call.info()["forward_replays"] == 2
    net.scale = 5.0
    assert torch.equal(call(x), net(x))


def test_settings_and_modes_are_part_of_the_signature(device: str) -> None:
    x = torch.ones(2, device=device)
    double = graphed(lambda t: t * 2, on_mismatch="raise")
    called(double, 2, x)
    with pytest.raises(RuntimeError, match="the grad mode changed since capture"), torch.no_grad():
        double(x)
    with pytest.raises(RuntimeError, match="autocast is now on"), torch.autocast(device):
        double(x)
    assert counts(double) == (1, 1, 0, 1)


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

    accumulated = graphed(accumulate, on_mismatch="raise")
    for _ in range(4):
        parameter.grad = memory.detach()
        accumulated()
        parameter.grad = None
    assert_bitwise_equal(total, torch.full_like(total, 4))
    assert counts(accumulated) == (1, 3, 0, 1)


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


def test_a_list_that_was_given_twice_is_followed_in_both_places(device: str) -> None:
    once, other = tensors(device), tensors(device)
    add = graphed(lambda a, b: a[0] + b[1])
    assert_bitwise_equal(called(add, 3, once, once).clone(), once[0] + once[1])
    assert_bitwise_equal(called(add, 3, once, other).clone(), once[0] + other[1])
    assert counts(add) == (2, 4, 1, 2)


def test_flags_of_tensors_that_are_not_used_count(device: str) -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    total = graphed(lambda ps: sum(p.detach().sum() for p in ps if p.requires_grad), on_mismatch="raise")
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
        self.reports = [lambda: (self.global_step, self.batches)]  # code that the function does not run

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


@pytest.mark.parametrize("drop", [lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad")], ids=["set", "del"])
def test_gradients_that_it_drops_are_dropped_though_there_were_none_at_the_capture(
    drop: Callable[[Tensor], None], device: str
) -> None:
    weight, x = torch.ones(3, device=device, requires_grad=True), torch.rand(3, device=device)

    def begin(x: Tensor) -> Tensor:
        drop(weight)
        return x / x.sum()

    replaying = graphed(begin)
    called(replaying, 3, x)
    assert counts(replaying)[1] == 2
    for _ in range(2):
        (replaying(x) * weight).sum().backward()
    assert_bitwise_equal(weight.grad, begin(x))
    weight.grad = None
    assert_bitwise_equal(replaying(x).clone(), begin(x))
    assert counts(replaying)[1] == 4
