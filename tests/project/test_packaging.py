"""What setup.py decides to build, what it refuses, and what the installed package says of itself."""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from setuptools import Extension
from torch.utils import cpp_extension

import te_graph
from te_graph import _build
from te_graph.collectives import options
from te_graph.graphs.tracing.backends import CudaBackend

ROOT = Path(__file__).resolve().parents[2]
BUILT = _build.build_info()


SETTINGS = ("TE_GRAPH_CUDA", "TE_GRAPH_CUDA_REASON", "TORCH_CUDA_ARCH_LIST")


def run_setup(monkeypatch: pytest.MonkeyPatch, **environment: str | None) -> Extension:
    """Runs setup.py up to setup() under the given environment. Returns the extension that it would build."""
    return setup_names(monkeypatch, **environment)["extension"]


def setup_names(monkeypatch: pytest.MonkeyPatch, **environment: str | None) -> dict[str, Any]:
    """The same; returns all names of setup.py, and the extension."""
    for name, value in {**dict.fromkeys(SETTINGS), **environment}.items():
        # Set first in any case, so that what setup.py itself writes is undone after the test.
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
    names = runpy.run_path(str(ROOT / "setup.py"))
    (extension,) = calls[0]["ext_modules"]
    return {**names, "extension": extension}


def pretend_toolkit(monkeypatch: pytest.MonkeyPatch, home: Path, release: str) -> None:
    """Makes setup.py see a CUDA build of torch and an nvcc of the given release."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", release)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(home))


def macros(extension: Extension) -> set[str]:
    named = {f"-D{name}" for name, _ in extension.define_macros}
    return named | {flag for flag in extension.extra_compile_args["cxx"] if flag.startswith("-D")}


def compiled(extension: Extension) -> list[str]:
    """Files of csrc/ that are compiled, alone or in the unit of their folder."""
    found = []
    for source in extension.sources:
        included = re.findall(r'^#include "(.*)"$', (ROOT / source).read_text(), re.MULTILINE)
        members = included if source.startswith("build/units/") else [f"../../{source}"]
        found += [os.path.normpath(f"build/units/{member}") for member in members]
    return sorted(found)


def files(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)


def test_te_graph_cuda_0_builds_every_cpp_file_and_no_kernel(monkeypatch):
    extension = run_setup(monkeypatch, TE_GRAPH_CUDA="0")
    assert compiled(extension) == files(".cpp")
    assert "-DTE_GRAPH_CUDA" not in macros(extension)
    assert "c10_cuda" not in extension.libraries


def test_with_torch_cuda_and_nvcc_every_kernel_is_built(monkeypatch, tmp_path):
    pretend_toolkit(monkeypatch, tmp_path, "13.0")
    extension = run_setup(monkeypatch)
    assert files(".cu")
    assert compiled(extension) == files(".cpp", ".cu")
    assert "-DTE_GRAPH_CUDA" in macros(extension)
    assert "c10_cuda" in extension.libraries


@pytest.mark.parametrize(
    ("wanted", "release", "built"),
    [
        (None, "13.0", "8.0;9.0;10.0+PTX"),
        (None, "12.6", "8.0;9.0+PTX"),
        ("9.0a", "13.0", "9.0a"),
    ],
)
def test_architectures_are_the_wanted_ones_or_the_default_that_nvcc_knows(
    monkeypatch, tmp_path, wanted, release, built
):
    pretend_toolkit(monkeypatch, tmp_path, release)
    run_setup(monkeypatch, TORCH_CUDA_ARCH_LIST=wanted)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == built


def test_te_graph_cuda_1_without_nvcc_is_refused_naming_nvcc(monkeypatch, tmp_path):
    pretend_toolkit(monkeypatch, tmp_path, "13.0")
    (tmp_path / "bin" / "nvcc").unlink()
    with pytest.raises(SystemExit, match=f"TE_GRAPH_CUDA=1 asks for CUDA, but nvcc was not found .no {tmp_path}/bin"):
        run_setup(monkeypatch, TE_GRAPH_CUDA="1")


def test_te_graph_cuda_1_with_a_cpu_build_of_torch_is_refused_naming_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match=f"but torch {re.escape(torch.__version__)} is a CPU build"):
        run_setup(monkeypatch, TE_GRAPH_CUDA="1")


def test_a_cpu_build_of_torch_gets_the_cpu_ops_unless_cuda_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert compiled(run_setup(monkeypatch)) == files(".cpp")


def test_cublaslt_is_linked_from_the_toolkit_or_where_it_has_none_from_the_packages_of_torch(monkeypatch, tmp_path):
    pretend_toolkit(monkeypatch, tmp_path / "cuda", "13.0")
    installed = sorted(Path(torch.__file__).parents[1].glob("nvidia/cu13/lib/libcublasLt.so.*"))
    expected = [str(installed[0].resolve())] if installed else ["-lcublasLt"]
    found = run_setup(monkeypatch, TE_GRAPH_CUDA="1").extra_link_args
    assert [str(Path(each).resolve()) if each.startswith("/") else each for each in found] == expected
    (tmp_path / "cuda" / "lib64").mkdir()
    (tmp_path / "cuda" / "lib64" / "libcublasLt.so").touch()
    assert run_setup(monkeypatch, TE_GRAPH_CUDA="1").extra_link_args == ["-lcublasLt"]
    assert not run_setup(monkeypatch, TE_GRAPH_CUDA="0").extra_link_args


def test_an_unknown_value_of_te_graph_cuda_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match="TE_GRAPH_CUDA must be 0 or 1, got 'yes'"):
        run_setup(monkeypatch, TE_GRAPH_CUDA="yes")


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("no GPU is visible here", "CPU ops only: no GPU is visible here; TE_GRAPH_CUDA=1 builds CUDA code"),
        (None, "CPU ops only: TE_GRAPH_CUDA=0; TE_GRAPH_CUDA=1 builds CUDA code"),
    ],
)
def test_a_build_of_the_cpu_ops_alone_knows_why(monkeypatch, reason, sentence):
    assert setup_names(monkeypatch, TE_GRAPH_CUDA="0", TE_GRAPH_CUDA_REASON=reason)["CPU_ONLY"] == sentence


def test_only_a_build_with_cuda_code_has_nothing_to_tell_cuda_tensors(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert setup_names(monkeypatch)["CPU_ONLY"] == f"CPU ops only: torch {torch.__version__} is a CPU build"
    pretend_toolkit(monkeypatch, tmp_path, "13.0")
    assert setup_names(monkeypatch, TE_GRAPH_CUDA_REASON="of another build")["CPU_ONLY"] is None


@pytest.mark.parametrize("own", [None, "clang++"])
def test_compilers_are_called_through_ccache_where_it_is_unless_others_are_named(monkeypatch, tmp_path, own):
    pretend_toolkit(monkeypatch, tmp_path, "13.0")
    names = setup_names(monkeypatch)
    use_ccache = names["use_ccache"]
    monkeypatch.setitem(use_ccache.__globals__, "ROOT", tmp_path)
    for name, value in {"CXX": own, "PYTORCH_NVCC": own, "CCACHE_BASEDIR": None, "CCACHE_NOHASHDIR": None}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    before = dict(os.environ)
    use_ccache()
    assert dict(os.environ) == before

    ccache = tmp_path / "bin" / "ccache"
    ccache.touch(mode=0o755)
    for _ in range(2):  # the second build finds the link of the first
        use_ccache()
    if own:
        assert (os.environ["PATH"], os.environ["PYTORCH_NVCC"]) == (before["PATH"], own)
    else:
        assert Path(shutil.which("c++")).resolve() == ccache.resolve()
        assert os.environ["PYTORCH_NVCC"] == f"{ccache} {tmp_path}/bin/nvcc"
    assert os.environ["CCACHE_BASEDIR"] == str(tmp_path)


def test_torch_older_than_2_11_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(SystemExit, match=r"torch >= 2.11 is needed, and torch 2.9.1\+cu128 is installed"):
        run_setup(monkeypatch)


def test_build_info_names_the_package_both_torch_versions_and_cuda():
    assert f'\nversion = "{BUILT["te_graph"]}"\n' in (ROOT / "pyproject.toml").read_text()
    assert BUILT["torch_running"] == torch.__version__
    assert (BUILT["cuda"] is None) == (BUILT["archs"] is None)
    assert te_graph.build_info() == BUILT


def test_build_info_tells_whether_the_extension_has_kernels():
    # Arguments of launches can be set with and without: the recorder has them, too.
    assert hasattr(_build.load_extension(), "KernelNode") == (BUILT["cuda"] is not None)


def ops() -> list[torch._ops.OpOverload]:
    """All of te_graph."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        if space == "te_graph":
            found.append(getattr(getattr(torch.ops.te_graph, op), overload or "default"))
    return found


