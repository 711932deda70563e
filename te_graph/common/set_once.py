"""Objects whose settings are read when they are made."""

from __future__ import annotations

from typing import Any, ClassVar


class SetOnce:
    """Attributes named in ``settings`` are set once: what was made by them would not follow."""

    settings: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settings and name in vars(self):
            raise AttributeError(
                f"{type(self).__name__}.{name}: expected it to be given when this is made, got {value!r:.100} later"
            )
        super().__setattr__(name, value)
