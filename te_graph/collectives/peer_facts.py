"""What ranks tell each other of themselves when they make a group."""

from typing import Any

_FACTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("on_timeout", "device", "name", "host"), (str,)),
    **dict.fromkeys(("wants_peers", "needs_tuning"), (bool,)),
    "buffer_bytes": (int,),
    "max_sms": (int, type(None)),
    "gpu": (str, type(None)),
}


def parse_facts(value: Any) -> dict[str, Any]:
    """``value``, once it is known to be the facts of a rank.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, dict) or value.keys() != _FACTS.keys():
        raise ValueError(f"expected {', '.join(sorted(_FACTS))}, got {str(value)[:100]}")
    for name, kinds in _FACTS.items():
        if type(value[name]) not in kinds:
            raise ValueError(f"expected {name} of type {kinds[0].__name__}, got {str(value[name])[:100]}")
    return value


def check_alike(facts: list[dict[str, Any]]) -> None:
    """Raise RuntimeError unless all ranks have made the group with the same options."""
    for what in ("buffer_bytes", "on_timeout", "max_sms", "device", "name"):
        for rank, fact in enumerate(facts):
            if fact[what] != facts[0][what]:
                raise RuntimeError(
                    f"PeerGroup: expected the same {what} on all ranks, got {facts[0][what]} on rank 0 and "
                    f"{fact[what]} on rank {rank}"
                )
