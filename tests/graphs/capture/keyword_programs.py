"""Random callables that take keyword arguments they may ignore, and random forms of their calls.

``python tests/graphs/capture/keyword_programs.py`` runs as many as KEYWORD_PROGRAMS says.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch
from torch import Tensor
from twins import eager_copy, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal, deterministic

_WIDTH, _CALLS = 5, 5
_NAMES = ("count", "scale", "mode", "mask", "shift")
# What a layer does with the keyword arguments that it collects, before it returns ``y``.
_USES = (
    "pass",
    "pass",
    "y = y * kwargs.get('scale', 1.0)",
    "y = y * kwargs.pop('scale', 2.0)",
    "y = y + 1.0 if 'mode' in kwargs else y",
    "y = y * (1.0 + len(kwargs))",
    "y = y + 1.0 if kwargs else y",
    "y = y * 2.0 if next(iter(kwargs), None) == 'count' else y",
    "y = y * float(sum(isinstance(v, float) for v in kwargs.values()) + 1)",
    "y = y * 3.0 if isinstance(kwargs.get('count'), int) and kwargs['count'] > 1 else y",
    "more = dict(kwargs); y = y + (1.0 if 'count' in more else 0.0)",
    "y = y + float(dict(y=1.0, **kwargs).get(NAME, 0.5) is not None)",
    "key = 'co' + 'unt'; y = y + (1.0 if key in kwargs else 0.0)",
    "y = y + (1.0 if self.key in kwargs else 0.0)",
    "kwargs['extra'] = 1.0",
    "y = self.told(y, kwargs)",
)
_PASSES = (
    "y = self.inner(y, **kwargs)",
    "y = self.inner(y, scale=1.5, **{k: v for k, v in kwargs.items() if k != 'scale'})",
    "y = helper(self.inner, y, **kwargs)",
    "y = functools.partial(self.inner, **kwargs)(y)",
    "y = self.inner(y)",
    "y = wrapped(self.inner)(y, **kwargs)",
)
_PARAMETERS = ("", "mask=None, ", "scale=1.0, ", "*, shift=0.0, ", "mask=None, *, mode='a', ")
_HEAD = """
import functools
import torch
from torch import nn

NAME = 'count'

def helper(module, *args, **kwargs):
    return module(*args, **kwargs)

def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        kwargs.pop('unused', None)
        return function(*args, **kwargs)
    return call

def renamed(function):
    def call(self, *args, **kwargs):
        if 'old' in kwargs:
            kwargs['mask'] = kwargs.pop('old')
        return function(self, *args, **kwargs)
    return call
"""
_LAYER = """
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({width}, {width})
        self.key = 'count'
        {inner}

    def told(self, y, more):
        return y * (1.0 + len(more))

    {decorator}
    def forward(self, x, {parameters}**kwargs):
        y = self.linear(x)
        {reads}
        {passes}
        {uses}
        return y
"""
_READS = {
    "mask": "y = y if mask is None else y * mask",
    "scale": "y = y * scale",
    "shift": "y = y + shift",
    "mode": "y = y if mode == 'a' else -y",
}


def text_of(rng: random.Random) -> str:
    """A module with a class ``Top``, which may hold others."""
    text, depth = _HEAD, rng.randint(1, 3)
    for level in range(depth):
        parameters = rng.choice(_PARAMETERS)
        text += _LAYER.format(
            name="Top" if level == depth - 1 else f"Level{level}",
            width=_WIDTH,
            inner=f"self.inner = Level{level - 1}()" if level else "pass",
            decorator="@renamed" if rng.random() < 0.3 else "",
            parameters=parameters,
            reads="; ".join([f"{code}" for name, code in _READS.items() if f"{name}=" in parameters]) or "pass",
            passes=rng.choice(_PASSES) if level else "pass",
            uses=rng.choice(_USES),
        ).replace("; y = ", "\n        y = ")
    return text


def _value(rng: random.Random, name: str) -> Any:
    if name == "mask":
        return rng.choice([None, torch.rand(_WIDTH)])
    if name == "mode":
        return rng.choice(["a", "b"])
    return rng.choice([1, 2, 0.5, 1.5, None, torch.rand(())]) if name == "count" else rng.choice([0.5, 1.5])


def keywords(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.choice([0, 0, 1, 1, 2]))
    return {name: _value(rng, name) for name in names}


def batch() -> Tensor:  # [3, _WIDTH]
    return torch.randn(3, _WIDTH, requires_grad=True)


def run_program(seed: int) -> int:
    """A callable with calls of many forms: each gives what eager execution gives, or is refused. Returns how many
    calls with other keywords than the sample's have replayed."""
    rng = random.Random(seed)
    scope: dict[str, Any] = {"__name__": "module_of_a_test"}
    exec(compile(text_of(rng), f"<program {seed}>", "exec"), scope)
    top, given, replayed = scope["Top"](), keywords(rng), 0
    twin = eager_copy(top)
    try:
        twin(batch(), **given)
    except (TypeError, ValueError):
        return 0  # no call at all
    tg.make_graphed_callables(top, (batch(),), sample_kwargs=given)
    for _ in range(_CALLS):
        called, x = keywords(rng), batch()
        before = top.te_graph.info()["forward_replays"]
        try:
            expected = run(twin, x, **called)
        except (TypeError, ValueError) as error:
            expected = error
        try:
            found = run(top, x, **called)
        except (ValueError, TypeError):
            continue
        assert not isinstance(expected, Exception), f"{seed}: {called} {expected}"
        assert_bitwise_equal(found, expected)
        is_other = called.keys() != given.keys()
        replayed += is_other and top.te_graph.info()["forward_replays"] > before
    return replayed


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    count = int(os.environ.get("KEYWORD_PROGRAMS", "100"))
    with deterministic():
        replays = []
        for number in range(first, first + count):
            torch.manual_seed(number)
            replays.append(run_program(number))
    print(f"{count} programs, {sum(replays)} replays with other keywords")
