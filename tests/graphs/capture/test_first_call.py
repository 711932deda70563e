"""What only the first call of a module does: with the values of its arguments it is refused, as the capture's are not
those of training; what depends on shapes alone may stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import replays
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Sets(nn.Module):
    """[3, 4] -> [3, 4]: its first call makes `state`."""

    def __init__(self, make: Callable[[Tensor], Tensor | float]) -> None:
        super().__init__()
        self.state = None
        self._make = make

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if self.state is None:
            self.state = self._make(x.detach())
        return x * self.state


class Initialises(nn.Module):
    """[3, 4] -> [3, 4]: its first call writes a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.is_initialised = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if not self.is_initialised:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.is_initialised = True
        return x + self.bias


class Averages(nn.Module):
    """[3, 4] -> [3, 4]: its first call makes zeros, and each one updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        with torch.no_grad():
            if self.state is None:
                self.state = torch.zeros(4, device=x.device)
            self.state.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.state


class Fills(nn.Module):
    """[3, 4] -> [3, 4]: its first call fills a buffer, which a capture undoes, and sets a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.is_filled = False

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if not self.is_filled:
            self.table.copy_(torch.arange(4.0, device=x.device).sin())
            self.is_filled = True
        return x + self.table


class FillsBesideTable(Fills):
    """[3, 4] -> [3, 4]: a tensor that it keeps says that the buffer is filled."""

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if self.is_filled is False:
            self.table.copy_(torch.arange(4.0, device=x.device).sin())
            self.is_filled = torch.ones(4, device=x.device)
        return x * self.is_filled + self.table


class FillsLazily(Fills):
    """[3, 4] -> [3, 4]: the tensor that it keeps was nowhere before."""

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        if not hasattr(self, "ones"):
            self.table.copy_(torch.arange(4.0, device=x.device).sin())
            self.ones = torch.ones(4, device=x.device)
        return x * self.ones + self.table


class Codebook(nn.Module):
    """[3, 4] -> [3, 4]: its first call initialises what each call updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.is_initialised = False

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        with torch.no_grad():
            if not self.is_initialised:
                self.mean.copy_(x.mean(0))
                self.is_initialised = True
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


BY_VALUES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a parameter": (Initialises, "writes bias by"),
    "an average": (Averages, "makes state of"),
    "a buffer that is filled": (Fills, r"writes table and sets is_filled \(from False to True\)"),
    "a buffer beside a tensor": (FillsBesideTable, "writes table and sets is_filled"),
    "a buffer beside a new tensor": (FillsLazily, r"writes table and sets ones \(set to a tensor\)"),
    "a codebook": (Codebook, r"writes mean and sets is_initialised \(from False to True\)"),
    "a tensor": (lambda: Sets(lambda x: x.std()), "makes state of"),
    "a parameter made": (lambda: Sets(lambda x: nn.Parameter(x.mean(0))), "makes state of"),
    "random numbers": (lambda: Sets(lambda x: torch.randn(4, device=x.device)), "makes state of"),
    "a count": (lambda: Sets(lambda x: float(x.abs().nonzero().shape[0])), "reads values of its arguments"),
    "a number": (lambda: Sets(lambda x: x.std().item()), r"reads values of its arguments and sets state \(from None"),
}
BY_SHAPES: dict[str, Callable[[Tensor], Tensor | float]] = {
    "a table": lambda x: torch.arange(4, device=x.device).type_as(x).cos(),
    "a mask": lambda x: torch.ones_like(x).tril(),
    "zeros": lambda x: x.new_zeros(4) + 1,
    "a number": lambda x: float(x.shape[0]),
}


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


@pytest.mark.parametrize(("kind", "words"), BY_VALUES.values(), ids=BY_VALUES)
def test_what_depends_on_values_is_refused_and_undone(device: str, kind: Callable, words: str) -> None:
    module, x = kind().to(device), batch(device)
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    state = [value.clone() for value in module.state_dict().values()]
    with pytest.raises(RuntimeError, match=f"{words}.*: a capture would do it with those of a sample"):
        make_graphed_callables(module, (batch(device),))
    assert {name: value for name, value in vars(module).items() if not name.startswith("_")} == before
    assert_bitwise_equal(list(module.state_dict().values()), state)
    module(x)
    make_graphed_callables(module, (batch(device),))
    module(x)
    assert replays(module) == 1


@pytest.mark.parametrize("kind", [Initialises, Averages])
def test_a_second_capture_with_real_data_leaves_it_to_an_eager_call(device: str, kind: Callable) -> None:
    modules = [nn.Sequential(nn.Linear(4, 4)).to(device) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    make_graphed_callables(modules[0], (batch(device),), on_mismatch="capture")
    for module in modules:
        module.append(kind().to(device))
    for _ in range(3):
        x = batch(device)
        assert_bitwise_equal(modules[0](x), modules[1](x))


@pytest.mark.parametrize("make", BY_SHAPES.values(), ids=BY_SHAPES)
def test_what_depends_on_shapes_stays(device: str, make: Callable) -> None:
    module, x = Sets(make), batch(device)
    make_graphed_callables(module, (batch(device),))
    assert_bitwise_equal(module(x), x * make(x))
    assert replays(module) == 1


def test_running_statistics_are_no_first_call(device: str) -> None:
    module = nn.BatchNorm1d(4).to(device)
    make_graphed_callables(module, (batch(device),))
    module(batch(device))
    assert replays(module) == 1 and module.num_batches_tracked == 1


class Kept:
    last: Tensor | None = None  # []


KEPT: dict[str, object] = {}


class Keeps(nn.Module):
    """[3, 4] -> [3, 4]: leaves what it computes outside."""

    def __init__(self, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._keep = keep

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self._keep(x.square().mean())
        return x * 2


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda value: setattr(Kept, "last", value), "last"),
        (lambda value: KEPT.__setitem__("loss", value.detach()), "KEPT"),
        (lambda value: KEPT.setdefault("all", []).append(value), "KEPT"),
    ],
    ids=["class", "dict", "list"],
)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_tensor_that_is_left_outside_is_refused(device: str, keep: Callable, name: str, max_in_flight: int) -> None:
    KEPT.clear()
    with pytest.raises(RuntimeError, match=rf"{name}"):
        make_graphed_callables(Keeps(keep), (batch(device),), max_in_flight=max_in_flight)
