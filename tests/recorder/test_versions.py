"""Under te_graph's dispatch modes versions of what operators write move on as they do without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from list_writes import WRITES
from torch import Tensor

from te_graph.graphs.functions.region_watch import RegionWatch
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.recorder import Recorder


@contextlib.contextmanager
def recorded_and_watched() -> Iterator[None]:
    with Recorder().capture(), RegionWatch():
        yield


MODES = {
    "watch": TensorWatch,
    "watch of a warm-up": lambda: WarmUpWatch(torch.device("cpu")),
    "recorder": lambda: Recorder().capture(),
    "both": recorded_and_watched,
}


def moves(write: Callable, mode: contextlib.AbstractContextManager) -> list[int]:
    tensors = [torch.ones(4), torch.ones(4)]
    with mode:
        write(tensors)
    return [tensor._version for tensor in tensors]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_versions_move_on_as_without_a_mode(write: Callable, mode: Callable) -> None:
    expected = moves(write, contextlib.nullcontext())
    assert expected[0] > 0
    assert moves(write, mode()) == expected


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_inference_mode_is_as_without_a_mode(is_made_inside: bool) -> None:
    outside = torch.ones(4)
    with torch.inference_mode():
        tensors: list[Tensor] = [torch.ones(4) if is_made_inside else outside]
        with TensorWatch():
            torch._foreach_add_(tensors, 1.0)
    assert tensors[0].tolist() == [2.0] * 4
    assert is_made_inside or outside._version == 1


def test_what_keeps_versions_keeps_them() -> None:
    tensor = torch.ones(4)
    with TensorWatch(), torch.autograd._unsafe_preserve_version_counter(tensor):
        torch._foreach_add_([tensor], 1.0)
    assert tensor._version == 0
