"""Settings that a class holds for its objects: constants of a class inside, tensors, and dictionaries of packages."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def test_constants_of_a_class_that_a_class_holds(device: str) -> None:
    class Scales(nn.Module):
        class Config:
            scale = 2.0

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x * self.Config.scale

    module, x = Scales(), batch(device)
    make_graphed_callables(module, (batch(device),))
    assert_bitwise_equal(module(x), x * 2.0)
    Scales.Config.scale = 3.0
    with pytest.raises(RuntimeError, match=r"Config\.scale changed from 2\.0 to 3\.0"):
        module(x)


def test_a_tensor_that_a_class_holds(device: str) -> None:
    class Masks(nn.Module):
        mask = torch.full((4,), 2.0, device=device)

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x * self.mask

    module, x = Masks(), batch(device)
    make_graphed_callables(module, (batch(device),))
    assert_bitwise_equal(module(x), x * 2.0)
    Masks.mask.mul_(2)
    assert_bitwise_equal(module(x), x * 4.0)
    Masks.mask = torch.full((4,), 5.0, device=device)
    with pytest.raises(RuntimeError, match=r"mask .*since capture"):
        module(x)


class Lazy(collections.OrderedDict):
    """Loads what it has not, and is not asked for here, when code goes through it."""

    def _refuse(self, *_: object) -> None:
        raise ImportError("not installed")

    items = keys = values = __iter__ = _refuse


LAZY = Lazy()
LAZY["scale"] = 2.0


def test_code_of_a_dictionary_does_not_run_for_a_guard(device: str) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x * LAZY["scale"]

    module, x = Scales(), batch(device)
    make_graphed_callables(module, (batch(device),))
    assert_bitwise_equal(module(x), x * 2.0)
    function = graphed(lambda x: x.detach() * LAZY["scale"])
    for _ in range(3):
        assert_bitwise_equal(function(x).clone(), x.detach() * 2.0)
