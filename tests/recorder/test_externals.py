"""TensorWatch finds what a region uses and did not make, with flags and the user's line, and undoes its writes.

The reference is what the test itself knows of the region: its modules' parameters and buffers, its closure tensors.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_graph.graphs.tracing.externals import External, TensorWatch
from te_graph.graphs.tracing.recorder import Recorder


def find(watch: TensorWatch, tensor: Tensor) -> External:
    return watch.externals[tensor.untyped_storage()._cdata]


def run(module: nn.Module, inputs: Tensor) -> TensorWatch:
    """Watch one forward and backward of ``module``; its inputs are owned."""
    watch = TensorWatch(owned=(inputs,))
    wanted = [tensor for tensor in (inputs, *module.parameters()) if tensor.requires_grad]
    with watch:
        with watch.saved_tensors():
            output = module(inputs)
        torch.autograd.grad(output, wanted, torch.ones_like(output))
    return watch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("scale", torch.rand(1))
        self.register_buffer("unused", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, 8] -> [batch, tokens, 8]
        query, key, value = (self.qkv(x) * self.scale).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).transpose(1, 2).flatten(2)


class LanguageLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, tokens + 1] -> scalar
        logits = checkpoint(self.head, self.embedding(tokens[:, :-1]), use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, num_layers=2, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, batch, 7] -> [tokens, batch, 5]
        return self.lstm(x)[0] * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 1))


MODULES = {
    "attention": (Attention, lambda: torch.randn(2, 3, 8, requires_grad=True)),
    "embedding and cross entropy": (LanguageLoss, lambda: torch.randint(31, (2, 5))),
    "lstm": (Recurrent, lambda: torch.randn(4, 2, 7, requires_grad=True)),
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 7, 7, requires_grad=True)),
}


@pytest.mark.parametrize(("build", "fresh"), MODULES.values(), ids=MODULES.keys())
def test_externals_of_a_module_are_its_parameters_and_used_buffers_and_nothing_else(
    build: Callable, fresh: Callable
) -> None:
    module = build()
    watch = run(module, fresh())
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    expected = {tensor.untyped_storage()._cdata for name, tensor in state.items() if name != "unused"}
    assert watch.externals.keys() == expected
    originals = {id(external.originals[0]) for external in watch.externals.values()}
    assert originals == {id(tensor) for name, tensor in state.items() if name != "unused"}


def test_flags_tell_what_was_read_written_and_saved() -> None:
    weight = torch.randn(3, requires_grad=True)
    bias, counter, sink, total = torch.randn(3), torch.zeros(1), torch.empty(3), torch.zeros(3)
    watch = TensorWatch()
    with watch, watch.saved_tensors():
        output = torch.ones(3) * weight * torch.exp(bias) + bias
        counter.add_(1)
        sink.copy_(output.detach())
        torch.add(sink, 1, out=total)
    flags = {
        name: (find(watch, tensor).read, find(watch, tensor).written, find(watch, tensor).saved)
        for name, tensor in {"weight": weight, "bias": bias, "counter": counter, "sink": sink, "total": total}.items()
    }
    assert flags == {
        "weight": (True, False, False),
        "bias": (True, False, False),
        "counter": (True, True, False),
        "sink": (True, True, False),
        "total": (False, True, False),
    }
    late = torch.randn(3)
    with watch, watch.saved_tensors():
        weight.exp() * bias * late
    assert find(watch, bias).saved
    assert find(watch, late).saved
    assert not find(watch, weight).saved


def test_saved_storages_name_owned_and_produced_tensors_too() -> None:
    owned = torch.randn(3, requires_grad=True)
    watch = TensorWatch(owned=(owned,))
    with watch, watch.saved_tensors():
        square = owned * owned
        result = square.sin()
    assert owned.untyped_storage()._cdata in watch.saved_storages
    assert square.untyped_storage()._cdata in watch.saved_storages
    assert result.untyped_storage()._cdata not in watch.saved_storages
    assert watch.externals == {}
    (grad,) = torch.autograd.grad(result.sum(), owned)
    assert torch.equal(grad, square.cos() * owned + square.cos() * owned)


def test_noting_what_is_saved_leaves_no_reference_cycle() -> None:
    weight, watch = torch.randn(3, requires_grad=True), TensorWatch()
    gc.disable()
    try:
        with watch, watch.saved_tensors():
            result = weight.exp()
        key = result.untyped_storage()._cdata
        del result
        assert watch._produced[key].expired()
    finally:
        gc.enable()


def test_external_names_the_first_operator_and_the_users_line() -> None:
    closed_over = torch.randn(3)

    def region(x: Tensor) -> Tensor:  # [3] -> [3]
        return F.relu(x).mul(closed_over)

    watch = TensorWatch()
    with watch:
        region(torch.ones(3))
    external = find(watch, closed_over)
    assert external.op == "aten.mul.Tensor"
    assert external.site == f"{__file__}:{region.__code__.co_firstlineno + 1} in region"
    assert external.originals[0] is closed_over


def test_external_of_the_engine_itself_is_placed_in_the_backward() -> None:
    weight = torch.randn(3, requires_grad=True)
    output = weight * torch.randn(3)
    watch = TensorWatch()
    with watch:
        torch.autograd.grad(output, weight, torch.ones(3))
    (external,) = watch.externals.values()
    assert external.site == "backward (MulBackward0)"


def test_parameters_that_share_one_flat_buffer_are_all_listed() -> None:
    flat = torch.randn(6)
    first, second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    watch = TensorWatch()
    with watch:
        torch.cat([first * 2, second * 2, first])
    assert [id(original) for original in find(watch, flat).originals] == [id(first), id(second)]


def test_storages_made_inside_are_produced_even_if_an_address_comes_again() -> None:
    watch = TensorWatch()
    with watch:
        for _ in range(50):
            made = torch.randn(1000).mul_(2)
            assert made.untyped_storage()._cdata in watch.produced_storages
            del made
            gc.collect(0)
    stranger = torch.randn(1000)
    with watch:
        stranger.add(1)
        torch.tensor([1.0, 2.0]).add_(1)
    assert list(watch.externals) == [stranger.untyped_storage()._cdata]


def test_produced_storages_are_not_kept_alive() -> None:
    watch = TensorWatch()
    with watch:
        made = torch.randn(10) + 1
    key = made.untyped_storage()._cdata
    del made
    assert watch._produced[key].expired()


def test_batch_norm_statistics_and_counters_are_restored() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    watch = run(module, torch.randn(5, 4, requires_grad=True))
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{i}.{name}" for i in (0, 2) for name in ("running_mean", "running_var", "num_batches_tracked")}
    watch.restore()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_batch_norm_in_eval_mode_writes_nothing() -> None:
    module = nn.BatchNorm1d(4).eval()
    watch = run(module, torch.randn(5, 4, requires_grad=True))
    assert find(watch, module.running_mean).read
    assert not any(external.written for external in watch.externals.values())


def writes_in_place(buffer: Tensor) -> None:  # [4, 6]
    buffer.view(-1)[3:9].mul_(2)
    buffer[:, 1:3].copy_(torch.ones(4, 2))
    buffer.t().index_put_((torch.tensor([0, 2]),), torch.full((1,), 9.0))


def writes_through_out(buffer: Tensor) -> None:  # [4, 6]
    torch.exp(torch.ones(4, 6), out=buffer)


def writes_through_foreach(buffer: Tensor) -> None:  # [4, 6]
    torch._foreach_add_([buffer[0], buffer[1], torch.zeros(3)], 1.0)


def writes_through_data(buffer: Tensor) -> None:  # [4, 6]
    buffer.data.zero_()


def writes_at_random(buffer: Tensor) -> None:  # [4, 6]
    buffer.normal_()
    F.dropout(buffer, 0.5, inplace=True)


@torch.library.custom_op("te_graph_externals_test::increment", mutates_args=("counters",))
def increment(counters: list[Tensor], step: Tensor) -> None:  # any shapes; step broadcastable
    for counter in counters:
        counter += step


def writes_through_custom_operator(buffer: Tensor) -> None:  # [4, 6]
    increment([torch.zeros(2), buffer], torch.ones(1))


WRITERS = (
    writes_in_place,
    writes_through_out,
    writes_through_foreach,
    writes_through_data,
    writes_at_random,
    writes_through_custom_operator,
)


@pytest.mark.parametrize("region", WRITERS, ids=lambda region: region.__name__)
def test_writes_are_restored_once_and_again(region: Callable) -> None:
    buffer = torch.randn(4, 6)
    before, version = buffer.clone(), buffer._version
    watch = TensorWatch()
    for _ in range(2):
        with watch:
            region(buffer)
        assert not torch.equal(buffer, before)
        assert find(watch, buffer).written
        changed_version = buffer._version
        watch.restore()
        assert torch.equal(buffer, before)
        assert buffer._version == changed_version >= version


REPEATED = {
    "scalar": lambda: torch.randn(1).expand(4),
    "rows": lambda: torch.randn(1, 5).expand(3, 5),
    "columns with gaps": lambda: torch.randn(3, 8)[:, ::3].unsqueeze(-1).expand(3, 3, 2),
    "windows": lambda: torch.randn(6).unfold(0, 3, 1),
    "expanded windows": lambda: torch.randn(6).unfold(0, 3, 1).expand(2, 4, 3),
    "without elements": lambda: torch.randn(1, 0).expand(3, 0),
}


@pytest.mark.parametrize("build", REPEATED.values(), ids=REPEATED)
def test_writes_to_elements_that_stand_for_several_are_restored(build: Callable) -> None:
    tensor = build()
    before, memory = tensor.clone(), tensor.untyped_storage().tolist()
    watch = TensorWatch()
    with watch:
        tensor.fill_(9.0)
    assert tensor.numel() == 0 or not torch.equal(tensor, before)
    watch.restore()
    assert torch.equal(tensor, before)
    assert tensor.untyped_storage().tolist() == memory


def test_what_cannot_be_restored_leaves_the_others_restored() -> None:
    first, last = torch.zeros(3), torch.zeros(3)
    watch = TensorWatch()
    with watch:
        first.add_(1)
        watch._snapshots["not to be written"] = (torch.ones(1).expand(3), torch.ones(3))
        last.add_(1)
    with pytest.raises(RuntimeError, match="single memory location"):
        watch.restore()
    assert first.tolist() == last.tolist() == [0, 0, 0]


def test_write_to_a_leaf_that_requires_grad_is_restored() -> None:
    weight = nn.Parameter(torch.randn(3))
    before = weight.detach().clone()
    watch = TensorWatch()
    with watch, torch.no_grad():
        weight.sub_(1)
    watch.restore()
    assert torch.equal(weight, before)
    assert weight.requires_grad and weight.is_leaf


def test_writes_before_an_exception_are_restored() -> None:
    counter, other = torch.zeros(1), torch.randn(3)
    before = other.clone()
    watch = TensorWatch()
    with pytest.raises(RuntimeError, match="size of tensor"), watch:
        counter.add_(1)
        other.add_(torch.ones(5))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert counter.item() == 1
    watch.restore()
    assert counter.item() == 0
    assert torch.equal(other, before)


def test_gradient_accumulated_by_a_backward_is_restored() -> None:
    weight = torch.randn(3, requires_grad=True)
    weight.grad = torch.randn(3)
    before = weight.grad.clone()
    watch = TensorWatch()
    with watch:
        (weight * 2).sum().backward()
    assert not torch.equal(weight.grad, before)
    watch.restore()
    assert torch.equal(weight.grad, before)


def test_owned_input_written_in_place_is_reported_and_not_restored() -> None:
    owned, untouched = torch.zeros(4), torch.zeros(4)

    def region() -> Tensor:  # -> [2]
        owned[1:3].add_(1)
        owned.mul_(2)
        return untouched[:2] + 1

    watch = TensorWatch(owned=(owned, untouched))
    with watch:
        region()
    site = f"{Path(__file__)}:{region.__code__.co_firstlineno + 1} in region"
    assert watch.mutated_owned == {owned.untyped_storage()._cdata: ("aten.add_.Tensor", site)}
    watch.restore()
    assert owned.tolist() == [0, 2, 2, 0]
    assert watch.externals == {}


def test_watch_around_a_recorder_sees_the_region_and_not_the_recorder() -> None:
    weight, static = nn.Parameter(torch.randn(3)), torch.randn(3)
    watch, recorder = TensorWatch(owned=(static,)), Recorder()
    with watch, recorder.capture():
        output = static * weight
        torch.rand(2)
    assert list(watch.externals) == [weight.untyped_storage()._cdata]
    assert find(watch, weight).op == "aten.mul.Tensor"
    assert len(watch.produced_storages) == 2
    assert output.untyped_storage()._cdata in watch.produced_storages


def test_higher_order_operator_passes_and_its_operands_count_as_read() -> None:
    predicate, operand = torch.tensor(True), torch.randn(3)
    watch = TensorWatch()
    with watch:
        result = torch.ops.higher_order.cond(predicate, torch.sin, torch.cos, (operand,))
    assert torch.equal(result, operand.sin())
    assert find(watch, operand).read
    assert find(watch, predicate).read


def test_storage_that_a_tensor_is_set_to_is_external() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    with TensorWatch() as watch:
        alias = torch.empty(0).set_(weight.detach().untyped_storage(), 0, (5,))
        alias * 2
    key = weight.untyped_storage()._cdata
    assert key in watch.externals
    assert key not in watch.produced_storages
    assert watch.externals[key].read
