"""The ways to do one thing that a benchmark compares, and which of them can be measured here."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A library, or a way to use one, that a benchmark measures beside others.

    Attributes:
        build: Makes what is timed of what the benchmark works on: a workload or a problem. It may leave anything in
            gradients, but must leave the tensors in place.
        package: What it needs beside torch and te_graph.
    """

    name: str
    build: Callable[..., Any]
    needs_cuda: bool = False
    package: str | None = None

    def missing(self, device: str) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return "needs a GPU" if self.needs_cuda and device != "cuda" else None

    @property
    def label(self) -> str:
        """Its name, with the version of the package."""
        if self.package is None or importlib.util.find_spec(self.package) is None:
            return self.name
        return f"{self.name} {importlib.metadata.version(self.package)}"


def import_packages(measured: Iterable[Any]) -> None:
    """Import each `package` of what is `measured` before the GPU is used: a package may bring a library, such as
    cuDNN, that does not load any more once torch has loaded parts of its own."""
    for one in measured:
        if one.package:
            importlib.import_module(f"{one.package}.pytorch")
