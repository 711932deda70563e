"""Parameters that are not flat, since they required no gradient when the others became it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from te_graph.common.gradient_state import flat_of
from te_graph.common.own_objects import OwnObject


class FrozenParameters(OwnObject):
    """Those of one ``FlatParameters``, which does not keep them alive. One that trains later would be passed over by
    its optimizers, and not be reduced: it is named instead."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """``named``: names and parameters [...], which require no gradient."""
        self._named = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in named}

    def __contains__(self, parameter: Tensor) -> bool:  # [...]
        """Whether it is one of these, and in no other ``FlatParameters`` by now."""
        _, reference = self._named.get(id(parameter), ("", lambda: None))
        return reference() is parameter and flat_of(parameter) is None

    def check(self) -> None:
        """Raise RuntimeError if one of them requires a gradient now, and is in no other ``FlatParameters``."""
        for name, reference in self._named.values():
            parameter = reference()
            if parameter is not None and parameter.requires_grad and flat_of(parameter) is None:
                raise RuntimeError(
                    f"FlatParameters: {name} requires a gradient now, and was frozen when FlatParameters was made: it "
                    "would not be reduced, nor stepped: call close(), and make it and its optimizer anew; or let it "
                    "require a gradient before"
                )
