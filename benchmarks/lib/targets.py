"""What a run has reached of a target, as records of results keep it.

what: the words of the target. bound, limit: "at least" or "at most" what. got: the worst number over all that the
target is about, None where one was not measured. is_met: None likewise.
"""

from typing import Any


def at_least(what: str, limit: float, values: list[float | None]) -> dict[str, Any]:
    """A target for the smallest of `values`."""
    got = min(values) if values and None not in values else None
    return {"what": what, "bound": "at least", "limit": limit, **_verdict(got, got is not None and got >= limit)}


def at_most(what: str, limit: float, values: list[float | None]) -> dict[str, Any]:
    """A target for the largest of `values`."""
    got = max(values) if values and None not in values else None
    return {"what": what, "bound": "at most", "limit": limit, **_verdict(got, got is not None and got <= limit)}


def _verdict(got: float | None, is_met: bool) -> dict[str, Any]:
    return {"got": None if got is None else round(got, 3), "is_met": None if got is None else is_met}
