"""What users of torch.cuda.make_graphed_callables and TransformerEngine's rely on, compared bit for bit.

The reference is eager execution of a copy of the same module, or of the same function, on the same inputs.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Attention(nn.Module):
    """Self-attention whose mask, True where a key is hidden, is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # x [2, 5, 8], mask bool [2, 5] -> [2, 5, 8], weights [2, 5, 5]
        return self.mha(x, x, x, key_padding_mask=mask)


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:  # [2, 5, 8] -> [2, 5, 8]
        query, key, value = self.qkv(self.norm(x)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.mlp(x)


def conv_bn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 8))


def values(*shape: int) -> Callable[[str], Tensor]:
    return lambda device: torch.randn(*shape, device=device, requires_grad=True)


def tokens(device: str) -> Tensor:  # int64 [4, 6]
    return torch.randint(11, (4, 6), device=device)


def lstm_state(device: str) -> tuple[Tensor, Tensor]:  # [3, 7], [3, 7]
    return values(3, 7)(device), values(3, 7)(device)


MODELS = {
    "Linear": (lambda: nn.Linear(8, 8), (values(2, 5, 8),)),
    "MLP": (mlp, (values(2, 5, 8),)),
    "transformer block": (Block, (values(2, 5, 8),)),
    "MHA": (Attention, (values(2, 5, 8),)),
    "Conv+BN": (conv_bn, (values(2, 3, 6, 6),)),
    "LSTM cell": (lambda: nn.LSTMCell(5, 7), (values(3, 5), lstm_state)),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 4)), (tokens,)),
}


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_two_micro_batches_are_bit_equal_to_eager_training(device, name, set_to_none, seed):
    make, arguments = MODELS[name]
    model = make().to(device)
    if not set_to_none:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    twin = eager_copy(model)
    steps = [[tuple(argument(device) for argument in arguments) for _ in range(2)] for _ in range(3)]
    make_graphed_callables(model, tuple(argument(device) for argument in arguments))
    torch.manual_seed(seed)
    seen = train(model, steps, set_to_none)
    torch.manual_seed(seed)
    assert_bitwise_equal(seen, train(twin, steps, set_to_none))
    info = model.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (6, 6, {})


def test_a_mask_passed_by_keyword_may_change_with_each_call(device):
    model = Attention().to(device)
    twin = eager_copy(model)
    hidden = torch.zeros(2, 5, dtype=torch.bool, device=device)
    make_graphed_callables(model, (values(2, 5, 8)(device),), sample_kwargs={"mask": hidden})
    outputs = []
    for length in (1, 3, 5, 2):
        x, mask = values(2, 5, 8)(device), (torch.arange(5, device=device) >= length).expand(2, 5)
        seen = run(model, x, mask=mask)
        assert_bitwise_equal(seen, run(twin, x, mask=mask))
        outputs.append(seen[0][1])
    assert not torch.equal(outputs[0], outputs[1])
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_that_a_user_keeps_never_change_with_a_later_replay(device, accumulate):
    model = mlp().to(device)
    make_graphed_callables(model, (values(4, 8)(device),), accumulate_grads=accumulate)
    kept, copies = [], []
    for _ in range(3):
        model.zero_grad()
        x = values(4, 8)(device)
        backward_of(model(x))
        kept.append([x.grad, *(p.grad for p in model.parameters())])
        copies.append(leaf_copy(kept[-1]))
    assert_bitwise_equal(kept, copies)
    addresses = [t.data_ptr() for grads in kept for t in grads]
    assert len(set(addresses)) == len(addresses)


def test_gradients_returned_by_autograd_grad_are_owned_by_the_caller(device):
    model = mlp().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (values(4, 8)(device),), accumulate_grads=False)
    inputs = [values(4, 8)(device) for _ in range(3)]

    def gradients(call: nn.Module) -> list:
        torch.manual_seed(6)
        return [torch.autograd.grad(call(x).square().sum(), [x, *call.parameters()]) for x in inputs]

    kept = gradients(model)
    assert_bitwise_equal(kept, gradients(twin))
    assert all(p.grad is None for p in model.parameters())
    kept[0][1].fill_(7)
    assert_bitwise_equal(gradients(model), gradients(twin))


