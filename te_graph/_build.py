"""What te_graph was built with, and loading of its extension module."""

import importlib
import importlib.metadata
import platform
import re
from pathlib import Path
from types import ModuleType

import torch

REINSTALL = "reinstall it with pip install --no-build-isolation --no-deps --force-reinstall ."


def build_info() -> dict[str, str | None]:
    """Tells what is installed and what is running.

    Returns:
        te_graph: version of this package; of a checkout that was not installed, what its pyproject.toml says.
        torch_built: torch that te_graph was compiled against.
        torch_running: torch of this process.
        cuda: CUDA toolkit that compiled the kernels; None where only the CPU ops were built.
        archs: GPU architectures of the kernels, as in TORCH_CUDA_ARCH_LIST; None without CUDA.
        compiler: C++ compiler.

    Raises:
        ImportError: te_graph was not built.
    """
    config = _build_config()
    return {
        "te_graph": _version(),
        "torch_built": config.TORCH_VERSION,
        "torch_running": str(torch.__version__),
        "cuda": config.CUDA_VERSION,
        "archs": config.ARCHS,
        "compiler": config.COMPILER,
    }


def cpu_only() -> str | None:
    """Why there are no CUDA kernels, in the sentence that CUDA tensors raise; None where there are."""
    return _build_config().CPU_ONLY


def check_is_built_for(device: torch.device) -> None:
    """Raises RuntimeError where ``device`` is a GPU and only the CPU ops were built."""
    if device.type == "cuda" and cpu_only():
        raise RuntimeError(cpu_only())


def load_extension() -> ModuleType:
    """Imports te_graph._C, which also registers the ops torch.ops.te_graph.*.

    Returns:
        The extension module.

    Raises:
        ImportError: te_graph was not built, was built for another minor version of torch, or does not load; one
            sentence says which.
    """
    # C++ symbols of torch change between minor versions, so another torch's extension may not even load far enough to
    # be asked: the version it was built for is read from a Python file.
    built, running = _build_config().TORCH_VERSION, str(torch.__version__)
    if _minor(built) != _minor(running):
        raise ImportError(f"te_graph was built for torch {built} and torch {running} is running: {REINSTALL}")
    try:
        return importlib.import_module("te_graph._C")
    except ImportError as error:
        raise ImportError(
            f"te_graph was built for torch {built} and does not load under torch {running} and Python "
            f"{platform.python_version()} ({error}): {REINSTALL}"
        ) from error


def _build_config() -> ModuleType:
    try:
        return importlib.import_module("te_graph._build_config")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"te_graph is not built in {Path(__file__).parents[1]}: run pip install --no-build-isolation -e . there, "
            "or import the installed te_graph from another working directory"
        ) from error


def _version() -> str:
    try:
        return importlib.metadata.version("te_graph")
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        project = Path(__file__).parents[1] / "pyproject.toml"
        text = project.read_text() if project.is_file() else ""
        found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
        return "not installed" if found is None else found[1]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
