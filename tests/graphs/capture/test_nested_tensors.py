"""Nested tensors, as torch's encoder makes them of padded batches: callables are refused, functions run eagerly."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.graphs.tracing.refusals import CaptureError
from te_graph.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

_SIZES = "the sizes of nested tensors"


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def encoder(device: str, **options: bool) -> nn.TransformerEncoder:
    """In eval mode, where it makes a nested tensor of what is padded at the end."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device=device)
    return nn.TransformerEncoder(layer, 2, **options).eval()


def padded_batch(device: str, is_left_aligned: bool = True) -> tuple[Tensor, Tensor]:
    """Values [3, 5, 8] and a mask [3, 5] that is true for padding."""
    mask = torch.zeros(3, 5, dtype=torch.bool, device=device)
    mask[0, 3:] = True
    if not is_left_aligned:
        mask[0, 0] = True
    return torch.randn(3, 5, 8, device=device), mask


@pytest.mark.parametrize("is_left_aligned", [True, False])
def test_an_encoder_that_may_make_nested_tensors_is_refused(is_left_aligned: bool, device: str) -> None:
    x, mask = padded_batch(device, is_left_aligned)
    with pytest.raises(CaptureError, match=f"TransformerEncoder: .*{_SIZES}.*enable_nested_tensor=False.*; at "):
        make_graphed_callables(encoder(device), (x,), sample_kwargs={"src_key_padding_mask": mask})


def test_an_encoder_without_nested_tensors_is_captured(device: str) -> None:
    x, mask = padded_batch(device)
    model, twin = encoder(device, enable_nested_tensor=False), encoder(device, enable_nested_tensor=False)
    make_graphed_callables(model, (torch.zeros_like(x),), sample_kwargs={"src_key_padding_mask": mask})
    assert_bitwise_equal(model(x, src_key_padding_mask=mask), twin(x, src_key_padding_mask=mask))


@pytest.mark.parametrize("is_left_aligned", [True, False])
def test_a_function_with_an_encoder_runs_eagerly_and_says_why(
    is_left_aligned: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    (x, mask), model = padded_batch(device, is_left_aligned), encoder(device)
    function = graphed(lambda x, mask: model(x, src_key_padding_mask=mask))
    with caplog.at_level(logging.WARNING, "te_graph"):
        for _ in range(4):
            x.normal_()
            assert_bitwise_equal(function(x, mask), model(x, src_key_padding_mask=mask))
    assert function.info()["forward_replays"] == 0
    assert sum(_SIZES in line and "(runs eagerly)" in line for line in caplog.messages) == 1


def padded(parts: Tensor) -> Tensor:  # nested, 2 times [..., 3] -> [2, 4, 3]
    return torch.nested.to_padded_tensor(parts, 0.0)


def nested_of(x: Tensor) -> Tensor:  # [4, 3] -> nested, [4, 3] and [1, 3]
    return torch.nested.nested_tensor([x, x[:1]])


def test_a_nested_sample_is_refused(device: str) -> None:
    parts = nested_of(torch.randn(4, 3, device=device))
    with pytest.raises(ValueError, match=r"padded: expected sample args\[0\] to be dense, got layout nested"):
        make_graphed_callables(padded, (parts,))


def test_a_nested_tensor_that_is_held_is_refused_where_it_is_used(device: str) -> None:
    x = torch.randn(4, 3, device=device)
    parts = nested_of(x)
    with pytest.raises(CaptureError, match=f"to_padded_tensor.*{_SIZES}"):
        make_graphed_callables(lambda x: padded(parts) * x, (x,))
    function = make_graphed_callables(lambda x: x * (parts is not None), (x,))
    assert_bitwise_equal(function(x), x)


def test_a_function_of_a_nested_tensor_runs_eagerly(device: str) -> None:
    parts = nested_of(torch.randn(4, 3, device=device))
    function = graphed(lambda: padded(parts * 2.0))
    for _ in range(3):
        assert_bitwise_equal(function(), padded(parts * 2.0))
    assert function.info()["forward_replays"] == 0


def test_a_function_that_holds_a_nested_tensor_and_does_not_use_it_replays(device: str) -> None:
    x = torch.randn(4, 3, device=device)
    held = [nested_of(x), x]
    function = graphed(lambda: held[1] * 2.0)
    for _ in range(3):
        assert_bitwise_equal(function(), x * 2.0)
    assert function.info()["forward_replays"] == 2


def test_operators_of_others_that_are_named_so_are_captured(device):
    with torch.library._scoped_library("te_graph_tests_nested", "DEF") as library:
        library.define("nested_gates(Tensor x) -> Tensor")
        library.impl("nested_gates", lambda x: x.sigmoid() * x, "CompositeExplicitAutograd")
        x = torch.randn(3, 4, device=device)
        call = make_graphed_callables(lambda x: torch.ops.te_graph_tests_nested.nested_gates(x), (x,))
        assert_bitwise_equal(call(x), x.sigmoid() * x)
        assert call.te_graph.info()["forward_replays"] == 1
