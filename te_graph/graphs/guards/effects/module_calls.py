"""Which modules are called while a callable warms up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from te_graph.common.dispatch import is_in_backward
from te_graph.common.own_objects import OwnObject


class ModuleCalls(OwnObject):
    """Context that notes the modules which are called on this thread, or in a backward.

    Args:
        check: called with each beforehand; may raise.

    Attributes:
        called: their identities.
    """

    def __init__(self, check: Callable[[nn.Module], None]) -> None:
        self._check = check
        self._thread = threading.get_ident()
        self.called: set[int] = set()

    def __enter__(self) -> ModuleCalls:
        self._handle = register_module_forward_pre_hook(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._handle.remove()

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if threading.get_ident() == self._thread or is_in_backward():
            self._check(module)
            self.called.add(id(module))
