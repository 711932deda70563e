"""What is said where a callable is captured while forwards of another one, by the same parameter, wait."""

from __future__ import annotations

import logging

from torch import Tensor

_log = logging.getLogger("te_graph")


def warn_of_forwards_before(label: str, other: str, parameter: Tensor) -> None:
    """Of those of ``label``, whose backward has no way to autograd for ``parameter`` [...], which ``other`` uses from
    now on."""
    _log.warning(
        "%s: a parameter of shape %s is used by %s as well, captured since its forward; the backward of that forward "
        "adds both gradients one after the other, later ones add their sum as eager execution does. Capture before the "
        "forward, or pass the parameter in autograd_params= to have that from the start",
        label,
        list(parameter.shape),
        other,
    )
