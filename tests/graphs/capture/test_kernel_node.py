"""KernelNode: the flag of captured scale updates, set between replays, against eager updates with that flag.

The reference is ``amax_and_scale_update_inplace`` itself, called with the flag; what it computes is tested elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fp8_references import ScaleState
from sequences import captures
from torch import Tensor, nn
from twins import eager_copy, gradients_of

import te_graph as tg
from te_graph.graphs.tracing.recorder import Recorder
from te_graph.testing import assert_bitwise_equal

KERNEL, FLAG = "amax_and_scale_update", "update_weight_scale_inv"
COLUMNS = 6
OPTIONS = (  # of update number 0, 1, 2: fp8_max, margin, algorithm
    (448.0, 0.0, "max"),
    (57344.0, 2.0, "most_recent"),
    (448.0, -1.0, "max"),
)


class Updates:
    """States [4, 6] of delayed scaling that an update each works on, with options of its own. Odd columns are weights.

    Attributes:
        states: one for each update.
    """

    def __init__(self, count: int, device: str) -> None:
        self.states = [
            ScaleState(*(torch.rand(shape, device=device) + 0.1 for shape in ([4, COLUMNS], [COLUMNS], [COLUMNS])))
            for _ in range(count)
        ]
        self.mask = torch.tensor([True, False], device=device).repeat(COLUMNS // 2)

    def copy(self) -> Updates:
        twin = Updates(0, self.mask.device.type)
        twin.states = [state.clone() for state in self.states]
        return twin

    def run(self, flags: Sequence[bool | Tensor]) -> None:
        for number, (state, flag) in enumerate(zip(self.states, flags, strict=True)):
            options = OPTIONS[number % len(OPTIONS)]
            tg.amax_and_scale_update_inplace(*state.tensors(), self.mask, flag, *options, skip_nonfinite=number == 1)

    def take(self, amaxes: Tensor) -> None:
        """Put ``amaxes`` [updates, 6] where casts would leave them."""
        for state, amax in zip(self.states, amaxes, strict=True):
            state.history[0] = amax

    def tensors(self) -> list[list[Tensor]]:
        return [state.tensors() for state in self.states]

    def scale_invs_of_weights(self) -> list[Tensor]:  # [3] each
        return [state.scale_inv[1::2].clone() for state in self.states]


def capture(work: Callable[[], Any], device: str) -> Any:
    """A graph of ``work``, which has not run."""
    graph = tg.create_graph() if device == "cuda" else Recorder()
    with tg.capture_to_graph(graph):
        work()
    return graph


def check_step(updates: Updates, twin: Updates, flags: list[bool], replay: Callable[[], Any]) -> None:
    """Replay on ``updates`` and run ``twin`` eagerly with ``flags``, on new amaxes; nothing may tell them apart."""
    amaxes = torch.rand(len(flags), COLUMNS, device=updates.mask.device) * 10 + 0.01
    for one in (updates, twin):
        one.take(amaxes)
    before = updates.scale_invs_of_weights()
    replay()
    twin.run(flags)
    assert_bitwise_equal(updates.tensors(), twin.tensors())
    now = [state.scale[1::2].reciprocal() for state in updates.states]
    expected = [new if flag else old for old, new, flag in zip(before, now, flags, strict=True)]
    assert_bitwise_equal(updates.scale_invs_of_weights(), expected)


@pytest.mark.parametrize("captured", [False, True])
def test_the_flag_set_either_way_on_one_capture_does_what_eager_updates_with_it_do(captured, device):
    updates = Updates(1, device)
    twin = updates.copy()
    graph = capture(lambda: updates.run([captured]), device)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    assert (node.kernel, node.arguments) == (KERNEL, (FLAG,))
    assert node.get(FLAG) is captured
    for flag in (captured, not captured, not captured, captured, captured, not captured):
        node.set_(update_weight_scale_inv=flag)
        assert node.get(FLAG) is flag
        check_step(updates, twin, [flag], graph.replay)
        check_step(updates, twin, [flag], graph.replay)


def test_nodes_are_found_in_the_order_of_capture_and_set_one_by_one_with_all_else_as_captured(device, rng):
    updates = Updates(5, device)
    twin = updates.copy()
    flags = [False, True, False, False, True]
    graph = capture(lambda: updates.run(flags), device)
    nodes = tg.KernelNode.find(graph, KERNEL)
    assert [node.get(FLAG) for node in nodes] == flags
    for _ in range(12):
        number = rng.randrange(len(flags))
        flags[number] = not flags[number]
        nodes[number].set_(update_weight_scale_inv=flags[number])
        assert [node.get(FLAG) for node in nodes] == flags
        check_step(updates, twin, flags, graph.replay)


def test_found_again_a_node_has_the_value_that_was_set(device):
    updates = Updates(1, device)
    graph = capture(lambda: updates.run([False]), device)
    tg.KernelNode.find(graph, KERNEL)[0].set_(update_weight_scale_inv=True)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    assert node.get(FLAG) is True
    check_step(updates, updates.copy(), [True], graph.replay)


def test_replays_that_are_enqueued_keep_the_flag_that_they_were_launched_with(device):
    updates = Updates(1, device)
    twin = updates.copy()
    graph = capture(lambda: updates.run([False]), device)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    if device == "cuda":
        torch.cuda._sleep(10**8)
    graph.replay()
    node.set_(update_weight_scale_inv=True)
    twin.run([False])
    assert_bitwise_equal(updates.tensors(), twin.tensors())


def test_other_kernels_are_not_found_nor_updates_whose_flag_lies_on_the_device(device):
    updates, x = Updates(2, device), torch.rand(8, 8, device=device)
    x @ x  # cuBLAS takes its workspace outside the capture
    on_device = torch.ones(1, dtype=torch.int32, device=device)

    def work() -> None:
        y = torch.mm(x, x).relu_()
        updates.run([on_device, False])
        y.add_(1).softmax(0)

    graph = capture(work, device)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    twin = updates.copy()
    node.set_(update_weight_scale_inv=True)
    check_step(updates, twin, [True, True], graph.replay)
    assert tg.KernelNode.find(capture(lambda: x.add_(1), device), KERNEL) == []


def test_a_name_that_is_none_is_refused_with_those_that_are(device):
    updates = Updates(1, device)
    graph = capture(lambda: updates.run([False]), device)
    with pytest.raises(ValueError, match=r"expected kernel to be one of \['amax_and_scale_update'\], got 'amax'"):
        tg.KernelNode.find(graph, "amax")
    (node,) = tg.KernelNode.find(graph, KERNEL)
    unknown = rf"amax_and_scale_update in \['{FLAG}'\], got 'fp8_max'"
    with pytest.raises(ValueError, match=rf"KernelNode\.get: expected an argument of {unknown}"):
        node.get("fp8_max")
    with pytest.raises(ValueError, match=rf"KernelNode\.set_: expected an argument of {unknown}"):
        node.set_(update_weight_scale_inv=True, fp8_max=1.0)
    assert node.get(FLAG) is False


@pytest.mark.parametrize("value", [1, 0, None, "True", 1.0, torch.tensor(True)], ids=repr)
def test_a_value_of_another_type_is_refused_and_sets_nothing(value, device):
    updates = Updates(1, device)
    graph = capture(lambda: updates.run([False]), device)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    expected = f"expected {FLAG} of amax_and_scale_update to be a bool, got .*{type(value).__name__}"
    with pytest.raises(TypeError, match=expected):
        node.set_(update_weight_scale_inv=value)
    assert node.get(FLAG) is False


@pytest.mark.parametrize("graph", [None, 3, nn.Linear(1, 1), capture, [Recorder()]], ids=lambda g: type(g).__name__)
def test_what_is_no_graph_is_refused(graph):
    with pytest.raises(TypeError, match=r"KernelNode\.find: expected graph to be .*, got "):
        tg.KernelNode.find(graph, KERNEL)


def test_a_graph_without_a_capture_is_refused(device):
    empty = torch.cuda.CUDAGraph(keep_graph=True) if device == "cuda" else Recorder()
    with pytest.raises(RuntimeError, match=r"expected a (captured graph|recording)"):
        tg.KernelNode.find(empty, KERNEL)
    with pytest.raises(RuntimeError, match="expected a captured graph, got a GraphedFunction without a graph"):
        tg.KernelNode.find(tg.graphed(lambda: None), KERNEL)


def test_disabled_there_are_no_nodes(monkeypatch):
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    assert tg.KernelNode.find(tg.create_graph(), KERNEL) == []


@pytest.mark.gpu
def test_a_graph_whose_nodes_torch_has_freed_is_refused_with_the_remedy():
    updates, graph = Updates(1, "cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        updates.run([False])
    with pytest.raises(RuntimeError, match=r"create_graph\(\), or a torch\.cuda\.CUDAGraph\(keep_graph=True\)"):
        tg.KernelNode.find(graph, KERNEL)


@pytest.mark.gpu
def test_a_flag_set_before_torch_instantiates_the_graph_counts_from_the_first_replay_on():
    updates, graph = Updates(1, "cuda"), torch.cuda.CUDAGraph(keep_graph=True)
    twin = updates.copy()
    with torch.cuda.graph(graph):
        updates.run([False])
    (node,) = tg.KernelNode.find(graph, KERNEL)
    node.set_(update_weight_scale_inv=True)
    check_step(updates, twin, [True], graph.replay)
    graph.instantiate()
    check_step(updates, twin, [True], graph.replay)
    node.set_(update_weight_scale_inv=False)
    check_step(updates, twin, [False], graph.replay)


def test_a_node_keeps_its_graph_alive_and_nothing_else_does(device):
    updates = Updates(1, device)
    twin, graph = updates.copy(), capture(lambda: updates.run([False]), device)
    reference = weakref.ref(graph)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    del graph
    gc.collect()
    node.set_(update_weight_scale_inv=True)
    assert node.get(FLAG) is True
    check_step(updates, twin, [True], lambda: reference().replay())
    del node
    gc.collect()
    assert reference() is None


def test_nodes_of_a_graph_that_was_reset_say_so(device):
    updates = Updates(1, device)
    graph = capture(lambda: updates.run([False]), device)
    (node,) = tg.KernelNode.find(graph, KERNEL)
    graph.reset()
    with pytest.raises(RuntimeError, match="reset since"):
        node.get(FLAG)
    with pytest.raises(RuntimeError, match="reset since"):
        node.set_(update_weight_scale_inv=True)


def test_a_flag_is_not_set_inside_a_capture_whose_replays_would_not_set_it(device):
    updates = Updates(2, device)
    graph = capture(lambda: updates.run([False, False]), device)
    node, _ = tg.KernelNode.find(graph, KERNEL)
    with pytest.raises(RuntimeError, match="between replays, got a capture"):
        capture(lambda: (updates.mask.logical_not_(), node.set_(update_weight_scale_inv=True)), device)
    assert node.get(FLAG) is False
    check_step(updates, updates.copy(), [False, False], graph.replay)


def test_a_graphed_function_has_nodes_once_it_is_captured_for_each_of_its_signatures(device):
    both = [Updates(1, device), Updates(1, device)]
    twins = [updates.copy() for updates in both]
    step = tg.graphed(lambda number: both[number].run([False]))
    for number in (0, 0, 1, 1):
        check_step(both[number], twins[number], [False], lambda number=number: step(number))
    nodes = tg.KernelNode.find(step, KERNEL)
    assert [node.get(FLAG) for node in nodes] == [False, False]
    nodes[0].set_(update_weight_scale_inv=True)  # the one that was replayed last comes first
    for _ in range(2):
        check_step(both[1], twins[1], [True], lambda: step(1))
        check_step(both[0], twins[0], [False], lambda: step(0))
    assert captures(step) == 2


class _UpdateInBackward(torch.autograd.Function):
    """The identity, whose backward updates the scales of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: UpdatedLayer) -> Tensor:  # [n, 6] -> [n, 6]
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # [n, 6]
        ctx.layer.update("backward", grad)
        return grad * ctx.layer.backward_scale, None


