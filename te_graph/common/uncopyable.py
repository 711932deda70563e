"""Objects that neither copy nor pickle."""

from __future__ import annotations

from typing import Any


class Uncopyable:
    """Base of what holds the addresses of tensors in tables: those of a copy lie elsewhere.

    Attributes:
        copy_advice: what to do instead, for the message.
    """

    copy_advice = "make one from the copy's tensors"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled; {self.copy_advice}")
