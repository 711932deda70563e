"""Owners of the memory of results: what they share it with, exports and observers of them, on several threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from both_ways import PASSING, Graph, both, leaf
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Results that share memory ----


class Holds(nn.Module):
    def __init__(self, device: str, forward: Callable[[Holds, Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, device=device))
        self.register_buffer("mask", torch.randn(2, 3, device=device))
        self._call = forward

    def forward(self, x: Tensor) -> Any:  # [2, 3]
        return self._call(self, x)


def two_of(call: Callable[[Holds, Tensor], Any]) -> Callable[[Holds, Tensor], Any]:
    def forward(module: Holds, x: Tensor) -> Any:
        y = x * module.w
        return call(module, y)

    return forward


ALIASES: dict[str, Callable[[Holds, Tensor], Any]] = {
    "one tensor twice": two_of(lambda m, y: (y, y)),
    "a row of the other": two_of(lambda m, y: (y, y[0])),
    "a row comes first": two_of(lambda m, y: (y[0], y)),
    "overlapping slices": two_of(lambda m, y: (y[:, :2], y[:, 1:])),
    "separate slices": two_of(lambda m, y: (y[:, :1], y[:, 1:])),
    "transposed": two_of(lambda m, y: (y, y.t())),
    "view of a view": two_of(lambda m, y: (y.view(-1)[1:], y.view(-1)[:3])),
    "detached": two_of(lambda m, y: (y, y.detach())),
    "the argument": lambda m, x: (x, x + m.w),
    "a view of the argument": lambda m, x: (x.view(-1), x + m.w),
    "two views of the argument": lambda m, x: (x[0], x.t()[1:], x + m.w),
    "the argument, detached": lambda m, x: (x.detach(), x + m.w),
    "a buffer": lambda m, x: (m.mask, x * m.w),
    "a view of a buffer": lambda m, x: (m.mask[1], x * m.w),
    "a buffer, detached": lambda m, x: (m.mask.detach(), x * m.w),
    "a buffer and a use of it": lambda m, x: (m.mask, x * m.w + m.mask),
    "a parameter": lambda m, x: (m.w, x * m.w),
    "a view of a parameter": lambda m, x: (m.w[1:], x * m.w),
}


@pytest.mark.parametrize("kind", ALIASES)
@pytest.mark.parametrize("changed", [None, 0, 1])
def test_results_that_share_memory(device: str, kind: str, changed: int | None) -> None:
    """In-place changes of a result reach what shares its memory, with their gradients; kept results keep theirs."""

    def program(graph: Graph) -> list[Any]:
        module = Holds(device, ALIASES[kind])
        call, seen = graph(module, leaf(device, 2, 3)), []
        for _ in range(3):
            x = leaf(device, 2, 3)
            hidden = x * 1
            results = call(hidden)
            may_change = changed is not None and not (results[changed].is_leaf and results[changed].requires_grad)
            if may_change and not (kind == "a view of a parameter" and changed == 0):
                results[changed].mul_(2)
            loss = sum((result * torch.randn_like(result)).sum() for result in results)
            loss = loss + (hidden * torch.randn_like(hidden)).sum()
            loss.backward()
            seen += [[r.detach().clone() for r in results], x.grad, module.w.grad.clone(), module.mask.clone()]
            seen += [hidden.detach().clone(), [r.data_ptr() == hidden.data_ptr() for r in results]]
            seen += [r is hidden for r in results] + [r is module.mask for r in results]
            seen.append(results[0].detach())  # kept
        return seen

    both(program)


def test_returned_buffer_that_is_replaced_is_refused_by_name(device: str) -> None:
    module = Holds(device, ALIASES["a buffer"])
    tg.make_graphed_callables(module, (leaf(device, 2, 3),))
    module.mask = torch.zeros(2, 3, device=device)
    with pytest.raises(RuntimeError, match="mask moved to other memory since capture"):
        module(leaf(device, 2, 3))


def test_views_of_an_argument_with_other_strides(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        call = graph(lambda x: (x[0], x * 2), leaf(device, 3, 3))
        x = leaf(device, 3, 3)
        row, double = call(x.t())
        (row.sum() + double.square().sum()).backward()
        return [row.detach(), x.grad]

    both(program, has_replays=False)


def test_call_on_the_buffer_that_the_callable_writes_runs_eagerly(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(3, device=device))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # [3] both
            with torch.no_grad():
                self.memory.add_(1)
            return x + memory

    def program(graph: Graph) -> list[Tensor]:
        bank = Bank()
        call = graph(bank, leaf(device, 3), torch.zeros(3, device=device))
        given = (bank.memory if step % 2 else torch.ones(3, device=device) for step in range(4))
        return [call(leaf(device, 3), memory).detach() for memory in given]

    both(program)
    assert "args[1] not to share memory with memory, which the callable writes" in caplog.text


def test_result_can_be_resized(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        call = graph(lambda x: x * 2, leaf(device, 4))
        seen = []
        with torch.no_grad():
            for size in (2, 8):
                result = call(torch.ones(4, device=device, requires_grad=True)).detach()
                seen.append(result.resize_(size)[:2].clone())
                call(torch.zeros(4, device=device, requires_grad=True))
                seen.append(result[:2].clone())
        return seen

    both(program, has_replays=False)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["identity", "dropout 0", "flatten"])
def test_chains_in_which_a_layer_returns_its_argument(device: str, kind: str, place: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        layers: list[nn.Module] = [nn.Linear(8, 8, device=device) for _ in range(3)]
        layers.insert({"first": 0, "middle": 2, "last": 3}[place], PASSING[kind](device))
        calls, seen = graph(tuple(layers), leaf(device, 4, 8), chain=True), []
        for _ in range(3):
            x = leaf(device, 4, 8)
            hidden = x * 1
            for call in calls:
                hidden = call(hidden)
            hidden.square().sum().backward()
            seen += [hidden.detach(), x.grad]
        return seen + [p.grad for layer in layers for p in layer.parameters()]

    both(program)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.mul_(3),
    "a view": lambda x: x.add_(1).view(-1),
    "a row and a product": lambda x: (x.mul_(2)[0], x * 3),
    "itself and a view": lambda x: (x.mul_(2), x.t()),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_results_that_are_a_changed_argument_or_a_view_of_it(device: str, kind: str, requires_grad: bool) -> None:
    def program(graph: Graph) -> list[Any]:
        call, seen = graph(CHANGES[kind], torch.randn(2, 3, device=device, requires_grad=requires_grad)), []
        for _ in range(2):
            leaf_of = torch.randn(2, 3, device=device, requires_grad=requires_grad)
            hidden = leaf_of * 1
            results = call(hidden)
            results = results if isinstance(results, tuple) else (results,)
            hidden.add_(10)
            seen += [[r.detach().clone() for r in results], [r is hidden for r in results], hidden.detach().clone()]
            if requires_grad:
                sum((r * torch.randn_like(r)).sum() for r in results).backward()
                seen.append(leaf_of.grad)
        return seen

    both(program)


# ---- Exports ----

EXPORTS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda y: y.detach().numpy(),
    "numpy of a view": lambda y: y.detach()[1:].numpy(),
    "forced numpy": lambda y: y.numpy(force=True),
    "asarray": lambda y: np.asarray(y.detach()),
    "from_dlpack": lambda y: np.from_dlpack(y.detach()),
    "torch.from_dlpack": lambda y: torch.from_dlpack(y.detach()),
    "to_dlpack": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y.detach())),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_exported_results_keep_their_values(kind: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        call, kept = graph(nn.Linear(4, 4), leaf("cpu", 3, 4)), []
        for _ in range(3):
            kept.append(EXPORTS[kind](call(leaf("cpu", 3, 4))))
        del call
        gc.collect()
        noise = [torch.zeros(3, 4) for _ in range(64)]
        return [torch.as_tensor(np.array(one)) for one in kept] + noise[:1]

    both(program)


IMPORTED_FIRST = """
from torch import Tensor, nn, ones
from torch.utils.dlpack import from_dlpack, to_dlpack
from te_graph import make_graphed_callables
to_numpy = Tensor.numpy
call, kept, values = make_graphed_callables(nn.Linear(4, 4), (ones(3, 4),)), [], []
for k in range(3):
    y = call(k * ones(3, 4)).detach()
    values.append(y.clone())
    kept.append((from_dlpack(to_dlpack(y)), to_numpy(y)))
    del y
