"""Flat parameters with what users combine them with: checkpoints, graphs, FP8, compilers, files."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path

import pytest
import torch
from flat_models import Model, assert_in_buffers, assert_same, gradients_of, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph.testing import same_bits

BF16 = torch.bfloat16


def tokens() -> Tensor:
    return torch.randint(7, (2, 3))


def pair(dtype: torch.dtype = torch.float32) -> tuple[tg.FlatParameters, Model, Model]:
    eager = Model().to(dtype)
    model = copy.deepcopy(eager)
    return tg.FlatParameters(model), model, eager


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:  # [...]
        return checkpoint(self.inner, x, use_reentrant=True)


def test_reentrant_checkpoints_end_with_the_backward_around_them(monkeypatch):
    """A backward inside a backward ends no step: what comes after it is reduced with the rest."""
    flat, model, eager = pair()
    for one in (model, eager):
        one.blocks[1] = Checkpointed(one.blocks[1])
        one.blocks[2] = Checkpointed(Checkpointed(one.blocks[2]))
    ends = []
    monkeypatch.setattr(
        flat.reducer._reductions, "run", lambda first: ends.append(all(one is not None for one in gradients_of(model)))
    )
    for count in (1, 2):
        x = tokens()
        for one in (model, eager):
            one(x).square().sum().backward()
        assert ends == [True] * count
        assert_same(model, eager)
    assert_in_buffers(flat, model)
    flat.close()


def test_backwards_on_two_threads():
    """As in eager execution two backwards may add to one parameter at once, and each ends by itself."""
    flat, model, _ = pair()
    x = tokens()

    def run() -> None:
        with flat.no_sync():
            model(x).sum().backward()

    model(x).sum().backward()
    expected = [grad.clone() for grad in gradients_of(model)]
    flat.zero_grad()
    run()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for grad, one in zip(gradients_of(model), expected, strict=True):
        torch.testing.assert_close(grad, 3 * one)
    flat.close()


def test_a_backward_that_fails_leaves_the_next_one_right():
    flat, model, eager = pair()
    handle = model.blocks[0].norm.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens()).sum().backward()
    handle.remove()
    flat.zero_grad()
    x = tokens()
    for one in (model, eager):
        one(x).sum().backward()
    assert_same(model, eager)
    flat.close()


def test_arrays_of_gradients_keep_their_values(monkeypatch):
    """Those that hold an address alone, also before anything was captured."""
    for name in ("numpy", "__dlpack__", "__cuda_array_interface__"):
        export = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, getattr(export, "__wrapped__", export))
    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", torch.utils.dlpack.to_dlpack)
    model = nn.Linear(3, 2)
    flat = tg.FlatParameters(model)

    def backward(scale: float) -> None:
        model(torch.full((1, 3), scale)).sum().backward()

    backward(1.0)
    grad = model.weight.grad
    array, shared = grad.numpy(), torch.from_dlpack(model.bias.grad)
    backward(1.0)
    assert model.weight.grad is grad and array[0, 0] == grad[0, 0] == 2.0
    model.zero_grad()
    backward(5.0)
    assert array[0, 0] == 2.0 and shared[0] == 2.0 and model.weight.grad[0, 0] == 5.0
    flat.close()


def test_torch_compile():
    flat, model, eager = pair()
    compiled = torch.compile(model, backend="aot_eager")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, eager)]
    for _ in range(2):
        x = tokens()
        for one, optimizer in zip((compiled, eager), optimizers, strict=True):
            for _ in range(2):
                one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, eager)
    flat.close()


def test_main_grads_are_the_sums_in_float32():
    flat, model, eager = pair(BF16)
    for _ in range(2):
        sums = [torch.zeros(one.shape) for one in trained(eager)]
        for number in range(3):
            x = tokens()
            model(x).float().square().sum().backward()
            grads = torch.autograd.grad(eager(x).float().square().sum(), trained(eager))
            sums = [
                grad.float() if number == 0 else total + grad.float() for total, grad in zip(sums, grads, strict=True)
            ]
        assert all(one.grad is None for one in model.parameters())
        assert all(same_bits(one.main_grad, total) for one, total in zip(trained(model), sums, strict=True))
        assert_in_buffers(flat, model)
        flat.zero_grad()
    flat.close()


def test_main_grads_with_hooks_that_want_the_gradient():
    """Those that are called after the accumulation find ``.grad``, which is added to main_grad afterwards."""
    flat, model, eager = pair(BF16)
    seen = []
    weight = model.blocks[0].linear.weight
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    weight.register_hook(lambda grad: grad * 2)
    x = tokens()
    grad = torch.autograd.grad(eager(x).float().sum(), eager.blocks[0].linear.weight)[0]
    for _ in range(2):
        model(x).float().sum().backward()
    assert [same_bits(one, grad * 2) for one in seen] == [True, True]
    assert same_bits(weight.main_grad, (grad * 2).float() + (grad * 2).float())
    assert weight.grad is None
    flat.close()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_main_grads_have_no_graph():
    model = nn.Linear(3, 2, dtype=BF16)
    flat = tg.FlatParameters(model)
    for _ in range(2):
        model(torch.ones(1, 3, dtype=BF16)).square().sum().backward(create_graph=True)
        assert all(one.grad is None and not one.main_grad.requires_grad for one in model.parameters())
    flat.close()


@pytest.mark.parametrize("left_by", ["a backward that fails", "the user"])
def test_steps_read_what_lies_beside_main_grads(left_by):
    """As clips and reductions do: ``.grad`` is added to ``main_grad``."""
    model = nn.Linear(3, 2, bias=False, dtype=BF16)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=1.0)
    before = model.weight.detach().clone()
    x = torch.ones(1, 3, dtype=BF16)
    model(x).sum().backward()
    if left_by == "the user":
        model.weight.grad = torch.full_like(model.weight, 2)
    else:
        model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        x = (2 * x).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(x.clone()).sum().backward()
    optimizer.step()
    assert model.weight.grad is None and model.weight.main_grad.eq(3).all()
    assert same_bits(model.weight.detach(), (before.float() - 3).to(BF16))
    flat.close()


def fail(grad: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("flat_dtype", [BF16, torch.float32], ids=["grad", "main_grad"])
def test_fp8_layers(flat_dtype, graphed):
    """Their products add to flat gradients by themselves."""
    torch.manual_seed(5)
    layers = [nn.Sequential(tg.Linear(32, 32, params_dtype=BF16), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*layers)
    eager = copy.deepcopy(model)
    flat = tg.FlatParameters(model, grad_dtype=flat_dtype)
    recipe = tg.DelayedScaling(amax_history_len=2)
    if graphed:
        for one in (model, eager):
            with tg.fp8_autocast(recipe=recipe):
                samples = tuple((torch.randn(16, 32, dtype=BF16, requires_grad=number > 0),) for number in range(2))
                tg.make_graphed_callables(tuple(one), samples)
    for _ in range(3):
        sums: list[Tensor] = []
        for number in range(2):
            x = torch.randn(16, 32, dtype=BF16)
            for one in (model, eager):
                with tg.fp8_autocast(recipe=recipe):
                    y = one(x)
                y.float().square().sum().backward()
            if flat_dtype == torch.float32:
                grads = [parameter.grad.float() for parameter in eager.parameters()]
                sums = grads if number == 0 else [total + grad for total, grad in zip(sums, grads, strict=True)]
                eager.zero_grad()
        if flat_dtype == BF16:
            assert_same(model, eager)
        else:
            for parameter, total in zip(model.parameters(), sums, strict=True):
                torch.testing.assert_close(parameter.main_grad, total, rtol=2e-2, atol=1e-1)
        assert_in_buffers(flat, model)
        flat.zero_grad()
        eager.zero_grad()
    flat.close()


def test_weights_are_cast_again_after_each_step():
    """A step writes the buffer, which the FP8 copies of the weights have to hear of."""
    torch.manual_seed(6)
    model = tg.Linear(32, 32, params_dtype=BF16)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=1.0)
    x = torch.randn(16, 32, dtype=BF16)
    results = []
    for _ in range(2):
        with tg.fp8_autocast(recipe=tg.Float8CurrentScaling()):
            y = model(x)
        results.append(y.detach().clone())
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = tg.Linear(32, 32, params_dtype=BF16)
    fresh.load_state_dict(model.state_dict(), strict=False)
    with tg.fp8_autocast(recipe=tg.Float8CurrentScaling()), torch.no_grad():
        assert same_bits(model(x), fresh(x))
    assert not torch.equal(*results)
    flat.close()


def test_graph_layers():
    flat, model, eager = pair()
    x = tokens()
    for one in (model, eager):
        tg.graph_layers(one, lambda one=one: one(x).square().sum().backward(), layers="blocks.*", max_in_flight=2)
    for _ in range(3):
        for _ in range(2):
            y = tokens()
            for one in (model, eager):
                one(y).square().sum().backward()
        assert_same(model, eager)
        assert_in_buffers(flat, model)
        model.zero_grad()
        eager.zero_grad()
    assert model.blocks[0].te_graph.info()["backward_replays"] == 6
    flat.close()


@pytest.mark.parametrize(("dtype", "drops_inside"), [(torch.float32, False), (BF16, False), (BF16, True)])
def test_clip_step_and_gather_in_one_graph(dtype, drops_inside):
    """Which gradients are there is compared: a graph that steps a parameter is not for a step without its gradient."""
    flat, model, eager = pair(dtype)
    flat_eager = tg.FlatParameters(eager)
    optimizers = [one.optimizer(torch.optim.AdamW, lr=1e-2, fused=True) for one in (flat, flat_eager)]

    def step(flat: tg.FlatParameters, optimizer: torch.optim.Optimizer) -> Tensor:
        norm = tg.clip_grad_norm_(flat, 1.0)
        optimizer.step()
        if drops_inside:
            optimizer.zero_grad()
        return norm

    graphed = tg.graphed(step)
    for number in range(12):
        x, uses_all = tokens(), number not in (5, 8, 9)
        for one in (model, eager):
            one(x, uses_all).float().square().sum().backward()
        norms = graphed(flat, optimizers[0]), step(flat_eager, optimizers[1])
        assert same_bits(*norms), number
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same(model, eager, f"step {number}")
        assert all(
            same_bits(one, other)
            for one, other in zip(gradients_of(model), gradients_of(eager), strict=True)
            if one is not None
        )
    # Twice the first two calls of a signature run as they are, or capture.
    assert graphed.info()["forward_replays"] >= 9, graphed.info()
    model.blocks[0].norm.weight.grad = torch.ones_like(model.blocks[0].norm.weight)
    graphed(flat, optimizers[0])
    flat.close()
    flat_eager.close()


def test_weights_are_cast_again_after_a_graphed_step():
    torch.manual_seed(7)
    model = tg.Linear(32, 32, params_dtype=BF16)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=1.0)
    step = tg.graphed(optimizer.step)
    x = torch.randn(16, 32, dtype=BF16)
    for _ in range(5):
        with tg.fp8_autocast(recipe=tg.Float8CurrentScaling()):
            y = model(x)
        fresh = tg.Linear(32, 32, params_dtype=BF16)
        fresh.load_state_dict(model.state_dict(), strict=False)
        with tg.fp8_autocast(recipe=tg.Float8CurrentScaling()), torch.no_grad():
            assert same_bits(y.detach(), fresh(x))
        y.float().sum().backward()
        step()
        optimizer.zero_grad()
    assert step.info()["forward_replays"] == 4
    flat.close()


def test_files_hold_the_parameters_alone(tmp_path: Path):
    flat, model, _ = pair()
    own = sum(one.nbytes for one in dict(model.named_parameters()).values())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    plain = io.BytesIO()
    torch.save(Model().state_dict(), plain)
    assert own < (tmp_path / "model.pt").stat().st_size <= plain.tell() * 1.01
    other = Model()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(model, other)
    other_flat = tg.FlatParameters(Model())
    del other_flat
    fresh, fresh_model, _ = pair()
    fresh_model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(fresh_model, model)
    assert_in_buffers(fresh, fresh_model)
    copied = copy.deepcopy(model)
    assert_same(copied, model)
    assert all(
        one.data_ptr() != two.data_ptr() for one, two in zip(copied.parameters(), model.parameters(), strict=True)
    )
    copied(tokens()).sum().backward()  # an ordinary model
    assert all(one is None for one in gradients_of(model))
    flat.close()
    fresh.close()


def test_safetensors(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    flat, model, _ = pair()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    safetensors.save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(same_bits(loaded[name], value) for name, value in state.items())
    flat.close()


def test_save_pretrained(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    flat = tg.FlatParameters(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert same_bits(one.detach(), other.detach()), name
    flat.close()
