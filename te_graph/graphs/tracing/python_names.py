"""Names that Python itself gives to attributes of objects, functions, classes and modules."""

from __future__ import annotations

import types

from te_graph.graphs.tracing.code_names import PATTERN
from te_graph.graphs.tracing.names import TABLE_OF_FIELDS

_NAMES_OF_PYTHON = frozenset(
    name
    for kind in (
        object,
        type,
        types.FunctionType,
        types.ModuleType,
        int,
        float,
        complex,
        str,
        list,
        dict,
        set,
        property,
    )
    for name in dir(kind)
    if name.startswith("__")
).union(
    *(("__wrapped__", "__weakref__", "__slots__", "__orig_class__", "__orig_bases__", "__parameters__"),),
    *(("__all__", "__path__", "__file__", "__cached__", "__builtins__", PATTERN, TABLE_OF_FIELDS),),
    *(("__dataclass_params__", "__abstractmethods__", "__firstlineno__", "__static_attributes__"),),
)


def is_pythons(name: str) -> bool:
    """True for names that Python itself gives to attributes of objects, functions, classes and modules."""
    return name in _NAMES_OF_PYTHON
