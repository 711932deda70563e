"""Is a graphed training equal to eager execution, bit for bit?

import te_graph as tg
from te_graph.testing import eager_twin

def train():
    model, optimizer = make_model()
    tg.make_graphed_callables(tuple(model.layers), samples)
    losses = [step(model, optimizer, batch) for batch in batches]
    return {"losses": losses, "parameters": model.state_dict()}

eager_twin(train)  # AssertionError: ['parameters']['layers.0.weight'] differs: 3 of 4096 elements, ...
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor
from torch.utils import _pytree as pytree

from te_graph.common.reporters import keep_registered

__all__ = ["assert_bitwise_equal", "deterministic", "eager_twin", "find_differences", "same_bits"]

_Result = TypeVar("_Result")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")  # with any other value torch refuses matrix products on CUDA
_DISABLE = "TE_GRAPH_DISABLE"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let eager execution itself repeat bit for bit: without that, nothing can be equal to it.

    Turns on ``torch.use_deterministic_algorithms``, turns off that memory without a value is filled, and sets
    ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` unless it has this value or ``:16:8``, with which torch takes cuBLAS for
    deterministic; all is as before afterwards. cuBLAS reads the variable when it is first used on a device: set it
    yourself where that was earlier.

    Raises:
        RuntimeError: by torch, inside, for operations that have no deterministic kernel.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    workspace = os.environ.get(_WORKSPACE)
    if workspace not in _REPEATABLE:
        os.environ[_WORKSPACE] = _REPEATABLE[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors [...], on whatever devices, or two arrays of NumPy have the same dtype, shape and bits.

    NaN equals NaN of the same bits, 0.0 differs from -0.0. Strides do not matter.

    Args:
        a, b: both tensors, or both arrays.

    Returns:
        True if so. Devices may differ.

    Stream and capture: allocates copies and synchronizes. Not inside a capture.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if isinstance(a, _numpy_types()):
        return not _wrong_elements(a, b)
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    return torch.equal(_bytes(a), _bytes(b))


def find_differences(actual: Any, expected: Any) -> list[str]:
    """Where two nests differ, in words, in the order of the nest; empty where they are equal bit for bit.

    Args:
        actual, expected: nests of lists, tuples, dictionaries and what else ``torch.utils._pytree`` knows, of tensors
            [...] and other objects. Tensors must agree in dtype, shape, device, ``requires_grad`` and bits, arrays and
            scalars of NumPy in type, dtype, shape and bits, floats and complex numbers in bits (of NaN in that), other
            objects in type and by ``==``.

    Returns:
        One sentence for each difference.

    Stream and capture: reads the tensors on the host, so not inside a capture.
    """
    got, got_shape = pytree.tree_flatten_with_path(actual)
    want, want_shape = pytree.tree_flatten_with_path(expected)
    if got_shape != want_shape:
        return [f"the structure differs: got {got_shape}, expected {want_shape}"]
    found = ((pytree.keystr(path), _difference(one, other)) for (path, one), (_, other) in zip(got, want, strict=True))
    return [f"{path or 'it'} differs: {difference}" for path, difference in found if difference]


def assert_bitwise_equal(actual: Any, expected: Any) -> None:
    """Check that two nests are equal bit for bit.

    Args:
        actual, expected: as of ``find_differences``; tensors of any shapes [...]. Not mutated.

    Raises:
        AssertionError: they are not; names the first difference, and how many more there are.

    Stream and capture: reads the tensors on the host, so not inside a capture.
    """
    differences = find_differences(actual, expected)
    if differences:
        more = f"; {len(differences) - 1} more differ" if len(differences) > 1 else ""
        raise AssertionError(differences[0] + more)


def eager_twin(train: Callable[[], _Result], *, seed: int = 0) -> _Result:
    """Run ``train`` twice, eagerly and graphed, and compare what it returns.

    Both runs begin with the same random states and are ``deterministic()``. In the first one te_graph is switched off
    (``TE_GRAPH_DISABLE=1``): the same code runs, and nothing is captured. Where nothing is replayed in the second one
    either, they are the same trivially, and a UserWarning says so, with the reasons. What is graphed lives until both
    have ended.

    Args:
        train: takes nothing; makes its model, captures, trains, and returns a nest of tensors [...] and numbers in the
            order in which they arise, so that the first one that differs is the earliest. What it changes outside of
            itself, the second run finds changed.
        seed: of the generators of torch, Python and NumPy in both runs. They are as before afterwards.

    Returns:
        What the graphed run returned.

    Raises:
        AssertionError: the runs differ; names the first tensor and how much of it differs.
        ValueError: ``train`` returned nothing that could differ.
        TypeError: ``train`` is no function; it returned objects that are equal only to themselves, such as a model.
    """
    if not callable(train):
        raise TypeError(f"eager_twin: expected train to be a function that takes nothing, got {type(train).__name__}")
    with _random_states_kept(), deterministic():
        with _disabled():
            expected = _copied(_seeded(train, seed))
        if all(leaf is None for leaf in pytree.tree_leaves(expected)):
            raise ValueError(
                "eager_twin: expected train to return what is to be compared, such as a dictionary of losses and "
                f"parameters, got {expected!r}"
            )
        with keep_registered() as graphed:
            actual = _seeded(train, seed)
    _refuse_identities(actual, expected)
    _warn_unless_replayed([one.info() for one in graphed])
    assert_bitwise_equal(_copied(actual), expected)
    return actual


def _refuse_identities(actual: Any, expected: Any) -> None:
    """Raise TypeError for a leaf that is another object after each run and that ``==`` knows by its identity alone."""
    leaves, _ = pytree.tree_flatten_with_path(actual)
    for (path, got), want in zip(leaves, pytree.tree_leaves(expected), strict=False):
        if got is want or type(got).__eq__ is not object.__eq__:
            continue
        if isinstance(got, torch.nn.Module):
            advice = "return its state_dict()"
        elif isinstance(got, Iterator):
            advice = "return a list of what it yields"
        else:
            advice = "return the tensors and numbers that it holds"
        place = f" at {pytree.keystr(path)}" if path else ""
        raise TypeError(
            "eager_twin: expected train to return tensors, and objects that are compared by value, got a "
            f"{type(got).__name__}{place}: {advice}"
        )


def _warn_unless_replayed(facts: list[dict[str, Any]]) -> None:
    if any(one["forward_replays"] for one in facts):
        return
    reasons = [f"{one['name']}: {', '.join(one['eager_calls']) or 'not called'}" for one in facts]
    warnings.warn(
        f"eager_twin: no graph was replayed, so both runs were eager ({'; '.join(reasons) or 'nothing was graphed'})",
        stacklevel=3,
    )


def _seeded(train: Callable[[], _Result], seed: int) -> _Result:
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
    return train()


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random.getstate()
    numpy_states = None
    with contextlib.suppress(ImportError):
        import numpy as np

        numpy_states = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(states)
        if numpy_states is not None:
            np.random.set_state(numpy_states)


@contextlib.contextmanager
def _disabled() -> Iterator[None]:
    before = os.environ.get(_DISABLE)
    os.environ[_DISABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE]
        else:
            os.environ[_DISABLE] = before


def _copied(nest: Any) -> Any:
    """``nest`` with copies of its tensors [...] and arrays, which a later replay does not overwrite."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf.copy()

    return pytree.tree_map_only((Tensor, *_numpy_types()), copy, nest)


