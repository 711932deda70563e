"""What cannot be flat is refused by name, before anything changes; what ends being flat later is named, too."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat_models import Model, assert_same
from torch import nn

import te_graph as tg

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def with_parameter(parameter: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = parameter
    return module


def with_grad(grad: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.grad = grad
    return module


def with_grad_dtype() -> nn.Module:
    module = nn.Linear(2, 2, dtype=BF16)
    module.weight.grad_dtype = F32
    return module


def with_one_memory() -> nn.Module:
    module = with_parameter(nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.zeros(5)[1:])
    module.extra.weight.data = module.weight.data[2:]
    return module


# What is made flat, further arguments, the error, its text.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "a number": (lambda: 3, {}, TypeError, "expected a module, or parameters with or without their names, got int"),
    "a tensor": (lambda: torch.ones(2), {}, TypeError, "expected a module, or parameters"),
    "a list of numbers": (lambda: [3], {}, TypeError, "expected parameters, got int as parameter 0"),
    "nothing": (lambda: [], {}, ValueError, "expected parameters that require a gradient, got none"),
    "frozen": (frozen, {}, ValueError, "expected parameters that require a gradient, got none"),
    "two devices": (
        lambda: with_parameter(nn.Parameter(torch.ones(2, device="meta"))),
        {},
        TypeError,
        "expected extra to be on a device, got one on meta: materialize the model before",
    ),
    "integers of a parameter": (
        lambda: with_parameter(nn.Parameter(torch.ones(2, dtype=torch.complex64))),
        {},
        TypeError,
        "expected extra to be of a floating-point dtype, got torch.complex64",
    ),
    "sparse": (
        lambda: with_parameter(nn.Parameter(torch.eye(2).to_sparse())),
        {},
        TypeError,
        "expected extra to be dense, got one of layout torch.sparse_coo",
    ),
    "expanded": (
        lambda: with_parameter(nn.Parameter(torch.ones(1).expand(3))),
        {},
        TypeError,
        "expected extra to be without gaps, got strides [0] for shape [3]",
    ),
    "a result": (
        lambda: [nn.Linear(2, 2).weight * 2],
        {},
        TypeError,
        "expected parameter 0 to be a leaf, got the result of MulBackward0",
    ),
    "a narrow grad_dtype": (
        lambda: nn.Linear(2, 2, dtype=F64),
        {},
        ValueError,
        "expected grad_dtype to hold the gradient of weight, torch.float64, got torch.float32",
    ),
    "reduce_dtype": (
        lambda: nn.Linear(2, 2),
        {"reduce_dtype": torch.float16},
        ValueError,
        "expected reduce_dtype to be grad_dtype, or torch.bfloat16 for torch.float32, got torch.float16 for "
        "torch.float32",
    ),
    "grad_dtype of the parameter": (
        with_grad_dtype,
        {},
        ValueError,
        "expected weight.grad_dtype to be torch.bfloat16, got torch.float32",
    ),
    "a sparse gradient": (
        lambda: with_grad(torch.eye(2).to_sparse()),
        {},
        ValueError,
        "expected weight.grad to be dense and of shape [2, 2], got layout torch.sparse_coo",
    ),
    "one memory": (
        with_one_memory,
        {},
        ValueError,
        "expected parameters that share no memory, got weight and extra.weight, which would be apart",
    ),
    "shard": (
        lambda: nn.Linear(2, 2),
        {"shard": "all"},
        ValueError,
        "expected shard to be one of ('none', 'optimizer')",
    ),
    "shard grads": (
        lambda: nn.Linear(2, 2),
        {"shard": "grads"},
        ValueError,
        "shard='grads' is not offered: until the last micro-batch a rank adds to the gradients of all parameters",
    ),
    "peer_group": (
        lambda: nn.Linear(2, 2),
        {"peer_group": 3},
        TypeError,
        "expected peer_group to be a PeerGroup, got int",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, options, error, text = REFUSED[name]
    given = make()
    before = (
        {id(one): one.data_ptr() for one in given.parameters() if one.layout == torch.strided}
        if isinstance(given, nn.Module)
        else {}
    )
    with pytest.raises(error, match=re.escape(f"FlatParameters: {text}")):
        tg.FlatParameters(given, **options)
    for parameter in given.parameters() if before else ():
        assert before.get(id(parameter), parameter.layout) in (
            parameter.layout,
            parameter.layout == torch.strided and parameter.data_ptr(),
        )
        assert not hasattr(parameter, "main_grad")


def test_a_second_one_over_a_parameter_is_refused():
    model = nn.Linear(2, 2)
    flat = tg.FlatParameters(model)
    message = r"weight is in another FlatParameters already: call close\(\) of that one first"
    with pytest.raises(ValueError, match=message):
        tg.FlatParameters(model)
    flat.close()
    again = tg.FlatParameters(model)
    again.close()


def to_bf16(model: nn.Module) -> None:
    model.bfloat16()


def move_one(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data.clone()


def transpose_one(model: nn.Module) -> None:
    model.blocks[0].linear.weight.data = model.blocks[0].linear.weight.data.t()


def freeze_one(model: nn.Module) -> None:
    model.blocks[0].norm.weight.requires_grad_(False)


def drop_hooks(model: nn.Module) -> None:
    model.blocks[0].norm.weight._backward_hooks = None


def share_one(model: nn.Module) -> None:
    """As a queue does that is given a state_dict."""
    model.state_dict()["blocks.0.norm.weight"].share_memory_()


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "dtype": (to_bf16, "conv.bias is now of dtype torch.bfloat16, it was torch.float32"),
    "memory": (move_one, "embedding.weight has moved to other memory"),
    "strides": (transpose_one, "blocks.0.linear.weight is now of shape"),
    "frozen": (freeze_one, "blocks.0.norm.weight is now frozen"),
    "hooks": (drop_hooks, "blocks.0.norm.weight has lost the hook by which its gradient is known"),
    "shared": (share_one, "blocks.0.norm.weight has moved to memory that processes share"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_ends_being_flat_is_named(name):
    change, text = CHANGES[name]
    model = Model()
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
    tokens = torch.randint(7, (2, 3))
    model(tokens).sum().backward()
    change(model)
    message = re.escape(f"FlatParameters: {text}")
    for act in (lambda: model(tokens).sum().backward(), flat.reduce_gradients, optimizer.step):
        with pytest.raises(RuntimeError, match=message):
            act()
    flat.close()


def test_a_main_grad_that_processes_share_is_named():
    model = Model().bfloat16()
    flat = tg.FlatParameters(model)
    model(torch.randint(7, (2, 3))).sum().backward()
    model.blocks[0].norm.weight.main_grad.share_memory_()
    with pytest.raises(RuntimeError, match=r"blocks.0.norm.weight.main_grad has moved to memory that processes share"):
        flat.reduce_gradients()
    flat.close()


def test_a_flat_parameters_that_is_gone_is_named():
    model = Model()
    flat = tg.FlatParameters(model)
    del flat
    gc.collect()
    with pytest.raises(RuntimeError, match="lies in the buffer of a FlatParameters that is gone"):
        model(torch.randint(7, (2, 3))).sum().backward()


def test_after_close_gradients_are_as_without():
    eager = Model()
    model = copy.deepcopy(eager)
    flat = tg.FlatParameters(model)
    tokens = torch.randint(7, (2, 3))
    model(tokens).sum().backward()
    flat.close()
    model.bfloat16().float()
    eager.bfloat16().float()
    model.zero_grad()
    for one in (model, eager):
        one(tokens).square().sum().backward()
    assert_same(model, eager)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_optimizers_that_do_not_know_where_gradients_are(dtype):
    model = nn.Linear(3, 3, dtype=dtype)
    flat = tg.FlatParameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # there is no gradient
    before = model.weight.detach().clone()
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    if dtype == F32:
        optimizer.step()
        assert not torch.equal(before, model.weight)
    else:
        with pytest.raises(
            RuntimeError,
            match=r"SGD.step: gradients of flat parameters lie in main_grad.*FlatParameters.optimizer\(SGD",
        ):
            optimizer.step()
        assert torch.equal(before, model.weight)
        for clip, given in ((tg.clip_grad_norm_, ()), (tg.clip_grads_with_norm_, (torch.ones(()),))):
            message = rf"{clip.__name__}: gradients of flat parameters lie in main_grad.*clip_grad_norm_\(flat"
            with pytest.raises(RuntimeError, match=message):
                clip(model.parameters(), 0.1, *given)
    flat.close()


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_optimizers_that_look_at_more_than_an_element(cls):
    flat = tg.FlatParameters(nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=f"expected an optimizer that treats each element by itself.*got {cls.__name__}"
    ):
        flat.optimizer(cls)
    flat.close()


def test_parameters_that_are_not_flat():
    flat = tg.FlatParameters(nn.Linear(3, 3))
    other = nn.Linear(2, 2)
    for given, name in ((other.parameters(), "parameter 0 of group 0"), (other.named_parameters(), "weight")):
        message = rf"expected parameters of FlatParameters.*got {name} of shape \[2, 2\] that is not in it"
        with pytest.raises(ValueError, match=message):
            flat.optimizer(torch.optim.SGD, given, lr=0.1)
    with pytest.raises(TypeError, match=r"expected a class of torch.optim.Optimizer, got <class 'int'>"):
        flat.optimizer(int)
    flat.close()


def test_a_parameter_that_is_unfrozen_later_is_named():
    """It would be trained by eager code, and passed over here."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    message = "0.weight requires a gradient now, and was frozen when FlatParameters was made.*call close"
    for act in (
        lambda: model(x).sum().backward(),
        optimizer.step,
        flat.reduce_gradients,
        lambda: flat.optimizer(torch.optim.SGD, model.parameters(), lr=0.1),
    ):
        with pytest.raises(RuntimeError, match=message):
            act()
    other = tg.FlatParameters(model[0])
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(ValueError, match=r"got 0\.weight of shape"):
        flat.optimizer(torch.optim.SGD, model.named_parameters(), lr=0.1)
    other.close()
    flat.close()


