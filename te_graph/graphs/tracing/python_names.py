"""Names that Python itself gives to attributes of objects, functions, classes and modules."""

from __future__ import annotations

import types
from typing import Any

from te_graph.graphs.tracing.code_names import PATTERN
from te_graph.graphs.tracing.names import OF_OBJECTS, TABLE_OF_FIELDS

_NAMES_OF_PYTHON = (
    frozenset(
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
    )
    .union(
        *(("__weakref__", "__slots__", "__orig_bases__", "__parameters__"),),
        *(("__cached__", "__builtins__", PATTERN, TABLE_OF_FIELDS),),
        *(("__dataclass_params__", "__abstractmethods__", "__firstlineno__", "__static_attributes__"),),
    )
    .difference(OF_OBJECTS)
)


def is_pythons(name: str) -> bool:
    """True for names that Python itself gives to attributes of objects, functions, classes and modules, but for those
    that code puts there as well."""
    return name in _NAMES_OF_PYTHON


def is_supplied(obj: Any, name: str) -> bool:
    """Whether the class of ``obj`` itself has an attribute of this ``name`` for it, which comes before what stands
    in its dictionary; of modules, also what an import puts there."""
    if isinstance(obj, types.ModuleType):
        return is_pythons(name)
    member = next((vars(base)[name] for base in type(obj).__mro__ if name in vars(base)), None)
    return isinstance(member, types.GetSetDescriptorType | types.MemberDescriptorType)
