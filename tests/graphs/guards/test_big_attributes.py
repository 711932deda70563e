"""Large containers of constants cost a capture milliseconds, wherever they stand, and calls nothing."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn

from te_graph import make_graphed_callables

_MANY = 1_000_000


class Big(nn.Module):
    """[3, 4] -> [3, 4]: holds many constants."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.layer, self.content = nn.Linear(4, 4), content

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.layer(x) * len(self.content)


CONTENTS: dict[str, Callable[[int], Any]] = {
    "dict": lambda count: {f"w{number}": number for number in range(count)},
    "dict of tuples": lambda count: {(number, number + 1): number for number in range(count)},
    "list": lambda count: list(range(count)),
    "tuple": lambda count: tuple(range(count)),
    "set": lambda count: set(range(count)),
}


def seconds_to_capture(module: nn.Module) -> float:
    started = time.process_time()
    make_graphed_callables(module, (batch(),))
    return time.process_time() - started


def batch() -> Tensor:  # [3, 4]
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_million_constants_cost_a_capture_no_second(content):
    seconds_to_capture(Big([1]))
    module = Big(CONTENTS[content](_MANY))
    assert seconds_to_capture(module) < 1.0
    before = replays(module)
    # The least of three: the garbage collector looks at them, too.
    assert min(timeit.repeat(lambda: module(batch()), timer=time.process_time, number=20, repeat=3)) < 0.02
    assert replays(module) == before + 60


@pytest.mark.parametrize("content", [tuple(range(_MANY)), frozenset(range(_MANY)), ((0, tuple(range(_MANY))),)])
def test_an_equal_tuple_or_set_in_the_place_of_a_large_one_is_right(content):
    module = Big(content)
    make_graphed_callables(module, (batch(),))
    module.content = type(content)(list(content))
    assert module.content is not content
    module(batch())
    assert replays(module) == 1
    module.content = type(content)([*content, -1])
    with pytest.raises(RuntimeError, match="content changed"):
        module(batch())


@pytest.mark.parametrize("content", ["dict", "list", "tuple"])
def test_a_large_container_of_another_length_is_seen(content):
    module = Big(CONTENTS[content](5000))
    make_graphed_callables(module, (batch(),))
    module(batch())
    module.content = CONTENTS[content](5001)
    with pytest.raises(RuntimeError, match="content changed"):
        module(batch())


def test_a_capture_that_fails_puts_back_a_large_dict():
    module = Big(CONTENTS["dict"](_MANY // 5))
    module.layer.forward = lambda x: module.content.update(more=1) or x * x.sum().item()
    seconds_to_capture(Big([1]))
    started = time.process_time()
    with pytest.raises(RuntimeError, match="item"):
        make_graphed_callables(module, (batch(),))
    assert time.process_time() - started < 0.5
    assert len(module.content) == _MANY // 5
