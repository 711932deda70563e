"""graphed(): what is refused at capture, by name, and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import pickle
import random
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sequences import called, counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.graphs.functions.region_watch import DeviceAccessMode, RegionWatch
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def assert_refused(function: Callable[..., Any], words: str, *args: Any) -> str:
    """The first call runs; the second and third are refused, with this message."""
    replayed = graphed(function)
    replayed(*args)
    for _ in range(2):
        with pytest.raises(CaptureError, match=words) as caught:
            replayed(*args)
    assert counts(replayed) == (0, 0, 0, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("region", "operation"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x + 1 if (x > 0).all() else x, "_local_scalar_dense|is_nonzero"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "aten.index"),
        (lambda x: x.unique(), "unique"),
        (lambda x: nn.utils.rnn.pack_padded_sequence(x.view(3, 2), torch.tensor([2, 2, 1]), True).data, "_pack_padded"),
        (lambda x: torch.tensor(x.tolist()), "tolist"),
        (lambda x: pickle.loads(pickle.dumps(x)), "__reduce_ex__ cannot be captured: it reads"),
        (lambda x: torch.save({"x": x}, io.BytesIO()), "__reduce_ex__ cannot be captured: it reads"),
        (lambda x: torch.tensor([x.mean(), x.max()]), r"(__float__|torch\.tensor) cannot be captured: it reads"),
        (lambda x: torch.as_tensor([[x[0]], [2.0]]), r"(__float__|torch\.as_tensor) cannot be captured"),
    ],
)
def test_host_reads_are_refused_with_the_line(device: str, region: Callable, operation: str) -> None:
    message = assert_refused(region, operation, torch.randn(6, device=device))
    assert re.search(r"test_graphed_fn_refusals.py:\d+", message)


def test_a_refused_call_leaves_no_trace(device: str) -> None:
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(2, device=device)
            self.steps = 0
            self.seen: list[int] = []
            self.weight = nn.Parameter(torch.ones(2, device=device))

        def update(self, value: Tensor) -> float:
            self.total.add_(value)
            self.weight.grad = self.total * 2
            self.steps += 1
            self.seen.append(self.steps)
            return self.total.sum().item()

    meter, value = Meter(), torch.ones(2, device=device)
    update = graphed(meter.update)
    update(value)
    gradient, state = meter.weight.grad, torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(CaptureError, match="_local_scalar_dense"):
            update(value)
    assert_bitwise_equal(meter.total, value)
    assert (meter.steps, meter.seen) == (1, [1])
    assert meter.weight.grad is gradient
    assert_bitwise_equal(gradient, value * 2)
    assert torch.equal(torch.get_rng_state(), state)


class Log:
    entries: list[int]


LOG = Log()


def test_a_refused_call_leaves_no_trace_in_globals_either(device: str) -> None:
    LOG.entries = []

    def note(x: Tensor) -> Tensor:
        LOG.entries.append(len(LOG.entries))
        return x * 2

    assert_refused(note, "length of global variable LOG.entries changed", torch.ones(2, device=device))
    assert LOG.entries == [0]


def test_a_counter_is_refused_with_advice(device: str) -> None:
    class Clipper:
        def __init__(self) -> None:
            self.steps = 0

        def clip(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x.clamp(-self.steps, self.steps)

    clipper = Clipper()
    message = assert_refused(clipper.clip, r"clip: .*self.steps changed from 1 to 2", torch.ones(2, device=device))
    assert "make it a tensor on the device" in message
    assert clipper.steps == 1


def test_what_only_the_first_call_does_is_fine(device: str) -> None:
    class Lazy:
        def __init__(self) -> None:
            self.is_ready, self.table = False, None

        def scale(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.table = torch.full_like(x, float(x.sum()))
                self.is_ready = True
            return x * self.table

    lazy, x = Lazy(), torch.ones(2, device=device)
    scale = graphed(lazy.scale)
    assert_bitwise_equal(called(scale, 4, x), x * 2)
    assert counts(scale) == (1, 3, 0, 1)


def test_a_list_that_the_function_grows_is_refused(device: str) -> None:
    log: list[float] = []

    def note(x: Tensor) -> Tensor:
        log.append(1.0)
        return x * len(log)

    assert_refused(note, "length of closure variable log changed", torch.ones(2, device=device))
    assert log == [1.0]


@pytest.mark.parametrize("place", ["attribute", "list", "grad", "dict"])
def test_a_tensor_that_escapes_is_refused(device: str, place: str) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.last: Tensor | None = None
            self.parameter = nn.Parameter(torch.ones(2, device=device))
            self.log: list[Tensor] = []
            self.table: dict[str, Tensor] = {}

        def keep(self, x: Tensor) -> None:
            kept = x * 2
            if place == "attribute":
                self.last = kept
            elif place == "list":
                self.log[:] = [kept]
            elif place == "grad":
                self.parameter.grad = kept
            else:
                self.table["kept"] = kept

    names = {
        "attribute": r"self\.last",
        "list": r"self\.log\[0\]",
        "grad": r"grad of self\.parameter",
        "dict": r"self\.table\['kept'\]",
    }
    keeper, x = Keeper(), torch.ones(2, device=device)
    message = assert_refused(keeper.keep, f"leaves a tensor that it computed in {names[place]}", x)
    assert "return the tensor" in message


def test_gradients_set_to_none_inside_and_made_outside_run_eagerly(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Linear(2, 2, device=device)
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (module, twin)]

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    replayed = graphed(functools.partial(step, optimizers[0]))
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for _ in range(6):
            for one in (module, twin):
                one(torch.ones(1, 2, device=device)).sum().backward()
            replayed()
            step(optimizers[1])
            assert module.weight.grad is None
            assert_bitwise_equal(module.weight.detach(), twin.weight.detach())
    assert re.search("change Python objects, .*: grad of .* is no longer a tensor", caplog.text)


def test_a_result_that_requires_a_gradient_is_refused(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    assert_refused(lambda x: {"y": x * weight}, "result 0 requires .*detached.*no_grad", torch.ones(2, device=device))


def test_a_result_that_is_no_tensor_or_constant_is_refused(device: str) -> None:
    assert_refused(lambda x: (x * 2, object()), "expected tensors, nested containers", torch.ones(2, device=device))


def test_a_tensor_that_nobody_can_name_is_refused(device: str) -> None:
    hidden = functools.cache(lambda: torch.ones(2, device=device))
    hidden()
    x = torch.ones(2, device=device)
    message = assert_refused(lambda x: x * hidden(), "aten.mul.* uses a tensor of shape", x)
    assert "pass it as an argument" in message


def test_setting_the_seed_is_refused(device: str) -> None:
    def draw(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.rand_like(x)

    replayed, x = graphed(draw), torch.ones(2, device=device)
    replayed(x)
    with pytest.raises(RuntimeError, match="seed"):
        replayed(x)


def test_an_exception_of_the_function_passes_and_leaves_what_it_did(device: str) -> None:
    total, hidden = torch.zeros(2, device=device), threading.Lock()  # whose state is not compared

    def bump() -> None:
        total.add_(1)
        if hidden.locked():
            raise KeyError("mine")

    replayed = graphed(bump)
    for fails in (False, True, False, False):
        if fails:
            with hidden, pytest.raises(KeyError, match="mine"):
                replayed()
        else:
            replayed()
    assert_bitwise_equal(total, torch.full_like(total, 4))
    assert counts(replayed) == (1, 2, 0, 2)


class OnDevice:
    """A stand-in for a GPU where there is none: tensors on "meta" are those of the device."""

    def __init__(self) -> None:
        self.watch = RegionWatch(torch.device("meta"))

    def run(self, region: Callable[..., Any], *args: Any) -> Any:
        with DeviceAccessMode(self.watch.refusals), self.watch:
            return region(*args)


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (lambda x, host: x * host, "aten.mul.* CPU tensor from outside"),
        (lambda x, host: host.add_(1), "aten.add_.* CPU tensor from outside"),
        (lambda x, host: torch._foreach_add_([host, host.clone()], 1), "aten.* CPU tensor from outside"),
        (lambda x, host: x * torch.rand(()), "aten.rand.* random numbers on the CPU"),
        (lambda x, host: x.cpu(), "Tensor.cpu.* between host and device"),
        (lambda x, host: x.to("cpu"), "Tensor.to.* between host and device"),
        (lambda x, host: x.copy_(torch.zeros(3)), "aten.copy_.* between host and device"),
        (lambda x, host: torch.ones(3).to("meta"), "Tensor.to.* between host and device|_to_copy.* between"),
        (lambda x, host: torch.tensor([1.0], device="meta"), "torch.tensor .* Python data"),
        (lambda x, host: x.new_tensor([1.0]), "torch.new_tensor .* Python data"),
        (lambda x, host: x.sum().item(), "_local_scalar_dense.* reads a tensor's value"),
        (lambda x, host: x.nonzero(), "nonzero.* depends on data"),
        (lambda x, host: x[torch.tensor([0, 1])], "aten.index.* between host and device"),
    ],
)
def test_on_a_gpu_work_of_the_host_is_refused(region: Callable, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        OnDevice().run(region, torch.ones(3, device="meta"), torch.ones(()))
    assert "test_graphed_fn_refusals.py" in str(caught.value)


def test_on_a_gpu_a_refusal_that_the_function_swallows_is_raised() -> None:
    def read(x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            x.sum().item()
        return x

    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        OnDevice().run(read, torch.ones(3, device="meta"))


@pytest.mark.parametrize(
    "region",
    [
        lambda x: x * 2 + torch.tensor(3.0),
        lambda x: x * torch.tensor(3.0).add(1).item(),
        lambda x: torch.where(x > 0, 1.0, torch.tensor(0.0)),
        lambda x: torch._foreach_mul([x, x], torch.tensor(2.0)),
        lambda x: x.fill_(torch.ones(2).sum().item()) + torch.zeros(3, device="meta"),
        lambda x: torch.rand_like(x).to(torch.float16).to("meta"),
    ],
)
def test_on_a_gpu_constants_of_the_host_are_fine(region: Callable) -> None:
    assert OnDevice().run(region, torch.ones(3, device="meta")) is not None


def test_a_refusal_that_the_function_swallows_is_raised(device: str) -> None:
    def read(x: Tensor) -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x * 0

    assert_refused(read, "_local_scalar_dense", torch.ones(2, device=device))


def test_random_numbers_of_python_and_numpy_are_refused_and_not_drawn() -> None:
    for module in (random, np.random):
        replayed, x = graphed(lambda t, module=module: t * module.random()), torch.ones(2)
        module.seed(3)
        replayed(x)
        expected = module.random()
        module.seed(3)
        module.random()
        with pytest.raises(CaptureError, match=r"draws random numbers from (Python's random module|numpy\.random)"):
            replayed(x)
        assert module.random() == expected


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random.Random": (lambda: random.Random(0), lambda one: one.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda one: one.rand()),
    "Generator": (lambda: np.random.default_rng(0), lambda one: one.random()),
    "PCG64": (lambda: np.random.PCG64(0), lambda one: one.random_raw() % 7),
    "MT19937": (lambda: np.random.MT19937(0), lambda one: one.random_raw() % 7),
    "Philox": (lambda: np.random.Philox(0), lambda one: one.random_raw() % 7),
    "SFC64": (lambda: np.random.SFC64(0), lambda one: one.random_raw() % 7),
    "torch.Generator": (torch.Generator, lambda one: torch.rand((), generator=one)),
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("where", ["variable", "list", "partial", "method"])
def test_numbers_that_a_refused_capture_drew_are_drawn_again(kind: str, where: str) -> None:
    make, draw = GENERATORS[kind]
    generator, twin = make(), make()
    held = [generator]
    draws = {
        "variable": lambda: draw(generator),
        "list": lambda: draw(held[0]),
        "partial": functools.partial(draw, generator),
        "method": types.MethodType(draw, generator),
    }[where]
    replayed, x = graphed(lambda t: t * draws()), torch.ones(2)
    assert_bitwise_equal(replayed(x), x * draw(twin))
    for _ in range(2):
        with pytest.raises(CaptureError):
            replayed(x)
    assert float(draws()) == float(draw(twin))


def test_a_method_of_a_class_that_cython_made_is_looked_into() -> None:
    generator, twin = np.random.PCG64(0), np.random.PCG64(0)
    replayed, x, draw = graphed(lambda t: t * (draw() % 7)), torch.ones(2), generator.random_raw
    assert_bitwise_equal(replayed(x), x * (twin.random_raw() % 7))
    with pytest.raises(CaptureError, match=r"draws random numbers|changes the state"):
        replayed(x)
    assert draw() == twin.random_raw()


@pytest.mark.parametrize("change", [lambda t, x: t.add_(x), lambda t, x: torch.mul(t, x, out=t)])
def test_writing_into_memory_that_numpy_lends_inside_is_refused(change: Callable) -> None:
    def function(x: Tensor) -> Tensor:
        counted = torch.from_numpy(np.array([1.0, 2.0, 3.0], dtype=np.float32))
        change(counted, x)
        return counted.clone()

    replayed, x = graphed(function), torch.randn(3)
    replayed(x)
    with pytest.raises(CaptureError, match=r"memory that another library lent .* use torch.tensor"):
        replayed(x)


def test_an_argument_that_numpy_reads_by_dlpack_is_refused() -> None:
    replayed, x = graphed(lambda x: x * float(np.from_dlpack(x).sum())), torch.randn(3)
    replayed(x)
    with pytest.raises(CaptureError, match=r"__dlpack__ .* reads a tensor's value on the host"):
        replayed(x)


class Table(dict):
    def get(self, name: str) -> object:
        return self[name]


def test_a_refused_capture_puts_back_what_a_dictionary_with_its_own_get_held() -> None:
    table, x = Table(scale=1.0), torch.ones(3)

    def scaled(x: Tensor) -> Tensor:  # [n] -> [n]
        table["scale"] += 1.0
        return x * table["scale"]

    function = graphed(scaled)
    assert torch.equal(function(x), x * 2)
    with pytest.raises(CaptureError, match="scale"):
        function(x)
    assert table["scale"] == 2.0


def test_forward_mode_derivatives_are_named(device: str) -> None:
    x, total = torch.ones(3, device=device), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(torch.func.jvp(lambda a: a * 2, (x,), (x,))[1])

    step = graphed(step)
    step()
    with pytest.raises(CaptureError, match="meta, as forward-mode derivatives make them"):
        step()
