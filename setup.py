"""Builds te_graph._C from csrc/. All metadata is in pyproject.toml.

Environment:
    TE_GRAPH_CUDA         1: with CUDA or fail; 0: CPU ops only; unset: with CUDA where torch has it and nvcc is found
    TE_GRAPH_CUDA_REASON  why it is 0, where the Makefile decided that
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for every torch extension
    CXX, PYTORCH_NVCC     compilers; where they are unset, they are called through ccache if that is there
    MAX_JOBS              number of parallel jobs
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from setuptools import setup


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"te_graph: {sentence}")


try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    fail(
        f"cannot import the torch to build against ({error}): install torch >= 2.11 in this environment, then run "
        "pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)


def first_line(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def find_cuda() -> tuple[str | None, str]:
    """Decides whether CUDA code is built.

    Returns:
        (version of the CUDA toolkit or None for CPU ops only, where the toolkit is or why there is none).
    """
    wish = os.environ.get("TE_GRAPH_CUDA", "")
    if wish not in ("", "0", "1"):
        fail(f"TE_GRAPH_CUDA must be 0 or 1, got {wish!r}")
    if wish == "0":
        return None, f"{os.environ.get('TE_GRAPH_CUDA_REASON') or 'TE_GRAPH_CUDA=0'}; TE_GRAPH_CUDA=1 builds CUDA code"

    home = cpp_extension.CUDA_HOME
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is a CPU build"
    elif not home or not Path(home, "bin", "nvcc").is_file():
        missing = f"nvcc was not found ({f'no {home}/bin/nvcc' if home else 'neither in CUDA_HOME nor on PATH'})"
    else:
        banner = subprocess.run([f"{home}/bin/nvcc", "--version"], check=True, capture_output=True, text=True).stdout
        return re.search(r"release (\d+\.\d+)", banner).group(1), home
    if wish == "1":
        fail(f"TE_GRAPH_CUDA=1 asks for CUDA, but {missing}")
    return None, missing


def use_ccache() -> None:
    """Puts ccache before the compilers that torch would call, by its own means: a link of the compiler's name."""
    ccache = shutil.which("ccache")
    if ccache is None:
        return
    if "CXX" not in os.environ:
        link = ROOT / "build" / "ccache" / "c++"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ccache)
        os.environ["PATH"] = f"{link.parent}{os.pathsep}{os.environ['PATH']}"
    if CUDA_VERSION:
        os.environ.setdefault("PYTORCH_NVCC", f"{ccache} {cpp_extension.CUDA_HOME}/bin/nvcc")
    # Another clone finds what this one compiled: neither its paths nor where it is compiled tell them apart.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")


