"""Layers that are one, whatever modules they are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class WholeLayer:
    """A module that computes with its parts at once, unless somebody looks at calls of these: then it calls them, and
    may round otherwise. So parts are neither watched nor captured by themselves."""


def wholes_of(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Of each of ``modules`` that is a part of such a layer, that layer."""
    layers = [module for module in modules if isinstance(module, WholeLayer)]
    return {part: layer for layer in layers for part in layer.modules() if part is not layer}
