"""Silent hazards of graph replay in what a graph reads and does not own: moved, replaced and shared tensors, pools.

The reference is eager execution of a copy of the same module, made after the change, on the same inputs.
"""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hazards import assert_right_when_captured_again
from torch import Tensor, nn
from twins import eager_copy, gradients_of, run, snapshot, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Net(nn.Module):
    """Two layers of equal size, an activation, a buffer, and tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.constants, self.table = [torch.randn(4)], {"bias": torch.randn(4)}

    def _apply(self, function: Callable, recurse: bool = True) -> nn.Module:
        self.constants = [function(t) for t in self.constants]
        self.table = {key: function(t) for key, t in self.table.items()}
        return super()._apply(function, recurse)

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.down(self.act(self.up(x)) + self.shift) * self.constants[0] + self.table["bias"]


def batch(device: str, dtype: torch.dtype = torch.float32) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, dtype=dtype, requires_grad=True)


def new_data(net: Net) -> None:
    net.down.weight.data = net.down.weight.data.clone()


def assigned_state(net: Net) -> None:
    net.load_state_dict({key: value * 2 for key, value in net.state_dict().items()}, assign=True)


def new_module(net: Net) -> None:
    net.down = copy.deepcopy(net.down)


def new_activation(net: Net) -> None:
    net.act = nn.Tanh()


def new_parameter(net: Net) -> None:
    net.up.weight = nn.Parameter(net.up.weight.detach() * 2)


def shared_weight(net: Net) -> None:
    net.down.weight = net.up.weight


def removed_bias(net: Net) -> None:
    net.up.bias = None


def new_buffer(net: Net) -> None:
    net.shift = net.shift + 1


def transposed_weight(net: Net) -> None:
    net.down.weight.data = net.down.weight.data.t()


def new_list_entry(net: Net) -> None:
    net.constants[0] = net.constants[0] * 2


def new_dict_entry(net: Net) -> None:
    net.table["bias"] = net.table["bias"] * 2


CHANGES = [
    (new_data, "weight of down moved"),
    (lambda net: net.double(), "(weight of up|shift) changed dtype from torch.float32 to torch.float64"),
    (assigned_state, "(weight of up|shift) moved"),
    (new_module, "(down was replaced|of down moved)"),
    (new_activation, "act was replaced"),
    (new_parameter, "weight of up moved"),
    (shared_weight, "weight of down moved"),
    (removed_bias, "bias of up is no longer a tensor"),
    (new_buffer, "shift moved"),
    (transposed_weight, "weight of down changed strides"),
    (new_list_entry, r"constants\[0\] moved"),
    (new_dict_entry, r"table\['bias'\] moved"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_moved_or_replaced_tensor_is_refused_by_name_and_reset_and_recapture_works(device, change, words):
    model = Net().to(device)
    make_graphed_callables(model, (batch(device),))
    run(model, batch(device))
    model.zero_grad()
    change(model)
    dtype = model.up.weight.dtype
    x = batch(device)
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"Net: .*{words}.* since capture; call \.te_graph\.reset\(\)"):
            model(x)
    assert model.te_graph.info()["forward_replays"] == 1
    assert_bitwise_equal(snapshot(model), before)

    model.te_graph.reset()
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device, dtype),))
    steps = [[(batch(device, dtype),) for _ in range(2)] for _ in range(2)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))


def test_an_activation_replaced_by_one_at_the_same_address_is_noticed_every_time(device):
    unnoticed = 0
    for _ in range(20):
        model = Net().to(device)
        make_graphed_callables(model, (batch(device),))
        del model.act
        model.act = nn.Tanh()
        try:
            model(batch(device))
            unnoticed += 1
        except RuntimeError as error:
            assert "act was replaced" in str(error)
    assert unnoticed == 0


@pytest.mark.parametrize("edit", [lambda net: net.append(nn.Tanh()), lambda net: net.insert(0, nn.Tanh())])
def test_a_layer_added_after_capture_is_refused_by_name(device, edit):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())).to(device)
    make_graphed_callables(model, (batch(device),))
    edit(model[1])
    with pytest.raises(RuntimeError, match=r"Sequential: .*1.* since capture; call \.te_graph\.reset\(\)"):
        model(batch(device))
    assert_right_when_captured_again(model, batch(device), batch(device))


def test_a_parameter_moved_between_forward_and_backward_is_refused_by_name(device):
    model = Net().to(device)
    make_graphed_callables(model, (batch(device),))
    output = model(batch(device))
    new_data(model)
    with pytest.raises(RuntimeError, match=r"weight of down moved .*reset\(\)"):
        output.sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_tensors_that_functions_reach_through_variables_are_refused_by_name_when_replaced(device):
    weight, holder = torch.randn(4, device=device), {"bias": torch.randn(4, device=device)}

    def affine(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * weight + holder["bias"]

    graphed = make_graphed_callables(affine, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(graphed, x), run(affine, x))
    first, weight = weight, torch.randn(4, device=device)
    with pytest.raises(RuntimeError, match="affine: closure variable weight moved"):
        graphed(x)
    weight = first
    assert_bitwise_equal(run(graphed, x), run(affine, x))
    holder["bias"] = holder["bias"] * 2
    with pytest.raises(RuntimeError, match=r"affine: closure variable holder\['bias'\] moved"):
        graphed(x)


def test_changing_values_in_place_is_no_move(device):
    model = Net().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    run(model, x)
    model.zero_grad()
    state = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    for net in (model, twin):
        net.load_state_dict(state)
        net.up.weight.data.mul_(3)
        net.constants[0].add_(1)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_a_deep_copy_has_addresses_of_its_own_and_runs_eagerly(device):
    model = Net().to(device)
    make_graphed_callables(model, (batch(device),))
    twin = eager_copy(model)
    assert type(twin) is Net
    x = batch(device)
    assert_bitwise_equal(run(twin, x), run(model, x))
    assert not hasattr(twin, "te_graph")
    assert model.te_graph.info()["forward_replays"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_an_input_in_host_memory_is_refused(pinned):
    model = Net().cuda()
    make_graphed_callables(model, (batch("cuda"),))
    x = torch.randn(3, 4, pin_memory=pinned, requires_grad=True)
    with pytest.raises(ValueError, match=r"Net: expected args\[0\] on cuda:0, got cpu"):
        model(x)


@pytest.mark.parametrize("is_chain", [False, True])
def test_an_input_that_is_freed_right_after_the_call_is_not_read_again(device, is_chain):
    layers = [Net().to(device) for _ in range(2)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), ((batch(device).detach(),), (batch(device),)), chain=is_chain)
    for _ in range(3):
        values, seen = torch.randn(3, 4, device=device), []
        for first, second in (layers, twins):
            result = second(first(values.clone()))
            reused = [torch.full_like(values, float("nan")) for _ in range(50)]
            result.square().sum().backward()
            seen.append([result.detach().clone(), gradients_of([*first.parameters(), *second.parameters()])])
            assert len(reused) == 50
        assert_bitwise_equal(*seen)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0), (2, 0, 2)])
def test_callables_captured_together_may_be_replayed_in_any_order(device, order):
    layers = [Net().to(device) for _ in range(3)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), tuple((batch(device),) for _ in layers))

    def step(nets: list[nn.Module]) -> list:
        return [run(nets[index], inputs[number]) for number, index in enumerate(order)]

    for _ in range(2):
        inputs = [batch(device) for _ in order]
        assert_bitwise_equal(step(layers), step(twins))
    for layer, twin in zip(layers, twins, strict=True):
        assert_bitwise_equal(gradients_of(list(layer.parameters())), gradients_of(list(twin.parameters())))


def test_forwards_that_wait_together_may_run_their_backwards_in_any_order(device):
    layers = [Net().to(device) for _ in range(3)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), tuple((batch(device),) for _ in layers))
    inputs = [batch(device) for _ in layers]

    def step(nets: list[nn.Module]) -> list:
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = [net(x) for net, x in zip(nets, leaves, strict=True)]
        for index in (1, 2, 0):
            outputs[index].square().sum().backward()
        return [gradients_of(leaves), [gradients_of(list(net.parameters())) for net in nets]]

    assert_bitwise_equal(step(layers), step(twins))


def test_an_input_gradient_is_right_when_two_graphed_branches_sum_into_it(device):
    left, right = Net().to(device), Net().to(device)
    twins = eager_copy(left), eager_copy(right)
    make_graphed_callables((left, right), ((batch(device),), (batch(device),)))
    x = batch(device)

    def forked(one: nn.Module, other: nn.Module) -> Callable:
        def call(x: Tensor) -> Tensor:
            hidden = x * 2
            return one(hidden) + other(hidden)

        return call

    for _ in range(2):
        assert_bitwise_equal(run(forked(left, right), x), run(forked(*twins), x))


@pytest.mark.parametrize("is_chain", [False, True])
def test_outputs_and_input_gradients_are_valid_for_longer_than_the_backwards_of_later_micro_batches(device, is_chain):
    stages = [Net().to(device) for _ in range(2)]
    twins = [eager_copy(stage) for stage in stages]
    samples = ((batch(device),), (batch(device),))
    make_graphed_callables(tuple(stages), samples, chain=is_chain, max_in_flight=2)
    inputs = [batch(device) for _ in range(5)]

    def one_forward_one_backward(nets: list[nn.Module]) -> list:
        received, sent = [], []
        for number, x in enumerate(inputs):
            received.append(x * 2)  # not a leaf: its gradient is sent to the stage before
            received[-1].retain_grad()
            sent.append(nets[1](nets[0](received[-1])))
            if number > 0:
                sent[number - 1].square().sum().backward()
        sent[-1].square().sum().backward()
        return [[t.detach().clone() for t in sent], gradients_of(received)]

    for _ in range(2):
        assert_bitwise_equal(one_forward_one_backward(stages), one_forward_one_backward(twins))


@pytest.mark.parametrize("is_hook", [False, True])
def test_the_first_replay_reads_the_weights_that_are_gathered_after_capture(device, is_hook):
    model = Net().to(device)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    gathered = [[torch.randn_like(parameter) for parameter in model.parameters()] for _ in range(3)]
    arriving: list[Tensor] = []
    side = torch.cuda.Stream() if device == "cuda" else None

    def gather(net: nn.Module) -> None:
        """As an all-gather does: on a stream of its own, after the last backward and before the next forward."""
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            if side is not None:
                torch.cuda._sleep(20_000_000)
            for parameter, values in zip(net.parameters(), arriving, strict=True):
                parameter.copy_(values)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    if is_hook:
        for net in (model, twin):
            net.register_forward_pre_hook(lambda net, args: gather(net))
    for weights in gathered:
        arriving[:] = weights
        x, seen = batch(device), []
        for net in (model, twin):
            if not is_hook:
                gather(net)
            seen.append([run(net, x), gradients_of(list(net.parameters()))])
        assert_bitwise_equal(*seen)
    assert model.te_graph.info()["forward_replays"] == 3


def test_the_last_reference_frees_a_module_and_its_graphs_without_the_garbage_collector(device):
    gc.collect()
    gc.disable()
    try:
        allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
        model = Net().to(device)
        make_graphed_callables(model, (batch(device),))
        run(model, batch(device))
        watched = [weakref.ref(model), weakref.ref(model.up.weight), weakref.ref(model.te_graph)]
        del model
        assert [reference() for reference in watched] == [None] * 3
        assert device == "cpu" or torch.cuda.memory_allocated() == allocated
    finally:
        gc.enable()


def test_reset_frees_a_function_and_what_only_its_graph_held(device):
    def scaling() -> Callable:
        weight = torch.randn(4, device=device, requires_grad=True)
        return lambda x: x * weight

    gc.collect()
    gc.disable()
    try:
        function = scaling()
        graphed = make_graphed_callables(function, (batch(device),))
        run(graphed, batch(device))
        assert graphed.te_graph.info()["graphs"] == 2
        watched = weakref.ref(function.__closure__[0].cell_contents)
        graphed.te_graph.reset()
        graphed.te_graph.reset()
        assert graphed.te_graph.info()["graphs"] == 0
        x = batch(device)
        assert_bitwise_equal(run(graphed, x), run(function, x))
        del graphed, function
        assert watched() is None
    finally:
        gc.enable()


def test_an_input_whose_memory_has_been_freed_is_refused_as_in_eager_execution(device):
    model = Net().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    for net in (twin, model):
        x = batch(device)
        x.untyped_storage().resize_(0)
        with pytest.raises((RuntimeError, ValueError)):
            net(x)
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