def test_a_backward_inside_a_graphed_function_is_refused():
    model = nn.Linear(3, 3)
    flat = tg.FlatParameters(model)

    @tg.graphed
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="FlatParameters: a backward inside a graphed function cannot be captured"):
        for _ in range(3):
            step(x)
    flat.close()


def test_what_is_closed_says_so():
    model = nn.Linear(3, 3)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    flat.close()
    for act in (optimizer.step, flat.reduce_gradients, lambda: tg.clip_grad_norm_(flat, 1.0)):
        with pytest.raises(RuntimeError, match=r"FlatParameters: close\(\) has been called"):
            act()


def test_copies_are_refused():
    model = nn.Linear(3, 3)
    model.flat = tg.FlatParameters(model)
    optimizer = model.flat.optimizer(torch.optim.SGD, lr=0.1)
    for copied, text in (
        (model, "FlatParameters: cannot be copied or pickled; keep it outside of the module, copy that, and make one"),
        (optimizer, "FlatOptimizer: cannot be copied or pickled; make one by FlatParameters.optimizer, and load this"),
    ):
        for act in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=re.escape(text)):
                act(copied)
    model.flat.close()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_second_close_leaves_the_next_one_alone(dtype):
    model = nn.Linear(3, 3, dtype=dtype)
    first = tg.FlatParameters(model)
    first.close()
    second = tg.FlatParameters(model)
    first.close()
    with pytest.raises(ValueError, match=r"weight is in another FlatParameters already: call close\(\) of that one"):
        tg.FlatParameters(model)
    second.close()


