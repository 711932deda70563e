"""The recorder replays a region bit for bit as eager execution runs it, and refuses what a graph cannot hold.

The reference is eager execution of the same function on the same inputs (``eager``).
"""

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from te_graph.recorder import CaptureError, Recorder


def eager(function: Callable, inputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_output: Tensor) -> list[Tensor]:
    """Reference: output and gradients of ``leaves``, in eager execution."""
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), index
        bits = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()).view(-1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*bits), f"tensor {index}: largest difference {(got - want).abs().max()}"


def tuple_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


class Block(nn.Module):
    """A GPT block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width] -> the same
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:  # as the inner module
        return checkpoint(self.inner, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 11, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, 7] -> [batch, tokens, 22]
        return self.lstm(x)[0]


class LanguageLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, tokens + 1] -> scalar
        logits = self.head(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
    second = nn.Sequential(nn.Conv2d(5, 6, 3, stride=2, groups=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    return nn.Sequential(first, second, nn.MaxPool2d(2))


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=dtype, requires_grad=True)


MODULES = {
    "gpt block": (lambda: Block(32, 4), floats(2, 9, 32)),
    "gpt block in bfloat16": (lambda: Block(32, 4).bfloat16(), floats(2, 9, 32, dtype=torch.bfloat16)),
    "gpt block with dropout": (lambda: Block(32, 4, dropout=0.2), floats(2, 9, 32)),
    "gpt block of one token": (lambda: Block(8, 1), floats(1, 1, 8)),
    "lstm with dropout": (Recurrent, floats(3, 5, 7)),
    "convolutions with batch norm": (convolutions, floats(2, 3, 13, 11)),
    "embedding and cross entropy": (LanguageLoss, lambda: torch.randint(31, (3, 7))),
    "checkpointed gpt block": (lambda: Checkpointed(Block(32, 4)), floats(2, 9, 32)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6), nn.SiLU()), floats(2, 4, 17)),
}


@pytest.mark.parametrize(("build", "fresh"), MODULES.values(), ids=MODULES.keys())
def test_forward_and_backward_replay_as_eager_runs(build: Callable, fresh: Callable) -> None:
    module, static = build(), fresh()
    leaves = [tensor for tensor in (static, *module.parameters()) if tensor.requires_grad]
    forward, backward = Recorder(), Recorder()
    with forward.capture():
        output = module(static)
    grad_output = torch.randn_like(output)
    with backward.capture():
        grads = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
    reference = copy.deepcopy(module)
    for _ in range(3):
        inputs = fresh()
        with torch.no_grad():
            static.copy_(inputs)
        grad_output.normal_()
        state = torch.get_rng_state()
        leaves = [tensor for tensor in (inputs, *reference.parameters()) if tensor.requires_grad]
        expected = eager(reference, [inputs], leaves, grad_output)
        state_after_eager = torch.get_rng_state()
        torch.set_rng_state(state)
        forward.replay()
        backward.replay()
        assert_same_bits([output, *grads, *module.buffers()], [*expected, *reference.buffers()])
        assert torch.equal(torch.get_rng_state(), state_after_eager)


def view_then_add(x: Tensor) -> Tensor:  # [rows, columns]
    x.view(-1).add_(1.5)
    return x * 2


def chunks_and_transposes(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    left, right = x.repeat(1, 2).chunk(2, dim=1)
    left.mul_(3)
    return left + right, right.t().contiguous(), left.transpose(0, 1).exp()


def indexed_writes(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    y = x.clone()
    rows = torch.arange(x.shape[0] - 1, -1, -1)
    y.index_put_((rows,), x * 0.5, accumulate=True)
    z = x[rows]
    z.masked_fill_(x > 0, -1.0)
    z[x < -0.5] = 4.0
    return y, z, torch.where(x > 0, y, z)


def scans_and_reductions(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    return x.cumsum(1), x.sum(0), x.sort(dim=1).values, x.softmax(1), x.logsumexp(1)


def out_variants(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    sized, unsized = torch.empty_like(x), torch.empty(0)
    torch.mul(x, 3, out=sized)
    torch.add(x, sized, out=unsized)
    torch.sin(unsized, out=sized)
    return sized, unsized


def foreach_operators(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    doubled = torch._foreach_mul([x, x + 1], 2.0)
    torch._foreach_add_(doubled, [x, x], alpha=3)
    return (*doubled, *torch._foreach_norm(doubled))


def factories(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    total = torch.zeros_like(x)
    total += x
    steps = torch.arange(x.shape[1]).to(x.dtype)
    steps.mul_(2)
    return total, steps + x, torch.full((3,), 2.5).add_(1), x.new_ones(2).neg_()


def python_data_changed_in_place(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    weights = torch.tensor([1.0, 2.0, 3.0])
    weights.mul_(2)
    return weights, x + weights[1]


def in_place_views(x: Tensor) -> Tensor:  # [rows, columns]
    y = x + 1
    y.t_()
    y.unsqueeze_(0)
    return y.mul_(2)


def random_draws(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    noise = torch.rand_like(x)
    return noise, torch.randperm(5), x.clone().uniform_(), torch.normal(x, 1.0), F.dropout(x, 0.5)


def complex_numbers(x: Tensor) -> tuple[Tensor, ...]:  # [rows, columns]
    z = torch.complex(x, x + 1)
    return (z * z.conj()).real, torch.view_as_real(z).clone()


REGIONS = (
    view_then_add,
    chunks_and_transposes,
    indexed_writes,
    scans_and_reductions,
    out_variants,
    foreach_operators,
    factories,
    python_data_changed_in_place,
    in_place_views,
    random_draws,
    complex_numbers,
)


@pytest.mark.parametrize("shape", [(7, 13), (1, 1), (0, 5)], ids=str)
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_region_replays_as_eager_runs(region: Callable, shape: tuple[int, int]) -> None:
    static = torch.randn(shape)
    recorder = Recorder()
    with recorder.capture():
        outputs = region(static)
    for _ in range(3):
        inputs = torch.randn(shape)
        static.copy_(inputs)
        state = torch.get_rng_state()
        expected = region(inputs)
        torch.set_rng_state(state)
        recorder.replay()
        assert_same_bits([*tuple_of(outputs), static], [*tuple_of(expected), inputs])


def test_capture_under_autocast_replays_the_casts_and_ignores_autocast_at_replay() -> None:
    linear, static = nn.Linear(5, 3), torch.randn(4, 5)
    low, full = Recorder(), Recorder()
    with low.capture(), torch.autocast("cpu", dtype=torch.bfloat16):
        low_output = linear(static).detach()
    with full.capture():
        full_output = linear(static).detach()
    static.normal_()
    low.replay()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected_low = linear(static)
        full.replay()
    assert_same_bits([low_output, full_output], [expected_low, linear(static)])


def test_compiled_function_is_recorded_by_its_operators() -> None:
    compiled = torch.compile(lambda x: torch.relu(x * 2) + x, backend="aot_eager")
    static = torch.randn(5)
    compiled(static)
    recorder = Recorder()
    with recorder.capture():
        output = compiled(static)
    static.normal_()
    recorder.replay()
    assert_same_bits([output], [torch.relu(static * 2) + static])


@torch.library.custom_op("te_graph_test::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, term: Tensor) -> Tensor:  # [n], [n] -> [n]
    total += term
    return total * 2


@torch.library.custom_op("te_graph_test::positives", mutates_args=())
def positives(x: Tensor) -> Tensor:  # [n] -> [count of positive elements]
    return x[x > 0]


def test_custom_operator_that_mutates_is_called_on_the_recorded_tensors() -> None:
    total, term = torch.zeros(3), torch.randn(3)
    recorder = Recorder()
    with recorder.capture():
        output = accumulate(total, term)
    expected = total + term.normal_()
    recorder.replay()
    assert_same_bits([total, output], [expected, expected * 2])


def test_result_that_changes_shape_at_replay_is_an_error() -> None:
    static = torch.ones(4)
    recorder = Recorder()
    with recorder.capture():
        positives(static)
    static[0] = -1
    with pytest.raises(RuntimeError, match=r"expected a result of shape \[4\] as at capture, got \[3\]"):
        recorder.replay()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_called_and_waited_for_at_replay(one_rank: None) -> None:
    static, gathered, reduced = torch.randn(6), torch.empty(6), torch.empty(6)
    recorder = Recorder()
    with recorder.capture():
        dist.all_gather_into_tensor(gathered, static)
        dist.all_reduce(reduced.copy_(static), async_op=True).wait()
        functional = functional_collectives.all_reduce(static, "sum", dist.group.WORLD) + 1
    for _ in range(3):
        static.normal_()
        recorder.replay()
        assert_same_bits([gathered, reduced, functional], [static, static, static + 1])
    names = [op.name for op in recorder.ops()]
    assert [name.split(".")[1] for name in names if "c10d" in name] == ["_allgather_base_", "allreduce_", "all_reduce"]


def test_python_values_and_branches_are_those_of_the_capture() -> None:
    settings = {"scale": 2.0, "negate": True}
    static = torch.randn(5)
    recorder = Recorder()
    with recorder.capture():
        output = static * settings["scale"]
        output = -output if settings["negate"] else output
    settings.update(scale=3.0, negate=False)
    static.normal_()
    recorder.replay()
    assert_same_bits([output], [static * -2.0])


def test_tensors_built_from_python_data_are_frozen_and_listed() -> None:
    values = [1.0, 2.0]
    recorder = Recorder()
    with recorder.capture():
        output = torch.tensor(values) * 2
    values[0] = 7.0
    recorder.replay()
    assert output.tolist() == [2.0, 4.0]
    (frozen,) = recorder.frozen
    assert frozen.value.tolist() == [1.0, 2.0]
    assert "test_recorder.py" in frozen.site
    assert "in test_tensors_built_from_python_data" in frozen.site


def test_memory_lent_by_numpy_is_not_written_by_a_replay() -> None:
    array = np.ones(3, dtype=np.float32)
    recorder = Recorder()
    with recorder.capture():
        output = torch.from_numpy(array) + 1
    array[:] = 5
    recorder.replay()
    assert array.tolist() == [5, 5, 5]
    assert output.tolist() == [6, 6, 6]
    assert recorder.frozen == []


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


def test_nbytes_counts_the_storages_born_inside() -> None:
    static = torch.randn(100)
    recorder = Recorder()
    with recorder.capture():
        torch.empty(10).copy_((static * 2).view(10, 10)[0])
    assert recorder.nbytes == 4 * (100 + 10)
    recorder.reset()
    assert recorder.nbytes == 0


def read_scalar(x: Tensor) -> float:  # [5]
    return x.sum().item()


def branch_on_tensor(x: Tensor) -> Tensor:  # [5]
    if x.sum() > 0:
        return x
    return -x


def assign_data(x: Tensor) -> None:  # [5]
    x.data = torch.ones(5)


def seed_inside(x: Tensor) -> Tensor:  # [5]
    torch.manual_seed(0)
    return torch.rand_like(x)


def own_generator(x: Tensor) -> Tensor:  # [5]
    generator = torch.Generator()
    return torch.rand(5, generator=generator)


REFUSED = {
    "item": (read_scalar, "aten._local_scalar_dense.default", 1),
    "bool": (branch_on_tensor, "aten._local_scalar_dense.default", 1),
    "int": (lambda x: int(x[0]), "aten._local_scalar_dense.default", 0),
    "float": (lambda x: float(x[0]), "aten._local_scalar_dense.default", 0),
    "equal": (lambda x: torch.equal(x, x), "aten.equal.default", 0),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero.default", 0),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten.masked_select.default", 0),
    "unique": (lambda x: x.unique(), "aten._unique2.default", 0),
    "boolean mask read": (lambda x: x[x > 0], "aten.index.Tensor", 0),
    "boolean mask write": (lambda x: x.index_put_((x > -9,), x + 1), "aten.index_put_.default", 0),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.arange(5)), "aten.repeat_interleave.Tensor", 0),
    "set_": (lambda x: torch.zeros(3).set_(x), "aten.set_.source_Tensor", 0),
    "resize_": (lambda x: torch.zeros(3).resize_(9), "aten.resize_.default", 0),
    "resize_as_": (lambda x: torch.zeros(3).resize_as_(x), "aten.resize_as_.default", 0),
    "data": (assign_data, "Tensor.data = ...", 1),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist", 0),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy", 0),
    "asarray": (lambda x: np.asarray(x), "Tensor.__array__", 0),
    "print": (lambda x: str(x), "Tensor.__repr__", 0),
    "cpu": (lambda x: x.cpu(), "Tensor.cpu", 0),
    "cuda": (lambda x: x.cuda(), "Tensor.cuda", 0),
    "to cuda": (lambda x: x.to("cuda", torch.float64), "Tensor.to('cuda')", 0),
    "to device of another tensor": (lambda x: x.to(torch.empty(1, device="meta")), "aten.empty.memory_format", 0),
    "to meta": (lambda x: x.to(device="meta"), "Tensor.to('meta')", 0),
    "copy from another device": (lambda x: torch.zeros(5, device="meta").copy_(x), "aten.zeros.default", 0),
    "sparse": (lambda x: x.to_sparse(), "aten._to_sparse.default", 0),
    "cond": (lambda x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond", 0),
    "manual_seed": (seed_inside, "aten.rand_like.default", 2),
    "other generator": (own_generator, "aten.rand.generator", 2),
}


@pytest.mark.parametrize(("region", "operation", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refusal_names_the_operation_and_the_users_line(region: Callable, operation: str, line: int) -> None:
    static = torch.randn(5)
    recorder = Recorder()
    with pytest.raises(CaptureError) as refusal, recorder.capture():
        region(static)
    message = str(refusal.value)
    assert message.startswith(f"{operation} cannot be captured: ")
    code = region.__code__
    assert message.endswith(f"at {__file__}:{code.co_firstlineno + line} in {code.co_name}")
    assert recorder.ops() == []


ACCEPTED = {
    "to own device": lambda x: x.to("cpu", torch.float64),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "index by integers": lambda x: x[torch.arange(3)],
    "one value under a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(1)),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(torch.arange(5), output_size=10),
    "default generator by name": lambda x: x.clone().normal_(generator=torch.default_generator),
}


@pytest.mark.parametrize("region", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_call_that_resembles_a_refused_one_is_recorded(region: Callable) -> None:
    static = torch.randn(5)
    recorder = Recorder()
    with recorder.capture():
        output = region(static)
    static.normal_()
    state = torch.get_rng_state()
    recorder.replay()
    torch.set_rng_state(state)
    assert_same_bits([output], [region(static)])


def test_refusal_in_a_backward_names_the_line_of_the_users_backward() -> None:
    class ReadsGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:  # [5] -> [5]
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # [5] -> [5]
            return grad * grad.max().item()

    leaf = torch.randn(5, requires_grad=True)
    output = ReadsGradient.apply(leaf)
    line = ReadsGradient.backward.__code__.co_firstlineno + 2
    message = rf"_local_scalar_dense.*test_recorder\.py:{line} in backward$"
    with pytest.raises(CaptureError, match=message), Recorder().capture():
        torch.autograd.grad(output, leaf, torch.ones(5))


def test_checkpoint_with_dropout_is_refused_in_the_backward() -> None:
    module, static = Checkpointed(Block(8, 2, dropout=0.5)), torch.randn(1, 3, 8, requires_grad=True)
    forward, backward = Recorder(), Recorder()
    with forward.capture():
        output = module(static)
    with pytest.raises(CaptureError, match="generator was set inside the region"), backward.capture():
        torch.autograd.grad(output, static, torch.ones_like(output))


def test_seeding_with_the_state_that_the_generator_has_is_refused_too() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="generator was set"), Recorder().capture():
        seed_inside(torch.empty(5))


def test_seeding_as_the_last_act_of_a_region_is_refused() -> None:
    recorder = Recorder()
    with pytest.raises(CaptureError, match="generator was set"), recorder.capture():
        torch.rand(3)
        torch.manual_seed(0)
    assert recorder.ops() == []


def test_capture_leaves_the_generator_where_it_was() -> None:
    before = torch.get_rng_state()
    with Recorder().capture():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(CaptureError), Recorder().capture():
        torch.rand(3).tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_refusal_that_the_region_swallows_fails_the_capture_all_the_same() -> None:
    recorder = Recorder()
    with pytest.raises(CaptureError, match="_local_scalar_dense"), recorder.capture():
        try:
            torch.ones(1).item()
        except RuntimeError:
            torch.ones(2)
    assert recorder.ops() == []


def test_exception_in_a_region_passes_unchanged_and_the_next_capture_works() -> None:
    recorder, static = Recorder(), torch.randn(3)
    error = ValueError("the region's own")
    with pytest.raises(ValueError, match="the region's own") as raised, recorder.capture():
        torch.tensor([1.0]) * static
        raise error
    assert raised.value is error
    assert recorder.ops() == recorder.frozen == []
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    with recorder.capture():
        output = static * 2
    static.normal_()
    recorder.replay()
    assert_same_bits([output], [static * 2])


def test_capture_or_replay_inside_a_capture_is_an_error() -> None:
    inner, outer = Recorder(), Recorder()
    with pytest.raises(RuntimeError, match=r"capture\(\): expected no capture"), outer.capture(), inner.capture():
        pass
    with inner.capture():
        torch.ones(2)
    with pytest.raises(RuntimeError, match=r"replay\(\): expected no capture under way"), outer.capture():
        inner.replay()


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


def test_poison_shows_a_read_of_memory_that_a_graph_would_have_reused() -> None:
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