def value_for(argument: torch.Argument) -> Any:
    """Something of the type that the schema names."""
    tensor = torch.zeros(2)
    values = {"Tensor": tensor, "List[Tensor]": [tensor], "float": 1.0, "int": 0, "bool": False, "str": ""}
    values["List[bool]"] = [True] * 3
    return None if str(argument.type).startswith("Optional") else values[str(argument.type)]


def test_ops_have_cuda_kernels_or_say_why_there_are_none():
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    assert (_build.cpu_only() is None) == (BUILT["cuda"] is not None)
    assert len(ops()) > 30
    for op in ops():
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CUDA"), op
        if BUILT["cuda"] is None:
            arguments = [argument for argument in op._schema.arguments if not argument.has_default_value()]
            with pytest.raises(RuntimeError, match=f"^{re.escape(_build.cpu_only())}"):
                op.redispatch(cuda, *map(value_for, arguments))


@pytest.mark.parametrize("sentence", [None, "CPU ops only: told"])
def test_what_captures_on_a_gpu_raises_exactly_where_there_are_no_kernels(monkeypatch, sentence):
    monkeypatch.setattr(_build._build_config(), "CPU_ONLY", sentence)
    gpu = torch.device("cuda", 0)
    graph = torch._C._CUDAGraph.__new__(torch.cuda.CUDAGraph)  # its __init__ would ask for a GPU
    calls = [
        lambda: CudaBackend(gpu, "thread_local"),
        lambda: options.device_of(types.SimpleNamespace(_device_types=[gpu]), gpu),
        lambda: te_graph.capture_to_graph(graph).__enter__(),
    ]
    _build.check_is_built_for(torch.device("cpu"))
    for call in calls[: len(calls) if sentence else 2]:  # the third would begin a capture
        with pytest.raises(RuntimeError, match=sentence) if sentence else contextlib.nullcontext():
            call()


