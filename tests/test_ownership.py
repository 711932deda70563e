"""Who owns a byte: what graphs lend, alias and write is what eager execution lends, aliases and writes.

Each case is a program that is run twice, eagerly and with its callables graphed; what it returns must be equal bit for
bit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import assert_bitwise_equal

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")

Graph = Callable[..., Any]  # (callable, *samples, **options) -> what replaces it: itself in the eager run


def both(program: Callable[[Graph], Any], *, has_replays: bool = True) -> None:
    """Run ``program`` eagerly and graphed, from the same random state; compare what it returns."""
    handles = []

    def graph(target: Any, *samples: Tensor, **options: Any) -> Any:
        made = tg.make_graphed_callables(target, samples, **options)
        handles.extend(one.te_graph for one in (made if isinstance(made, tuple) else (made,)))
        return made

    torch.manual_seed(0)
    expected = program(lambda target, *samples, **options: target)
    torch.manual_seed(0)
    assert_bitwise_equal(program(graph), expected)
    assert any(handle.info()["forward_replays"] for handle in handles) or not has_replays


def leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


# ---- Gradients that pass through unchanged ----


class Position(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [n, 8]
        return x + self.table


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class SameGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


PASSING: dict[str, Callable[[str], Any]] = {
    "identity": lambda device: nn.Identity(),
    "flatten": lambda device: nn.Flatten(),
    "dropout 0": lambda device: nn.Dropout(0.0),
    "bias": Position,
    "cat": lambda device: lambda x: torch.cat([x[:, :4], x[:, 4:]], -1),
    "straight through": lambda device: SameGradient.apply,
    "reversal": lambda device: Reversal.apply,
    "contiguous": lambda device: lambda x: x.contiguous(),
    "permuted": lambda device: lambda x: x.t().t(),
    "sum": lambda device: lambda x: x.sum(0, keepdim=True),
}


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("chain", [False, True])
def test_branches_from_one_hidden_state(device: str, kind: str, chain: bool) -> None:
    def program(graph: Graph) -> list[Tensor]:
        stem, proj, other = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device), PASSING[kind](device)
        passes, x = graph(other, leaf(device, 4, 8)), leaf(device, 4, 8)
        branch = graph(proj, leaf(device, 4, 8), chain=chain)
        seen = []
        for _ in range(2):
            hidden = stem(x)
            a, b = branch(hidden), passes(hidden)
            ((a * a).mean() + (b**3).mean()).backward()
            seen += [stem.weight.grad.clone(), x.grad.clone()]
        return seen

    both(program)


@pytest.mark.parametrize("kind", PASSING)
def test_gradients_of_inputs_keep_their_values(device: str, kind: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        call, kept = graph(PASSING[kind](device), leaf(device, 4, 8)), []
        for _ in range(3):
            hidden = leaf(device, 4, 8) * 1
            result = call(hidden)
            kept.append(torch.autograd.grad(result, hidden, torch.randn_like(result))[0])
        return kept

    both(program)


class GradientInForward(torch.autograd.Function):
    """As fused losses do: the gradient is computed, and kept, in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
        ctx.gradient = x * 2
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.gradient


