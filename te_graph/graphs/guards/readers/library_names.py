"""Which names torch's methods of a class say: code of the user's that calls them reads what they name."""

from __future__ import annotations

import inspect
import types
from collections.abc import Set

from torch import nn

from te_graph.common.class_origins import module_of
from te_graph.graphs.tracing.code_names import strings_in
from te_graph.graphs.tracing.names import is_implicit


def called_in_library(kind: type) -> frozenset[str]:
    """The methods that torch gives to modules of ``kind`` and its own code there names, which an attribute of the
    instance would hide; not ``forward``."""
    methods = {
        name
        for base in kind.__mro__
        if base is not nn.Module and module_of(base).startswith("torch.")
        for name, member in vars(base).items()
        if isinstance(member, types.FunctionType) and not is_implicit(name)
    }
    return names_in_library(kind, frozenset()) & methods - {"forward"}


def names_in_library(kind: type, said: Set[str]) -> frozenset[str]:
    """What torch's methods of ``kind`` name: of a module all of them, else those that code may call which has ``said``
    these names. Of te_graph's own modules what they say are settings."""
    methods: dict[str, set[str]] = {}
    constants: set[str] = set()  # of te_graph's own modules, whose other attributes are no settings
    for base in kind.__mro__:
        if module_of(base).startswith("te_graph."):
            constants.update(vars(base).get("__constants__", ()))
        if base is not nn.Module and module_of(base).startswith("torch."):
            for name, member in vars(base).items():
                if isinstance(member, types.FunctionType):  # one of a base may be called by that of a class above
                    methods.setdefault(name, set()).update(strings_in(inspect.unwrap(member).__code__))
    if issubclass(kind, nn.Module):
        return frozenset(constants).union(*methods.values())
    called: set[str] = set()
    following = {name for name in methods if name in said or is_implicit(name)}
    while following - called:
        called |= following
        following = {name for one in called for name in methods[one] if name in methods}
    return frozenset().union(*(methods[name] for name in called))
