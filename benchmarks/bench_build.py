"""Time to compile te_graph: all of it, and after a change of one file, with CUDA code and without.

    python benchmarks/bench_build.py                # needs nvcc and an idle machine; a quarter of an hour on two cores
    python benchmarks/bench_build.py --kinds cpu    # the CPU ops only

Compiled is a copy of the sources in a temporary folder, for one GPU architecture, without ccache, by as many jobs as
it is pinned to cores. One file of each folder is changed alone. A complete run is kept as results/build.json,
a part of it only where --out says. Exit status: 0 measured, 1 a build failed, 2 bad input.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from lib.environment import environment
from lib.results import RESULTS, ROOT, write_json
from lib.targets import at_most
from torch.utils import cpp_extension

KINDS = {"cuda": "with CUDA code", "cpu": "CPU ops only"}
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "te_graph")
# One file of each folder, whose files are compiled together: its ops, or else the largest.
CPP = sorted((ROOT / "csrc").rglob("*.cpp"), key=lambda path: (path.name == "ops.cpp", path.stat().st_size))
CHANGED = sorted(str(path.relative_to(ROOT)) for path in {path.parent: path for path in CPP}.values())
SECONDS = {"whole": 480.0, "one_file": 40.0}  # at most, of a build with CUDA code


class Build:
    """A copy of the sources, and a folder of what is compiled from it.

    Args:
        folder: empty, takes both.
        kind: of KINDS.
        arch: GPU architecture, as in TORCH_CUDA_ARCH_LIST.
        jobs: how many files are compiled at a time.
    """

    def __init__(self, folder: Path, kind: str, arch: str, jobs: int) -> None:
        self.sources = folder / "sources"
        for name in SOURCES:
            place = ROOT / name
            copy = shutil.copytree if place.is_dir() else shutil.copy
            self.sources.mkdir(exist_ok=True)
            copy(place, self.sources / name)
        self._command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder / "lib")]
        self._command += ["--build-temp", str(folder / "objects")]
        settings = {"TE_GRAPH_CUDA": "1" if kind == "cuda" else "0", "TORCH_CUDA_ARCH_LIST": arch}
        self._environment = {**os.environ, **settings, "MAX_JOBS": str(jobs), "CCACHE_DISABLE": "1"}

    def run(self) -> float:
        """Seconds until all is compiled and linked.

        Raises:
            RuntimeError: it failed; with the end of what was printed.
        """
        start = perf_counter()
        done = subprocess.run(
            self._command, cwd=self.sources, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(self._command)}: {(done.stdout + done.stderr)[-2000:]}")
        return perf_counter() - start

    def change(self, source: str) -> None:
        """Make a source, relative to the repository, another one than was compiled."""
        with open(self.sources / source, "a", encoding="utf-8") as file:
            file.write("// Changed.\n")


def measure(kind: str, arch: str, jobs: int) -> list[dict[str, Any]]:
    """Rows of one kind: the whole build, then one for each changed file."""
    with tempfile.TemporaryDirectory() as folder:
        build = Build(Path(folder), kind, arch, jobs)
        rows = [{"kind": kind, "changed": None, "seconds": round(build.run(), 1)}]
        for source in CHANGED:
            build.change(source)
            rows.append({"kind": kind, "changed": source, "seconds": round(build.run(), 1)})
    return rows


def targets_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether builds with CUDA code are as fast as they have to be."""
    cuda = [row for row in rows if row["kind"] == "cuda"]
    whole = [row["seconds"] for row in cuda if row["changed"] is None]
    one_file = [row["seconds"] for row in cuda if row["changed"]]
    wholes = [at_most("whole build, s", SECONDS["whole"], whole)] if whole else []
    return wholes + ([at_most("one file, s", SECONDS["one_file"], one_file)] if one_file else [])


def compiler() -> str:
    command = [*shlex.split(cpp_extension.get_cxx_compiler()), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description="Time to compile te_graph.")
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is compiled")
    add("--arch", default="9.0", help="the GPU architecture")
    add("--cores", type=int, default=2, help="cores that are used, and files compiled at a time")
    add("--out", type=Path, help="folder for the JSON; by default benchmarks/results if the run is complete")
    add("--commit", help="commit to record where git is missing; with -dirty behind it if files differ from it")
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= options.cores <= len(cores):
        parser.error(f"--cores: expected 1 to {len(cores)}, as many as there are, got {options.cores}")
    os.sched_setaffinity(0, cores[: options.cores])
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for kind in options.kinds:
        try:
            rows += measure(kind, options.arch, options.cores)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"error: {error}", file=sys.stderr)
    for row in rows:
        print(f"{KINDS[row['kind']]}, {row['changed'] or 'all'}: {row['seconds']} s")
    is_complete = options.kinds == list(KINDS) and not failures
    out = options.out or (RESULTS if is_complete else None)
    if out is not None:
        extra = [] if options.kinds == list(KINDS) else ["--kinds", *options.kinds]
        extra += ["--cores", str(options.cores)] if options.cores != 2 else []
        record = {
            "benchmark": "build",
            **environment("cpu", options.commit),
            "command": shlex.join(["python", "benchmarks/bench_build.py", *extra]),
            "cores": options.cores,
            "compiler": compiler(),
            "arch": options.arch,
            "kinds": {kind: KINDS[kind] for kind in options.kinds},
            "rows": rows,
            "targets": targets_of(rows),
            "failures": failures,
        }
        write_json(out / "build.json", record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
