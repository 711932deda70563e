"""The recorder replays a region bit for bit as eager execution runs it.

The reference is eager execution of the same function on the same inputs (``recorded.eager``).
"""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from recorded import Block, Checkpointed, assert_same_bits, eager
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives

from te_graph.graphs.tracing.recorder import Recorder

# Kept: torch.export and inductor look at all operators that torch.ops has had, and fail if one is gone.
_LIBRARY = torch.library.Library("te_graph_test", "FRAGMENT")


def tuple_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


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


def foreach_operators_on_one_tensor(x: Tensor) -> Tensor:  # [rows, columns]
    return torch._foreach_mul([x], 2.0)[0]


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
    foreach_operators_on_one_tensor,
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


def test_operator_with_an_autograd_kernel_of_its_own_is_replayed_beneath_it() -> None:
    _LIBRARY.define("halve(Tensor x) -> Tensor")
    _LIBRARY.impl("halve", lambda x: x / 2, "CPU")

    def halve_and_add_one(x: Tensor) -> Tensor:  # [5] -> [5]
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.te_graph_test.halve(x) + 1

    _LIBRARY.impl("halve", halve_and_add_one, "AutogradCPU")
    static, recorder = torch.randn(5), Recorder()
    with recorder.capture():
        output = torch.ops.te_graph_test.halve(static)
    static.normal_()
    recorder.replay()
    assert_same_bits([output], [static / 2 + 1])


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
        assert torch._C._distributed_c10d._get_work_registry_size() == 0
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
