"""What a class is to be derived from so that objects of another one can become its instances.

CPython exchanges the class of an object only for one of the same layout, and compares where both take it from: the
class below the lowest one that has it. A module takes it from ``nn.Module``, where that is the first of its bases, or
makes it anew upon a first base that has none: ``abc.ABC``, ``typing.Generic``, any mixin with ``__slots__ = ()``.
"""

from __future__ import annotations

import typing


class _Bare:
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


class _BareGeneric(typing.Generic[typing.TypeVar("T")]):
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def below_layout(base: type) -> tuple[type, type]:
    """What a class is to be derived from that comes before ``base`` among the bases of a third one; and what it is to
    be derived from first, of the same layout, until its ``__bases__`` are set: that runs no ``__init_subclass__``."""
    kind = base
    while _layout(kind.__base__) == _layout(kind):
        kind = kind.__base__
    below = kind.__base__
    if below is object or _layout(below) != _layout(object):  # slots: base leads then
        return object, object
    return below, _BareGeneric if typing.Generic in below.__mro__ else _Bare


def _layout(kind: type) -> tuple[int, ...]:
    return kind.__basicsize__, kind.__itemsize__, kind.__dictoffset__, kind.__weakrefoffset__
