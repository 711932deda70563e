"""Objects of te_graph's own among those of the user."""

from __future__ import annotations


class OwnObject:
    """An object of te_graph's own that user code leads to, as a hook: captures compare which one it is, and no more."""
