"""Where and from what a benchmark runs: what every record of results begins with."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lib.results import ROOT

DIRTY = "-dirty"


def environment(device: str, commit: str | None) -> dict[str, Any]:
    """Where and from what a benchmark runs.

    Args:
        device: "cuda" or "cpu".
        commit: Commit of this repository, with "-dirty" behind it if files differ from it. None: TE_GRAPH_COMMIT of the
            environment, else what git says.

    Returns:
        gpu, driver, commit and dirty are None where there is none or nobody can tell; date is UTC.
    """
    describe = ("git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=40", f"--dirty={DIRTY}")
    state = commit or os.environ.get("TE_GRAPH_COMMIT") or _output_of(*describe)
    is_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if is_gpu else None,
        "cpu": _cpu_name(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_gpu else None,
        "python": platform.python_version(),
        "commit": state.removesuffix(DIRTY) if state else None,
        "dirty": state.endswith(DIRTY) if state else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _output_of(*command: str) -> str | None:
    """First line that a program prints, or None where it is missing or fails."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
