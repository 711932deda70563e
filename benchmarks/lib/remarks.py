"""Numbers and sentences that the tables of all results share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def show_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def show_range(values: Sequence[float], show: Callable[[float], str]) -> str:
    return "-".join(dict.fromkeys((show(min(values)), show(max(values)))))


def show_times(row: dict[str, Any]) -> str:
    return f"{show_number(row['device_us'])} / {show_number(row['host_us'])}"


def missed_targets_remark(record: dict[str, Any]) -> str:
    """The targets that were missed, with what was reached."""
    missed = [
        f"{target['what']} {target['got']:g} ({target['bound']} {target['limit']:g})"
        for target in record["targets"]
        if target["is_met"] is False
    ]
    return f"Targets missed: {'; '.join(missed)}." if missed else ""


def not_measured_remark(record: dict[str, Any]) -> str:
    missing = record.get("not_measured", {})
    return f"Not measured: {', '.join(f'{label} ({reason})' for label, reason in missing.items())}." if missing else ""


def origin_remark(record: dict[str, Any]) -> str:
    where = record["gpu"] or f"CPU ({record['cpu']}), recorder"
    versions = [f"torch {record['torch']}"]
    versions += [f"{name} {record[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if record[key]]
    versions.append(f"Python {record['python']}")
    commit = f"commit {record['commit'][:12]}" if record["commit"] else "unknown commit"
    changes = " with changes" if record["dirty"] else ""
    return f"{where}, {', '.join(versions)}, {commit}{changes}, {record['date'][:10]}: `{record['command']}`."


def join_remarks(remarks: Sequence[str], record: dict[str, Any]) -> str:
    """The remarks that are not empty, and where the results come from."""
    return " ".join(filter(None, [*remarks, origin_remark(record)]))


def table_head(columns: Iterable[str]) -> list[str]:
    """The first two lines of a Markdown table; its first column has no name."""
    names = list(columns)
    return [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