def sources_of(*suffixes: str) -> list[str]:
    """Files under csrc/ with one of the suffixes, sorted, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)


def make_units() -> list[str]:
    """Writes one source for each folder of csrc/, which includes those of its .cpp files that use Torch.

    Most of a compiler's time goes into Torch's headers and what they instantiate, the same for each file. The files
    *_cpu.cpp are without Torch and stay on their own, for the GoogleTests.

    Returns:
        Names of the sources, relative to the repository.
    """
    units: dict[str, list[str]] = {}
    for source in sources_of(".cpp"):
        if not source.endswith("_cpu.cpp"):
            units.setdefault("_".join(Path(source).parts[1:-1]) or "library", []).append(source)
    folder = ROOT / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    for old in {path.stem for path in folder.glob("*.cpp")} - units.keys():
        (folder / f"{old}.cpp").unlink()
    for name, members in units.items():
        text = "".join(f'#include "../../{member}"\n' for member in members)
        unit = folder / f"{name}.cpp"
        if not unit.exists() or unit.read_text() != text:  # a unit that is written again is compiled again
            unit.write_text(text)
    return sorted(f"build/units/{name}.cpp" for name in units)


def find_cublaslt() -> list[str]:
    """What the linker is told, so that it finds cuBLASLt: the toolkit's, or, where that came without it, the one that
    torch loads from pip's packages, which have no name without a version."""
    if not CUDA_VERSION:
        return []
    folders = [Path(cpp_extension.CUDA_HOME, name) for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    if any((folder / "libcublasLt.so").exists() for folder in folders):
        return ["-lcublasLt"]
    site = Path(torch.__file__).resolve().parents[1]
    found = sorted(site.glob(f"nvidia/cu{CUDA_VERSION.split('.')[0]}/lib/libcublasLt.so.*"))
    return [str(found[0])] if found else ["-lcublasLt"]


def make_extension():
    """The extension module; every file under csrc/ belongs to it."""
    sources = [*make_units(), *(source for source in sources_of(".cpp") if source.endswith("_cpu.cpp"))]
    sources += sources_of(".cu") if CUDA_VERSION else []

    warnings = ["-Wall", "-Wextra", "-Werror=return-type"]
    # A directory named by -isystem is no longer searched as the -I directory that torch adds, and warns no more.
    headers = cpp_extension.include_paths("cuda" if CUDA_VERSION else "cpu")
    # Without fused multiply-adds the CPU finds the bits that the kernels find.
    cxx = ["-std=c++20", "-O3", "-ffp-contract=off", "-g0", "-fvisibility=hidden", *warnings]
    cxx += [flag for path in headers for flag in ("-isystem", path)]
    nvcc = ["-std=c++20", "-O3", *(f"-Xcompiler={flag}" for flag in ["-fvisibility=hidden", *warnings])]

    make = cpp_extension.CUDAExtension if CUDA_VERSION else cpp_extension.CppExtension
    return make(
        "te_graph._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        # The one that torch has loaded, by its name.
        extra_link_args=find_cublaslt(),
        define_macros=[("AT_PER_OPERATOR_HEADERS", None), *([("TE_GRAPH_CUDA", None)] if CUDA_VERSION else [])],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        depends=sources_of(".h", ".cuh", ".cpp"),
    )


class BuildExtension(cpp_extension.BuildExtension):
    """Builds in build/, so that pip compiles only what changed, or where --build-temp says.

    Writes te_graph/_build_config.py, and to build/objects where GoogleTests find what was compiled.
    """

    def finalize_options(self) -> None:
        kind = f"cuda{CUDA_VERSION}" if CUDA_VERSION else "cpu"
        usual = str(ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}-{kind}")
        self.build_temp = self.build_temp or usual
        self.is_usual = self.build_temp == usual
        super().finalize_options()

    def run(self) -> None:
        compiler = first_line([*shlex.split(cpp_extension.get_cxx_compiler()), "--version"])
        version = self.distribution.get_version()
        use_ccache()
        print(f"te_graph {version}, torch {torch.__version__}, Python {platform.python_version()}")
        print(f"  CUDA           {CUDA_VERSION or 'no'} ({CUDA_REASON})")
        print(f"  architectures  {ARCHS or 'none: CPU ops only'}")
        print(f"  compiler       {compiler}", flush=True)
        super().run()
        if self.is_usual:
            (ROOT / "build" / "objects").write_text(self.build_temp)
        config = {
            "TORCH_VERSION": str(torch.__version__),
            "CUDA_VERSION": CUDA_VERSION,
            "ARCHS": ARCHS or None,
            "CPU_ONLY": CPU_ONLY,
            "COMPILER": compiler,
        }
        lines = ['"""What te_graph._C was built with. Written by setup.py."""', ""]
        lines += [f"{name} = {value!r}" for name, value in config.items()]
        folder = Path(self.get_ext_fullpath("te_graph._C")).parent
        (folder / "_build_config.py").write_text("\n".join(lines) + "\n")


if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
    fail(f"torch >= 2.11 is needed, and torch {torch.__version__} is installed")

CUDA_VERSION, CUDA_REASON = find_cuda()
CPU_ONLY = None if CUDA_VERSION else f"CPU ops only: {CUDA_REASON}"  # what CUDA tensors are told
ARCHS = ""
if CUDA_VERSION:
    # 10.0 is known to nvcc from CUDA 12.8 on.
    knows_10 = tuple(int(part) for part in CUDA_VERSION.split(".")) >= (12, 8)
    ARCHS = os.environ.get("TORCH_CUDA_ARCH_LIST") or ("8.0;9.0;10.0+PTX" if knows_10 else "8.0;9.0+PTX")
    os.environ["TORCH_CUDA_ARCH_LIST"] = ARCHS

setup(ext_modules=[make_extension()], cmdclass={"build_ext": BuildExtension})
