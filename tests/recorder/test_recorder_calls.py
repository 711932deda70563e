"""Recorder.calls: recorded calls by operator, whose scalar arguments are exchanged between replays.

The reference is the same operator called eagerly with the argument.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_graph import Recorder
from te_graph.testing import assert_bitwise_equal


def recorded() -> tuple[Recorder, tuple[Tensor, ...], list[Tensor]]:
    """A recording of three operators on x [5] and y [5], these, and its results."""
    x, y = torch.randn(5), torch.randn(5)
    recorder = Recorder()
    with recorder.capture():
        results = [torch.add(x, y), torch.add(x, y, alpha=3), *torch.topk(x, 2), x.clamp(-0.5, 0.5)]
    return recorder, (x, y), results


def test_calls_are_found_by_operator_and_overload_in_their_order():
    recorder, _, _ = recorded()
    assert [call.get("alpha") for call in recorder.calls("aten.add.Tensor")] == [1, 3]
    (call,) = recorder.calls("aten.topk.default")
    assert [call.get(name) for name in ("k", "dim", "largest", "sorted")] == [2, -1, True, True]
    assert recorder.calls("aten.add.Scalar") == [] and recorder.calls("aten.topk") == []


def test_positional_keyword_and_default_arguments_are_exchanged_and_others_stay():
    recorder, (x, y), results = recorded()
    first, second = recorder.calls("aten.add.Tensor")
    first.set_({"alpha": -2})
    second.set_({"alpha": 5})
    (clamp,) = recorder.calls("aten.clamp.default")
    clamp.set_({"min": -0.25})
    assert (first.get("alpha"), second.get("alpha"), clamp.get("min"), clamp.get("max")) == (-2, 5, -0.25, 0.5)
    x.normal_()
    recorder.replay()
    expected = [x - 2 * y, torch.add(x, y, alpha=5), *torch.topk(x, 2), x.clamp(-0.25, 0.5)]
    assert_bitwise_equal(results, expected)


def test_a_call_with_several_results_takes_other_arguments_too():
    recorder, (x, _), results = recorded()
    (call,) = recorder.calls("aten.topk.default")
    call.set_({"largest": False})
    recorder.replay()
    assert_bitwise_equal(results[2:4], list(torch.topk(x, 2, largest=False)))
    call.set_({"largest": True})
    recorder.replay()
    assert_bitwise_equal(results[2:4], list(torch.topk(x, 2)))


def test_calls_of_a_recording_that_is_no_more_are_refused():
    recorder, _, _ = recorded()
    (call,) = recorder.calls("aten.topk.default")
    recorder.reset()
    with pytest.raises(RuntimeError, match=r"Recorder\.calls: expected a recording, got an empty recorder"):
        recorder.calls("aten.topk.default")
    with recorder.capture():
        torch.topk(torch.randn(5), 2)
    for use in (lambda: call.get("largest"), lambda: call.set_({"largest": False})):
        with pytest.raises(RuntimeError, match="expected the recording that the call was found in"):
            use()
