"""Methods that no code names and that run: Python calls them by itself, or a library puts their names together."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

import pytest
from mutations import assert_not_seen, assert_seen
from torch import Tensor

pytestmark = pytest.mark.usefixtures("repeatable")

Read = Callable[[type, Any, Any], float]


def made_with(value: float) -> Callable:
    def __init__(self: Any, *given: float) -> None:
        vars(self)["scale"] = value

    return __init__


def set_to(value: float) -> Callable:
    return lambda self, name, given: object.__setattr__(self, name, value)


def subclass_with(value: float) -> classmethod:
    return classmethod(lambda cls: type.__setattr__(cls, "gain", value))


# What a class has at first, what it gets instead, and what the forward reads by it of the class and two objects.
METHODS: dict[str, tuple[Any, Any, Read]] = {
    "__init__": (made_with(2.0), made_with(3.0), lambda kind, one, other: kind().scale),
    "__new__": (
        staticmethod(lambda kind, *given: object.__new__(kind)),
        staticmethod(lambda kind, *given: None),
        lambda kind, one, other: 2.0 if isinstance(kind(1.0), kind) else 3.0,
    ),
    "__eq__": (lambda self, other: True, lambda self, other: False, lambda kind, one, other: 2.0 + (one == other)),
    "__ne__": (lambda self, other: True, lambda self, other: False, lambda kind, one, other: 2.0 + (one != other)),
    "__lt__": (lambda self, other: True, lambda self, other: False, lambda kind, one, other: 2.0 + (one < other)),
    "__gt__": (lambda self, other: True, lambda self, other: False, lambda kind, one, other: 2.0 + (one > other)),
    "__hash__": (lambda self: 2, lambda self: 3, lambda kind, one, other: float(hash(one))),
    "__str__": (lambda self: "2", lambda self: "3", lambda kind, one, other: float(str(one))),
    "__repr__": (lambda self: "2", lambda self: "3", lambda kind, one, other: float(repr(one))),
    "__dir__": (lambda self: ["a"], lambda self: ["a", "b"], lambda kind, one, other: float(len(dir(one)))),
    "__copy__": (lambda self: 2.0, lambda self: 3.0, lambda kind, one, other: copy.copy(one)),
    "__deepcopy__": (lambda self, memo: 2.0, lambda self, memo: 3.0, lambda kind, one, other: copy.deepcopy(one)),
    "__reduce__": (
        lambda self: (float, (2.0,)),
        lambda self: (float, (3.0,)),
        lambda kind, one, other: copy.copy(one),
    ),
    "__setattr__": (set_to(2.0), set_to(3.0), lambda kind, one, other: setattr(kind(), "scale", 9.0) or one.scale),
    "__init_subclass__": (
        subclass_with(2.0),
        subclass_with(3.0),
        lambda kind, one, other: type("Below", (kind,), {}).gain,
    ),
}


def build(name: str) -> tuple[Callable[[Tensor], Tensor], type]:
    first, _, read = METHODS[name]

    class Own:
        scale = 1.0

    setattr(Own, name, first)
    one, other = Own(), Own()
    return lambda x: x * read(Own, one, other), Own


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_python_calls_by_itself_and_that_is_replaced_is_seen(name: str, device: str) -> None:
    second = METHODS[name][1]
    assert_seen(lambda: build(name), lambda kind: setattr(kind, name, second), f"{name} of class Own", device)


def test_a_method_whose_name_a_library_puts_together_is_seen(device: str) -> None:
    class Reader(ast.NodeVisitor):
        def visit_Constant(self, node: ast.Constant) -> float:
            return float(node.value)

    tree = ast.parse("2.0", mode="eval").body
    first, second = Reader.visit_Constant, lambda self, node: 3.0

    def made() -> tuple[Callable[[Tensor], Tensor], type]:
        Reader.visit_Constant = first
        reader = Reader()
        return lambda x: x * reader.visit(tree), Reader

    assert_seen(made, lambda kind: setattr(kind, "visit_Constant", second), "visit_Constant of class Reader", device)


def test_a_method_that_did_not_run_may_be_replaced(device: str) -> None:
    call, kind = build("__eq__")
    kind.__repr__ = lambda self: "one"
    assert_not_seen(lambda: (call, kind), lambda kind: setattr(kind, "__repr__", lambda self: "other"), device)
