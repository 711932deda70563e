"""What modules have to do before a capture, so that it finds all that they keep from call to call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class ReadyForCapture:
    """A module that makes what it keeps at its first call. A capture puts back what it changes, and has that done
    before. No abstract base class: modules get and lose classes with this one among their bases."""

    __slots__ = ()

    def make_ready_for_capture(self) -> None:
        """Make what calls like those that are to be captured find made."""
        raise NotImplementedError

    def adds_to_main_grad(self, parameter: Tensor) -> bool:
        """Whether the backward of an eager call that came now would itself add the gradient of ``parameter`` [...] to
        its ``main_grad``."""
        return False


def make_ready(objects: Iterable[Any]) -> list[ReadyForCapture]:
    """Let all modules among ``objects``, which a capture can get to, make ready for it.

    Returns:
        These modules.
    """
    modules = {id(each): each for each in objects if isinstance(each, ReadyForCapture)}
    for module in modules.values():
        module.make_ready_for_capture()
    return list(modules.values())
