"""The models of the stress test, what a user holds of them, and how two tensors are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_graph.testing import same_bits

WIDTH, BATCH = 6, 4
GRAPHED, EAGER = 0, 1
KINDS = ("plain", "batchnorm", "tied", "dropout")
MOVED = r"moved to other memory"
SINCE_CAPTURE = r".* since capture; call \.te_graph\.reset\(\)"
IN_FLIGHT = (
    r"a forward is called while \d+ earlier ones? still waits? for (?:its|their) backward; "
    r"capture with max_in_flight=\d+"
)
MODIFIED = r"is needed for backward and has been modified by an inplace operation"
ARGUMENTS = r"ValueError: .*expected args\[0\] "


class Layer(nn.Module):
    """A feed-forward layer: [n, WIDTH] -> [n, WIDTH]. What autograd saves differs between the subclasses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batchnorm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3 if kind == "dropout" else 0.0)

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> the same
        return self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class First(Layer):
    """Its result is not saved for the backward."""


class Second(Layer):
    """Its result is saved for the backward."""

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> the same
        return super().forward(x).tanh()


class Third(Layer):
    """It has a residual branch. The branch begins inside: an input that is used twice inside, and outside as well, has
    three gradients, which a replay cannot add in the order in which eager execution meets them."""

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> the same
        hidden = self.norm(x)
        return hidden + self.down(self.drop(F.gelu(self.up(hidden))))


class Stack(nn.Module):
    """The layers; tied: one weight twice inside the second layer, and one in the first and the third."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(kind), Second(kind), Third(kind)])
        if kind == "tied":
            first, second, third = self.layers
            second.down.weight = second.up.weight
            third.up.weight = first.up.weight


@dataclass(frozen=True)
class Operation:
    """One kind of thing that a user may do.

    Attributes:
        run: does it on both sides of a ``stress.World``.
        weight: how often it comes in one round of all operations.
        is_possible: whether it can be done now; it is put off until it can.
    """

    run: Callable[[Any], None]
    weight: int
    is_possible: Callable[[Any], bool] = lambda world: True

    @property
    def name(self) -> str:
        return self.run.__name__


@dataclass(eq=False)
class Hook:
    """A registered hook, the tensors [...] that it has seen, and what has to be held for it to stay."""

    log: list[Tensor | None] = field(default_factory=list)
    handle: Any = None
    anchor: Any = None


@dataclass(eq=False)
class Side:
    """The graphed model or its twin, and what a user would hold of it."""

    model: Stack
    hooks: list[Hook] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


@dataclass(eq=False)
class Call:
    """One layer's part in a pending forward.

    Attributes:
        number: which layer.
        handle: the ``te_graph`` handle whose slot it holds, None when it ran eagerly.
        addresses: of the tensors that the layer used.
        node: the twin's autograd node of what the layer itself made, before its hooks saw it.
        slot: stands for the slot; copies of a call share it.
        is_due: the backward of the pending forward will run through it; else only its slot is in use.
    """

    number: int
    handle: Any
    addresses: list[int]
    node: Any
    is_due: bool = True
    slot: object = field(default_factory=object)


@dataclass(eq=False)
class Pending:
    """A forward whose backward has not run. Tensors come in pairs: graphed, eager.

    Attributes:
        inputs: of the first layer, [n, WIDTH] each.
        outputs: of the last layer, [n, WIDTH] each.
        calls: of layers, in order.
        inner: what the last but one returned, [n, WIDTH] each, where it is held.
        weights: of the loss, [n, WIDTH] each; none for a plain sum.
        uses_inner: the loss depends on ``inner`` as well.
        is_read: a later forward reads the outputs.
        losses: scalars, once they are computed.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    calls: list[Call]
    inner: list[Tensor] | None = None
    weights: list[Tensor] = field(default_factory=list)
    uses_inner: bool = False
    is_read: bool = False
    losses: list[Tensor] | None = None

    def loss(self, side: int) -> Tensor:
        """A scalar of what the results of one side are by now."""
        # Doubled, so that its gradient is dense: it is copied to where it was at capture, as dense as the result was,
        # while eager matrix products of an expanded one may round otherwise.
        loss = (2 * self.outputs[side]).sum()
        if self.weights:
            loss = (self.outputs[side][1:] * self.weights[side][1:]).sum()
        if self.uses_inner and self.inner is not None:
            loss = loss + self.inner[side].square().mean()
        return loss


def refusal_of(action: Callable[[], Any]) -> tuple[Any, str]:
    """The result of ``action`` and "", or None and ``type: message`` of what it raised."""
    try:
        return action(), ""
    except (RuntimeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def circumstances(layer: nn.Module) -> dict[str, Any]:
    """What a replay of ``layer`` takes for granted, by the words with which a change is refused."""
    inner = [module for module in layer.modules() if module is not layer]
    return {
        MOVED: [t.data_ptr() for t in (*layer.parameters(), *layer.buffers())],
        r"changed requires_grad from (True|False)": [p.requires_grad for p in layer.parameters()],
        r"training flag of \w+ is now (True|False)": [module.training for module in inner],
        r"forward hooks of \w+ changed": [len(module._forward_hooks) for module in inner],
    }


def assert_same(name: str, actual: Tensor | None, expected: Tensor | None) -> None:
    """Both None, or tensors [...] of the same dtype, layout and bits."""
    assert (actual is None) == (expected is None), f"{name}: got {actual}, expected {expected}"
    if actual is None:
        return
    facts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (actual, expected)]
    assert facts[0] == facts[1], f"{name}: {facts[0]} is not {facts[1]}"
    assert same_bits(actual, expected), (
        f"{name}: largest difference {(actual.detach() - expected.detach()).abs().max()}"
    )


class Stopped(Exception):
    """Ends the backward of a twin."""


def stop(grads: tuple[Tensor, ...]) -> None:
    raise Stopped


def inner_modules(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if module is not layer]


def generator_state(device: str) -> Tensor:  # [bytes], uint8
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def set_generator_state(device: str, state: Tensor) -> None:  # [bytes], uint8
    torch.cuda.set_rng_state(state) if device == "cuda" else torch.set_rng_state(state)
