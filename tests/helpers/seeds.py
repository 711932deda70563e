"""Where random programs start: at other seeds for each state of the code, at the same ones for each run of it.

So what CI finds can be repeated at once, and every change of the code is tried with programs that none was tried with.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def first_seed(topic: str) -> int:
    """The first seed of the programs of ``topic``, below 2^31; TE_GRAPH_PROGRAM_SEED=<first seed> takes its place."""
    chosen = os.environ.get("TE_GRAPH_PROGRAM_SEED")
    seed = int(chosen) if chosen else _seed_of(topic)
    print(f"TE_GRAPH_PROGRAM_SEED={seed}")
    return seed


@functools.cache
def _seed_of(topic: str) -> int:
    digest = hashlib.sha256(topic.encode())
    files = (path for folder in ("te_graph", "csrc") for path in (_ROOT / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")):
        if path.name != "_build_config.py":  # written by the build
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "little") >> 1
