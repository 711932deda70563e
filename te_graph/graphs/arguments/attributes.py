"""The attributes that an object has of its own, whatever its class makes of them: in its dictionary, and in slots."""

from __future__ import annotations

import ctypes
import threading
import types
from typing import Any

import torch

from te_graph.common.class_origins import is_of_python

# A class may give its objects another ``__dict__``, as proxies do, or another way to find attributes.
_generic_dict = ctypes.PyDLL(None).PyObject_GenericGetDict
_generic_dict.restype, _generic_dict.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_void_p)
_set_generic_dict = ctypes.PyDLL(None).PyObject_GenericSetDict
_set_generic_dict.restype = ctypes.c_int
_set_generic_dict.argtypes = (ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, tuple, frozenset, slice, torch.dtype, torch.device}
)


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """The attributes of an object that has a dictionary of them."""
    kind = type(obj)
    if issubclass(kind, threading.local):  # another one on each thread
        return obj.__dict__
    if not kind.__dictoffset__ or issubclass(kind, type):  # what a class has is no dictionary
        return None
    members = _generic_dict(ctypes.py_object(obj), None)  # of a ctypes.py_object ctypes takes what that holds
    return members if isinstance(members, dict) else None


def set_instance_dict(obj: Any, members: dict[str, Any]) -> None:
    """Give ``obj`` the dictionary that ``instance_dict`` has found before, without code of its class."""
    _set_generic_dict(ctypes.py_object(obj), members, None)


def own_attribute(obj: Any, name: str) -> Any:
    """Without what the class makes up (``__getattr__ = dict.__getitem__``); NotImplemented where there is none."""
    try:
        return object.__getattribute__(obj, name)
    except AttributeError:
        return NotImplemented


def slot_of(kind: type, name: str) -> types.MemberDescriptorType | None:
    """Where instances of ``kind`` have what stands in their slot of this ``name``; a class below may hide it."""
    members = (vars(base).get(name) for base in kind.__mro__)
    return next((member for member in members if isinstance(member, types.MemberDescriptorType)), None)


def in_slot(obj: Any, name: str) -> Any:
    """What stands in a slot of ``obj``, whatever its class makes of the name; NotImplemented where there is nothing."""
    member = slot_of(type(obj), name)
    if member is None:  # of a cell
        return own_attribute(obj, name)
    try:
        return member.__get__(obj)
    except AttributeError:
        return NotImplemented


def hides_slot(kind: type, name: str) -> bool:
    """Whether code that asks an instance of ``kind`` for the slot of this ``name`` gets something else: a property
    stands before it, or the class finds attributes in another way."""
    first = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    getter = next(vars(base)["__getattribute__"] for base in kind.__mro__ if "__getattribute__" in vars(base))
    return isinstance(getter, types.FunctionType) or first is not (slot_of(kind, name) or first)


def may_have_attributes(value: Any) -> bool:
    """Whether a value is of a class that gives it attributes besides: a dictionary of them, or slots."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    return bool(kind.__dictoffset__) or any(
        isinstance(member, types.MemberDescriptorType)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that ``value`` has of its own, by name, but for slots of Python's classes, which may be caches."""
    found: dict[str, Any] = {}
    for base in reversed(type(value).__mro__):
        for name, member in vars(base).items() if "__slots__" in vars(base) and not is_of_python(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # nothing there yet
                    continue
    found.update(instance_dict(value) or {})
    return found