for value, (capsule, array) in zip(values, kept):
    assert capsule.equal(value) and (array == value.numpy()).all(), (value, capsule, array)
"""


def test_results_exported_by_functions_imported_before_the_first_capture_keep_their_values() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED_FIRST], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dlpack", "interface"])
def test_results_that_are_exported_on_a_gpu_keep_their_values(kind: str) -> None:
    class Foreign:
        def __init__(self, tensor: Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__
            self._owner = tensor

    def program(graph: Graph) -> list[Tensor]:
        call, kept = graph(nn.Linear(4, 4, device="cuda"), leaf("cuda", 3, 4)), []
        for _ in range(3):
            y = call(leaf("cuda", 3, 4)).detach()
            kept.append(torch.from_dlpack(y) if kind == "dlpack" else torch.as_tensor(Foreign(y), device="cuda"))
        return [one.clone() for one in kept]

    both(program)


def test_an_exported_result_and_its_array_share_memory() -> None:
    call = tg.make_graphed_callables(nn.Linear(4, 4), (leaf("cpu", 3, 4),))
    result = call(leaf("cpu", 3, 4)).detach()
    array = result.numpy()
    array[:] = 5
    assert torch.equal(result, torch.full((3, 4), 5.0))


# ---- Hooks ----


class Attention(nn.Module):
    def __init__(self, device: str, cloned: bool) -> None:
        super().__init__()
        self.linear, self.cloned = nn.Linear(3, 3, device=device), cloned

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [3, 3]
        weights = self.linear(x).softmax(-1)
        return weights @ x, weights.clone() if self.cloned else weights


OBSERVERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_grad": lambda y, a: (a.retain_grad(), y.square().sum().backward()),
    "hook": lambda y, a: (a.register_hook(lambda g: g * 0), y.square().sum().backward()),
    "autograd.grad": lambda y, a: torch.autograd.grad(y.square().sum(), a),
    "autograd.grad, unused allowed": lambda y, a: torch.autograd.grad(y.square().sum(), a, allow_unused=True),
    "backward(inputs=)": lambda y, a: (y.square().sum() + a.sum()).backward(inputs=[a]),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_gradient_of_a_result_that_another_result_is_computed_from_is_refused_by_name(
    device: str, observer: str
) -> None:
    module = tg.make_graphed_callables(Attention(device, cloned=False), (torch.randn(3, 3, device=device),))
    y, weights = module(torch.randn(3, 3, device=device))
    with pytest.raises(RuntimeError, match=r"Attention: result 1 .* another result is computed from it"):
        OBSERVERS[observer](y, weights)


def test_results_that_no_other_is_computed_from_may_be_observed(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        module = Attention(device, cloned=True)
        y, weights = graph(module, torch.randn(3, 3, device=device))(torch.randn(3, 3, device=device))
        y.register_hook(lambda grad: grad * 2)
        y.retain_grad()
        weights.retain_grad()
        (y.square().sum() + weights.square().sum()).backward()
        return [y.grad, weights.grad, module.linear.weight.grad]

    both(program)


def test_the_outer_of_two_results_may_be_observed(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        module = Attention(device, cloned=False)
        y, weights = graph(module, torch.randn(3, 3, device=device))(torch.randn(3, 3, device=device))
        y.retain_grad()
        (y.square().sum() + weights.square().sum()).backward()
        return [y.grad, module.linear.weight.grad]

    both(program)


def test_hooks_of_what_gets_no_gradient_are_called_with_none(device: str) -> None:
    """As documented: all parameters and inputs are below one node. Hooks of results are not called."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.ones(3, device=device)), nn.Parameter(torch.ones(3, device=device))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [3]
            return x * self.p, x * self.q

    module, seen = Two(), []
    tg.make_graphed_callables(module, (leaf(device, 3),))
    module.q.register_hook(lambda grad: seen.append(grad))
    y, z = module(leaf(device, 3))
    z.register_hook(lambda grad: seen.append("a result"))
    y.sum().backward()
    assert seen == [None]
    assert module.q.grad is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_hook_of_a_parameter_that_runs_another_backward_of_the_callable(device: str, when: str) -> None:
    def program(graph: Graph) -> Tensor:
        linear = nn.Linear(2, 2, device=device)
        call = graph(linear, leaf(device, 1, 2))
        done: list[int] = []

        def hook(grad: Tensor) -> None:
            if not done:
                done.append(1)
                torch.autograd.grad(extra, x, retain_graph=True)

        if when == "before":
            linear.weight.register_hook(hook)
        x = leaf(device, 1, 2)
        y = call(x)
        extra = y.square().sum()
        if when == "after":
            linear.weight.register_hook(hook)
        y.sum().backward(retain_graph=True)
        return linear.weight.grad

    both(program)