def test_documented_limit_autograd_grad_sees_parameters_in_autograd_params_alone(device):
    """To others there is no edge: torch says that they are unused, or gives None where that is allowed."""
    for seen in (False, True):
        model = nn.Linear(8, 8).to(device)
        twin = eager_copy(model)
        options = {"autograd_params": list(model.parameters())} if seen else {}
        make_graphed_callables(model, (values(4, 8)(device),), **options)
        x = values(4, 8)(device)
        both = [
            torch.autograd.grad(call(x).square().sum(), [x, *call.parameters()], allow_unused=True)
            for call in (model, twin)
        ]
        if not seen:
            assert all(grad is None for grad in both[0][1:])
            both = [grads[:1] for grads in both]
        assert_bitwise_equal(*both)
        assert all(p.grad is None for p in model.parameters())


def test_two_micro_batches_from_none_leave_the_exact_sum(device):
    model = nn.Linear(8, 8).to(device)
    make_graphed_callables(model, (values(4, 8)(device),))
    inputs = [values(4, 8)(device) for _ in range(2)]
    single = []
    for x in inputs:
        model.zero_grad()
        run(model, x)
        single.append(gradients_of(list(model.parameters())))
    for _ in range(3):
        model.zero_grad()
        for x in inputs:
            run(model, x)
        sums = [one + other for one, other in zip(*single, strict=True)]
        assert_bitwise_equal(gradients_of(list(model.parameters())), sums)


