"""Random programs: a function of the user's that reads an object, in wrappers of any kind, at any place. The object
changes: graphed functions see it, and callables refuse to replay."""

from __future__ import annotations

import contextlib
import functools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables


class Scale:
    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k

    def apply(self, x: Tensor) -> Tensor:
        return x * self.k


class SlottedScale:
    __slots__ = ("__weakref__", "k")
    __init__, __call__, apply = Scale.__init__, Scale.__call__, Scale.apply


class CallsAttribute:
    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


class CallsWrapped:
    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function, assigned=())

    def __call__(self, x: Tensor) -> Tensor:
        return self.__wrapped__(x)


@contextlib.contextmanager
def _nothing() -> Any:
    yield


def _in_wraps(function: Callable) -> Callable:
    @functools.wraps(function, assigned=())
    def wrapper(x: Tensor) -> Tensor:
        return function(x)

    return wrapper


def _with_default(scale: Any) -> Callable:
    def function(x: Tensor, c: Any = scale) -> Tensor:
        return x * c.k

    return function


def _calls_inside(context: contextlib.nullcontext) -> Callable:
    def function(x: Tensor) -> Tensor:
        with context as held:
            return held(x)

    return function


def _calls_weakly(holder: CallsAttribute) -> Callable:
    weak = weakref.WeakMethod(holder.__call__)
    return lambda x, held=holder: weak()(x)


# What calls an object ``o`` with a number ``k``.
_LEAVES: dict[str, Callable[[Any], Callable]] = {
    "object": lambda o: o,
    "method": lambda o: o.apply,
    "partial": lambda o: functools.partial(lambda x, c: x * c.k, c=o),
    "partial of a dictionary": lambda o: functools.partial(lambda x, c: x * c["k"][0].k, c={"k": [o]}),
    "variable": lambda o: lambda x: x * o.k,
    "default": _with_default,
    "method type": lambda o: types.MethodType(lambda self, x: x * self.k, o),
    "alias": lambda o: types.MethodType(lambda self, x: x * self.__args__[0].k, types.GenericAlias(list, (o,))),
}
_WRAPPERS: dict[str, Callable[[Callable], Callable]] = {
    "wraps": _in_wraps,
    "attribute": CallsAttribute,
    "__wrapped__": CallsWrapped,
    "partial": functools.partial,
    "enable_grad": lambda f: torch.enable_grad()(f),
    "autocast": lambda f: torch.autocast("cpu", enabled=False)(f),
    "disable": lambda f: torch.compiler.disable(_in_wraps(f)),
    "context manager": lambda f: _nothing()(f),
    "vmap": torch.vmap,
    "static method": staticmethod,
    "method": lambda f: types.MethodType(lambda self, x: self(x), f),
    "lambda": lambda f: lambda x: f(x),
    "list": lambda f: lambda x, held=[f]: held[0](x),
    "method of a dictionary": lambda f: lambda x, get={"f": f}.get: get("f")(x),
    "nullcontext": lambda f: _calls_inside(contextlib.nullcontext(f)),
    "weak method": lambda f: _calls_weakly(CallsAttribute(f)),
}


def _in_class(function: Callable) -> Callable:
    class Holder:
        held = staticmethod(function)

    return lambda x: Holder.held(x)


def _in_property(function: Callable) -> Callable:
    class Holder:
        @property
        def held(self) -> Callable:
            return function

    holder = Holder()
    return lambda x: holder.held(x)


class Calls(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.act = function

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def _in_attribute(function: Callable) -> Callable:
    holder = types.SimpleNamespace(held=function)
    return lambda x: holder.held(x)


_PLACES: dict[str, Callable[[Callable], Callable]] = {
    "variable": lambda f: lambda x: f(x),
    "default": lambda f: lambda x, held=f: held(x),
    "attribute": _in_attribute,
    "dictionary": lambda f: lambda x, held={"a": [f]}: held["a"][0](x),
    "class": _in_class,
    "property": _in_property,
    "module": Calls,
    "submodule": lambda f: nn.Sequential(Calls(f)),
}


def check(seed: int) -> None:
    """One program; what is wrong names its parts."""
    rng = random.Random(seed)
    scale = rng.choice([Scale, SlottedScale])(2.0)
    leaf, place = rng.choice(list(_LEAVES)), rng.choice(list(_PLACES))
    wrappers = rng.choices(list(_WRAPPERS), k=rng.choice([0, 1, 1, 2]))
    if "weak method" in wrappers:  # with others it leads further than the 16 objects that docs/limits.md tell of
        wrappers = ["weak method"]
    function = _LEAVES[leaf](scale)
    for wrapper in wrappers:
        function = _WRAPPERS[wrapper](function)
    target = _PLACES[place](function)
    program = f"seed {seed}: {leaf} in {' in '.join([*wrappers, place])}"
    x = torch.ones(2, 2)
    assert torch.equal(target(x), 2 * x), program
    if rng.random() < 0.4:
        _check_function(target, scale, x, program)
    else:
        _check_callable(target, scale, x, program)


def _check_function(target: Callable, scale: Any, x: Tensor, program: str) -> None:
    function = graphed(target.forward if isinstance(target, nn.Module) else target)
    for _ in range(3):
        assert torch.equal(function(x), 2 * x), program
    scale.k = 3.0
    assert torch.equal(function(x), 3 * x), f"{program}: the function goes on with the old number"


def _check_callable(target: Callable, scale: Any, x: Tensor, program: str) -> None:
    callable_ = make_graphed_callables(target, (x,))
    assert torch.equal(callable_(x), 2 * x), program
    assert callable_.te_graph.info()["forward_replays"] == 1, program
    scale.k = 3.0
    try:
        callable_(x)
    except RuntimeError as error:
        assert "since capture" in str(error), program
    else:
        raise AssertionError(f"{program}: the callable goes on with the old number")
