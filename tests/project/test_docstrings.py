"""Docstrings of what te_graph exports have the agreed parts: Args, Returns, Raises, Stream and capture."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import te_graph

TENSOR = re.compile(r"\bTensor\b")
NOTHING = ("None", None, "Iterator[None]")


def callables_of(owner: Any, prefix: str, names: list[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions and methods among ``names`` of ``owner``, by name."""
    for name in names:
        found = inspect.getattr_static(owner, name)
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if isinstance(found, ModuleType):
            own = [key for key, one in vars(found).items() if getattr(one, "__module__", None) == found.__name__]
            exported = getattr(found, "__all__", own)
            yield from callables_of(found, f"{prefix}{name}.", [key for key in exported if not key.startswith("_")])
        elif isinstance(found, type):
            methods = [key for key, one in vars(found).items() if not key.startswith("_") and not isinstance(one, type)]
            yield from callables_of(found, f"{prefix}{name}.", methods)
        elif inspect.isfunction(found):
            yield f"{prefix}{name}", found


PUBLIC = dict(callables_of(te_graph, "", te_graph.__all__))


def missing_parts(function: Callable[..., Any]) -> list[str]:
    """The parts that the docstring of ``function`` should have and has not."""
    text, signature = function.__doc__ or "", inspect.signature(function)
    given = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    takes_tensors = any(TENSOR.search(str(parameter.annotation)) for parameter in given)
    wanted = {
        "Args:": bool(given),
        "Returns:": signature.return_annotation not in (*NOTHING, inspect.Signature.empty) and bool(given),
        "Raises:": takes_tensors,
        "Stream and capture:": takes_tensors,
    }
    return [part for part, is_wanted in wanted.items() if is_wanted and part not in text]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_the_agreed_parts(name: str) -> None:
    assert missing_parts(PUBLIC[name]) == []


def test_what_lacks_parts_is_seen() -> None:
    def scaled(x: Tensor, factor: float) -> Tensor:  # [...] each
        """Args: of some kind."""

    assert missing_parts(scaled) == ["Returns:", "Raises:", "Stream and capture:"]
