"""Gradients: after any replays every .grad is, bit for bit, what eager execution leaves there (G1 to G4)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import mlp, sample

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


class Twin:
    """A module and its eager copy, driven together."""

    def __init__(self, module: nn.Module, sample: Tensor, **options):
        self.eager = copy.deepcopy(module)
        self.graphed = tg.make_graphed_callables(module, (sample,), **options)
        self.sample = sample

    def both(self, action: Callable[[nn.Module], object]) -> None:
        action(self.eager)
        action(self.graphed)

    def step(self, x: Tensor | None = None) -> None:
        """One forward and backward of each on the same fresh data [like the sample]."""
        x = torch.randn_like(self.sample) if x is None else x
        weight = torch.randn_like(self.eager(x.detach()))
        for module in (self.eager, self.graphed):
            leaf = x.detach().clone().requires_grad_(self.sample.requires_grad)
            (module(leaf) * weight).sum().backward()

    def check(self) -> None:
        for (name, eager), graphed in zip(self.eager.named_parameters(), self.graphed.parameters(), strict=True):
            if eager.grad is None:
                assert graphed.grad is None, f"{name}: expected no gradient"
            else:
                assert graphed.grad is not None, f"{name}: expected a gradient"
                assert graphed.grad.stride() == eager.grad.stride(), name
                assert graphed.grad.dtype == eager.grad.dtype, name
                assert torch.equal(eager.grad, graphed.grad), name


# The example of the problem statement: a Linear of weight 1, input 1, gradient 1 at every step.


def linear_of_one(device: str) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device=device)
    nn.init.ones_(linear.weight)
    return linear


@pytest.mark.parametrize("grad_before", ["none", "created", "used"])
@pytest.mark.parametrize("zero", [True, False])
def test_the_one_two_two_example_prints_what_eager_prints(device: str, grad_before: str, zero: bool) -> None:
    linear = linear_of_one(device)
    if grad_before == "created":
        linear.weight.grad = torch.zeros_like(linear.weight)
    elif grad_before == "used":
        linear(torch.ones(1, 1, device=device)).backward(torch.ones(1, 1, device=device))
        linear.weight.grad.zero_()
    x = torch.ones(1, 1, device=device, requires_grad=True)
    graphed = tg.make_graphed_callables(linear, (x,))
    seen = []
    for _ in range(3):
        if zero and graphed.weight.grad is not None:
            graphed.weight.grad.zero_()
        graphed(torch.ones(1, 1, device=device, requires_grad=True)).backward(torch.ones(1, 1, device=device))
        seen.append(graphed.weight.grad.item())
    assert seen == ([1, 1, 1] if zero else [1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_and_microbatches_accumulate_as_eager(device: str, dtype: torch.dtype, set_to_none: bool) -> None:
    twin = Twin(mlp(device, dtype), sample(device, dtype))
    for _ in range(3):
        twin.both(lambda m: m.zero_grad(set_to_none=set_to_none))
        for _ in range(3):
            twin.step()
            twin.check()


def test_gradient_that_is_none_is_stored_without_reading_old_memory(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    for parameter in twin.graphed.parameters():
        parameter.grad.fill_(float("nan"))
    twin.both(lambda m: m.zero_grad(set_to_none=True))
    twin.step()
    twin.check()


def test_gradient_is_not_created_before_its_backward_runs(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    assert all(p.grad is None for p in twin.graphed.parameters())
    output = twin.graphed(sample(device))
    assert all(p.grad is None for p in twin.graphed.parameters())
    output.sum().backward()
    assert all(p.grad is not None for p in twin.graphed.parameters())


def test_capture_leaves_grad_as_found(device: str) -> None:
    module = mlp(device)
    module[0].weight.grad = torch.randn_like(module[0].weight)
    found, kept = module[0].weight.grad, module[0].weight.grad.clone()
    tg.make_graphed_callables(module, (sample(device),))
    assert module[0].weight.grad is found
    assert torch.equal(found, kept)
    assert module[0].bias.grad is None


def test_kept_reference_to_an_old_grad_keeps_its_value(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    kept = [p.grad for p in twin.graphed.parameters()]
    values = [g.clone() for g in kept]
    for _ in range(3):
        twin.both(lambda m: m.zero_grad(set_to_none=True))
        twin.step()
        twin.check()
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))


def test_kept_view_or_storage_of_an_old_grad_keeps_its_value(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    view = twin.graphed[0].weight.grad.view(-1)[1:]
    storage = twin.graphed[3].weight.grad.untyped_storage()
    values = view.clone(), storage.clone()
    twin.both(lambda m: m.zero_grad(set_to_none=True))
    twin.step()
    twin.check()
    assert torch.equal(view, values[0])
    assert list(storage.cpu()) == list(values[1].cpu())


def test_dropped_grad_memory_is_used_again(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    address = twin.graphed[0].weight.grad.data_ptr()
    for _ in range(3):
        twin.both(lambda m: m.zero_grad(set_to_none=True))
        twin.step()
        assert twin.graphed[0].weight.grad.data_ptr() == address


def test_some_gradients_none(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()

    def drop(module: nn.Module) -> None:
        module[0].weight.grad = None
        module[3].bias.grad = None

    for _ in range(2):
        twin.both(drop)
        twin.step()
        twin.check()


def test_replaced_gradient_is_added_to(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    other = torch.randn_like(twin.eager[0].weight)
    twin.both(lambda m: setattr(m[0].weight, "grad", other.clone()))
    mine = twin.graphed[0].weight.grad
    twin.step()
    twin.check()
    assert twin.graphed[0].weight.grad is mine


@pytest.mark.parametrize("layout", ["transposed", "strided", "odd offset"])
def test_replaced_gradient_of_another_layout_is_added_to(device: str, layout: str) -> None:
    twin = Twin(mlp(device), sample(device))
    rows, columns = twin.eager[0].weight.shape
    values = torch.randn(rows, columns, device=device)

    def other() -> Tensor:
        if layout == "transposed":
            return values.clone().t().contiguous().t()
        if layout == "strided":
            return torch.zeros(rows, 2 * columns, device=device)[:, ::2].copy_(values)
        return torch.zeros(rows * columns + 1, device=device)[1:].view(rows, columns).copy_(values)

    twin.both(lambda m: setattr(m[0].weight, "grad", other()))
    for _ in range(2):
        twin.step()
        twin.check()


def test_gradient_shared_with_a_flat_buffer_is_written_in_place(device: str) -> None:
    twin = Twin(mlp(device), sample(device))

    def flatten(module: nn.Module) -> Tensor:
        flat = torch.zeros(sum(p.numel() for p in module.parameters()), device=device)
        offset = 0
        for parameter in module.parameters():
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        return flat

    flats = [flatten(twin.eager), flatten(twin.graphed)]
    for _ in range(2):
        twin.step()
        assert torch.equal(*flats)
        assert flats[0].count_nonzero() > 0


def test_gradient_version_moves_as_in_eager(device: str) -> None:
    twin = Twin(mlp(device), sample(device))
    twin.step()
    before = [p.grad._version for p in twin.graphed.parameters()]
    twin.step()
    assert [p.grad._version for p in twin.graphed.parameters()] == [v + 1 for v in before]


def test_accumulate_grads_false_hands_owned_gradients_to_autograd(device: str) -> None:
    twin = Twin(mlp(device), sample(device), accumulate_grads=False)
    twin.step()
    addresses = {p.grad.data_ptr() for p in twin.graphed.parameters()}
    kept = twin.graphed[0].weight.grad.clone()
    grad = twin.graphed[0].weight.grad
    twin.both(lambda m: m.zero_grad(set_to_none=True))
    twin.step()
    assert torch.equal(grad, kept)
    assert len(addresses) == 6
    for _ in range(3):
        twin.step()
        twin.check()


def test_autograd_has_edges_to_inputs_and_to_parameters_with_hooks_and_no_others(device: str) -> None:
    graphed = tg.make_graphed_callables(mlp(device), (sample(device, requires_grad=True),))
    assert len(graphed(sample(device, requires_grad=True)).grad_fn.next_functions) == 1
    graphed[2].weight.register_hook(lambda grad: None)
    edges = graphed(sample(device, requires_grad=True)).grad_fn.next_functions
    assert [node.name() for node, _ in edges] == ["torch::autograd::AccumulateGrad"] * 2
    assert edges[1][0].variable is graphed[2].weight


HOOKS = {
    "tensor hook": lambda p, seen: p.register_hook(lambda g: seen.append(g.clone()) or g * 2),
    "post-accumulate hook": lambda p, seen: p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone())),
    "AccumulateGrad hook": lambda p, seen: (
        p.expand_as(p).grad_fn.next_functions[0][0].register_hook(lambda *_: seen.append(p.grad.clone()))
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("when", ["before capture", "after capture"])
def test_hooks_on_parameters_run_once_with_the_right_gradient(device: str, kind: str, when: str) -> None:
    module = mlp(device)
    eager = copy.deepcopy(module)
    seen: list[list[Tensor]] = [[], []]
    # An AccumulateGrad node lives only as long as it is referred to.
    held = [p.expand_as(p) for p in (module[0].weight, eager[0].weight)]
    if when == "before capture":
        HOOKS[kind](module[0].weight, seen[1])
    graphed = tg.make_graphed_callables(module, (sample(device),))
    assert seen[1] == []
    if when == "after capture":
        HOOKS[kind](graphed[0].weight, seen[1])
    HOOKS[kind](eager[0].weight, seen[0])
    for _ in range(3):
        x = sample(device)
        for m in (eager, graphed):
            m(x).square().sum().backward()
        for a, b in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert len(seen[0]) == 3
    assert len(seen[1]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert len(held) == 2


class UsesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [n, 5]
        return (x @ self.weight).tanh() @ self.weight + self.frozen


def test_parameter_used_twice_unused_and_frozen(device: str) -> None:
    twin = Twin(UsesTwice().to(device, torch.bfloat16), torch.randn(3, 5, device=device, dtype=torch.bfloat16))
    for _ in range(3):
        twin.step()
        twin.check()
    assert twin.graphed.unused.grad is None
    assert twin.graphed.frozen.grad is None


@pytest.mark.parametrize("separate_calls", [False, True])
def test_parameter_tied_between_callables_is_summed_before_it_is_added(device: str, separate_calls: bool) -> None:
    def build() -> tuple[nn.Linear, nn.Linear]:
        first, second = (nn.Linear(6, 6).to(device, torch.bfloat16) for _ in range(2))
        second.weight = first.weight
        return first, second

    eager = build()
    pair = copy.deepcopy(nn.ModuleList(eager))
    x = torch.randn(4, 6, device=device, dtype=torch.bfloat16, requires_grad=True)
    if separate_calls:
        graphed = tuple(tg.make_graphed_callables(m, (x,)) for m in pair)
    else:
        graphed = tg.make_graphed_callables(tuple(pair), ((x,), (x,)))
    for _ in range(3):
        x = torch.randn(4, 6, device=device, dtype=torch.bfloat16)
        for first, second in (eager, graphed):
            second(first(x.clone().requires_grad_()).relu()).float().square().sum().backward()
        assert torch.equal(eager[0].weight.grad, graphed[0].weight.grad)
        assert torch.equal(eager[1].bias.grad, graphed[1].bias.grad)


def test_leaf_input_accumulates_in_its_grad(device: str) -> None:
    module = mlp(device)
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(module, (sample(device, requires_grad=True),))
    leaves = [sample(device, requires_grad=True)]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    for _ in range(3):
        for m, leaf in zip((eager, graphed), leaves, strict=True):
            m(leaf).square().sum().backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad)
    address = leaves[1].grad.data_ptr()
    graphed(sample(device, requires_grad=True)).sum().backward()
    assert leaves[1].grad.data_ptr() == address
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_autograd_grad_returns_input_gradients_and_writes_no_parameter(device: str) -> None:
    twin = Twin(mlp(device), sample(device, requires_grad=True))
    twin.step()
    x = sample(device, requires_grad=True)
    results = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (twin.eager, twin.graphed)]
    assert torch.equal(*results)
    twin.check()
    for m in (twin.eager, twin.graphed):
        m(x).square().sum().backward(inputs=[x])
    twin.check()
    twin.step()
    twin.check()


def test_autograd_grad_for_a_parameter_says_it_is_unused(device: str) -> None:
    graphed = tg.make_graphed_callables(mlp(device), (sample(device, requires_grad=True),))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(graphed(sample(device, requires_grad=True)).sum(), graphed[0].weight)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4]
        h = self.trunk(x).relu()
        return self.left(h), self.right(h)


def test_output_without_gradient_leaves_its_parameters_none(device: str) -> None:
    module = TwoHeads().to(device)
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(module, (torch.randn(3, 4, device=device),))
    for heads in ((0,), (1,), (0, 1), (0,)):
        x = torch.randn(3, 4, device=device)
        for m in (eager, graphed):
            m.zero_grad(set_to_none=True)
            outputs = m(x)
            sum(outputs[head].square().sum() for head in heads).backward()
        for (name, a), b in zip(eager.named_parameters(), graphed.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_channels_last_and_expanded_parameters_get_gradients_of_autograds_layout(device: str) -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).to(device).to(memory_format=torch.channels_last)
    twin = Twin(module, torch.randn(2, 4, 8, 8, device=device).to(memory_format=torch.channels_last))
    for _ in range(3):
        twin.step()
        twin.check()


def test_complex_parameters(device: str) -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:  # [n, 5] complex
            return torch.view_as_real(x * self.phase)

    twin = Twin(Rotate().to(device), torch.randn(3, 5, device=device, dtype=torch.complex64))
    for _ in range(3):
        twin.step()
        twin.check()


def test_conjugated_gradient_is_added_to(device: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:  # [n, 5] complex
            return torch.view_as_real(x * self.weight)

    twin = Twin(Scale().to(device), torch.randn(3, 5, device=device, dtype=torch.complex64))
    values = torch.randn(5, device=device, dtype=torch.complex64)
    twin.both(lambda m: setattr(m.weight, "grad", values.clone().conj()))
    for _ in range(2):
        twin.step()
        assert torch.equal(twin.eager.weight.grad.resolve_conj(), twin.graphed.weight.grad.resolve_conj())


@pytest.mark.parametrize("overlap", ["same tensor", "shifted view"])
def test_gradients_that_share_memory_are_added_one_after_the_other(device: str, overlap: str) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(9000)), nn.Parameter(torch.randn(9000))

        def forward(self, x: Tensor) -> Tensor:  # [9000]
            return x * self.first + 3 * x * self.second

    twin = Twin(Pair().to(device), torch.randn(9000, device=device))

    def share(module: nn.Module) -> None:
        memory = torch.zeros(9001, device=device)
        module.first.grad = memory[:9000]
        module.second.grad = module.first.grad if overlap == "same tensor" else memory[1:]

    twin.both(share)
    for _ in range(3):
        twin.step(torch.randint(-8, 8, (9000,), device=device).float())
        torch.testing.assert_close(twin.graphed.first.grad, twin.eager.first.grad)
        torch.testing.assert_close(twin.graphed.second.grad, twin.eager.second.grad)