# ---- Threads ----


def test_backwards_of_one_scope_on_several_threads(device: str) -> None:
    count, steps = 3, 20

    def program(graph: Graph) -> list[Tensor]:
        layers = [nn.Linear(16, 16, device=device) for _ in range(count)]
        graph(tuple(layers), *((leaf(device, 8, 16),) for _ in layers), max_in_flight=2)
        data = torch.randn(count, steps, 8, 16, device=device)

        def work(number: int) -> None:
            for step in range(steps):
                layers[number](data[number, step].clone().requires_grad_()).square().sum().backward()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [layer.weight.grad for layer in layers]

    both(program)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parts_of_an_argument_with_a_gradient_are_copies_which_is_a_documented_limit(device, requires_grad):
    x = torch.randn(4, 6, device=device, requires_grad=requires_grad)
    graphed = tg.make_graphed_callables(lambda x: x.chunk(2), (x,))
    parts = graphed(x)
    for part, expected in zip(parts, x.chunk(2), strict=True):
        assert torch.equal(part, expected)
        assert (part.data_ptr() == expected.data_ptr()) is not requires_grad


def test_a_result_that_is_an_argument_as_another_dtype_is_a_copy_a_documented_limit(device: str) -> None:
    class Bits(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [2] -> [2], [2] int32
            return x + 1, x.view(torch.int32)

    net = tg.make_graphed_callables(Bits(), (torch.ones(2, device=device),))
    x = torch.tensor([1.0, 2.0], device=device)
    _, bits = net(x)
    assert torch.equal(bits, x.view(torch.int32))
    bits.zero_()
    assert x.tolist() == [1.0, 2.0]
