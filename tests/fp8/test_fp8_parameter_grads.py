"""Gradients of parameters that a layer adds up by itself: where, in what order, and whose memory it is.

The reference are gradients that were made one by one with ``torch.autograd.grad``, and added by torch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from fp8_gradients import IN, OUT, RECIPE, a_layer, a_sample, backward, call, grad_for, gradients_of
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
graphed_or_not = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
names = pytest.mark.parametrize("name", ["weight", "bias"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@names
@graphed_or_not
@dtypes
def test_sums_have_the_bits_of_additions_by_torch(device: str, dtype: torch.dtype, graphed: bool, name: str) -> None:
    layer = a_layer(device, dtype, graphed)
    samples = [a_sample(device, dtype) for _ in range(4)]
    total = None
    for x, gradient in zip(samples, gradients_of(layer, samples, dtype, name), strict=True):
        backward(layer, x)
        total = gradient if total is None else total + gradient
        assert same_bits(getattr(layer, name).grad, total)


@names
def test_uses_in_one_backward_are_added_one_after_the_other(device: str, name: str) -> None:
    """Last ones first: autograd would add their sum, which rounds otherwise."""
    layer = a_layer(device)
    parameter = getattr(layer, name)
    samples = [a_sample(device) * 3 for _ in range(2)]
    first, second = gradients_of(layer, samples, torch.bfloat16, name)
    start = torch.randn(parameter.shape, device=device).bfloat16()
    parameter.grad = start.clone()
    results = [call(layer, x) for x in samples]
    torch.autograd.backward(results, [grad_for(y) for y in results])
    assert same_bits(parameter.grad, start + second + first)
    assert name == "bias" or not same_bits(parameter.grad, start + (second + first))


@names
@graphed_or_not
def test_a_first_gradient_does_not_read_what_lies_there(device: str, graphed: bool, name: str) -> None:
    layer, x = a_layer(device, graphed=graphed), a_sample(device)
    parameter = getattr(layer, name)
    for _ in range(2):
        layer.zero_grad()
        backward(layer, x)
        expected = parameter.grad.clone()
        parameter.grad.fill_(float("nan"))
        parameter.grad = None
        backward(layer, x)
        assert same_bits(parameter.grad, expected)


def plain(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    backward(layer, x)


def exchange(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, 0.5)
    backward(layer, x)


def keep(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    backward(layer, x)
    kept = parameter.grad
    parameter.grad = None
    backward(layer, x)
    return kept, kept.clone()


def ask_for_inputs(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> Tensor:
    backward(layer, x)
    return torch.autograd.grad(call(layer, x).float().sum(), x)[0]


def backward_of_inputs(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    backward(layer, x)
    call(layer, x).float().sum().backward(inputs=[x])


def view_as_grad(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> Tensor:
    memory = torch.ones(2 * parameter.numel(), device=x.device, dtype=x.dtype)
    parameter.grad = memory[parameter.numel() :].view_as(parameter)
    backward(layer, x)
    return memory


def transposed_grad(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter).t().contiguous().t()
    backward(layer, x)


def two_in_flight(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    first, second = call(layer, x), call(layer, x * 2)
    second.float().sum().backward()
    first.float().sum().backward()


def hooked(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> Tensor:
    seen = []
    handle = parameter.register_hook(lambda grad: seen.append(grad.clone()))
    backward(layer, x)
    handle.remove()
    backward(layer, x)
    return torch.stack(seen)


def after_accumulation(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    def double(leaf: Tensor) -> None:
        leaf.grad.mul_(2)

    handle = parameter.register_post_accumulate_grad_hook(double)
    backward(layer, x)
    handle.remove()


def zero(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    backward(layer, x)
    layer.zero_grad(set_to_none=False)
    backward(layer, x)


def frozen_between(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    backward(layer, x)
    parameter.requires_grad_(False)
    call(layer, x).float().sum().backward()
    parameter.requires_grad_(True)
    backward(layer, x)


def on_other_thread(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> None:
    thread = threading.Thread(target=lambda: backward(layer, x))
    thread.start()
    thread.join()
    backward(layer, x)


def copied(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> list[Tensor]:
    backward(layer, x)
    other = copy.deepcopy(layer)
    backward(layer, x)
    backward(other, x)
    return [other.weight.grad, other.bias.grad]


def as_numpy(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> Tensor:
    backward(layer, x)
    array = parameter.grad.float().cpu().numpy()
    backward(layer, x)
    return torch.from_numpy(array.copy())


def dlpacked(layer: nn.Module, x: Tensor, parameter: nn.Parameter) -> Tensor:
    backward(layer, x)
    taken = torch.from_dlpack(parameter.grad)
    parameter.grad = None
    backward(layer, x)
    return taken


USES: dict[str, Callable[[nn.Module, Tensor, nn.Parameter], object]] = {
    use.__name__: use
    for use in (
        plain,
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
        frozen_between,
        on_other_thread,
        copied,
        as_numpy,
        dlpacked,
    )
}


@pytest.mark.filterwarnings("ignore:.*is used outside the callable")
@names
@pytest.mark.parametrize("use", USES)
@pytest.mark.one_of(5)
def test_graphs_leave_what_eager_execution_leaves(device: str, use: str, name: str) -> None:
    results = []
    for graphed in (False, True):
        layer, generator = a_layer(device, graphed=graphed), torch.Generator().manual_seed(1)
        values = []
        for _ in range(3):
            x = torch.randn(7, IN, generator=generator).to(device, torch.bfloat16).requires_grad_()
            value = USES[use](layer, x, getattr(layer, name))
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
    device = "cuda"
    layer, x = a_layer(device), a_sample(device).detach()
    backward(layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        backward(layer, x)
    added = [event.input_shapes for event in profile.events() if event.name == "aten::add_"]
    assert not added


def test_hooks_on_the_node_of_a_layer_get_and_change_its_gradients(device: str) -> None:
    layer, x = a_layer(device), a_sample(device)
    expected = [2 * gradients_of(layer, [x], torch.bfloat16, name)[0] for name in ("weight", "bias")]
    y = call(layer, x)
    y.grad_fn.register_hook(lambda grads, _: tuple(2 * grad for grad in grads))
    y.backward(grad_for(y))
    assert same_bits(layer.weight.grad, expected[0]) and same_bits(layer.bias.grad, expected[1])


def test_anomaly_detection_finds_a_nan(device: str) -> None:
    layer, x = a_layer(device), a_sample(device)
    y = call(layer, x)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        y.backward(torch.full_like(y, float("nan")))


def test_what_is_frozen_since_the_forward_gets_no_gradient(device: str) -> None:
    layer = a_layer(device)
    y = call(layer, a_sample(device))
    layer.requires_grad_(False)
    y.backward(grad_for(y))
    assert layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.gpu
def test_uses_of_a_weight_on_several_streams_are_added_one_after_the_other() -> None:
    device = "cuda"
    streams = [torch.cuda.Stream() for _ in range(2)]
    sums = []
    for own in (False, True):
        torch.manual_seed(0)
        layer = tg.Linear(1024, 1024, device=device, dtype=torch.bfloat16)
        samples = [torch.randn(512, 1024, device=device).bfloat16().requires_grad_() for _ in range(8)]
        for _ in range(20):
            results = []
            for number, x in enumerate(samples):
                stream = streams[number % 2] if own else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results.append(call(layer, x))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            torch.autograd.backward(results, [grad_for(y) for y in results])
        sums.append([layer.weight.grad, layer.bias.grad])
    assert all(map(same_bits, *sums))


class Two(nn.Module):
    """x [n, IN] -> [n, IN]."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first, self.second = (tg.Linear(IN, IN, bias=False, device=device) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("offsets", [(128, 0), (0, 128), (0, 0), (0, 1024)], ids=str)
