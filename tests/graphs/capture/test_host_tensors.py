"""A CPU tensor that a callable on a GPU uses is refused by name: replays would go on with its value of the capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_graph import CaptureError, make_graphed_callables
from te_graph.graphs.capture.capture_checks import check_devices
from te_graph.graphs.tracing.explanations import WarmUpWatch


class Reads(nn.Module):
    """Uses tensors that stay on the CPU: [3, 4] -> [...]."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.use, self.scale, self.places = use, torch.tensor(2.0), torch.tensor([2])

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


USES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "an operand": (lambda module, x: x * module.scale, "aten.mul.Tensor of scale"),
    "a number": (lambda module, x: torch.add(x, x, alpha=module.scale), "_local_scalar_dense.default of scale"),
    "item()": (lambda module, x: x * module.scale.item(), "_local_scalar_dense.default of scale"),
    "tolist()": (lambda module, x: x[:, module.places.tolist()[0]], "Tensor.tolist of places"),
    "numpy()": (lambda module, x: x * float(module.places.numpy()[0]), "Tensor.numpy of places"),
    "where to split": (lambda module, x: x.tensor_split(module.places, 1)[0], "torch.tensor_split of places"),
    "work on the host": (lambda module, x: x * (module.scale + 1), "aten.add.Tensor of scale"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", USES)
def test_cpu_tensors_from_outside_are_refused_in_captures_on_a_gpu(case):
    use, what = USES[case]
    module = Reads(use)
    with pytest.raises(CaptureError, match=f"Reads: .*{what} cannot be captured: it uses a CPU tensor from outside"):
        make_graphed_callables(module, (torch.randn(3, 4, device="cuda", requires_grad=True),))
    assert module(torch.ones(3, 4, device="cuda")).is_cuda


@pytest.mark.gpu
def test_numbers_made_inside_and_pinned_memory_that_is_copied_are_used_by_replays_on_a_gpu():
    pinned = torch.full((4,), 2.0).pin_memory()

    def scaled(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * torch.tensor(3.0) * pinned.to("cuda", non_blocking=True)

    x = torch.ones(3, 4, device="cuda", requires_grad=True)
    graphed = make_graphed_callables(scaled, (x,))
    assert torch.equal(graphed(x), torch.full_like(x, 6))
    torch.cuda.synchronize()
    pinned.fill_(5)
    assert torch.equal(graphed(x), torch.full_like(x, 15))


@pytest.mark.parametrize("case", USES)
def test_a_watch_for_a_gpu_finds_cpu_tensors_from_outside(case):
    use, what = USES[case]
    module, x = Reads(use), torch.randn(3, 4)
    watch = WarmUpWatch(torch.device("cuda", 0), [x])
    with watch:
        module(x)
    words = what.rpartition(" of ")[0]
    with pytest.raises(CaptureError, match=f"Reads: .*{words} cannot be captured: it uses a CPU tensor from outside"):
        check_devices("Reads", torch.device("cuda", 0), [], watch)
    check_devices("Reads", torch.device("cpu"), [], watch)


def test_a_watch_for_a_gpu_lets_numbers_pass_that_are_made_inside():
    x, device = torch.randn(3, 4), torch.device("cuda", 0)
    watch = WarmUpWatch(device, [x])
    with watch:
        _ = x * torch.tensor(2.0) * torch.tensor([3]).tolist()[0]
    check_devices("Reads", device, [], watch)