def test_a_linear_layer_of_ones_shows_1_1_1_with_and_1_2_3_without_zeroing(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    make_graphed_callables(model, (torch.ones(1, 1, device=device),))
    shown = []
    for zeroes in (True, False):
        model.weight.grad = None
        for _ in range(3):
            if zeroes:
                model.zero_grad(set_to_none=False)
            model(torch.ones(1, 1, device=device)).backward()
            shown.append(model.weight.grad.item())
    assert shown == [1, 1, 1, 1, 2, 3]


class Dictionaries(nn.Module):
    """Takes and gives nests of tensors, None and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: dict, more: list) -> dict:  # {"x": [4, 8], "scale": [8]}, [[4, 8], (float, None)]
        hidden = self.linear(inputs["x"]) * inputs["scale"]
        return {"out": (hidden, more[0] * more[1][0]), "mask": hidden.detach() > 0, "none": None, "width": 8}


def test_dictionaries_and_nests_go_in_and_come_out(device):
    model = Dictionaries().to(device)
    twin = eager_copy(model)

    def nest() -> tuple:
        return {"x": values(4, 8)(device), "scale": torch.randn(8, device=device)}, [values(4, 8)(device), (0.5, None)]

    make_graphed_callables(model, nest())
    steps = [[nest() for _ in range(2)] for _ in range(2)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))


class Parameterless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [4, 8] -> [4]
        return F.gelu(x).sum(1)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_modules_without_parameters_replay(device, needs_grad):
    model = Parameterless()
    twin = eager_copy(model)
    make_graphed_callables(model, (values(4, 8)(device).detach().requires_grad_(needs_grad),))
    for _ in range(2):
        x = values(4, 8)(device).detach().requires_grad_(needs_grad)
        results = []
        for call in (model, twin):
            leaf = leaf_copy(x)
            output = call(leaf)
            if needs_grad:
                backward_of(output)
            results.append([leaf_copy(output), leaf.grad])
        assert_bitwise_equal(*results)
    assert model.te_graph.info()["graphs"] == (2 if needs_grad else 1)


def test_python_functions_replay_and_keep_their_names(device):
    weight = torch.randn(8, device=device, requires_grad=True)

    def loss_of(x: Tensor, target: Tensor, power: int = 2) -> Tensor:  # [4, 8], [4, 8] -> []
        """A loss."""
        return (x * weight - target).pow(power).mean()

    graphed = make_graphed_callables(loss_of, (values(4, 8)(device), torch.randn(4, 8, device=device), 3))
    assert (graphed.__name__, graphed.__doc__) == ("loss_of", "A loss.")
    for _ in range(2):
        x, target = values(4, 8)(device), torch.randn(4, 8, device=device)
        seen = []
        for call in (graphed, loss_of):
            weight.grad = None
            seen.append([run(call, x, target, 3), weight.grad.clone()])
        assert_bitwise_equal(*seen)


def test_eval_runs_eagerly_with_any_shape_and_training_replays_again(device):
    model = mlp().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (values(4, 8)(device),))
    for mode, rows in ((False, 9), (True, 4), (False, 2)):
        x = values(rows, 8)(device)
        seen = []
        for call in (model.train(mode), twin.train(mode)):
            torch.manual_seed(7)
            seen.append(run(call, x))
        assert_bitwise_equal(*seen)
    assert model.te_graph.info()["forward_replays"] == 1


def test_an_input_that_requires_grad_and_is_not_used_needs_the_flag_and_gets_no_gradient(device):
    def first(x: Tensor, y: Tensor) -> Tensor:  # [4, 8], [4, 8] -> [4, 8]
        return x * 2

    samples = values(4, 8)(device), values(4, 8)(device)
    with pytest.raises(RuntimeError, match=r"first: args\[1\] requires a gradient .*allow_unused_input=True"):
        make_graphed_callables(first, samples)
    graphed = make_graphed_callables(first, samples, allow_unused_input=True)
    x, y = values(4, 8)(device), values(4, 8)(device)
    result, grads = run(graphed, x, y)
    assert_bitwise_equal((result, grads), run(first, x, y))
    assert grads[0][1] is None


def test_a_tuple_of_modules_and_functions_trains_like_eager_execution(device):
    first, last = Block().to(device), nn.Linear(8, 3).to(device)
    twins = eager_copy(first), eager_copy(last)

    def mean(x: Tensor) -> Tensor:  # [2, 5, 3] -> [5, 3]
        return x.mean(0)

    samples = (values(2, 5, 8)(device),), (values(2, 5, 8)(device),), (values(2, 5, 3)(device),)
    graphed = make_graphed_callables((first, last, mean), samples)
    assert (graphed[0], graphed[1]) == (first, last)
    seen = []
    for one, two, three in (graphed, (*twins, mean)):
        chain = nn.Sequential(one, two)
        torch.manual_seed(8)
        inputs = [values(2, 5, 8)(device) for _ in range(4)]
        seen.append([run(lambda x, chain=chain, three=three: three(chain(x)), x) for x in inputs])
        seen[-1].append(gradients_of(list(chain.parameters())))
    assert_bitwise_equal(*seen)
    assert [call.te_graph.info()["backward_replays"] for call in graphed] == [4, 4, 4]


def test_a_module_that_was_reset_runs_eagerly_and_can_be_captured_again_with_other_shapes(device):
    model = mlp().to(device)
    twin, kind = eager_copy(model), type(model)
    for rows in (4, 6, 4):
        make_graphed_callables(model, (values(rows, 8)(device),))
        steps = [[(values(rows, 8)(device),) for _ in range(2)]]
        torch.manual_seed(9)
        seen = train(model, steps)
        torch.manual_seed(9)
        assert_bitwise_equal(seen, train(twin, steps))
        model.te_graph.reset()
        assert type(model) is kind
        longer = values(9, 8)(device)
        torch.manual_seed(9)
        seen = run(model, longer)
        torch.manual_seed(9)
        assert_bitwise_equal(seen, run(twin, longer))


def test_results_gradients_and_a_backward_that_is_due_outlive_the_callable(device):
    model = nn.Linear(8, 8).to(device)
    twin = eager_copy(model)
    parameters = list(model.parameters())
    make_graphed_callables(model, (values(4, 8)(device),))
    x, other = values(4, 8)(device), values(4, 8)(device)
    first = run(model, x)
    leaf = leaf_copy(other)
    output = model(leaf)
    model.te_graph.reset()
    del model
    backward_of(output)
    assert_bitwise_equal(first, run(twin, x))
    expected, (grads, _) = run(twin, other)
    assert_bitwise_equal((output.detach(), leaf.grad), (expected, grads[0]))
    assert_bitwise_equal(gradients_of(parameters), gradients_of(list(twin.parameters())))


def test_outputs_that_were_never_used_may_be_dropped_after_the_callable(device):
    model = nn.Linear(8, 8).to(device)
    make_graphed_callables(model, (values(4, 8)(device),), max_in_flight=2)
    outputs = [model(values(4, 8)(device)) for _ in range(2)]
    copies = leaf_copy([output.detach() for output in outputs])
    del model
    assert_bitwise_equal([output.detach() for output in outputs], copies)
    del outputs


def test_a_gradient_that_autograd_keeps_as_a_conjugate_view_is_a_plain_tensor_a_documented_limit(device):
    class Conjugated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.complex(torch.ones(3), torch.arange(3.0)))

        def forward(self, x: Tensor) -> Tensor:  # [3] -> [3]
            y = torch.complex(x, x) + self.p.conj()
            return y.real * 2 + y.imag

    module = Conjugated().to(device)
    twin = eager_copy(module)
    x = torch.ones(3, device=device, requires_grad=True)
    make_graphed_callables(module, (x,))
    for one in (twin, module):
        one(x).sum().backward()
    assert (twin.p.grad.is_conj(), module.p.grad.is_conj()) == (True, False)
    assert_bitwise_equal(module.p.grad, twin.p.grad.resolve_conj())
