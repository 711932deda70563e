"""Tensors where torch, or Python, takes a number: after the tensor has changed a replay gives what eager execution
gives, or the recorder has refused the operation by name. Where torch reads the tensor by no operator, nothing else
would tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from te_graph import CaptureError, Recorder
from te_graph.testing import assert_bitwise_equal

X = torch.arange(24.0).reshape(6, 4).sin()  # [6, 4]
IMAGE = X[:4].reshape(1, 1, 4, 4)
LOGITS = torch.arange(40.0).reshape(5, 2, 4).sin().log_softmax(-1)
LSTM = nn.LSTM(4, 3)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()


def _assigned(assign: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor], Tensor]:
    def assigned(t: Tensor) -> Tensor:  # [...] -> [6, 4]
        result = X.clone()
        assign(result, t)
        return result

    return assigned


def _set(index: Callable[[Tensor], Any], value: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return _assigned(lambda x, t: x.__setitem__(index(t), value(t)))


# By name: what is done with a tensor, its value at the capture, and later.
CASES: dict[str, tuple[Callable[[Tensor], Any], Any, Any]] = {
    "tensor_split": (lambda t: torch.tensor_split(X, t), [1, 3], [2, 4]),
    "Tensor.tensor_split": (lambda t: X.tensor_split(t, dim=0), [1, 3], [2, 4]),
    "tensor_split by name": (lambda t: torch.tensor_split(input=X, tensor_indices_or_sections=t), [1, 3], [2, 4]),
    "tensor_split into": (lambda t: X.tensor_split(t), 2, 3),
    "hsplit": (lambda t: torch.hsplit(X, t), 2, 4),
    "split": (lambda t: torch.split(X, t), 2, 3),
    "split into a list": (lambda t: torch.split(X, [t, 6 - t]), 2, 3),
    "chunk": (lambda t: X.chunk(t), 2, 3),
    "LSTM": (lambda t: LSTM(PackedSequence(X, t))[1], [3, 2, 1], [2, 2, 2]),
    "pad_packed_sequence": (lambda t: pad_packed_sequence(PackedSequence(X, t))[0], [3, 2, 1], [2, 2, 2]),
    "ctc_loss": (lambda t: F.ctc_loss(LOGITS, torch.ones(2, 2), t, torch.tensor([2, 2])), [5, 5], [4, 3]),
    "segment_reduce": (lambda t: torch.segment_reduce(X, "sum", lengths=t), [2, 4], [3, 3]),
    "embedding_bag": (lambda t: F.embedding_bag(torch.arange(4), X, t), [0, 2], [0, 3]),
    "repeat_interleave": (lambda t: X.repeat_interleave(t, 0, output_size=8), [2, 2, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2]),
    "arange": (lambda t: torch.arange(0, 4, t), 1.0, 2.0),
    "linspace": (lambda t: torch.linspace(t, 3, 4), 1.0, 2.0),
    "full": (lambda t: torch.full((2,), t), 3.0, 4.0),
    "a size of full": (lambda t: torch.full((t,), 1.0), 3, 4),
    "zeros": (lambda t: torch.zeros(t), 3, 4),
    "eye": (lambda t: torch.eye(t), 2, 3),
    "a slice": (lambda t: X[t:], 1, 2),
    "an index": (lambda t: X[t], 1, 2),
    "an index of a list": (lambda t: [X, X + 1][t], 0, 1),
    "a mask": (lambda t: X[t], True, False),
    "an index written": (_set(lambda t: t, lambda t: 0.0), 1, 2),
    "a slice written": (_set(lambda t: slice(t, None), lambda t: 0.0), 1, 2),
    "a value written": (_set(lambda t: 0, lambda t: t), 1.0, 2.0),
    "select": (lambda t: X.select(0, t), 1, 2),
    "narrow": (lambda t: X.narrow(0, t, 2), 1, 2),
    "range": (lambda t: X * len(range(t)), 1, 2),
    "iteration": (lambda t: X * sum(t), [1.0, 2.0], [3.0, 4.0]),
    "in": (lambda t: X * (2.0 in t), [2.0, 3.0], [3.0, 4.0]),
    "math": (lambda t: X * math.sqrt(t), 2.0, 3.0),
    "a string": (lambda t: X * float(f"{t:.3f}"), 2.0, 3.0),
    "numpy": (lambda t: X * float(np.sqrt(t)), 2.0, 3.0),
    "from_dlpack": (lambda t: X * float(np.from_dlpack(t)), 2.0, 3.0),
    "torch.tensor": (lambda t: X * torch.tensor([t, t])[0], 2.0, 3.0),
    "as_tensor": (lambda t: X * torch.as_tensor([t])[0], 2.0, 3.0),
    "new_tensor": (lambda t: X * X.new_tensor([t])[0], 2.0, 3.0),
    "torch.Tensor": (lambda t: X * torch.Tensor([t])[0], 2.0, 3.0),
    "storage": (lambda t: X * t.untyped_storage()[3], 2.0, 300.0),
    "interpolate": (lambda t: F.interpolate(IMAGE, size=t), 2, 3),
    "bincount": (lambda t: torch.bincount(torch.tensor([0, 1]), minlength=t), 3, 4),
    "addcmul": (lambda t: torch.addcmul(X, X, X, value=t), 1.0, 2.0),
    "add": (lambda t: torch.add(X, X, alpha=t), 1.0, 2.0),
    "clamp": (lambda t: X.clamp(min=t), 0.0, 0.5),
    "clamp between": (lambda t: X.clamp(t, 1.0), 0.0, 0.5),
    "masked_fill": (lambda t: X.masked_fill(X > 0, t), 2.0, 3.0),
    "index_fill": (lambda t: X.index_fill(0, torch.tensor([1]), t), 2.0, 3.0),
    "fill_": (lambda t: X.clone().fill_(t), 2.0, 3.0),
    "a power": (lambda t: 2.0**t * X, 1, 2),
    "matrix_power": (lambda t: torch.matrix_power(X[:4], t), 1, 2),
    "quantile": (lambda t: torch.quantile(X, t), 0.5, 0.25),
    "dropout": (lambda t: F.dropout(X, p=t), 0.0, 1.0),
    "leaky_relu": (lambda t: F.leaky_relu(X, t), 0.1, 0.3),
    "layer_norm": (lambda t: F.layer_norm(X, (4,), eps=t), 1.0, 3.0),
    "attention": (lambda t: F.scaled_dot_product_attention(X[None], X[None], X[None], scale=t), 1.0, 3.0),
    "an encoder's mask": (
        lambda t: ENCODER(X.reshape(2, 3, 4), src_key_padding_mask=t),
        [[False, False, True], [False, True, True]],
        [[False, True, True], [False, False, True]],
    ),
    "one_hot": (lambda t: F.one_hot(t), [0, 1], [0, 3]),
    "topk": (lambda t: X.topk(t), 1, 2),
    "tril": (lambda t: X.tril(t), 0, 1),
    "sum": (lambda t: X.sum(t), 0, 1),
    "roll": (lambda t: X.roll(t), 1, 2),
    "view": (lambda t: X.view(t, -1), 2, 3),
    "reshape": (lambda t: X.reshape([t, -1]), 2, 3),
    "pad": (lambda t: F.pad(X, (t, 0)), 2, 3),
    "expand": (lambda t: X[0].expand(t, 4), 2, 3),
    "unfold": (lambda t: X.unfold(0, t, 1), 2, 3),
    "equal": (lambda t: X * torch.equal(t, torch.tensor([2.0])), [2.0], [3.0]),
    "foreach": (lambda t: torch._foreach_mul([X], t), 2.0, 3.0),
    "foreach by scalars": (lambda t: torch._foreach_addcmul([X], [X], [X], t), [2.0], [3.0]),
}


@pytest.mark.parametrize(("function", "first", "later"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_a_number_that_changes_is_followed_or_refused(function: Callable, first: Any, later: Any) -> None:
    number, recorder = torch.tensor(first), Recorder()
    try:
        with recorder.capture():
            results = function(number)
    except CaptureError as error:
        assert "cannot be captured" in str(error)
        return
    number.copy_(torch.tensor(later))
    recorder.replay()
    assert_bitwise_equal(tree_leaves(results), tree_leaves(function(number)))


@torch.no_grad()
def test_numbers_split_as_ever() -> None:
    x, recorder = X.clone(), Recorder()
    with recorder.capture():
        parts = [part + 1 for part in (*x.tensor_split([1, 3]), *torch.tensor_split(input=x, sections=2))]
    x.mul_(2)
    recorder.replay()
    assert_bitwise_equal(parts, [part + 1 for part in (*x.tensor_split((1, 3)), *x.tensor_split(2))])
