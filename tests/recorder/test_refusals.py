"""What a graph cannot hold is refused with the operation and the user's line, and a failed capture leaves no trace.

The reference is the table of regions below: each one's operation, and the line of it inside the region.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from recorded import Block, Checkpointed, assert_same_bits
from torch import Tensor

from te_graph.graphs.tracing.recorder import Recorder
from te_graph.graphs.tracing.refusals import CaptureError


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
    "tensor_split": (lambda x: torch.tensor_split(x, torch.tensor([1, 3])), "torch.tensor_split", 0),
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
    message = rf"_local_scalar_dense.*test_refusals\.py:{line} in backward$"
    with pytest.raises(CaptureError, match=message), Recorder().capture():
        torch.autograd.grad(output, leaf, torch.ones(5))


def test_checkpoint_with_dropout_is_refused_in_the_backward() -> None:
    module, static = Checkpointed(Block(8, 2, dropout=0.5)), torch.randn(1, 3, 8, requires_grad=True)
    forward, backward = Recorder(), Recorder()
    with forward.capture():
        output = module(static)
    words = "generator was set inside the region .*checkpointing with dropout, which make_graphed_callables alone"
    with pytest.raises(CaptureError, match=words), backward.capture():
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


def test_checks_of_distributions_are_refused_with_the_option_that_leaves_them_out() -> None:
    def sampled(x: Tensor, **options: bool) -> Tensor:  # [5]
        noise = torch.distributions.Normal(x, 1.0, **options)
        return torch.distributions.kl_divergence(noise, torch.distributions.Normal(0.0, 1.0, **options))

    x = torch.randn(5)
    with pytest.raises(CaptureError, match="pass validate_args=False to each distribution"), Recorder().capture():
        sampled(x, validate_args=True)  # the default, until torch.compile changes it for the process
    recorder = Recorder()
    with recorder.capture():
        result = sampled(x, validate_args=False)
    x.copy_(torch.randn(5))
    recorder.replay()
    assert_same_bits([result], [sampled(x)])
