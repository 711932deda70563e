"""Silent hazards of graph replay in what goes in: arguments that a copy would accept, and frozen Python values.

The reference is eager execution of a copy of the same module, or of the same function, on the same inputs.
"""

import enum

import pytest
import torch
import torch.nn.functional as F
from hazards import assert_right_when_captured_again, batch, mlp
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, snapshot

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda device: torch.randn(1, 4, device=device), r"of shape \[3, 4\], got \[1, 4\]"),
        (lambda device: torch.randn((), device=device), r"of shape \[3, 4\], got \[\]"),
        (lambda device: torch.randn(3, 4, 1, device=device), r"of shape \[3, 4\], got \[3, 4, 1\]"),
        (
            lambda device: torch.randn(3, 4, device=device, dtype=torch.float64),
            "of dtype torch.float32, got torch.float64",
        ),
        (lambda device: torch.ones(3, 4, device=device, dtype=torch.int64), "of dtype torch.float32, got torch.int64"),
        (lambda device: torch.randn(3, 4, device="meta"), "got meta"),
    ],
)
def test_an_input_that_a_copy_would_silently_accept_is_refused(device, make, words):
    model = mlp(device)
    make_graphed_callables(model, (batch(device, requires_grad=False),))
    x = make(device)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"Sequential: expected args\[0\] .*{words}"):
        model(x)
    assert model.te_graph.info()["forward_replays"] == 0
    assert_bitwise_equal(snapshot(model), before)


@pytest.mark.parametrize("restride", [lambda t: t.t(), lambda t: t[:, :1].expand(4, 4), lambda t: t.flip(0)[:4]])
def test_an_input_of_the_same_shape_and_other_strides_is_right(device, restride):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (torch.randn(4, 4, device=device, requires_grad=True),))
    x = torch.randn(4, 4, device=device, requires_grad=True)

    def step(call: nn.Module) -> list:
        leaf = leaf_copy(x)
        output = call(restride(leaf).contiguous() if call is twin else restride(leaf))
        backward_of(output)
        return [output.detach(), leaf.grad, gradients_of(list(call.parameters()))]

    assert_bitwise_equal(step(model), step(twin))


@pytest.mark.parametrize(
    "restride",
    [lambda t: t.t(), lambda t: t[:1].expand(4, 4), lambda t: t[:, :1].expand(4, 4)],
)
def test_an_input_at_the_static_address_with_other_strides_is_right(device, restride):
    """In a chain the input of the second is where the first has written its result."""
    first, second = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    twins = eager_copy(first), eager_copy(second)
    make_graphed_callables((first, second), (torch.randn(4, 4, device=device, requires_grad=True),), chain=True)
    for _ in range(3):
        x, seen = torch.randn(4, 4, device=device, requires_grad=True), []
        for one, other in ((first, second), twins):
            hidden = one(leaf_copy(x))
            view = restride(hidden)
            assert (view.data_ptr(), view.shape) == (hidden.data_ptr(), hidden.shape)
            result = other(view)
            backward_of(result)
            seen.append([hidden.detach(), result.detach(), gradients_of([*one.parameters(), *other.parameters()])])
            del hidden, view, result
        assert_bitwise_equal(*seen)


@pytest.mark.parametrize("change", [lambda x: x.data.mul_(3), lambda x: x.detach().mul_(3)], ids=["data", "detached"])
def test_a_backward_goes_on_with_the_argument_that_its_forward_was_given(device, change):
    """A documented limit: eager execution raises an error, or computes with what it was changed to."""
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    expected = leaf_copy(x)
    twin(expected).square().sum().backward()
    result = model(x)
    change(x)
    result.square().sum().backward()
    assert_bitwise_equal(
        [x.grad, gradients_of(list(model.parameters()))], [expected.grad, gradients_of(list(twin.parameters()))]
    )
    assert model.te_graph.info()["backward_replays"] == 1


