"""FP8 casts, scale updates and flags inside graphs of make_graphed_callables: equal to eager execution bit for bit.

The reference is the same layers run eagerly, without a graph and, where models are interleaved, alone. What the ops
compute is tested elsewhere; reciprocals and casts come from fp8_references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp8_references import E4M3, reciprocal, reference_cast
from fp8_runs import ROWS, addresses, an_input, everything, fp8_linear, new_layers, run
from fp8_tensors import POISON, assert_same_bits
from tensor_lists import no_sync
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
mechanisms = pytest.mark.parametrize("mechanism", fp8_linear.MECHANISMS)
UPDATE = "amax_and_scale_update"
STEPS = 3


def trajectory(
    call: Callable[..., Tensor], layers: Any, seed: int, micro_batches: int, seen: list[Any], steps: int = STEPS
) -> Iterator[None]:
    """Train ``layers``, stopping after each forward and each backward; ``seen`` gets all that can be seen.

    Every forward also finds new amaxes of weights in the history, as if these were cast in each micro-batch. Within a
    step they grow, so that with a history of two rows scales move in each while the flag keeps their scale_inv.
    """
    generator, device = torch.Generator().manual_seed(seed), layers.state.block.device
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(steps):
        for number in range(micro_batches):
            x = torch.randn(ROWS, 32, generator=generator) * (1 + number)
            x = x.to(device, torch.bfloat16).requires_grad_()
            amaxes = torch.rand(3, generator=generator) + (1 + number)
            layers.forward_scaling.history[0, 1::2] = amaxes.to(device)
            result = call(x, is_first=number == 0)
            yield
            result.backward(result.detach() * 0.25 + 0.5)
            seen.append((result.detach().clone(), x.grad, everything(layers)))
            yield
        optimizer.step()
        optimizer.zero_grad()


def eager_trajectory(seed: int, device: str, mechanism: str, micro_batches: int) -> list[Any]:
    layers, seen = new_layers(seed, device, mechanism), []
    for _ in trajectory(fp8_linear.MicroBatches(layers, layers), layers, seed, micro_batches, seen):
        pass
    return seen


def graphed_layers(seed: int, device: str, mechanism: str) -> tuple[Any, Any]:
    """Layers whose graph is captured, and what calls them."""
    layers = new_layers(seed, device, mechanism)
    return layers, fp8_linear.MicroBatches(layers, layers, (an_input(device),))


def set_flag(layers: Any, mechanism: str, nodes: list[tg.KernelNode], flag: bool) -> None:
    if mechanism == "flag":
        layers.state.set_(flag)
    else:
        layers.update_weight_scale_inv = flag
        for node in nodes:
            node.set_(update_weight_scale_inv=flag)


@mechanisms
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_three_optimizer_steps_of_replays_are_the_eager_ones_bit_for_bit(micro_batches, mechanism, device, seed):
    """A12: results, gradients, weights, FP8 copies, scales, scale_invs, histories, after every micro-batch."""
    layers, call = graphed_layers(seed, device, mechanism)
    seen: list[Any] = []
    for _ in trajectory(call, layers, seed, micro_batches, seen):
        pass
    assert_bitwise_equal(seen, eager_trajectory(seed, device, mechanism, micro_batches))
    info = layers.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == len(seen) == STEPS * micro_batches
    assert (info["eager_calls"], info["recaptures"]) == ({}, 0)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_versions_of_the_weights_tell_graphs_what_the_caller_does_not(micro_batches, device, seed):
    layers, _ = graphed_layers(seed, device, "flag")
    seen: list[Any] = []
    for _ in trajectory(lambda x, is_first: layers(x), layers, seed, micro_batches, seen):
        pass
    assert_bitwise_equal(seen, eager_trajectory(seed, device, "flag", micro_batches))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_layers_that_are_graphed_one_by_one_share_the_cast_of_a_step(micro_batches, device, seed):
    layers = new_layers(seed, device)
    samples = tuple(
        (torch.zeros(ROWS, layer.weight.shape[1], dtype=torch.bfloat16, device=device, requires_grad=True),)
        for layer in layers.layers
    )
    graphed = tg.make_graphed_callables(tuple(layers.layers), samples, step_state=layers.state)
    seen: list[Any] = []
    for _ in trajectory(lambda x, is_first: layers(x), layers, seed, micro_batches, seen):
        pass
    assert_bitwise_equal(seen, eager_trajectory(seed, device, "flag", micro_batches))
    assert [layer.te_graph.info()["backward_replays"] for layer in graphed] == [STEPS * micro_batches] * 3


@mechanisms
def test_the_flag_switches_the_weights_scale_inv_of_one_capture_and_nothing_else(mechanism, device, seed):
    """A4. What is written between the replays lies on the device, or is an argument of the captured kernel."""
    graphed, eager = (new_layers(seed, device, mechanism) for _ in range(2))
    for layers in (graphed, eager):
        layers.weights.cast_()
    by_host = ("update_weight_scale_inv",) if mechanism == "node" else ()
    tg.make_graphed_callables(graphed, (an_input(device),), ignore_attributes=by_host)
    nodes = tg.KernelNode.find(graphed, UPDATE) if mechanism == "node" else []
    scaling = graphed.forward_scaling
    for replay, flag in enumerate([True, False, False, False] * 2):
        x, amaxes = an_input(device, 2.0**replay), torch.rand(3, device=device) + 2.0**replay
        before = [t.clone() for t in (scaling.scale, scaling.scale_inv)]
        for layers in (graphed, eager):
            layers.forward_scaling.history[0, 1::2] = amaxes
            set_flag(layers, mechanism, nodes, flag)
        assert_bitwise_equal(run(graphed, x), run(eager, x))
        assert_bitwise_equal(everything(graphed), everything(eager))
        scale, scale_inv = scaling.scale, scaling.scale_inv
        assert bool((scale != before[0]).all())
        assert torch.equal(scaling.history[-1, 1::2], amaxes) and not scaling.history[0].any()
        assert_same_bits(scale_inv[0::2], reciprocal(scale[0::2]))
        assert_same_bits(scale_inv[1::2], reciprocal(scale[1::2]) if flag else before[1][1::2].cpu())
        assert flag or bool((scale_inv[1::2].cpu() != reciprocal(scale[1::2])).all())
    info = graphed.te_graph.info()
    assert (info["forward_replays"], info["recaptures"], info["eager_calls"]) == (8, 0, {})


def test_a_capture_has_one_update_for_each_direction(device, seed):
    layers, _ = graphed_layers(seed, device, "node")
    assert len(tg.KernelNode.find(layers, UPDATE)) == 2


class Recast(nn.Module):
    """Casts the weights of ``layers`` inside the graph, unless the word of the step state's block that says that they
    are cast is set: [n] -> [n], which only passes through."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("skip", layers.state.skip_weight_cast, persistent=False)
        prepared = layers.weights
        vectors = (prepared.scale, prepared.scale_inv, prepared.amax)
        for name, tensor in zip(("scale", "scale_inv", "amax"), vectors, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [n]
        prepared, weights = self.layers.weights, [layer.weight for layer in self.layers.layers]
        with torch.no_grad():
            tg.fp8_cast_weights_(
                prepared.data, prepared.transposed, weights, self.scale, self.scale_inv, self.amax, noop=self.skip
            )
        return x * 2


@pytest.mark.parametrize("value", [1, -3, 256])
def test_a_captured_cast_of_weights_touches_no_byte_while_its_flag_is_not_0(value, device, seed):
    """A8: every buffer is poisoned first."""
    layers, twin = (new_layers(seed, device) for _ in range(2))
    recast, x = Recast(layers), torch.randn(5, device=device)
    tg.make_graphed_callables(recast, (torch.zeros(5, device=device),))
    prepared = layers.weights
    outputs = [*prepared.data, *prepared.transposed, prepared.scale_inv, layers.forward_scaling.history]
    layers.state.block[1] = value
    for tensor in outputs:
        tensor.copy_(torch.full(tensor.shape, POISON, dtype=torch.uint8, device=device).to(tensor.dtype))
    before = [tensor.clone() for tensor in outputs]
    assert torch.equal(recast(x), x * 2)
    assert_bitwise_equal(outputs, before)
    layers.state.block[1] = 0
    layers.forward_scaling.history.zero_()
    recast(x)
    twin.weights.cast_()
    expected = twin.weights
    assert_bitwise_equal([*prepared.data, *prepared.transposed], [*expected.data, *expected.transposed])
    assert_bitwise_equal([prepared.scale_inv, prepared.amax], [expected.scale_inv, expected.amax])
    assert recast.te_graph.info()["forward_replays"] == 2


@mechanisms
def test_models_in_turns_never_see_each_others_flags(mechanism, device, seed, rng):
    """A10, G10: forwards and backwards of two models with steps of different lengths, in any order."""
    lengths = (2, 3)
    alone = [eager_trajectory(seed + number, device, mechanism, length) for number, length in enumerate(lengths)]
    together: list[list[Any]] = [[], []]
    models = [graphed_layers(seed + number, device, mechanism) for number in range(2)]
    running = [
        trajectory(call, layers, seed + number, lengths[number], together[number])
        for number, (layers, call) in enumerate(models)
    ]
    while running:
        turn = rng.choice(running)
        if next(turn, "end") == "end":
            running.remove(turn)
    assert_bitwise_equal(together, alone)


@mechanisms
def test_nothing_moves_in_a_hundred_replays_and_their_optimizer_steps(mechanism, device, seed):
    """A11."""
    layers = new_layers(seed, device, mechanism)
    before = addresses(layers)
    call = fp8_linear.MicroBatches(layers, layers, (an_input(device),))
    for _ in trajectory(call, layers, seed, 4, [], steps=25):
        pass
    assert addresses(layers) == before
    assert layers.te_graph.info()["backward_replays"] == 100


@mechanisms
def test_scale_inv_of_weights_goes_with_their_bytes_after_any_sequence(mechanism, device, seed, rng, monkeypatch):
    """G12: it is 1 / (the scale of the last cast), whatever updates and skipped casts came after it."""
    casts: list[tuple[Tensor, list[Tensor]]] = []
    cast_ = tg.Fp8Weights.cast_

    def spy(prepared: tg.Fp8Weights, **kwargs: Any) -> None:
        casts.append((prepared.scale.clone(), [layer.weight.detach().clone() for layer in layers.layers]))
        cast_(prepared, **kwargs)

    layers, call = graphed_layers(seed, device, mechanism)
    monkeypatch.setattr(tg.Fp8Weights, "cast_", spy)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    is_first, firsts = True, 0
    for _ in range(24):
        layers.forward_scaling.history[0, 1::2] = torch.rand(3, device=device) * 2.0 ** rng.randrange(-4, 5)
        run(call, an_input(device), is_first=is_first)
        firsts += is_first
        scale, weights = casts[-1]
        assert_same_bits(layers.weights.scale_inv, reciprocal(scale))
        for number, weight in enumerate(weights):
            expected = reference_cast(weight, scale[number], E4M3)
            assert_same_bits(layers.weights.data[number], expected.out)
            assert_same_bits(layers.weights.transposed[number], expected.out.t().contiguous())
        is_first = rng.random() < 0.4
        if is_first and rng.random() < 0.7:
            optimizer.step()
    assert 1 < len(casts) == firsts < 24


def test_a_capture_leaves_all_as_it_was(device, seed):
    layers = new_layers(seed, device)
    run(fp8_linear.MicroBatches(layers, layers), an_input(device), is_first=True)
    before, versions = everything(layers), [weight._version for weight in layers.parameters()]
    tg.make_graphed_callables(layers, (an_input(device),), step_state=layers.state)
    assert_bitwise_equal(everything(layers), before)
    assert [weight._version for weight in layers.parameters()] == versions
    assert not layers.weights.is_stale


def test_a_later_micro_batch_with_changed_weights_is_refused_before_it_runs(device, seed):
    layers, call = graphed_layers(seed, device, "flag")
    run(call, an_input(device), is_first=True)
    with torch.no_grad():
        layers.layers[1].weight.mul_(1.5)
    before = everything(layers)
    with pytest.raises(ValueError, match=r"is_first_microbatch=False contradicts .*weight of layer 1"):
        call(an_input(device), is_first=False)
    assert_bitwise_equal(everything(layers), before)
    assert layers.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize("graphed", [True, False])
@mechanisms
def test_on_later_micro_batches_nothing_is_launched_for_weights(mechanism, graphed, device, seed):
    """Operators that run: on the CPU those inside of replays too, on a GPU those outside of graphs."""
    layers = new_layers(seed, device, mechanism)
    call = fp8_linear.MicroBatches(layers, layers, (an_input(device),) if graphed else None)
    casts, flags = [], []
    for _ in range(2):
        for number in range(3):
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
                run(call, an_input(device), is_first=number == 0)
            names = [event.name for event in profiler.events()]
            assert any("te_graph::fp8_cast_transpose" in name for name in names) or (graphed and device == "cuda")
            casts.append(sum("fp8_cast_weights" in name for name in names))
            flags.append(sum("step_state_set" in name for name in names))
        with torch.no_grad():
            layers.layers[0].weight.mul_(1.5)
    assert casts == [1, 0, 0] * 2
    # The flags of the first step are those that a new state has.
    assert flags == [0, 1, 0, 1, 1, 0]


@pytest.mark.gpu
@mechanisms
def test_micro_batches_do_not_wait_for_the_device(mechanism, seed):
    _, call = graphed_layers(seed, "cuda", mechanism)
    inputs = [an_input("cuda") for _ in range(4)]
    run(call, inputs[0], is_first=True)
    with no_sync("cuda"):
        for number, x in enumerate(inputs):
            run(call, x, is_first=number % 2 == 0)


def test_weight_gradients_of_micro_batches_add_up_in_fp32(device, seed):
    """A17: main_grad is the sum of the separate gradients, added one after the other in fp32."""
    layers, twin = (new_layers(seed, device) for _ in range(2))
    tg.make_graphed_callables(layers, (an_input(device),), step_state=layers.state, grad_dtype=torch.float32)
    call = fp8_linear.MicroBatches(twin, twin)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in twin.parameters()]
    for number in range(4):
        x = an_input(device, 1 + number)
        run(layers, x, is_first_microbatch=number == 0)
        run(call, x, is_first=number == 0)
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            total += parameter.grad
            parameter.grad = None
    assert_bitwise_equal([p.main_grad for p in layers.parameters()], sums)
    assert all(p.grad is None for p in layers.parameters())