def test_gradients_that_overlap_are_added_one_after_the_other(device: str, offsets: tuple[int, int]) -> None:
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layer, x = Two(device), torch.randn(7, IN, device=device).requires_grad_()
        if graphed:
            with tg.fp8_autocast(recipe=RECIPE):
                tg.make_graphed_callables(layer, (x,))
        for _ in range(2):
            memory = torch.zeros(2 * IN * IN, device=device)
            for parameter, offset in zip(layer.parameters(), offsets, strict=True):
                parameter.grad = memory[offset : offset + IN * IN].view(IN, IN)
            backward(layer, x)
            found.append(memory)
    assert all(map(torch.allclose, found[:2], found[2:]))


def test_a_gradient_at_any_address_is_added_to(device: str) -> None:
    layer, samples = a_layer(device), [a_sample(device) for _ in range(2)]
    expected, size = gradients_of(layer, samples, torch.bfloat16), layer.weight.numel()
    for offset in (0, 1, 8):
        memory = torch.zeros(size + 9, device=device, dtype=torch.bfloat16)
        layer.weight.grad = memory[offset : offset + size].view(OUT, IN)
        for x in samples:
            backward(layer, x)
        assert same_bits(memory[offset : offset + size].view(OUT, IN), expected[0] + expected[1])
        assert memory.count_nonzero() == layer.weight.grad.count_nonzero()


@pytest.mark.parametrize("shared", ["weight", "layer"])
def test_gradients_of_a_weight_of_two_graphed_callables_are_summed_before_they_are_added(
    device: str, shared: str
) -> None:
    """As docs/limits.md says: eager execution adds one after the other."""
    torch.manual_seed(0)
    options = {"device": device, "bias": False}
    first = tg.Linear(IN, IN, **options)
    last = first if shared == "layer" else tg.Linear(IN, IN, **options)
    last.weight = first.weight
    apart = [tg.Linear(IN, IN, **options) for _ in range(2)]
    for layer in apart:
        layer.load_state_dict(first.state_dict())
    callables = (nn.Sequential(first, nn.Tanh()), nn.Sequential(last, nn.Tanh()))
    twins = tuple(nn.Sequential(layer, nn.Tanh()) for layer in apart)
    samples = [a_sample(device, torch.float32) for _ in range(4)]

    def loss_of(parts: tuple[nn.Module, ...], x: Tensor) -> Tensor:
        with tg.fp8_autocast(recipe=RECIPE):
            return parts[1](parts[0](x)).square().sum()

    each = [torch.autograd.grad(loss_of(twins, x), [layer.weight for layer in apart]) for x in samples]
    in_turn: list[Tensor] = []
    summed: list[Tensor] = []
    for of_first, of_last in each:
        in_turn.append((in_turn[-1] + of_last) + of_first if in_turn else of_last + of_first)
        summed.append(summed[-1] + (of_last + of_first) if summed else of_last + of_first)

    def trained() -> list[Tensor]:
        first.weight.grad, found = None, []
        for x in samples:
            loss_of(callables, x).backward()
            found.append(first.weight.grad.clone())
        return found

    assert all(map(same_bits, trained(), in_turn))
    with tg.fp8_autocast(recipe=RECIPE):
        tg.make_graphed_callables(callables, ((samples[0],),) * 2)
    found = trained()
    assert same_bits(found[0], in_turn[0])
    assert all(map(same_bits, found, summed))
    assert not same_bits(found[-1], in_turn[-1])
    torch.testing.assert_close(found, in_turn)