@pytest.mark.parametrize("captured", [False, True])
def test_an_input_with_another_requires_grad_than_the_sample_is_refused(device, captured):
    model = mlp(device)
    make_graphed_callables(model, (batch(device, requires_grad=captured),))
    words = rf"expected args\[0\] with requires_grad={captured}, got requires_grad={not captured}"
    advice = r"x.detach\(\)" if captured else r"x.detach\(\).requires_grad_\(\)"
    with pytest.raises(ValueError, match=rf"{words}; capture with a sample whose .* that of the calls: {advice};"):
        model(batch(device, requires_grad=not captured))


@pytest.mark.parametrize("captured", [False, True])
def test_a_parameter_frozen_or_unfrozen_after_capture_is_refused_by_name(device, captured):
    model = mlp(device)
    model[2].weight.requires_grad_(captured)
    make_graphed_callables(model, (batch(device),))
    model[2].weight.requires_grad_(not captured)
    with pytest.raises(RuntimeError, match=rf"weight of 2 changed requires_grad from {captured} .*reset\(\)"):
        model(batch(device))
    twin = assert_right_when_captured_again(model, batch(device), batch(device))
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def masked(x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # [3, 4], each
    x = x if mask is None else x.masked_fill(mask > 0, 0.0)
    return x * 2 if bias is None else x * 2 + bias


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (1, (), "expected keyword argument mask, which was given at capture"),
        (1, ("mask", "bias"), "got keyword argument bias, which was not given at capture"),
        (1, ("bias",), "got keyword argument bias, which was not given at capture"),
        (3, (), "expected 1 positional argument as at capture, got 3"),
        (0, ("mask",), "expected 1 positional argument as at capture, got 0"),
    ],
)
def test_other_arguments_than_at_capture_are_refused_by_name(device, args, kwargs, words):
    def one() -> Tensor:
        return batch(device, requires_grad=False)

    graphed = make_graphed_callables(masked, (one(),), sample_kwargs={"mask": one()})
    with pytest.raises(ValueError, match=f"masked: {words}"):
        graphed(*(one() for _ in range(args)), **{name: one() for name in kwargs})


def test_is_first_microbatch_without_a_step_state_says_what_takes_it(device):
    module = make_graphed_callables(nn.Linear(4, 4, device=device), (torch.randn(3, 4, device=device),))
    with pytest.raises(ValueError, match=r"got keyword argument is_first_microbatch, .*: capture with step_state="):
        module(torch.randn(3, 4, device=device), is_first_microbatch=True)


def test_none_where_the_capture_had_a_tensor_is_refused_and_the_reverse(device):
    x, mask = batch(device, requires_grad=False), batch(device, requires_grad=False)
    graphed = make_graphed_callables(masked, (x, mask))
    with pytest.raises(ValueError, match=r"masked: expected args\[1\] \(mask\) to be a tensor as at capture, got None"):
        graphed(x, None)
    graphed = make_graphed_callables(masked, (x, None))
    with pytest.raises(ValueError, match=r"masked: expected args\[1\] \(mask\) to be None as at capture, got tensor"):
        graphed(x, mask)


def test_a_tensor_and_none_that_have_changed_places_are_refused(device):
    x, mask = batch(device, requires_grad=False), batch(device, requires_grad=False)
    graphed = make_graphed_callables(masked, (x, mask, None))
    with pytest.raises(ValueError, match=r"masked: expected args\[1\] \(mask\) to be a tensor as at capture, got None"):
        graphed(x, None, mask)
    graphed = make_graphed_callables(masked, (x,), sample_kwargs={"mask": mask, "bias": None})
    with pytest.raises(ValueError, match=r"masked: expected kwargs\['mask'\] to be a tensor as at capture"):
        graphed(x, mask=None, bias=mask)


class Mode(enum.Enum):
    HALF = 0.5
    DOUBLE = 2.0


