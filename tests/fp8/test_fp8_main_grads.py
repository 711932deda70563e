"""``fuse_wgrad_accumulation``: gradients of weights that products add to ``main_grad``.

The reference are gradients that were made one by one with ``torch.autograd.grad``, and added by torch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fp8_gradients import IN, OUT, RECIPE, a_sample, backward, call, gradients_of
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
graphed_or_not = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])


def fused(device: str, dtype: torch.dtype, main_dtype: torch.dtype, graphed: bool) -> tg.Linear:
    torch.manual_seed(0)
    layer = tg.Linear(IN, OUT, device=device, dtype=dtype, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full(layer.weight.shape, 0.25, device=device, dtype=main_dtype)
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(layer, (a_sample(device, dtype),))
        assert bool((layer.weight.main_grad == 0.25).all())
    return layer


@graphed_or_not
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_added_to_in_its_dtype(device: str, main_dtype: torch.dtype, graphed: bool) -> None:
    layer = fused(device, torch.bfloat16, main_dtype, graphed)
    samples = [a_sample(device) for _ in range(4)]
    # Casts of bfloat16 values are the same in float32.
    gradients = gradients_of(layer, samples, main_dtype)
    total = layer.weight.main_grad.clone()
    for step, (x, gradient) in enumerate(zip(samples, gradients, strict=True)):
        if step == 2:
            tg.reset_main_grads([layer.weight])
            total = None
        backward(layer, x)
        total = gradient if total is None else total + gradient
        assert same_bits(layer.weight.main_grad, total)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_graphs_leave_in_main_grad_what_eager_execution_leaves(device: str) -> None:
    results = []
    for graphed in (False, True):
        layer = fused(device, torch.bfloat16, torch.float32, graphed)
        generator = torch.Generator().manual_seed(3)
        values = []
        for step in range(4):
            x = torch.randn(7, IN, generator=generator).to(device, torch.bfloat16).requires_grad_()
            if step == 2:
                tg.reset_main_grads([layer.weight])
            version = layer.weight.main_grad._version
            torch.autograd.grad(call(layer, x).float().sum(), x)
            assert layer.weight.main_grad._version == version
            values.append(layer.weight.main_grad.clone())
            backward(layer, x)
            values += [layer.weight.main_grad.clone(), layer.bias.grad.clone(), x.grad]
        results.append(values)
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_reset_from_before_graph_layers_is_for_the_first_backward_of_the_training(device: str, ends: str) -> None:
    """The step that ``graph_layers`` watches has a backward, which overwrites what it accumulates in."""
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        options = {"device": device, "bias": False, "fuse_wgrad_accumulation": True}
        model = nn.Sequential(tg.Linear(IN, IN, **options), nn.Sequential(tg.Linear(IN, IN, **options), nn.GELU()))
        samples = [a_sample(device, torch.float32) for _ in range(3)]
        for parameter in model.parameters():
            parameter.main_grad = torch.full_like(parameter, 7.0)
        tg.reset_main_grads(model.parameters())

        def step(x: Tensor, model: nn.Module = model) -> None:
            with tg.fp8_autocast(recipe=RECIPE):
                loss = model(x).square().mean()
            loss.backward()

        def watched(step: Callable[[Tensor], None] = step, x: Tensor = samples[0]) -> None:
            step(x)
            if ends != "well":
                raise KeyError("the loader")

        if graphed and ends == "well":
            tg.graph_layers(model, watched, layers=tg.Linear)
        elif graphed:
            with pytest.raises(KeyError, match="the loader"):
                tg.graph_layers(model, watched)
        for x in samples:
            step(x)
            results.append([parameter.main_grad.clone() for parameter in model.parameters()])
    assert_bitwise_equal(results[:3], results[3:])


@graphed_or_not
def test_a_replaced_main_grad_is_added_to_or_named(device: str, graphed: bool) -> None:
    layer = fused(device, torch.bfloat16, torch.float32, graphed)
    layer.weight.main_grad = torch.zeros_like(layer.weight.main_grad)
    if graphed:
        with pytest.raises(RuntimeError, match="main_grad of weight"):
            backward(layer, a_sample(device))
    else:
        backward(layer, a_sample(device))
        assert layer.weight.main_grad.count_nonzero() > 0


def test_a_hook_gets_the_gradient_through_autograd(device: str) -> None:
    layer, seen = fused(device, torch.bfloat16, torch.float32, False), []
    layer.weight.register_hook(lambda grad: seen.append(grad))
    backward(layer, a_sample(device))
    assert len(seen) == 1
    assert layer.weight.grad is not None
    assert bool((layer.weight.main_grad == 0.25).all())


def moved(tensor: Tensor, device: str) -> Tensor:
    """``tensor`` [...] on ``device``, as far from the beginning of its memory and with its strides."""
    memory = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), device=device, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        (None, RuntimeError, "expected weight.main_grad.* got none: make it, or leave fuse_wgrad_accumulation out"),
        (
            torch.zeros(OUT, IN, dtype=torch.float64),
            ValueError,
            "contiguous, of float32, bfloat16 or float16 and of shape",
        ),
        (torch.zeros(IN, OUT).t(), ValueError, r"expected weight.main_grad.* got .* and strides \[1, 48\]"),
        (torch.zeros(OUT, IN, device="meta"), ValueError, "expected weight.main_grad.* on meta"),
        (
            torch.zeros(OUT * IN + 1)[1:].view(OUT, IN),
            ValueError,
            "expected weight.main_grad.* at a multiple of 16 bytes",
        ),
    ],
    ids=["none", "dtype", "strides", "device", "address"],
)
def test_main_grads_that_cannot_be_added_to_are_named(
    device: str, main_grad: Tensor | None, error: type[Exception], message: str
) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        layer.weight.main_grad = main_grad if main_grad.is_meta else moved(main_grad, device)
    with pytest.raises(error, match=message):
        backward(layer, a_sample(device))
    assert layer.weight.grad is None


def test_a_backward_inside_a_captured_function_is_refused(device: str) -> None:
    layer = fused(device, torch.bfloat16, torch.float32, False)
    call, x = tg.graphed(lambda x: backward(layer, x)), a_sample(device).detach()
    with pytest.raises(
        RuntimeError, match="with fuse_wgrad_accumulation no backward can be captured inside a function"
    ):
        for _ in range(3):
            call(x)


@pytest.mark.parametrize("fuses", [False, True])
def test_whether_gradients_go_to_main_grad_may_change_after_a_call(device: str, fuses: bool) -> None:
    """Scales and histories go on."""
    results = []
    for is_changed in (False, True):
        torch.manual_seed(0)
        layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=fuses != is_changed)
        layer.weight.main_grad = torch.zeros(OUT, IN, device=device)
        samples = [torch.ones(4, IN, device=device, dtype=torch.bfloat16) * 2.0**power for power in range(4)]
        for x in samples[:2]:
            backward(layer, x)
        layer.fuse_wgrad_accumulation = fuses
        layer.weight.main_grad.zero_()
        layer.weight.grad = None
        for x in samples[2:]:
            backward(layer, x)
        assert (layer.weight.grad is None) == fuses
        assert bool(layer.weight.main_grad.any()) == fuses
        layer.fp8.update_if_due()
        results.append([layer.weight.main_grad, layer.get_extra_state()])
    assert all(map(same_bits, *results))


class Tied(nn.Module):
    """A product by a weight that an FP8 layer may have as well."""

    def __init__(self, layer: tg.Linear, is_tied: bool) -> None:
        super().__init__()
        self.layer, self.is_tied = layer, is_tied

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]"""
        y = self.layer(x)
        return y + F.linear(x, self.layer.weight) if self.is_tied else y


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_an_eager_call_of_a_layer_that_adds_to_main_grad_itself_passes(device: str, is_module: bool) -> None:
    results, samples = [], [a_sample(device).detach()[:count] for count in (7, 3, 7)]
    for graphed in (False, True):
        layer = fused(device, torch.bfloat16, torch.float32, False)
        model = Tied(layer, is_tied=False) if is_module else lambda x, layer=layer: layer(x)
        if graphed:
            with tg.fp8_autocast(recipe=RECIPE):
                model = tg.make_graphed_callables(model, (samples[0],), on_mismatch="eager")
        for x in samples:
            backward(model, x)
        assert layer.weight.grad is None
        results.append([layer.weight.main_grad, layer.bias.grad])
        assert not graphed or sum(model.te_graph.info()["eager_calls"].values()) == 1
    assert all(map(same_bits, *results))


