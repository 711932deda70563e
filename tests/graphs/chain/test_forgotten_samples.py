"""What a chain was warmed up with is let go of before it is captured, on the recorder and on a GPU."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import te_graph
from te_graph.graphs.capture.callable_capture import CallableCapture


class Pair(nn.Module):
    """Its second argument is not what the one before it returns."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, device=device)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # x, y: [3, 5]
        return self.linear(x) * y, y + 1


@pytest.mark.parametrize(("kind", "goes", "stays"), [(nn.Linear, 2 + 1, 1), (Pair, 2 + 2, 2 + 2)])
def test_samples_in_whose_place_results_are_read_are_gone_before_the_capture(device, kind, goes, stays, monkeypatch):
    layers = [nn.Linear(5, 5, device=device) if kind is nn.Linear else Pair(device) for _ in range(3)]
    sample = tuple(torch.randn(3, 5, device=device, requires_grad=True) for _ in range(1 + (kind is Pair)))
    forgotten, kept, alive = [], [], []
    forget, capture = CallableCapture.forget_samples, CallableCapture.capture_forward

    begun, begin = [], CallableCapture.link_to

    def linking(one: CallableCapture, predecessor: CallableCapture, everything: bool) -> None:
        begun.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in predecessor.sample_results)
        begin(one, predecessor, everything)

    def noting(one: CallableCapture) -> None:
        tensors = [(number in one.links, tensor) for number, tensor in enumerate(one.samples)]
        tensors += [(True, tensor) for tensor in one.sample_results]
        for is_forgotten, tensor in tensors:
            (forgotten if is_forgotten else kept).append(StorageWeakRef(tensor.untyped_storage()))
        del tensors, tensor
        forget(one)

    def looking(one: CallableCapture, pool: object) -> None:
        alive.append([sum(not each.expired() for each in group) for group in (begun, forgotten, kept)])
        capture(one, pool)

    monkeypatch.setattr(CallableCapture, "link_to", linking)
    monkeypatch.setattr(CallableCapture, "forget_samples", noting)
    monkeypatch.setattr(CallableCapture, "capture_forward", looking)
    te_graph.make_graphed_callables(tuple(layers), (sample,) * 3, chain=True, show_progress=False)
    assert len(begun) == 2 * len(sample)  # results that were read in place
    assert (len(forgotten), len(kept)) == (goes, stays)  # samples of all but the first, and results of the last one
    assert alive == [[0, 0, stays]] * 3