@pytest.mark.parametrize(
    ("captured", "called"),
    [
        (2, 3),
        (2, 2.0),
        (1, True),
        (0.1, 0.2),
        (None, 0),
        ("relu", "gelu"),
        (Mode.HALF, Mode.DOUBLE),
        (torch.float32, torch.float64),
        ((1, 2), (1, 3)),
        ({"factor": 1}, {"factor": 2}),
        (slice(0, 2), slice(0, 3)),
    ],
)
def test_a_constant_argument_with_another_value_is_refused_not_ignored(device, captured, called):
    def scale(x: Tensor, how: object) -> Tensor:  # [3, 4] -> [3, 4]
        return x * (2 if how == captured else 3)

    x = batch(device)
    graphed = make_graphed_callables(scale, (x, captured))
    assert_bitwise_equal(run(graphed, x, captured), run(scale, x, captured))
    with pytest.raises(ValueError, match=r"scale: expected args\[1\].* as at capture, got"):
        graphed(x, called)


@pytest.mark.parametrize(
    ("captured", "called"), [((1, 2), (1, 2, 3)), ([1, 2], (1, 2)), ({"a": 1}, {"b": 1}), ((1, (2,)), ((1,), 2))]
)
def test_a_nest_of_another_structure_is_refused(device, captured, called):
    graphed = make_graphed_callables(lambda x, how: x * 2, (batch(device), captured))
    with pytest.raises(ValueError, match=r"expected args\[1\] \(how\) nested as at capture"):
        graphed(batch(device), called)


class Scaled(nn.Module):
    """x -> act(weight * x) * scale, where scale is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.scale, self.use_relu = 2.0, True

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        x = x * self.weight
        return (F.relu(x) if self.use_relu else x) * self.scale


@pytest.mark.parametrize(("attribute", "value"), [("scale", 3.0), ("use_relu", False)])
def test_other_python_values_and_branches_than_at_capture_are_refused_until_reset(device, attribute, value):
    model = Scaled().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    setattr(model, attribute, value)
    with pytest.raises(RuntimeError, match=rf"Scaled: {attribute} changed from .* to {value} since capture"):
        model(x)
    model.te_graph.reset()
    setattr(twin, attribute, value)
    make_graphed_callables(model, (batch(device),))
    assert_bitwise_equal(run(model, x), run(twin, x))


def test_one_tensor_given_for_several_arguments_is_one_tensor_in_the_graph_too(device):
    model = nn.MultiheadAttention(4, 2).to(device)  # has a path of its own for self-attention: query is key is value
    twin, sample = eager_copy(model), batch(device)
    make_graphed_callables(model, (sample, sample, sample))
    x, seen = batch(device), []
    for call in (model, twin):
        leaf = leaf_copy(x)
        output, weights = call(leaf, leaf, leaf)
        backward_of((output, weights))
        seen.append([output.detach(), weights.detach(), leaf.grad, gradients_of(list(call.parameters()))])
    assert_bitwise_equal(*seen)
    with pytest.raises(ValueError, match=r"MultiheadAttention: expected args\[1\]"):
        model(x, batch(device), x)


class Leaver(nn.Module):
    """Leaves something that it computed behind, as ``leave`` tells it."""

    def __init__(self, leave) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.leave, self.last, self.log, self.cache = leave, None, [], {}

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        y = self.linear(x)
        self.leave(self, y)
        return y * 2


LEAVING = {
    "attribute": lambda module, y: setattr(module, "last", y),
    "list": lambda module, y: module.log.append(y),
    "dict": lambda module, y: module.cache.update(y=y),
    "buffer": lambda module, y: setattr(module, "steps", module.steps + 1),
}


@pytest.mark.parametrize("where", LEAVING)
def test_a_callable_that_leaves_a_computed_tensor_behind_is_refused_and_left_as_it_was(device, where):
    model = Leaver(LEAVING[where]).to(device)
    sample = batch(device)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"Leaver: .*(last|log|cache|steps)"):
        make_graphed_callables(model, (sample,))
    assert_bitwise_equal(snapshot(model), before)
    assert (model.last, model.log, model.cache) == (None, [], {})