@pytest.mark.parametrize("way", ["closed", "saved", "saved when closed"])
def test_behind_it_gradients_are_found_by_graphs_and_optimizers_of_torch(way):
    """Of bf16 they were main_grad, which neither files nor what closes leave."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.Tanh(), nn.Linear(4, 4, dtype=BF16))
    x = torch.ones(3, 4, dtype=BF16)
    flat = tg.FlatParameters(model)
    model(x).float().sum().backward()
    main_grads = [parameter.main_grad.clone() for parameter in model.parameters()]
    if "closed" in way:
        flat.close()
        for parameter, main_grad in zip(model.parameters(), main_grads, strict=True):
            assert not hasattr(parameter, "main_grad") and torch.equal(parameter.grad, main_grad.to(BF16))
    if "saved" in way:
        model = pickle.loads(pickle.dumps(model))
    model.zero_grad()
    eager = nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.Tanh(), nn.Linear(4, 4, dtype=BF16))
    eager.load_state_dict(model.state_dict())
    graphed = tg.make_graphed_callables(model, (x,))
    for one in (eager, graphed):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            one(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_next_one_begins_without_gradients_that_were_dropped_in_between():
    model, x = nn.Linear(4, 4, dtype=BF16), torch.randn(3, 4, dtype=BF16)
    first = tg.FlatParameters(model)
    model(x).sum().backward()
    before = model.weight.main_grad.clone()
    first.close()
    model.zero_grad()
    second = tg.FlatParameters(model)
    model(x).sum().backward()
    assert torch.equal(model.weight.main_grad, before)
    second.close()


def test_graphs_that_add_to_main_grad_are_no_more_when_it_is_gone():
    model, x = nn.Sequential(nn.Linear(4, 4, dtype=BF16)), torch.ones(3, 4, dtype=BF16)
    flat = tg.FlatParameters(model)
    graphed = tg.make_graphed_callables(model, (x,))
    graphed(x).float().sum().backward()
    flat.close()
    with pytest.raises(RuntimeError, match=r"main_grad of \w+ of 0 is gone since capture"):
        graphed(x)
