"""What make decides to compile, and when it compiles again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = 'probe:\n\t@echo "$$TE_GRAPH_CUDA, $$TE_GRAPH_CUDA_REASON, $$TORCH_CUDA_ARCH_LIST"\n'
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
SENTENCE = "CPU ops only: no GPU is visible here; TE_GRAPH_CUDA=1 builds CUDA code"

Make = Callable[..., list[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(target, gpus=..., NAME=value, ...): the lines that make prints in a folder with this Makefile and no source.

    ``gpus``: compute capabilities that nvidia-smi tells, () where it fails.
    """
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "probe.mk").write_text(PROBE)
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / name).touch()
    for name in ("csrc", "build", "te_graph", "bin"):
        (tmp_path / name).mkdir()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.touch(mode=0o755)

    def run(*arguments: str, gpus: tuple[str, ...] = (), **environment: str) -> list[str]:
        told = "\n".join(gpus)
        tool.write_text(f'#!/bin/sh\necho "{told or NO_DRIVER}"\nexit {0 if gpus else 9}\n')
        # make and pytest under make set these.
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TE_GRAPH_", "TORCH_", "MAKE"))
        }
        kept["PATH"] = f"{tool.parent}{os.pathsep}{kept['PATH']}"
        command = ["make", "-s", "-f", "Makefile", "-f", "probe.mk", f"PYTHON={sys.executable}", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env={**kept, **environment}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("gpus", "asked", "decided"),
    [
        ((), {}, "0, no GPU is visible here, "),
        ((), {"TE_GRAPH_CUDA": "1"}, "1, , "),
        ((), {"TE_GRAPH_CUDA": "0"}, "0, , "),
        ((), {"TORCH_CUDA_ARCH_LIST": "9.0"}, ", , 9.0"),
        (("9.0", "9.0"), {}, ", , 9.0"),
        (("9.0", "8.0"), {}, ", , 8.0 9.0"),
        (("9.0",), {"TE_GRAPH_CUDA": "1"}, "1, , 9.0"),
        (("9.0",), {"TORCH_CUDA_ARCH_LIST": "8.0+PTX"}, ", , 8.0+PTX"),
        (("9.0",), {"CUDA_VISIBLE_DEVICES": ""}, ", , 9.0"),  # hidden from one process, and there for the next
    ],
)
def test_compiled_is_what_was_asked_for_or_what_the_gpus_of_the_machine_need(make: Make, gpus, asked, decided) -> None:
    assert make("probe", gpus=gpus, **asked) == [decided]


def test_an_empty_setting_asks_for_nothing(make: Make) -> None:
    assert make("probe", TE_GRAPH_CUDA="", TORCH_CUDA_ARCH_LIST="") == make("probe")


def test_a_gpu_that_appears_later_or_another_one_compiles_again(make: Make, tmp_path: Path) -> None:
    (tmp_path / "te_graph" / "_build_config.py").write_text("CPU_ONLY = None\n")

    def builds(*gpus: str) -> bool:
        return any("pip install" in line for line in make("-n", "build", gpus=gpus))

    assert builds() and builds("9.0")
    (stamp,) = {line.split()[-1] for line in make("-n", "build") if "touch" in line}
    (tmp_path / stamp).touch()
    assert not builds() and builds("9.0")
    (stamp,) = {line.split()[-1] for line in make("-n", "build", gpus=("9.0",)) if "touch" in line}
    (tmp_path / stamp).touch()
    assert not builds("9.0") and builds("8.0")


@pytest.mark.parametrize("sentence", [SENTENCE, None])
def test_a_build_of_the_cpu_ops_alone_says_why_last(make: Make, tmp_path: Path, sentence: str | None) -> None:
    (tmp_path / "te_graph" / "_build_config.py").write_text(f"CPU_ONLY = {sentence!r}\n")
    (stamp,) = {line.split()[-1] for line in make("-n", "build") if "touch" in line}
    (tmp_path / stamp).touch()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train_gpt.py").write_text("print('trained')\n")
    assert make("build") == ([sentence] if sentence else [])
    assert make("train") == ["trained", *([sentence] if sentence else [])]


def test_help_tells_what_is_compiled(make: Make) -> None:
    text = " ".join(make("help"))
    assert "make train" in text and "the CPU ops only. TE_GRAPH_CUDA=1 builds CUDA code anyway" in text


def test_ci_compiles_cuda_code_for_one_architecture() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert (
        'TE_GRAPH_CUDA="${TE_GRAPH_CUDA:-1}"' in script
        and 'TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"' in script
    )
