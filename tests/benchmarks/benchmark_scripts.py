"""Benchmarks run as users run them: scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(name: str, *options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, BENCHMARKS / name, *map(str, options)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
