"""What passes out of a failed capture: exceptions of the callable with a note, what CUDA says in words of ours."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor, nn

from te_graph import CaptureError, graphed, make_graphed_callables
from te_graph.graphs.tracing.explanations import Notes, explained

BARE = "CUDA error: operation not permitted when stream is capturing"


def leaf(device: str) -> Tensor:  # [5]
    return torch.randn(5, device=device, requires_grad=True)


def fail(error: Exception) -> None:
    raise error


IN_FAIL = f"{__file__}:{fail.__code__.co_firstlineno + 1} in fail"


def notes_of(error: BaseException, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Before Python 3.11 they are in the log."""
    in_log = [record.message.partition(": ")[2] for record in caplog.records if record.levelno == logging.WARNING]
    return getattr(error, "__notes__", in_log)


class Picky(nn.Module):
    """Raises in the call of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls, self.number = iter(range(1, 100)), number

    def forward(self, x: Tensor) -> Tensor:  # [5] -> [5]
        if next(self.calls) == self.number:
            raise KeyError("mine")
        return x * 2


@pytest.mark.parametrize(("number", "what"), [(1, "warm-up"), (2, "warm-up"), (3, "warm-up"), (4, "capture")])
def test_an_exception_passes_with_a_note_that_names_the_callable(device, number, what, caplog):
    with pytest.raises(KeyError, match="mine") as caught:
        samples = ((leaf(device),), (leaf(device),))
        make_graphed_callables((nn.Identity(), Picky(number)), samples, ignore_attributes=("calls",))
    line = Picky.forward.__code__.co_firstlineno + 2
    note = f"raised in the {what} of callable 1 (Picky), at {__file__}:{line} in forward"
    assert notes_of(caught.value, caplog) == [note]


def test_an_exception_in_the_capture_of_a_graphed_function_is_that_of_a_call_as_it_is(device):
    hidden = threading.Lock()  # whose state is not compared

    def picky(x: Tensor) -> Tensor:  # [5] -> [5]
        if hidden.locked():
            raise KeyError("mine")
        return x * 2

    step, x = graphed(picky), torch.ones(5, device=device)
    step(x)
    with hidden, pytest.raises(KeyError, match="mine") as caught:
        step(x)
    assert getattr(caught.value, "__notes__", []) == []
    assert sum(step.info()["eager_calls"].values()) == 2


def test_errors_that_name_the_callable_already_get_no_note(caplog):
    with pytest.raises(RuntimeError) as caught, explained("layer", "the warm-up"):
        fail(RuntimeError("layer: too large"))
    assert notes_of(caught.value, caplog) == []


@pytest.mark.parametrize("label", ["a", "layer"])
def test_a_label_is_told_from_the_words_of_an_error(label):
    with pytest.raises(CaptureError) as caught, explained(label, "the capture", Notes()):
        fail(CaptureError("aten.item.default cannot be captured, see layer"))
    assert str(caught.value) == f"{label}: aten.item.default cannot be captured, see layer"


def test_where_exceptions_take_no_notes_the_log_tells(caplog):
    class Old(Exception):
        add_note = None  # as before Python 3.11

    with pytest.raises(Old), explained("layer", "the warm-up"):
        fail(Old())
    assert [record.message for record in caplog.records] == [f"Old: raised in the warm-up of layer, at {IN_FAIL}"]


@pytest.mark.parametrize("words", ["CUDA error: an illegal memory access was encountered", "out of memory"])
def test_errors_that_are_not_about_captures_stay_what_they_are(words, caplog):
    error = torch.AcceleratorError(words)
    with pytest.raises(torch.AcceleratorError) as caught, explained("layer", "the capture", Notes()):
        fail(error)
    assert caught.value is error
    assert notes_of(error, caplog) == [f"raised in the capture of layer, at {IN_FAIL}"]


class CaptureOfMine(RuntimeError):
    pass


def test_errors_about_captures_that_are_not_of_torch_stay_what_they_are():
    with pytest.raises(CaptureOfMine, match="no capture"), explained("layer", "the capture", Notes()):
        fail(CaptureOfMine("no capture"))


def test_errors_about_captures_that_nothing_was_noted_for_keep_their_words():
    error = torch.AcceleratorError(f"{BARE}\nSearch for `cudaErrorStreamCaptureUnsupported'")
    with pytest.raises(CaptureError) as caught, explained("layer", "the capture", Notes()):
        fail(error)
    assert str(caught.value) == f"layer: {BARE}; at {IN_FAIL}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.AcceleratorError(BARE), f"one of a, b cannot be captured: {BARE}; at {IN_FAIL}"),
        (RuntimeError("step() cannot be captured"), f"step() cannot be captured; at {IN_FAIL}"),
    ],
)
def test_errors_with_words_of_their_own_keep_them(error, words):
    notes = Notes(operators={IN_FAIL: {"a": None, "b": None}, "elsewhere": {"c": None}})
    with pytest.raises(CaptureError) as caught, explained("layer", "the capture", notes):
        fail(error)
    assert str(caught.value) == f"layer: {words}"
