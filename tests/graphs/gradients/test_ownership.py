"""Owners of memory: what graphs lend, alias and write is what eager execution lends, aliases and writes.

Each case is a program that is run twice, eagerly and with its callables graphed; what it returns must be equal bit for
bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_ways import PASSING, Graph, Position, both, leaf
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Gradients that pass through unchanged ----


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


def test_a_sparse_gradient_of_a_result_is_refused_by_name(device: str) -> None:
    model = tg.make_graphed_callables(nn.Linear(4, 4).to(device), (torch.randn(3, 4, device=device),))
    result = model(torch.randn(3, 4, device=device))
    with pytest.raises(RuntimeError, match=r"Linear: expected a dense gradient of output 0, got one of layout Sparse"):
        result.backward(torch.eye(3, 4, device=device).to_sparse())
    assert model.weight.grad is None


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
