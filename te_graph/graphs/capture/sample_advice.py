"""What a sample lacks that is no call of its callable, and what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

from te_graph.graphs.arguments.signature import Signature

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MAX_NAMED = 4


def check_sample(label: str, parameters: inspect.Signature | None, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the callable ``label``, which has ``parameters``, cannot be called with ``args`` and
    ``kwargs``; it says what can be."""
    if parameters is None:
        return
    try:
        parameters.bind(*args, **kwargs)
    except TypeError as error:
        advice = _advice(parameters, args, kwargs)
        raise TypeError(f"{label}: expected a sample that fits {_shown(parameters)}: {error}{advice}") from None


def left_out(parameters: inspect.Signature | None, signature: Signature) -> str:
    """Of the ``parameters`` with the default None those that the sample of ``signature`` does not give, in words."""
    if parameters is None:
        return ""
    args, kwargs = signature.shape.children
    named = [one for one in parameters.parameters.values() if one.kind not in _STARRED]
    absent = [one.name for one in named[len(args.children) :] if one.default is None and one.name not in kwargs.keys]
    if not absent:
        return ""
    return f"; the sample leaves out {', '.join(absent)}: what the model gives goes into {_sample_kwargs(absent)}"


def _advice(parameters: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> str:
    each = parameters.parameters
    by_position = [one.name for one in each.values() if one.kind not in (*_STARRED, inspect.Parameter.KEYWORD_ONLY)]
    takes = {one.kind for one in each.values()}
    if len(args) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in takes:
        return f"; write {_sample_args(by_position)}"
    given = {*by_position[: len(args)], *kwargs}
    unknown = [name for name in kwargs if name not in each]
    if unknown and inspect.Parameter.VAR_KEYWORD not in takes:
        return f"; leave {', '.join(unknown)} out of sample_kwargs"
    if twice := [name for name in by_position[: len(args)] if name in kwargs]:
        return f"; leave {', '.join(twice)} out of sample_kwargs"
    needed = [one.name for one in each.values() if one.default is one.empty and one.kind not in _STARRED]
    missing = [name for name in needed if name not in given]
    in_place = by_position[: len(args) + len(missing)]
    by_order = f"{_sample_args(in_place)} or " if in_place[len(args) :] == missing else ""
    return f"; write {by_order}{_sample_kwargs(missing)}"


def _sample_args(names: list[str]) -> str:
    return f"sample_args=({', '.join(names)}{',' if len(names) == 1 else ''})"


def _sample_kwargs(names: list[str]) -> str:
    shown = ", ".join(f'"{name}": ...' for name in names[:_MAX_NAMED])
    return f"sample_kwargs={{{shown}{', ...' if len(names) > _MAX_NAMED else ''}}}"


def _shown(parameters: inspect.Signature) -> str:
    """The parameters, without annotations."""
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters.parameters.values()]
    return str(inspect.Signature(bare))
