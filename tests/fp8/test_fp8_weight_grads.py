"""Weight gradients that the products add up by themselves: where, in what order, and whose memory it is.

The reference are products that were made one by one with ``torch.autograd.grad``, and added by torch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
IN, OUT = 32, 48
RECIPE = tg.Float8CurrentScaling()
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def a_layer(device: str, dtype: torch.dtype = torch.bfloat16, graphed: bool = False) -> tg.Linear:
    torch.manual_seed(0)
    layer = tg.Linear(IN, OUT, device=device, dtype=dtype)
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(layer, (a_sample(device, dtype),), max_in_flight=2)
    return layer


def a_sample(device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(7, IN, device=device).to(dtype).requires_grad_()


def call(layer: nn.Module, x: Tensor) -> Tensor:
    with tg.fp8_autocast(recipe=RECIPE):
        return layer(x)


def products_of(layer: tg.Linear, samples: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of each of ``samples`` the gradient of the weight, as a product of ``dtype``."""
    other = tg.Linear(IN, OUT, device=layer.weight.device, dtype=dtype)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        other.bias.copy_(layer.bias)
    products = []
    for x in samples:
        y = call(other, x.detach().to(dtype))
        products += torch.autograd.grad(y, other.weight, torch.ones_like(y))
    return products


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@dtypes
def test_sums_have_the_bits_of_additions_by_torch(device: str, dtype: torch.dtype, graphed: bool) -> None:
    layer = a_layer(device, dtype, graphed)
    samples = [a_sample(device, dtype) for _ in range(4)]
    total = None
    for x, product in zip(samples, products_of(layer, samples, dtype), strict=True):
        backward(layer, x)
        total = product if total is None else total + product
        assert same_bits(layer.weight.grad, total)


def test_uses_in_one_backward_are_added_one_after_the_other(device: str) -> None:
    """Last ones first: autograd would add their sum, which rounds otherwise."""
    layer = a_layer(device)
    samples = [a_sample(device) for _ in range(2)]
    first, second = products_of(layer, samples, torch.bfloat16)
    start = torch.randn(OUT, IN, device=device).bfloat16()
    layer.weight.grad = start.clone()
    results = [call(layer, x) for x in samples]
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    assert same_bits(layer.weight.grad, start + second + first)
    assert not same_bits(layer.weight.grad, start + (second + first))


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_a_first_product_does_not_read_what_lies_there(device: str, graphed: bool) -> None:
    layer, x = a_layer(device, graphed=graphed), a_sample(device)
    for _ in range(2):
        layer.zero_grad()
        call(layer, x).float().sum().backward()
        expected = layer.weight.grad.clone()
        layer.weight.grad.fill_(float("nan"))
        layer.weight.grad = None
        call(layer, x).float().sum().backward()
        assert same_bits(layer.weight.grad, expected)


def backward(layer: nn.Module, x: Tensor) -> None:
    y = call(layer, x)
    y.backward(torch.ones_like(y))


def exchange(layer: nn.Module, x: Tensor) -> None:
    layer.weight.grad = torch.full_like(layer.weight, 0.5)
    backward(layer, x)


def keep(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    backward(layer, x)
    kept = layer.weight.grad
    layer.weight.grad = None
    backward(layer, x)
    return kept, kept.clone()


def ask_for_inputs(layer: nn.Module, x: Tensor) -> Tensor:
    backward(layer, x)
    return torch.autograd.grad(call(layer, x).float().sum(), x)[0]


def backward_of_inputs(layer: nn.Module, x: Tensor) -> None:
    backward(layer, x)
    call(layer, x).float().sum().backward(inputs=[x])


def view_as_grad(layer: nn.Module, x: Tensor) -> Tensor:
    memory = torch.ones(2 * layer.weight.numel(), device=x.device, dtype=x.dtype)
    layer.weight.grad = memory[layer.weight.numel() :].view_as(layer.weight)
    backward(layer, x)
    return memory


def transposed_grad(layer: nn.Module, x: Tensor) -> None:
    layer.weight.grad = torch.ones_like(layer.weight).t().contiguous().t()
    backward(layer, x)


def two_in_flight(layer: nn.Module, x: Tensor) -> None:
    first, second = call(layer, x), call(layer, x * 2)
    second.float().sum().backward()
    first.float().sum().backward()


def hooked(layer: nn.Module, x: Tensor) -> Tensor:
    seen = []
    handle = layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    backward(layer, x)
    handle.remove()
    backward(layer, x)
    return torch.stack(seen)


def after_accumulation(layer: nn.Module, x: Tensor) -> None:
    def double(weight: Tensor) -> None:
        weight.grad.mul_(2)

    handle = layer.weight.register_post_accumulate_grad_hook(double)
    backward(layer, x)
    handle.remove()


def zero(layer: nn.Module, x: Tensor) -> None:
    backward(layer, x)
    layer.zero_grad(set_to_none=False)
    backward(layer, x)


def frozen_between(layer: nn.Module, x: Tensor) -> None:
    backward(layer, x)
    layer.weight.requires_grad_(False)
    call(layer, x).float().sum().backward()
    layer.weight.requires_grad_(True)
    backward(layer, x)


def on_other_thread(layer: nn.Module, x: Tensor) -> None:
    thread = threading.Thread(target=lambda: backward(layer, x))
    thread.start()
    thread.join()
    backward(layer, x)


def copied(layer: nn.Module, x: Tensor) -> Tensor:
    backward(layer, x)
    other = copy.deepcopy(layer)
    backward(layer, x)
    backward(other, x)
    return other.weight.grad


def as_numpy(layer: nn.Module, x: Tensor) -> Tensor:
    backward(layer, x)
    array = layer.weight.grad.float().cpu().numpy()
    backward(layer, x)
    return torch.from_numpy(array.copy())


def dlpacked(layer: nn.Module, x: Tensor) -> Tensor:
    backward(layer, x)
    taken = torch.from_dlpack(layer.weight.grad)
    layer.weight.grad = None
    backward(layer, x)
    return taken


USES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    use.__name__: use
    for use in (
        backward,
        exchange,
        keep,
        ask_for_inputs,
        backward_of_inputs,
        view_as_grad,
        transposed_grad,
        two_in_flight,
        hooked,
        after_accumulation,
        zero,
        on_other_thread,
        copied,
        as_numpy,
        dlpacked,
    )
}


