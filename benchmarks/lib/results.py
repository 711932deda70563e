"""Files of results: where they are kept, which there are for numbers of ranks, how they are written."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WORLDS = (2, 4, 8)  # numbers of ranks whose results are kept, as collectives_RANKS.json


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record`, making the folder if needed; a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
