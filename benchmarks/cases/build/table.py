"""The table of build.json."""

from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, show_number, table_head


def build_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for build.json: one row per kind of build, whole and after a change of one file."""
    changed = list(dict.fromkeys(row["changed"] for row in record["rows"]))
    seconds = {(row["kind"], row["changed"]): show_number(row["seconds"]) for row in record["rows"]}
    lines = [
        f"Seconds to compile and link, for one GPU architecture ({record['arch']}), on {record['cores']} cores: "
        "everything, and after a change of one file.",
        "",
        *table_head([f"`{name}`" if name else "everything" for name in changed]),
    ]
    for kind, label in record["kinds"].items():
        lines.append(f"| {label} | {' | '.join(seconds.get((kind, name), 'failed') for name in changed)} |")
    origin = {**record, "gpu": f"Without ccache. {record['cpu']}, {record['compiler']}"}
    return [*lines, "", join_remarks([missed_targets_remark(record)], origin)]