def test_gradient_that_the_forward_computed_keeps_its_value(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        loss, kept = graph(lambda x: GradientInForward.apply(x), leaf(device, 5)), []
        for _ in range(3):
            x = leaf(device, 5)
            hidden = x * 1
            kept += torch.autograd.grad(loss(hidden), hidden)
        return kept

    both(program)


def test_clones_are_made_where_a_gradient_lies_in_memory_of_others_and_counted(device: str) -> None:
    passes = tg.make_graphed_callables(Position(device), (leaf(device, 4, 8),), max_in_flight=2)
    computes = tg.make_graphed_callables(nn.Linear(8, 8, device=device), (leaf(device, 4, 8),), max_in_flight=2)
    assert passes.te_graph.info()["clones"] == 2
    assert computes.te_graph.info()["clones"] == 0


def test_grad_that_autograd_took_from_lent_memory_is_added_to_where_it_moved(device: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(2, 3, device=device))

        def forward(self, x: Tensor) -> Tensor:  # [2, 3]
            return x * self.p * 5

    def program(graph: Graph) -> Tensor:
        ones = torch.ones(2, 3, device=device)
        module = graph(Scale(), ones)
        double = graph(lambda v: v * 2, torch.ones(6, device=device, requires_grad=True))
        (module(ones).sum() + double(module.p.view(-1)).sum()).backward()
        return module.p.grad

    both(program)


# ---- Layouts of parameters and of what their gradients go to ----


class Uses(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:  # like the parameter, or broadcast
        used = self.p.conj() if self.p.is_complex() else torch.cat([self.p, self.p * 2], -1)[..., : self.p.shape[-1]]
        return x * used


LAYOUTS: dict[str, Callable[[str], Tensor]] = {
    "column view": lambda device: torch.randn(4, 8, device=device)[:, :3],
    "other columns": lambda device: torch.randn(4, 8, device=device)[:, 5:],
    "expanded": lambda device: torch.randn(1, device=device).expand(4, 3),
    "row expanded": lambda device: torch.randn(1, 3, device=device).expand(4, 3),
    "transposed": lambda device: torch.randn(3, 4, device=device).t(),
    "every other": lambda device: torch.randn(8, 6, device=device)[::2, ::2],
    "channels last": lambda device: torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
    "complex": lambda device: torch.randn(4, 3, device=device, dtype=torch.complex64),
    "scalar": lambda device: torch.randn(1, device=device),
    "empty": lambda device: torch.randn(0, 3, device=device),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_of_any_layout(device: str, layout: str, set_to_none: bool) -> None:
    def program(graph: Graph) -> list[Any]:
        module = Uses(LAYOUTS[layout](device))
        x = torch.randn_like(module.p, memory_format=torch.contiguous_format).requires_grad_()
        call, seen = graph(module, x), []
        for step in range(4):
            result = call(torch.randn_like(x).requires_grad_())
            result.backward(torch.randn_like(result))
            seen.append((module.p.grad.clone(), module.p.grad.stride(), module.p.grad.dtype))
            if step == 1:
                module.zero_grad(set_to_none)
        return seen

    both(program)


def test_columns_of_one_fused_weight(device: str) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(4, 8, device=device)
            self.q, self.k = nn.Parameter(weight[:, :3]), nn.Parameter(weight[:, 3:])

        def forward(self, x: Tensor) -> Tensor:  # [4, 8]
            return x * torch.cat([self.q, self.k], 1)

    def program(graph: Graph) -> list[Tensor]:
        module = graph(Fused(), leaf(device, 4, 8))
        for _ in range(2):
            result = module(leaf(device, 4, 8))
            result.backward(torch.randn_like(result))
        return [p.grad for p in module.parameters()]

    both(program)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_grad_dtype_of_a_parameter_is_kept_to(device: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    def program(graph: Graph) -> list[Tensor]:
        linear = nn.Linear(64, 64, bias=False, device=device, dtype=dtype)
        linear.weight.grad_dtype = grad_dtype
        call, seen = graph(linear, leaf(device, 3, 64, dtype=dtype)), []
        for _ in range(3):
            call(leaf(device, 3, 64, dtype=dtype)).float().square().sum().backward()
            seen.append(linear.weight.grad.clone())
        return seen

    both(program)


def test_grad_dtype_that_changes_is_named(device: str) -> None:
    linear = nn.Linear(4, 4, device=device, dtype=torch.bfloat16)
    tg.make_graphed_callables(linear, (leaf(device, 3, 4, dtype=torch.bfloat16),))
    linear.weight.grad_dtype = torch.float32
    with pytest.raises(RuntimeError, match="grad_dtype of weight changed since capture"):
        linear(leaf(device, 3, 4, dtype=torch.bfloat16))


MAIN_GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda like: torch.zeros_like(like),
    "transposed": lambda like: torch.zeros(like.shape[::-1], device=like.device).t(),
    "column view": lambda like: torch.zeros(like.shape[0], 2 * like.shape[1], device=like.device)[:, : like.shape[1]],
    "flat buffer": lambda like: torch.zeros(like.numel() + 3, device=like.device)[3:].view(like.shape),
    "double": lambda like: torch.zeros_like(like, dtype=torch.float64),
    "bfloat16": lambda like: torch.zeros_like(like, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", MAIN_GRADS)
def test_main_grads_of_any_layout_and_dtype(device: str, kind: str) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(3, 2, bias=False, device=device)
    main_grad = linear.weight.main_grad = MAIN_GRADS[kind](linear.weight.detach())
    expected = torch.zeros_like(main_grad)
    around = None if main_grad._base is None else main_grad._base.clone()
    tg.make_graphed_callables(linear, (leaf(device, 4, 3),))
    for step in range(4):
        x, upstream = leaf(device, 4, 3), torch.randn(4, 2, device=device)
        (gradient,) = torch.autograd.grad(nn.functional.linear(x, linear.weight), linear.weight, upstream)
        if step == 2:
            tg.reset_main_grads(linear.parameters())
            expected.zero_()
        expected += gradient
        linear(x).backward(upstream)
        assert torch.equal(main_grad, expected)
    if around is not None:  # what lies beside it belongs to others
        main_grad.zero_()
        assert torch.equal(main_grad._base, around)


def test_main_grad_of_a_channels_last_weight_that_is_a_view_of_a_flat_buffer(device: str) -> None:
    conv = nn.Conv2d(2, 2, 2, bias=False, device=device).to(memory_format=torch.channels_last)
    conv.weight.main_grad = torch.zeros(conv.weight.numel(), device=device).view(conv.weight.shape)
    x = torch.randn(1, 2, 3, 3, device=device).to(memory_format=torch.channels_last).requires_grad_()
    (expected,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    tg.make_graphed_callables(conv, (x,))
    conv(x).square().sum().backward()
    assert torch.equal(conv.weight.main_grad, expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: torch.zeros(w.numel()), r"main_grad of weight with shape .*\[2, 3\].* got .*\[6\]"),
        (lambda w: torch.zeros(3, 2), r"main_grad of weight with shape"),
        (lambda w: torch.zeros(2, 3, device="meta"), "main_grad of weight with device .* got meta"),
        (lambda w: torch.zeros(1, 1).expand(2, 3), "main_grad of weight with memory for each element"),
        (lambda w: torch.zeros(2, 3).to_sparse(), "main_grad of weight to be a dense tensor, got one of layout"),
        (lambda w: 1.0, "main_grad of weight to be a dense tensor, got float"),
    ],
)
def test_main_grad_that_cannot_hold_the_gradient_is_refused(make: Callable[[Tensor], Any], words: str) -> None:
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.main_grad = make(linear.weight)
    with pytest.raises(ValueError, match=words):
        tg.make_graphed_callables(linear, (leaf("cpu", 4, 3),))
    assert not hasattr(linear, "te_graph")


def test_sparse_grad_beside_a_graphed_callable(device: str) -> None:
    class Head(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, h: Tensor) -> Tensor:  # [n, 3]
            return h @ self.weight.t()

    def program(graph: Graph) -> Tensor:
        embedding = nn.Embedding(5, 3, sparse=True, device=device)
        head = graph(Head(embedding.weight), leaf(device, 2, 3))
        embedding(torch.tensor([1, 2], device=device)).sum().backward()
        head(leaf(device, 2, 3)).sum().backward()
        return embedding.weight.grad

    both(program)


# ---- Every .grad is a tensor of its own ----


def test_a_new_grad_has_nothing_of_the_last_one(device: str) -> None:
    def program(graph: Graph) -> list[Any]:
        linear = graph(nn.Linear(2, 2, bias=False, device=device), leaf(device, 1, 2))
        seen: list[Any] = []
        for _ in range(3):
            linear(leaf(device, 1, 2)).sum().backward()
            grad = linear.weight.grad
            if not getattr(grad, "is_reduced", False):
                grad.mul_(10)
                grad.is_reduced = True
            seen += [grad.clone(), grad._version]
            grad.requires_grad_(True)
            alive = weakref.ref(grad)
            del grad
            linear.weight.grad = None
            gc.collect()
            seen.append(alive() is None)
        return seen

    both(program)


def test_the_memory_of_a_dropped_grad_is_used_again(device: str) -> None:
    linear = nn.Linear(4, 4, device=device)
    tg.make_graphed_callables(linear, (leaf(device, 3, 4),))
    addresses = set()
    for _ in range(4):
        linear(leaf(device, 3, 4)).sum().backward()
        addresses.add(linear.weight.grad.data_ptr())
        linear.zero_grad()
        noise = torch.zeros(4, 4, device=device)  # would take freed memory
    assert len(addresses) == 1 and noise.data_ptr() not in addresses


def test_a_grad_whose_memory_was_freed_is_made_anew(device: str) -> None:
    def program(graph: Graph) -> Tensor:
        linear = graph(nn.Linear(4, 4, device=device), leaf(device, 3, 4))
        linear(leaf(device, 3, 4)).sum().backward()
        linear.weight.grad.untyped_storage().resize_(0)
        linear.zero_grad()
        linear(leaf(device, 3, 4)).sum().backward()
        return linear.weight.grad

    both(program)


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


def test_an_exported_result_and_its_array_share_memory(device: str) -> None:
    if device != "cpu":
        pytest.skip("NumPy arrays lie on the CPU")
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


# ---- Sums in eager's order ----


class Twice(nn.Module):
    """Uses its input several times, as attention uses the memory of an encoder."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)

    def forward(self, x: Tensor) -> Tensor:  # [n, 8]
        return self.key(x).sigmoid() * self.value(x) + x * x


@pytest.mark.parametrize("outside", ["none", "before", "after", "both", "each other"])
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_gradients_of_several_uses_are_added_in_the_order_of_eager(
    device: str, outside: str, is_leaf: bool, chain: bool
) -> None:
    def program(graph: Graph) -> list[Tensor]:
        first, second = graph(Twice(device), leaf(device, 5, 8), chain=chain), Twice(device)
        second = graph(second, leaf(device, 5, 8)) if outside == "each other" else second
        seen = []
        for _ in range(3):
            x = leaf(device, 5, 8)
            hidden = x if is_leaf else x * 1.5
            terms = [hidden.sin() * 3] if outside in ("before", "both") else []
            terms.append(first(hidden))
            if outside == "each other":
                terms.append(second(hidden))
            terms += [hidden.cos() * 5] if outside in ("after", "both") else []
            del hidden
            sum((term * torch.randn_like(term)).sum() for term in terms).backward()
            seen.append(x.grad)
        return seen

    both(program)


def test_a_chain_is_one_node_though_its_layers_use_their_input_several_times(device: str) -> None:
    layers = tuple(Twice(device) for _ in range(3))
    tg.make_graphed_callables(layers, (leaf(device, 5, 8),), chain=True)
    for _ in range(2):
        hidden = leaf(device, 5, 8)
        for layer in layers:
            hidden = layer(hidden)
        names, stack = [], [hidden.grad_fn]
        while stack:
            node = stack.pop()
            names.append(node.name())
            stack += [following for following, _ in node.next_functions if following is not None]
        hidden.sum().backward()
    assert sum(name.startswith("GraphedBackward") for name in set(names)) == 2


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:  # [n, 8]
        return x.sigmoid() @ self.weight.t()


def test_gradients_of_a_weight_that_eager_code_used_before_are_summed_first(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        stem = nn.Linear(8, 8, bias=False, device=device)
        head, seen = graph(Head(stem.weight), leaf(device, 5, 8)), []
        for _ in range(3):
            head(stem(torch.randn(5, 8, device=device)).relu()).square().sum().backward()
            seen.append(stem.weight.grad.clone())
        return seen

    both(program)


def test_a_weight_that_eager_code_uses_afterwards_is_named_and_then_summed_first(device: str) -> None:
    torch.manual_seed(3)
    head, twin = (Head(nn.Parameter(torch.eye(8, device=device) / 3)) for _ in range(2))
    tg.make_graphed_callables(head, (leaf(device, 5, 8),))

    def step(module: Head, x: Tensor) -> Tensor:
        module.weight.grad = None
        nn.functional.linear(module(x), module.weight).square().sum().backward()
        return module.weight.grad

    x = leaf(device, 5, 8)
    with pytest.warns(UserWarning, match="Head: weight is used outside the callable as well"):
        step(head, x)
    for _ in range(3):
        x = leaf(device, 5, 8)
        assert_bitwise_equal(step(head, x), step(twin, x))


def test_an_input_that_is_written_into_a_slice_and_used_once_more(device: str) -> None:
    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, device=device)

        def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 8]
            padded = x.new_zeros(x.shape[0], 8)
            padded[:, :4] = x
            padded[:, 4:] = self.linear(x)
            return padded

    def program(graph: Graph) -> list[Tensor]:
        module, x = Pads(), leaf(device, 2, 4)
        graph(module, leaf(device, 2, 4))(x * 1).square().sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    both(program)