@pytest.mark.filterwarnings("ignore:.*is used outside the callable")
@pytest.mark.parametrize("use", USES)
def test_graphs_leave_what_eager_execution_leaves(device: str, use: str) -> None:
    results = []
    for graphed in (False, True):
        layer, generator = a_layer(device, graphed=graphed), torch.Generator().manual_seed(1)
        values = []
        for _ in range(3):
            x = torch.randn(7, IN, generator=generator).to(device, torch.bfloat16).requires_grad_()
            value = USES[use](layer, x)
            values += [value] if isinstance(value, Tensor) else list(value or ())
            values += [layer.weight.grad.clone(), layer.bias.grad.clone()]
            values += [] if x.grad is None else [x.grad]
            if len(values) % 2:
                layer.zero_grad()
        results.append(values)
        if graphed:
            assert layer.te_graph.info()["forward_replays"] >= 3
    assert all(map(same_bits, *results))
    if use == "keep":
        assert same_bits(results[1][0], results[1][1])


@pytest.mark.gpu
def test_no_pass_over_memory_adds_them() -> None:
    """What AccumulateGrad adds is the bias."""
    device = "cuda"
    layer, x = a_layer(device), a_sample(device).detach()
    backward(layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        backward(layer, x)
    added = [event.input_shapes for event in profile.events() if event.name == "aten::add_"]
    assert [shapes[0] for shapes in added] == [[OUT]]


def fused(device: str, dtype: torch.dtype, main_dtype: torch.dtype, graphed: bool) -> tg.Linear:
    torch.manual_seed(0)
    layer = tg.Linear(IN, OUT, device=device, dtype=dtype, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full(layer.weight.shape, 0.25, device=device, dtype=main_dtype)
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(layer, (a_sample(device, dtype),))
        assert bool((layer.weight.main_grad == 0.25).all())
    return layer


graphed_or_not = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])


@graphed_or_not
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_added_to_in_its_dtype(device: str, main_dtype: torch.dtype, graphed: bool) -> None:
    layer = fused(device, torch.bfloat16, main_dtype, graphed)
    samples = [a_sample(device) for _ in range(4)]
    # Casts of bfloat16 values are the same in float32.
    products = products_of(layer, samples, main_dtype)
    total = layer.weight.main_grad.clone()
    for step, (x, product) in enumerate(zip(samples, products, strict=True)):
        if step == 2:
            tg.reset_main_grads([layer.weight])
            total = None
        backward(layer, x)
        total = product if total is None else total + product
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


@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        (None, RuntimeError, "expected weight.main_grad, to which fuse_wgrad_accumulation adds"),
        (
            torch.zeros(OUT, IN, dtype=torch.float64),
            ValueError,
            "contiguous, of float32, bfloat16 or float16 and of shape",
        ),
        (torch.zeros(IN, OUT).t(), ValueError, r"expected weight.main_grad.* got .* and strides \[1, 48\]"),
        (torch.zeros(OUT, IN, device="meta"), ValueError, "expected weight.main_grad.* on meta"),
    ],
    ids=["none", "dtype", "strides", "device"],
)
def test_main_grads_that_cannot_be_added_to_are_named(
    device: str, main_grad: Tensor | None, error: type[Exception], message: str
) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        layer.weight.main_grad = main_grad if main_grad.is_meta else main_grad.to(device)
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
