"""Markers, seeds, and the fixtures that several files share: ``pytestmark = pytest.mark.usefixtures("repeatable")``."""

import importlib.util
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import shared_gpu
import torch

from te_graph.testing import deterministic

OTHERS = ("transformer_engine",)  # packages of which tests ``need`` one


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Operations repeat bit for bit."""
    with deterministic():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """multi_gpu implies gpu, so that -m "not gpu" leaves out both; one_of makes the others full. Pytest says what too
    few GPUs leave out, or packages that are not installed. What is installed and cannot be imported fails."""
    several = [item for item in items if item.get_closest_marker("multi_gpu")]
    for item in several:
        item.add_marker("gpu")
    mark_sampled(items)
    there = 8 if shared_gpu.IS_SHARED else torch.cuda.device_count()
    too_many = [item for item in several if 0 < there < gpus_of(item)]
    if shared_gpu.IS_SHARED:
        too_many += [item for item in several if item.get_closest_marker("gpus_apart")]
    left_out = {*too_many, *(item for item in items if missing_packages(item))}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def mark_sampled(items: Sequence[pytest.Item]) -> None:
    """Marks full, of each test that is ``one_of(n)``, all but each n-th of what it is on the CPU."""
    counts: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_of")
        if mark is None or item.get_closest_marker("gpu") or item.get_closest_marker("full"):
            continue
        test = item.nodeid.partition("[")[0]
        if counts[test] % mark.args[0]:
            item.add_marker("full")
        counts[test] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the packages whose tests were left out."""
    for package in OTHERS:
        if not is_installed(package):
            terminalreporter.write_line(f"{package} is not installed: its tests were left out")


def missing_packages(item: pytest.Item) -> list[str]:
    """What is not installed of the packages that the test ``needs``."""
    needed = [mark.args[0] for mark in item.iter_markers("needs")]
    if unknown := set(needed) - set(OTHERS):
        raise ValueError(f"{item.nodeid}: expected needs() of {', '.join(OTHERS)}, got {', '.join(unknown)}")
    return [package for package in needed if not is_installed(package)]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def gpus_of(item: pytest.Item) -> int:
    """Of ``multi_gpu(4)`` four, of ``multi_gpu`` two."""
    return next(iter(item.get_closest_marker("multi_gpu").args), 2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Both backends. A machine without CUDA deselects the second with -m "not gpu"; nothing is skipped silently."""
    return request.param


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch on all devices with a number of the test's own: inputs differ between tests and repeat in each."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Numbers of the test's own for what torch does not draw."""
    return random.Random(seed)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