def outside(model: nn.Module, x: Tensor) -> None:
    model(x).float().sum().backward()


def hooked(model: nn.Module, x: Tensor) -> None:
    model.layer.weight.register_hook(lambda grad: grad)
    backward(model, x)


def with_bias(model: nn.Module, x: Tensor) -> None:
    model.layer.bias.main_grad = torch.zeros(OUT, device=x.device)
    backward(model, x)


@pytest.mark.parametrize(
    ("is_tied", "call_otherwise"),
    [(True, backward), (False, outside), (False, hooked), (False, with_bias)],
    ids=["tied", "outside", "hooked", "bias"],
)
def test_other_eager_calls_that_would_miss_main_grad_are_refused(
    device: str, is_tied: bool, call_otherwise: Callable
) -> None:
    layer = fused(device, torch.bfloat16, torch.float32, False)
    model = Tied(layer, is_tied)
    with tg.fp8_autocast(recipe=RECIPE):
        tg.make_graphed_callables(model, (a_sample(device).detach(),), on_mismatch="eager")
    with pytest.raises(RuntimeError, match=r"an eager call would leave gradients in \.grad instead of main_grad"):
        call_otherwise(model, a_sample(device)[:3].detach())
    assert layer.weight.grad is None
    assert bool((layer.weight.main_grad == 0.25).all())
