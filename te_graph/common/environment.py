"""Switches in the environment: 0 or 1, and nothing that might be taken for either."""

from __future__ import annotations

import os


def switch(name: str, default: bool) -> bool:
    """Whether the environment variable ``name`` is 1; ``default`` where it is unset or empty.

    Raises:
        ValueError: it has another value than 0 or 1. "true" must not be taken for 0 without a word.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"te_graph: expected the environment variable {name} to be 0 or 1, got {value!r}")
    return value == "1" if value else default


def is_disabled() -> bool:
    """True when the environment wants everything to run eagerly."""
    return switch("TE_GRAPH_DISABLE", default=False)
