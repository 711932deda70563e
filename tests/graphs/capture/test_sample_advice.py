"""A sample that is no call of its callable is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg


def batch() -> Tensor:  # [3, 5]
    return torch.randn(3, 5, requires_grad=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, cos: Tensor, attention_mask: Tensor | None = None, *, flag: bool = True) -> Tensor:
        return self.linear(x) * cos * attention_mask.unsqueeze(-1)


def two(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


SHOWN = r"\(x, cos, attention_mask=None, \*, flag=True\)"


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "words"),
    [
        (Layer(), 1, {}, rf"Layer: expected a sample that fits {SHOWN}: missing .* 'cos'; write "
                         r'sample_args=\(x, cos\) or sample_kwargs={"cos": ...}'),
        (Layer(), 4, {}, r"too many positional arguments; write sample_args=\(x, cos, attention_mask\)"),
        (Layer(), 2, {"mask": 1}, "unexpected keyword argument 'mask'; leave mask out of sample_kwargs"),
        (Layer(), 2, {"cos": 1.0}, "multiple values for argument 'cos'; leave cos out of sample_kwargs"),
        (two, 1, {}, r'two: expected .* write sample_kwargs={"scale": ...}'),
        (nn.Linear(5, 5), 2, {}, r"Linear: .*\(input\): too many .*write sample_args=\(input,\)"),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit(target: Any, args: int, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        tg.make_graphed_callables(target, tuple(batch() for _ in range(args)), sample_kwargs=kwargs)


def test_a_later_one_of_a_tuple_is_named() -> None:
    with pytest.raises(TypeError, match=r"callable 1 \(Layer\): expected a sample that fits"):
        tg.make_graphed_callables((nn.Linear(5, 5), Layer()), ((batch(),), (batch(),)))


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="the log has it before Python 3.11")
def test_what_a_sample_leaves_out_is_said_where_the_callable_fails() -> None:
    with pytest.raises(AttributeError, match="NoneType") as caught:
        tg.make_graphed_callables(Layer(), (batch(), batch()))
    (note,) = caught.value.__notes__
    assert note.startswith("raised in the warm-up of Layer, at ")
    assert note.endswith(
        'the sample leaves out attention_mask: what the model gives goes into sample_kwargs={"attention_mask": ...}'
    )


def test_the_call_that_then_works() -> None:
    layer = Layer()
    mask = torch.ones(3)
    tg.make_graphed_callables(layer, (batch(), batch()), sample_kwargs={"attention_mask": mask})
    assert layer(batch(), batch(), attention_mask=mask).shape == (3, 5)
