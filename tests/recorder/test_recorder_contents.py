"""What a recording holds: its calls, its bytes, whom it keeps alive, and what a graph would have reused.

The reference is what the test itself knows of the region it records.
"""

import ctypes
import gc
import weakref

import pytest
import torch
from recorded import assert_same_bits, eager
from torch.multiprocessing.reductions import StorageWeakRef

from te_graph.graphs.tracing.recorder import Recorder


def test_ops_name_what_a_replay_calls_with_shapes_and_the_users_line() -> None:
    weight, static = torch.randn(3, 5, requires_grad=True), torch.randn(2, 5)
    recorder = Recorder()
    with recorder.capture():
        product = static @ weight.t()
        torch.empty(4)
        torch.autograd.grad(product.sum(), weight)
    records = recorder.ops()
    assert [record.name for record in records] == [
        "aten.mm.default",
        "aten.sum.default",
        "aten.ones_like.default",
        "aten.mm.default",
    ]
    assert records[0].inputs == ((2, 5), (5, 3))
    assert records[0].outputs == ((2, 3),)
    line = test_ops_name_what_a_replay_calls_with_shapes_and_the_users_line.__code__.co_firstlineno + 4
    assert (
        records[0].site
        == f"{__file__}:{line} in {test_ops_name_what_a_replay_calls_with_shapes_and_the_users_line.__name__}"
    )
    assert records[3].site == "backward (MmBackward0)"


def test_views_and_uninitialised_factories_need_no_call() -> None:
    recorder = Recorder()
    with recorder.capture():
        transposed = (torch.empty(2, 3) + 1).t_()
        transposed.unsqueeze_(0).transpose(1, 2).view(6).mul_(2)
    assert [record.name for record in recorder.ops()] == ["aten.add.Tensor", "aten.mul_.Tensor"]


def test_nbytes_counts_the_storages_born_inside() -> None:
    static = torch.randn(100)
    recorder = Recorder()
    with recorder.capture():
        torch.empty(10).copy_((static * 2).view(10, 10)[0])
    assert recorder.nbytes == 4 * (100 + 10)
    recorder.reset()
    assert recorder.nbytes == 0


def test_recorder_in_the_wrong_state_says_what_to_call() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match=r"capture\(\) first"):
        recorder.replay()
    with pytest.raises(RuntimeError, match="got an empty recorder"):
        recorder.freeze_lifetimes()
    with recorder.capture():
        pass
    recorder.replay()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"), recorder.capture():
        pass


def test_recorder_keeps_no_autograd_graph_and_reset_frees_the_storages() -> None:
    class Payload:
        pass

    leaf, recorder = torch.randn(5, requires_grad=True), Recorder()
    gc.disable()
    try:
        with recorder.capture():
            hidden = leaf * 2
            output = hidden.exp()
        payload = Payload()
        output.grad_fn.metadata["payload"] = payload
        graph, storage = weakref.ref(payload), StorageWeakRef(hidden.untyped_storage())
        del payload, hidden, output
        assert graph() is None
        assert not storage.expired()
        recorder.reset()
        assert storage.expired()
    finally:
        gc.enable()


def test_replay_leaves_version_counters_and_requires_grad_alone() -> None:
    leaf, buffer = torch.randn(5, requires_grad=True), torch.zeros(5)
    recorder = Recorder()
    with recorder.capture():
        output = leaf * 2
        buffer.add_(1)
    versions = [tensor._version for tensor in (leaf, output, buffer)]
    recorder.replay()
    assert versions == [tensor._version for tensor in (leaf, output, buffer)]
    assert output.requires_grad and not buffer.requires_grad
    assert buffer.tolist() == [2.0] * 5


def read_floats(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_poison_shows_a_read_of_memory_that_a_graph_would_have_reused(default: str) -> None:
    static = torch.randn(4)
    recorder = Recorder(poison=True)
    with recorder.capture():
        temporary = static * 2
        output = temporary + 1
        kept = static - 1
    address = temporary.data_ptr()
    del temporary
    for _ in range(2):
        static.normal_()
        with torch.device(default):
            recorder.replay()
        assert_same_bits([output, kept], [static * 2 + 1, static - 1])
        assert all(value != value for value in read_floats(address, 4))


def test_poison_spares_what_autograd_or_another_recorder_holds_when_lifetimes_are_frozen() -> None:
    leaf, grad = torch.randn(4, requires_grad=True), torch.randn(4)
    forward, backward = Recorder(poison=True), Recorder(poison=True)
    with forward.capture():
        dropped = leaf * 2
        output = dropped.exp().sin()
    with backward.capture():
        (grad_leaf,) = torch.autograd.grad(output, leaf, grad, retain_graph=True)
    address = dropped.data_ptr()
    result = output.detach()
    del dropped, output
    forward.freeze_lifetimes()
    backward.freeze_lifetimes()
    for _ in range(2):
        with torch.no_grad():
            leaf.normal_()
        forward.replay()
        backward.replay()
        assert_same_bits([result, grad_leaf], eager(lambda x: (x * 2).exp().sin(), [leaf], [leaf], grad))
        assert all(value != value for value in read_floats(address, 4))
