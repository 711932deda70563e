"""Large containers of constants cost a capture milliseconds, wherever they stand, and calls nothing."""

from __future__ import annotations

import gc
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


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def seconds_to_capture(module: nn.Module) -> float:
    return seconds(lambda: make_graphed_callables(module, (batch(),)))


def seconds_to_look_at(content: Any) -> float:
    """CPU seconds of one look at each object alive, by Python's collector, and at each member of `content`, in Python:
    what a second is on one machine is half of one on another."""
    return seconds(gc.collect) + min(seconds(lambda: [type(member) for member in content]) for _ in range(3))


def seconds_of_calls(module: nn.Module) -> float:
    """Of 20 calls; the least of three: the garbage collector looks at large containers, too."""
    return min(timeit.repeat(lambda: module(batch()), timer=time.process_time, number=20, repeat=3))


def batch() -> Tensor:  # [3, 4]
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_million_constants_cost_a_capture_few_looks_at_them_and_calls_nothing(content):
    small, module = Big([1]), Big(CONTENTS[content](_MANY))
    seconds_to_capture(small)
    # 1.4 to 2.6 looks, seen; a Python statement for each member is more than 6.
    assert seconds_to_capture(module) < 6 * seconds_to_look_at(module.content)
    before = replays(module)
    assert seconds_of_calls(module) < 3 * seconds_of_calls(small)
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
    module = Big(CONTENTS["dict"](_MANY))
    module.layer.forward = lambda x: module.content.update(more=1) or x * x.sum().item()
    seconds_to_capture(Big([1]))

    def captures() -> None:
        with pytest.raises(RuntimeError, match="item"):
            make_graphed_callables(module, (batch(),))

    taken = seconds(captures)
    assert taken < 12 * seconds_to_look_at(module.content)
    assert len(module.content) == _MANY