class UpdatedLayer(nn.Module):
    """Updates scales from the amaxes of its input in the forward, of the gradient in the backward: [n, 6] -> [n, 6]."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(COLUMNS, device=device) + 0.5)
        self.register_buffer("mask", torch.tensor([True, False], device=device).repeat(COLUMNS // 2))
        for part in ("forward", "backward"):
            for name, shape in (("history", [3, COLUMNS]), ("scale", [COLUMNS]), ("scale_inv", [COLUMNS])):
                self.register_buffer(f"{part}_{name}", torch.rand(shape, device=device) + 0.1)
        self.flags = {"forward": False, "backward": False}

    def update(self, part: str, x: Tensor) -> None:  # [n, 6]
        history, scale, scale_inv = (getattr(self, f"{part}_{name}") for name in ("history", "scale", "scale_inv"))
        with torch.no_grad():
            history[0] = x.abs().amax(0)
            tg.amax_and_scale_update_inplace(history, scale, scale_inv, self.mask, self.flags[part], 448.0)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        self.update("forward", x)
        return _UpdateInBackward.apply(torch.tanh(x) * self.weight * self.forward_scale_inv, self)


def train_step(layers: Sequence[nn.Module], x: Tensor) -> None:  # [n, 6]
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()


def state_of(layers: Sequence[nn.Module]) -> Any:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return gradients_of(parameters), [list(layer.buffers()) for layer in layers]


@pytest.mark.parametrize("chain", [False, True])
def test_graphed_modules_have_nodes_of_both_directions_merged_backwards_too(chain, device, rng):
    layers = [UpdatedLayer(device) for _ in range(3)]
    twins = [eager_copy(layer) for layer in layers]
    samples = (
        (torch.randn(4, COLUMNS, device=device),)
        if chain
        else tuple((torch.randn(4, COLUMNS, device=device, requires_grad=number > 0),) for number in range(3))
    )
    graphed = tg.make_graphed_callables(tuple(layers), samples, chain=chain)
    nodes = [dict(zip(("forward", "backward"), tg.KernelNode.find(layer, KERNEL), strict=True)) for layer in graphed]
    assert len(tg.KernelNode.find(graphed, KERNEL)) == 6
    # Backwards of a chain become one graph once they have come together twice: some steps before flags are set.
    for step in range(16):
        number, part = rng.randrange(3), rng.choice(("forward", "backward"))
        if step >= 4:
            flags = twins[number].flags
            flags[part] = not flags[part]
            nodes[number][part].set_(update_weight_scale_inv=flags[part])
        x = torch.randn(4, COLUMNS, device=device)
        train_step(graphed, x)
        train_step(twins, x)
        assert_bitwise_equal(state_of(layers), state_of(twins))
    assert all(sum(layer.te_graph.info()["eager_calls"].values()) == 0 for layer in graphed)


def loaded_cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))


def add_child(graph: torch.cuda.CUDAGraph, child: torch.cuda.CUDAGraph) -> None:
    node = ctypes.c_void_p()
    handles = [ctypes.c_void_p(one.raw_cuda_graph()) for one in (graph, child)]
    none = ctypes.c_void_p()
    add = loaded_cudart().cudaGraphAddChildGraphNode
    assert add(ctypes.byref(node), handles[0], none, ctypes.c_size_t(0), handles[1]) == 0


@pytest.mark.gpu
def test_nodes_in_child_graphs_are_set_in_the_graph_that_holds_them():
    parts = [Updates(1, "cuda") for _ in range(3)]
    twins = [part.copy() for part in parts]
    graphs = []
    for part in parts:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            part.run([False])
        if graphs:
            add_child(graph, graphs[-1])
        graphs.append(graph)
    outer = graphs[-1]
    outer.instantiate()
    nodes = tg.KernelNode.find(outer, KERNEL)
    assert [node.get(FLAG) for node in nodes] == [False] * 3

    def check(flags: list[bool]) -> None:
        amaxes = torch.rand(3, 1, COLUMNS, device="cuda") + 0.01
        for part, twin, amax in zip(parts, twins, amaxes, strict=True):
            part.take(amax)
            twin.take(amax)
        outer.replay()
        for twin, flag in zip(twins, flags, strict=True):
            twin.run([flag])
        assert_bitwise_equal([part.tensors() for part in parts], [twin.tensors() for twin in twins])

    check([False] * 3)
    # The outer graph's own launch was captured first, and a child comes after it: parts in reverse order.
    for number, flags in ((2, [True, False, False]), (0, [True, False, True]), (1, [True] * 3)):
        nodes[number].set_(update_weight_scale_inv=True)
        check(flags)
    nodes[2].set_(update_weight_scale_inv=False)
    check([False, True, True])
    (own,) = tg.KernelNode.find(graphs[0], KERNEL)
    assert own.get(FLAG) is False


def test_arguments_that_can_be_set_are_those_of_the_op_that_launches_the_kernel():
    from te_graph import _C

    kernels = _C.kernels()
    assert kernels
    for operator, arguments in kernels.values():
        name, overload = operator.removeprefix("te_graph.").split(".")
        schema = getattr(getattr(torch.ops.te_graph, name), overload)._schema
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        assert arguments.items() <= types.items()