def test_python_m_te_graph_prints_build_info_on_a_machine_without_gpu():
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run([sys.executable, "-m", "te_graph"], env=no_gpu, cwd=ROOT, capture_output=True, text=True)
    lines = [f"{name}: {value or 'none (CPU ops only)'}" for name, value in BUILT.items()]
    assert printed.stdout.splitlines() == lines, printed.stderr


def test_another_minor_version_of_torch_is_named_before_the_extension_is_loaded(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setitem(sys.modules, "te_graph._C", None)  # loading it would raise another error
    with pytest.raises(ImportError) as error:
        _build.load_extension()
    both = f"te_graph was built for torch {BUILT['torch_built']} and torch 2.99.0+cpu is running: reinstall it with "
    assert str(error.value).startswith(both)


def test_another_patch_version_of_torch_is_accepted(monkeypatch):
    major, minor = BUILT["torch_built"].split(".")[:2]
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.99")
    assert _build.load_extension().__name__ == "te_graph._C"


def test_an_extension_that_does_not_load_is_reported_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "te_graph._C", None)
    with pytest.raises(ImportError, match=r"^te_graph was built for .* does not load under .*_C.*: reinstall it"):
        _build.load_extension()


def test_a_source_folder_that_was_not_built_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "te_graph._build_config", None)
    folder = re.escape(str(Path(_build.__file__).parents[1]))
    with pytest.raises(ImportError, match=f"^te_graph is not built in {folder}: run pip install"):
        _build.load_extension()


def test_the_package_ships_its_type_hints():
    assert (Path(te_graph.__file__).parent / "py.typed").is_file()
