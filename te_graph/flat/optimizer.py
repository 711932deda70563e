"""An optimizer over this rank's part of flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from te_graph import _C
from te_graph.common.gradient_state import flat_of
from te_graph.flat.flat_buffer import FlatBuffer, gradient_of
from te_graph.flat.optimizer_state import flattened, load_state, whole_states

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters

# They treat each element by itself, so a part of a parameter is stepped as the whole would be.
_ELEMENT_WISE = frozenset(
    (
        *("torch.optim.adadelta.Adadelta", "torch.optim.adagrad.Adagrad", "torch.optim.adam.Adam"),
        *("torch.optim.adamax.Adamax", "torch.optim.adamw.AdamW", "torch.optim.asgd.ASGD", "torch.optim.nadam.NAdam"),
        *("torch.optim.radam.RAdam", "torch.optim.rmsprop.RMSprop", "torch.optim.rprop.Rprop", "torch.optim.sgd.SGD"),
    )
)


@dataclass(frozen=True)
class Segment:
    """What this rank steps of one parameter.

    Attributes:
        gradient: of the parameter.
        begin, end: elements of it, in the order of its memory.
        master: [end - begin], what the optimizer steps: float32, the parameter's own memory if that is of float32.
        data: [end - begin], the parameter's own memory.
        grad: [end - begin], the gradient's.
    """

    parameter: Tensor
    gradient: _C.FlatGradient
    begin: int
    end: int
    master: nn.Parameter
    data: Tensor
    grad: Tensor

    @property
    def is_copied(self) -> bool:
        """Whether ``master`` is a copy."""
        return self.master.dtype != self.data.dtype

    def set_grad(self) -> None:
        """Give ``master`` the gradient of this step, or none."""
        if self.gradient.is_missing():
            self.master.grad = None
            return
        elsewhere = self.gradient.elsewhere()
        grad = self.grad if elsewhere is None else flattened(elsewhere, self.parameter)[self.begin : self.end]
        self.master.grad = grad.to(self.master.dtype)


class FlatOptimizer(Optimizer):
    """What ``FlatParameters.optimizer`` returns: an optimizer of torch over the parts of parameters of this rank.

    ``param_groups`` hold the parameters themselves, and whatever is set there, as schedulers do, holds for the step.
    ``state`` is that of the parts. ``step`` takes gradients from where they lie, ``.grad`` or ``main_grad``, steps
    float32 masters, writes parameters, and gathers them over the ranks. ``zero_grad`` drops gradients of both kinds.

    Attributes:
        flat: the FlatParameters.
        inner: the optimizer of the masters.
    """

    def __init__(
        self,
        flat: FlatParameters,
        cls: type[Optimizer],
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        elementwise: bool,
    ) -> None:
        _check_class(cls, elementwise)
        self.flat = flat
        if params is None:
            params = [parameter for _, parameter in reversed(list(flat.named_parameters()))]
        super().__init__(params, dict(defaults))
        for group in self.param_groups:
            for parameter in group["params"]:
                if flat_of(parameter) is not flat:
                    raise ValueError(
                        f"FlatParameters.optimizer: expected parameters of {flat!r}, got one of shape "
                        f"{list(parameter.shape)} that is not in it: give it an optimizer of its own"
                    )
        self._segments = [_segments_of(flat, group["params"]) for group in self.param_groups]
        self._by_parameter: dict[int, list[Segment]] = {}
        for segment in (segment for segments in self._segments for segment in segments):
            self._by_parameter.setdefault(id(segment.parameter), []).append(segment)
        self._gradients = _C.FlatGradients(
            [gradient_of(parameter) for group in self.param_groups for parameter in group["params"]]
        )
        self.inner = cls(
            [
                {**_settings(group), "params": [segment.master for segment in segments]}
                for group, segments in zip(self.param_groups, self._segments, strict=True)
            ],
            **defaults,
        )
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_settings(inner))
        self.defaults, self.state = self.inner.defaults, self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients.

        Args:
            closure: computes gradients and returns a loss, before the step.

        Returns:
            What ``closure`` returns.

        Raises:
            RuntimeError: a parameter has moved, or was frozen.

        Stream and capture: what the optimizer's own step does (capture with ``fused=True`` or ``capturable=True``), a
            copy where parameters are not of float32, and the collectives. Allocates gradients of float32 where they are
            of another dtype. No host sync of its own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flat.check_places()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(group))
        for name in ("found_inf", "grad_scale"):
            if hasattr(self, name):
                setattr(self.inner, name, getattr(self, name))
        segments = [segment for group in self._segments for segment in group]
        self._gradients.note_read()
        for segment in segments:
            segment.set_grad()
        self.inner.step()
        copied = [segment for segment in segments if segment.is_copied]
        if copied:
            torch._foreach_copy_([one.data for one in copied], [one.master for one in copied])
        for segment in segments:
            segment.master.grad = None
        self.flat.gather_parameters()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters of ``param_groups``, ``main_grad`` included: the next backward stores.

        Args:
            set_to_none: taken for compatibility; what is dropped is not read again.
        """
        self._gradients.drop()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state of whole parameters in their shapes, ``master`` among it where parameters are not
        of float32. All ranks call it; what they get can be loaded by any number of ranks, and by the optimizer's own
        class.

        Stream and capture: allocates, synchronizes.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        segments = [self._by_parameter.get(id(parameter), []) for parameter in parameters]
        packed, first = [], 0
        for group in self.param_groups:
            numbers = list(range(first, first := first + len(group["params"])))
            packed.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        return {
            "state": whole_states(parameters, segments, self.inner.state, self.flat.sharding_group),
            "param_groups": packed,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class, at any number of ranks, or of the optimizer's own class returned.

        Load the parameters before: without ``master`` masters are copies of them.

        Raises:
            ValueError: it has other groups.
        """
        given = state_dict["param_groups"]
        if [len(group["params"]) for group in given] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("FlatOptimizer.load_state_dict: expected groups of as many parameters as there are here")
        for group, loaded in zip(self.param_groups, given, strict=True):
            group.update(_settings(loaded))
            numbers = zip(group["params"], loaded["params"], strict=True)
            for parameter, number in numbers:
                for segment in self._by_parameter.get(id(parameter), []):
                    load_state(segment, state_dict["state"].get(number, {}), self.inner.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; once the optimizer is made, an error: the masters are laid out by then.

        Raises:
            RuntimeError: the optimizer is made.
        """
        if hasattr(self, "inner"):
            raise RuntimeError("FlatOptimizer: expected all groups when it is made, got another one later")
        super().add_param_group(param_group)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_class(cls: type[Optimizer], elementwise: bool) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"FlatParameters.optimizer: expected a class of torch.optim.Optimizer, got {cls!r}")
    if not elementwise and f"{cls.__module__}.{cls.__qualname__}" not in _ELEMENT_WISE:
        raise ValueError(
            f"FlatParameters.optimizer: expected an optimizer that treats each element by itself, such as AdamW, got "
            f"{cls.__name__}: it would be stepped with parts of parameters. If it is one, pass elementwise=True"
        )


def _segments_of(flat: FlatParameters, parameters: list[Tensor]) -> list[Segment]:
    places = {
        id(parameter): (buffer, number) for buffer in flat.buffers for number, parameter in enumerate(buffer.parameters)
    }
    segments = []
    for parameter in parameters:
        buffer, number = places[id(parameter)]
        segments.extend(_segments_in(buffer, number, flat.own_parts(buffer)))
    return segments


def _segments_in(buffer: FlatBuffer, number: int, parts: list[tuple[int, int]]) -> list[Segment]:
    """Those of parameter ``number`` of ``buffer`` that lie in ``parts``."""
    parameter, gradient, offset = buffer.parameters[number], buffer.gradients[number], buffer.layout.offsets[number]
    segments = []
    for part_begin, part_end in parts:
        begin, end = max(part_begin, offset), min(part_end, offset + parameter.numel())
        if begin >= end:
            continue
        data = buffer.data[begin:end]
        master = nn.Parameter(data if data.dtype in (torch.float32, torch.float64) else data.float())
        segments.append(
            Segment(parameter, gradient, begin - offset, end - offset, master, data, buffer.grads[begin:end])
        )
    return segments
