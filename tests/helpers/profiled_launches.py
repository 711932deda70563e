"""``launches``: benchmarks/lib/launches.py, which counts in a profiler's trace what a step launches."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
launches = importlib.import_module("lib.launches")