def _numpy_types() -> tuple[type, ...]:
    """Arrays and scalars of NumPy; none where nothing has imported it."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray, numpy.generic)


def _bytes(tensor: Tensor) -> Tensor:
    """Those of ``tensor`` [...] in the order of its elements, uint8 [bytes]."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # Views of one element count as contiguous whatever their strides, and cannot be viewed as bytes.
    return torch.empty(plain.shape, dtype=plain.dtype, device=plain.device).copy_(plain).view(torch.uint8)


def _difference(one: Any, other: Any) -> str:
    """What differs between two leaves; empty where nothing does."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        facts = [(t.dtype, tuple(t.shape), t.device, t.requires_grad) for t in (one, other)]
        if facts[0] != facts[1]:
            return f"got {facts[0]}, expected {facts[1]}"
        return "" if same_bits(one, other) else _elements(one, other)
    if type(one) is not type(other):
        return f"got {one!r} ({type(one).__name__}), expected {other!r} ({type(other).__name__})"
    if isinstance(one, _numpy_types()):
        return _array_difference(one, other)
    # The notation of hex() is exact and tells -0.0 from 0.0.
    if type(one) is float:
        is_same = one.hex() == other.hex()
    elif type(one) is complex:
        is_same = (one.real.hex(), one.imag.hex()) == (other.real.hex(), other.imag.hex())
    else:
        is_same = bool(one == other)
    return "" if is_same else f"got {one!r}, expected {other!r}"


def _array_difference(one: Any, other: Any) -> str:
    """What differs between two arrays, or two scalars, of NumPy; empty where nothing does."""
    facts = [(array.dtype, array.shape) for array in (one, other)]
    if facts[0] != facts[1]:
        return f"got {facts[0]}, expected {facts[1]}"
    wrong = _wrong_elements(one, other)
    if not wrong:
        return ""
    got, want = (array.reshape(-1)[wrong[0]] for array in (one, other))
    if isinstance(one, _numpy_types()[1]):
        return f"got {got!r}, expected {want!r}"
    return f"{len(wrong)} of {one.size} elements, the first at {wrong[0]}: got {got!r}, expected {want!r}"


def _wrong_elements(one: Any, other: Any) -> list[int]:
    """Where two arrays, or two scalars, of NumPy of one dtype and shape differ, in the order of their elements."""
    if one.dtype.hasobject or one.dtype.names is not None:
        # What lies in memory is an address, or has gaps.
        pairs = zip(one.reshape(-1).tolist(), other.reshape(-1).tolist(), strict=True)
        return [i for i, (got, want) in enumerate(pairs) if find_differences(got, want)]
    found = [array.tobytes() for array in (one, other)]
    if found[0] == found[1]:
        return []
    size = one.dtype.itemsize
    return [i for i in range(one.size) if found[0][i * size : (i + 1) * size] != found[1][i * size : (i + 1) * size]]


def _elements(one: Tensor, other: Tensor) -> str:
    """How many elements of two tensors [...] of one dtype and shape differ, and the first of them."""
    count = one.numel()
    pair = [_bytes(t).view(count, -1) for t in (one, other)]
    wrong = (pair[0] != pair[1]).any(1).nonzero().flatten()
    first = int(wrong[0])
    got, want = (t.detach().reshape(-1)[first].item() for t in (one, other))
    return f"{len(wrong)} of {count} elements, the first at {first}: got {got!r}, expected {want!r}"
