"""te_graph.testing: what is equal bit for bit, what is not and how it is named, and trainings that run twice."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.utils.deterministic
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal, deterministic, eager_twin, find_differences, same_bits

NAN = float("nan")


def test_same_bits_tells_zeros_apart_and_takes_nan_for_nan(device):
    a = torch.tensor([0.0, NAN, 1.0, math.inf], device=device)
    assert same_bits(a, a.clone()) and same_bits(a, a.cpu())
    assert not same_bits(a, torch.tensor([-0.0, NAN, 1.0, math.inf], device=device))
    for other in (a.double(), a[:3], a[None]):
        assert not same_bits(a, other)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (3, 5), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_same_bits_knows_every_shape_and_dtype(device, shape, dtype):
    a = torch.randn(shape, device=device).to(dtype)
    assert same_bits(a, a.clone())
    if a.numel():
        changed = a.clone()
        changed.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert not same_bits(a, changed)


def test_same_bits_goes_by_elements_and_not_by_memory(device):
    a = torch.randn(4, 6, device=device)
    assert same_bits(a.t(), a.t().contiguous()) and same_bits(a[::2, 1:2], a[::2, 1:2].clone())
    z = torch.randn(3, dtype=torch.complex64, device=device)
    assert same_bits(z.conj(), z.conj().resolve_conj()) and same_bits(z.conj().imag, -z.imag)


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        (1.0, 1, "it differs: got 1.0 (float), expected 1 (int)"),
        (0.0, -0.0, "it differs: got 0.0, expected -0.0"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "['a'][1] differs: got 2, expected 3"),
        ([torch.zeros(2)], [torch.zeros(2).half()], "[0] differs: got (torch.float32, (2,)"),
        (torch.zeros(3), torch.tensor([0.0, 2.0, 2.0]), "2 of 3 elements, the first at 1: got 0.0, expected 2.0"),
        (torch.zeros(()), torch.tensor(-0.0), "1 of 1 elements, the first at 0: got 0.0, expected -0.0"),
        (torch.zeros(1), torch.zeros(1, requires_grad=True), "False), expected (torch.float32, (1,)"),
        ([1], [1, 2], "the structure differs"),
        ({"a": 1}, {"b": 1}, "the structure differs"),
        (None, 0, "expected"),
    ],
)
def test_differences_are_named(got, expected, difference):
    (found,) = find_differences(got, expected)
    assert difference in found
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(got, expected)
    assert str(caught.value) == found
    assert find_differences(got, got) == find_differences(expected, expected) == []


ARRAYS = {
    "array": lambda: np.ones(3),
    "array of several dimensions": lambda: np.arange(6, dtype=np.int16).reshape(2, 3),
    "array with NaN": lambda: np.array([NAN, 1, -0.0], np.float32),
    "no dimension": lambda: np.array(2.0),
    "no element": lambda: np.ones((0, 3)),
    "objects": lambda: np.array([1.5, "text", None, np.ones(2)], object),
    "fields": lambda: np.array([(1, NAN), (2, 0.0)], np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "text": lambda: np.array(["a", "bc"]),
    "NaN": lambda: np.float64(NAN),
    "float32": lambda: np.float32(0.5),
    "bool": lambda: np.bool_(True),
    "complex NaN": lambda: complex(NAN, 1),
    "complex64 NaN": lambda: np.complex64(complex(1, NAN)),
    "a list of them": lambda: [np.ones(2), np.int64(3), {"x": np.float16(NAN)}],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_and_scalars_of_numpy_equal_their_likes(name):
    assert find_differences(ARRAYS[name](), ARRAYS[name]()) == []
    assert find_differences(eager_twin_of(ARRAYS[name]), ARRAYS[name]()) == []


def eager_twin_of(make) -> object:
    with pytest.warns(UserWarning, match="no graph was replayed"):
        return eager_twin(make)


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        (np.zeros(3), np.array([0.0, 2.0, -0.0]), "2 of 3 elements, the first at 1: got "),
        (np.zeros(3), np.zeros(3, np.float32), "got (dtype('float64'), (3,)), expected (dtype('float32'), (3,))"),
        (np.zeros(3), np.zeros((3, 1)), "(3,)), expected (dtype('float64'), (3, 1))"),
        (np.array([1, "a"], object), np.array([1, "b"], object), "1 of 2 elements, the first at 1: got 'a'"),
        (np.array([1, 2], object), np.array([1, 2.0], object), "1 of 2 elements, the first at 1"),
        (np.array([(1, 0.0)], "i4,f8"), np.array([(1, -0.0)], "i4,f8"), "1 of 1 elements, the first at 0"),
        (np.float32(0.0), np.float32(-0.0), "got np.float32(0.0), expected np.float32(-0.0)"),
        (np.float64(1), np.float32(1), "(float64), expected"),
        (np.float64(1), 1.0, "(float64), expected 1.0 (float)"),
        (np.ones(1), torch.ones(1), "(ndarray), expected tensor([1.]) (Tensor)"),
        (complex(0.0, 1), complex(-0.0, 1), "got 1j, expected (-0+1j)"),
    ],
)
def test_differences_of_arrays_and_scalars_are_named(got, expected, difference):
    (found,) = find_differences([got], [expected])
    assert found.startswith("[0] differs: ") and difference in found


def test_same_bits_takes_arrays():
    a = np.array([0.0, NAN, 1.0])
    assert same_bits(a, a.copy()) and same_bits(a[::2], np.array([0.0, 1.0])) and same_bits(a[1], np.float64(NAN))
    for other in (np.array([-0.0, NAN, 1.0]), a.astype(np.float32), a[:2], torch.from_numpy(a)):
        assert not same_bits(a, other)


def test_arrays_that_the_second_run_overwrites_are_compared_as_the_first_one_left_them():
    shared, runs = np.zeros(2), []

    def train() -> np.ndarray:
        runs.append(1)
        shared[:] = len(runs)
        return shared

    with (
        pytest.warns(UserWarning, match="no graph was replayed"),
        pytest.raises(AssertionError, match=r"2 of 2 elements, the first at 0: got .*2.0.*, expected .*1.0"),
    ):
        eager_twin(train)


def test_nothing_imports_numpy_to_compare():
    program = (
        "import sys; sys.modules['numpy'] = None; import torch; from te_graph.testing import find_differences\n"
        "assert find_differences([1.0, complex(1, 2), torch.ones(2)], [1.0, complex(1, 2), torch.ones(2)]) == []"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_it_is_an_attribute_of_the_package():
    program = "import te_graph as tg; assert tg.testing.same_bits"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_of_several_differences_is_the_first_of_the_nest():
    with pytest.raises(AssertionError, match=r"^\['x'\]\[1\] differs: got 2, expected 5; 1 more differ"):
        assert_bitwise_equal({"x": [1, 2], "y": 3.0}, {"x": [1, 5], "y": 4.0})


@pytest.mark.parametrize("before", [(False, True, None), (True, False, ":16:8"), (False, False, ":0:0")])
def test_deterministic_puts_back_what_it_changes(monkeypatch, before):
    def settings() -> tuple[object, ...]:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), filled, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    enabled, filled, workspace = before
    own = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.use_deterministic_algorithms(enabled)
    try:
        with pytest.raises(KeyError), deterministic():
            # torch takes cuBLAS for deterministic with ":16:8" and ":4096:8" only.
            assert settings() == (True, False, ":16:8" if workspace == ":16:8" else ":4096:8")
            raise KeyError
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(own)


class Training:
    """Trains a small model with dropout for three steps; ``after`` sees it at the end of each."""

    def __init__(self, device: str, after=lambda model, is_graphed: None) -> None:
        self.device, self.after, self.eager_calls = device, after, []

    def __call__(self) -> dict[str, object]:
        layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(self.device)
        tg.make_graphed_callables(layer, (torch.randn(5, 4, device=self.device),))
        is_graphed = hasattr(layer, "te_graph") and layer.te_graph.info()["graphs"] > 0
        self.eager_calls.append(not is_graphed)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + random.random()) + np.random.rand())
        losses = []
        for _ in range(3):
            loss = layer(torch.randn(5, 4, device=self.device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            self.after(layer, is_graphed)
        return {"losses": losses, "parameters": dict(layer.named_parameters())}


def test_a_training_is_run_eagerly_and_graphed_and_found_equal(device):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    training = Training(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = eager_twin(training, seed=7)
    assert training.eager_calls == [True, False]
    assert isinstance(result["losses"][2], Tensor)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert find_differences(after, states) == []
    assert "TE_GRAPH_DISABLE" not in os.environ


@pytest.mark.parametrize(
    ("graphs_a_layer", "why"),
    [(False, "nothing was graphed"), (True, "Linear: called under no_grad, captured with gradients")],
)
def test_a_training_that_replays_nothing_is_told(device, graphs_a_layer, why):
    def train() -> Tensor:
        layer = nn.Linear(4, 4, device=device)
        x = torch.randn(2, 4, device=device)
        if graphs_a_layer:
            tg.make_graphed_callables(layer, (x,))
        with torch.no_grad():
            return layer(x)

    with pytest.warns(UserWarning, match=rf"^eager_twin: no graph was replayed, so both runs were eager \({why}\)$"):
        eager_twin(train)


def test_a_training_that_differs_names_the_first_tensor(device):
    def spoil(model: nn.Module, is_graphed: bool) -> None:
        if is_graphed:
            with torch.no_grad():
                model[2].bias[1].add_(1e-3)

    with pytest.raises(AssertionError, match=r"^\['losses'\]\[1\] differs: 1 of 1 elements.*more differ$"):
        eager_twin(Training(device, spoil))


def test_an_error_inside_leaves_no_setting_behind():
    def fail() -> None:
        raise ZeroDivisionError(os.environ.get("TE_GRAPH_DISABLE"))

    with pytest.raises(ZeroDivisionError, match=r"^1$"):
        eager_twin(fail)
    assert "TE_GRAPH_DISABLE" not in os.environ and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("empty", [None, [], {"losses": []}])
def test_a_training_that_returns_nothing_to_compare_is_refused(empty):
    with pytest.raises(ValueError, match=r"^eager_twin: expected train to return what is to be compared, .*, got "):
        eager_twin(lambda: empty)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), r"got a Linear: return its state_dict\(\)$"),
        (lambda: {"steps": iter([1.0])}, r"got a list_iterator at \['steps'\]: return a list of what it yields$"),
        (lambda: [1.0, object()], r"got a object at \[1\]: return the tensors and numbers that it holds$"),
    ],
)
def test_a_training_that_returns_what_has_no_value_is_refused(make, words):
    with pytest.raises(TypeError, match=f"^eager_twin: expected train to return .* are compared by value, {words}"):
        eager_twin(make)


def test_what_is_no_training_is_refused():
    with pytest.raises(TypeError, match=r"^eager_twin: expected train to be a function that takes nothing, got dict$"):
        eager_twin({})  # type: ignore[arg-type]
