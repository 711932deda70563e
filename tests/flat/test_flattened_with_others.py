"""FlattenParamsWrapper with what users combine it with: files, copies, compilers, graphs, FlatParameters, FP8."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_models import Model, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph.testing import same_bits

BF16 = torch.bfloat16
BOTH_WAYS = pytest.mark.parametrize("optimized", [False, True], ids=["off", "on"])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6, bias=False))


def wrapped(module: nn.Module, optimized: bool) -> tg.FlattenParamsWrapper:
    """A copy of ``module``, flat."""
    return tg.FlattenParamsWrapper(copy.deepcopy(module), optimize_backward_concat=optimized)


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])


def check_training(
    module: nn.Module, wrapper: tg.FlattenParamsWrapper, x: Tensor, call: Callable[..., Any] | None = None
) -> None:
    """Three steps of two micro-batches have the gradients and losses of ``module``; x: [...]."""
    call = call or (lambda one, x: one(x))
    for _ in range(3):
        for number in range(2):
            losses = []
            for one in (wrapper, module):
                with wrapper.no_sync() if number == 0 else contextlib.nullcontext():
                    y = call(one, x)
                    loss = (y[0] if isinstance(y, tuple) else y).float().square().sum()
                    loss.backward()
                losses.append(loss.detach())
            assert same_bits(*losses)
        assert same_bits(wrapper.flat_param.grad, flat_gradient(module))
        for one in (wrapper, module):
            torch.optim.SGD(one.parameters(), lr=0.01).step()
            one.zero_grad()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Tensor:  # [...]
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@BOTH_WAYS
def test_checkpoints_inside(optimized, use_reentrant):
    """Of the reentrant kind they run backwards inside the backward, of which none hands over."""
    inner = Checkpointed(nn.Linear(6, 6), use_reentrant)
    module = nn.Sequential(nn.Linear(6, 6), inner, Checkpointed(Checkpointed(nn.Linear(6, 6), use_reentrant), True))
    wrapper = wrapped(module, optimized)
    seen: list[int] = []
    wrapper.flat_param.register_post_accumulate_grad_hook(lambda one: seen.append(one._version))
    check_training(module, wrapper, torch.randn(4, 6))
    assert not optimized or len(seen) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
@BOTH_WAYS
def test_checkpoints_around(optimized, use_reentrant):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    check_training(
        module, wrapped(module, optimized), x, lambda one, x: checkpoint(one, x, use_reentrant=use_reentrant)
    )


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 4, 2, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
    "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6, bias=False)),
}


@pytest.mark.parametrize("name", MODULES)
@BOTH_WAYS
def test_modules_that_treat_parameters_in_their_own_way(name, optimized):
    module = MODULES[name]()
    wrapper = wrapped(module, optimized)
    check_training(module, wrapper, torch.randn(2, 3, 6))
    assert list(wrapper.state_dict()) == list(module.state_dict())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@BOTH_WAYS
def test_weight_norm_of_old(optimized):
    """It computes the weight in a hook, from two parameters."""
    module, other = (torch.nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(2))
    module.load_state_dict(other.state_dict())
    check_training(module, tg.FlattenParamsWrapper(other, optimize_backward_concat=optimized), torch.randn(4, 6))


@BOTH_WAYS
def test_compile(optimized):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, optimized)
    compiled = [torch.compile(one, backend="aot_eager") for one in (wrapper, module)]
    check_training(module, wrapper, torch.randn(4, 6), lambda one, x: compiled[one is module](x))


@BOTH_WAYS
def test_functional_call(optimized):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, optimized)
    x = torch.randn(4, 6)

    def loss(flat: Tensor) -> Tensor:  # [n] -> []
        return torch.func.functional_call(wrapper, {"flat_param_0": flat}, (x,)).square().sum()

    flat = wrapper.flat_param.detach() * 2
    leaf = flat.clone().requires_grad_()
    loss(leaf).backward()
    assert same_bits(torch.func.grad(loss)(flat), leaf.grad)
    assert wrapper.flat_param.grad is None
    check_training(module, wrapper, x)


@BOTH_WAYS
def test_evaluation_in_inference_mode(optimized):
    module = network()
    wrapper = wrapped(module, optimized)
    x = torch.randn(4, 6)
    wrapper.flat_param.data = wrapper.flat_param.data.clone()
    with torch.inference_mode():
        assert same_bits(wrapper(x), module(x))
    check_training(module, wrapper, x)


@BOTH_WAYS
def test_backwards_on_two_threads(optimized):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, optimized)
    x = torch.randn(4, 6)
    module(x).square().sum().backward()
    with wrapper.no_sync():
        threads = [threading.Thread(target=lambda: wrapper(x).square().sum().backward()) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wrapper.hand_over_gradients()
    torch.testing.assert_close(wrapper.flat_param.grad, 4 * flat_gradient(module))


@BOTH_WAYS
def test_state_dicts_are_those_of_the_module(tmp_path: Path, optimized):
    module = network()
    wrapper = wrapped(module, optimized)
    state, expected = wrapper.state_dict(prefix="a."), module.state_dict(prefix="a.")
    assert list(state) == list(expected) and state._metadata == expected._metadata
    assert all(same_bits(state[name], expected[name]) for name in expected)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in state.values())
    torch.save(wrapper.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    other = wrapped(network(), optimized)
    around = nn.ModuleDict({"inner": other})
    before = other.flat_param
    for load in (
        lambda: other.load_state_dict(loaded),
        lambda: other.load_state_dict(loaded, assign=True),
        lambda: around.load_state_dict({f"inner.{name}": one for name, one in loaded.items()}),
        lambda: other.load_state_dict(wrapper.flat_state_dict()),
    ):
        with torch.no_grad():
            other.flat_param.zero_()
        assert str(load()) == "<All keys matched successfully>"
        assert other.flat_param is before
        assert same_bits(other.flat_param.detach(), wrapper.flat_param.detach())
    assert list(around.state_dict()) == [f"inner.{name}" for name in loaded]
    assert list(wrapper.flat_state_dict()) == [
        *(name.removeprefix("a.") for name in expected if "running" in name or "batches" in name),
        "flat_param_0",
    ]
    check_training(module, other, torch.randn(4, 6))


@BOTH_WAYS
def test_state_dicts_that_do_not_fit(optimized):
    wrapper = wrapped(network(), optimized)
    state = wrapper.state_dict()
    del state["0.bias"]
    state["3.other"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"0\.bias".*Unexpected key.*"3\.other"'):
        wrapper.load_state_dict(state)
    assert str(wrapper.load_state_dict(state, strict=False)) == (
        "_IncompatibleKeys(missing_keys=['0.bias'], unexpected_keys=['3.other'])"
    )
    state["0.weight"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        wrapper.load_state_dict(state, strict=False)
    wrapper(torch.randn(4, 6)).sum().backward()  # goes on
    assert [name for name, _ in wrapper.named_parameters()] == ["flat_param_0"]


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save", "deepcopy of what is around"])
@BOTH_WAYS
def test_copies(copied, optimized):
    module = network()
    wrapper = wrapped(module, optimized)
    x = torch.randn(4, 6)
    with wrapper.no_sync():
        wrapper(x).sum().backward()
    if copied == "deepcopy":
        other = copy.deepcopy(wrapper)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(wrapper))
    elif copied == "save":
        file = io.BytesIO()
        torch.save(wrapper, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(nn.Sequential(wrapper))[0]
    other.zero_grad()
    wrapper.zero_grad()
    module.load_state_dict(wrapper.state_dict())
    check_training(module, other, x)
    wrapper(x)
    assert wrapper.flat_param.grad is None
    assert wrapper[0].weight.data_ptr() == wrapper.flat_param.data_ptr() != other[0].weight.data_ptr()
    assert other[0].weight.data_ptr() == other.flat_param.data_ptr()


@BOTH_WAYS
def test_parameters_for_a_while(optimized):
    wrapper = wrapped(network(), optimized)
    flat, views = wrapper.flat_param, wrapper._views[0]
    with wrapper.unflatten_params():
        assert not wrapper.is_flattened and wrapper.flat_params == []
        assert [name for name, _ in wrapper.module.named_parameters()] == wrapper.metadata(0)[0]
        with torch.no_grad():
            wrapper[0].weight.fill_(2)
        wrapper.module[0].bias = nn.Parameter(torch.full((6,), 3.0))
    assert wrapper.flat_param is flat
    assert flat[:42].tolist() == [2.0] * 36 + [3.0] * 6
    given = torch.zeros_like(flat)
    with wrapper.unflatten_params([given]):
        assert wrapper[0].weight.data_ptr() == given.data_ptr()
    assert flat[0] == 2 and wrapper[0].weight is views[0]
    with (
        pytest.raises(ValueError, match=r"expected 90 elements for 0\.weight and those behind it, got 3"),
        wrapper.unflatten_params([torch.ones(3)]),
    ):
        pass
    assert [list(view.shape) for view in wrapper.get_param_views()] == [[6, 6], [6], [6], [6], [6, 6]]
    assert wrapper.metadata(0)[1:] == ([one.shape for one in wrapper.get_param_views()], [36, 6, 6, 6, 36])


@BOTH_WAYS
def test_lists_of_parameters(optimized):
    """Each is one flat parameter; what is in none stays a parameter of the module."""
    model = Model()
    expected = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    groups = [[model.embedding.weight], [one for one in trained(model)[1:] if one is not model.conv.bias]]
    wrapper = tg.FlattenParamsWrapper(model, groups, ["tied", "rest"], optimize_backward_concat=optimized)
    left = ["_fpw_module.blocks.1.linear.bias", "_fpw_module.conv.bias"]
    assert [name for name, _ in wrapper.named_parameters()] == ["flat_param_tied", "flat_param_rest", *left]
    assert wrapper.head.weight is wrapper.embedding.weight
    assert [*wrapper.metadata(0)[0], *wrapper.metadata(1)[0]] == [
        name for name in names if f"_fpw_module.{name}" not in left
    ]
    with pytest.raises(RuntimeError, match="expected one flat parameter, there are 2"):
        _ = wrapper.flat_param
    x = torch.randint(7, (2, 3))
    for one in (wrapper, expected):
        one(x).sum().backward()
    torch.testing.assert_close(wrapper.flat_params[0].grad, expected.embedding.weight.grad.reshape(-1))
    torch.testing.assert_close(model.conv.bias.grad, expected.conv.bias.grad)


@BOTH_WAYS
def test_conversions(optimized):
    wrapper = wrapped(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), optimized)
    wrapper.double()
    assert wrapper[0].weight.dtype == wrapper.flat_param.dtype == torch.float64
    wrapper(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    wrapper.zero_grad()
    wrapper.requires_grad_(False)
    assert not wrapper(torch.randn(4, 6, dtype=torch.float64)).requires_grad
    wrapper.requires_grad_(True)
    wrapper(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert wrapper.flat_param.grad is not None


def with_two_wrapped(optimized: bool, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6, dtype=dtype) for _ in range(4)]
    layers[1:3] = [tg.FlattenParamsWrapper(one, optimize_backward_concat=optimized) for one in layers[1:3]]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_in_flat_parameters(dtype, scale, monkeypatch):
    """The sum over micro-batches is then FlatParameters', in its dtype, with and without the concat. What two wrappers
    hand over is reduced together."""
    models = [with_two_wrapped(optimized, dtype) for optimized in (False, True)]
    flats = [tg.FlatParameters(one[1:3], gradient_scale=scale) for one in models]
    optimizers = [flat.optimizer(torch.optim.AdamW, lr=1e-2) for flat in flats]
    reductions = []
    own = flats[1].reducer._reductions
    monkeypatch.setattr(own, "run", lambda first, before=own.run: reductions.append(before(first)))
    for step in range(1, 4):
        drawn = torch.randn(3, 4, 6, dtype=dtype)
        for model, flat, optimizer in zip(models, flats, optimizers, strict=True):
            for number, x in enumerate(drawn):
                with contextlib.ExitStack() as stack:
                    for one in (flat, model[1], model[2]) if number < 2 else ():
                        stack.enter_context(one.no_sync())
                    model(x).float().square().sum().backward()
            optimizer.step()
        assert len(reductions) == step
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert same_bits(getattr(one, "main_grad", one.grad), getattr(other, "main_grad", other.grad))
            assert same_bits(one.detach(), other.detach())
        for optimizer in optimizers:
            optimizer.zero_grad()
    for flat in flats:
        flat.close()


def test_flat_parameters_of_other_parameters_too_are_refused():
    """They would reduce at the end of the backward, and again after the hand-over."""
    model = with_two_wrapped(True, torch.float32)
    flat = tg.FlatParameters(model)
    with pytest.raises(RuntimeError, match=r"alone, got one that has 3\.bias, too: its gradient comes earlier"):
        model(torch.randn(4, 6)).sum().backward()
    flat.close()


@pytest.mark.parametrize("recipe", [tg.DelayedScaling(amax_history_len=2), tg.Float8CurrentScaling()], ids=str)
@BOTH_WAYS
def test_fp8_layers(optimized, recipe):
    module = nn.Sequential(*(tg.Linear(32, 32, params_dtype=BF16) for _ in range(2)))
    wrapper = wrapped(module, optimized)

    def call(one: nn.Module, x: Tensor) -> Tensor:  # [16, 32]
        with tg.fp8_autocast(recipe=recipe):
            return one(x)

    check_training(module, wrapper, torch.randn(16, 32, dtype=BF16), call)


def test_graphs_inside():
    """Views are tensors outside of the graph, which stay where they are."""
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, True)
    tg.make_graphed_callables(wrapper[2], (torch.randn(4, 6, requires_grad=True),))
    check_training(module, wrapper, torch.randn(4, 6))
    assert wrapper[2].te_graph.info()["backward_replays"] == 6
    off = wrapped(module, False)
    with pytest.raises(RuntimeError, match=r"weight was computed outside the callable .* and requires a gradient"):
        tg.make_graphed_callables(off[2], (torch.randn(4, 6, requires_grad=True),))


def test_graph_layers_inside():
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, True)
    x = torch.randn(4, 6)
    tg.graph_layers(wrapper, lambda: wrapper(x).sum().backward(), layers="_fpw_module.2")
    wrapper.zero_grad()
    check_training(module, wrapper, x)
    assert wrapper[2].te_graph.info()["backward_replays"] == 6


@BOTH_WAYS
def test_inference_around_is_captured(optimized):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    wrapper = wrapped(module, optimized)
    graphed = tg.graphed(wrapper)
    x = torch.randn(4, 6)
    with torch.no_grad():
        for _ in range(5):
            assert same_bits(graphed(x), module(x))
        wrapper.flat_param.mul_(2)
        assert same_bits(graphed(x), copy.deepcopy(wrapper)(x))
    assert graphed.info()["forward_replays"] == 5


def test_graphs_around_a_training_are_refused():
    for optimized in (False, True):
        wrapper = wrapped(network(), optimized)
        text = "expected a training's forward not to be captured" if optimized else "was computed outside the callable"
        with pytest.raises(RuntimeError, match=text):
            tg.make_graphed_callables(wrapper, (torch.randn(4, 6),))
    wrapper = wrapped(network(), True)
    x = torch.randn(4, 6)
    graphed = tg.graphed(lambda: wrapper(x).sum().backward())
    with pytest.raises(RuntimeError, match="expected a training's forward not to be captured"):
        for _ in range(3):
            graphed()
    loss = wrapper(x).sum()
    graphed = tg.graphed(lambda: loss.backward(retain_graph=True))
    with pytest.raises(RuntimeError, match="a backward with optimize_backward_concat=True cannot be captured"):
        for _ in range(3):
            graphed()
    wrapper.zero_grad()
