"""The state of a FlatOptimizer for torch.distributed.checkpoint, by names and parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_graph.flat.optimizer_state import MASTER, settings_of
from te_graph.flat.segments import Segment
from te_graph.flat.tensor_part import TensorPart

if TYPE_CHECKING:
    from te_graph.flat.optimizer import FlatOptimizer


class ShardedState:
    """What ``FlatOptimizer.sharded`` returns, a ``Stateful`` of torch.distributed.checkpoint.

    A file has ``state.<name of the parameter>.<key>`` for each key that the optimizer keeps, None where a parameter has
    no state yet, and ``param_groups``.
    """

    def __init__(self, optimizer: FlatOptimizer, defaults: dict[str, Any]) -> None:
        """Of ``optimizer``, whose class was given ``defaults``."""
        self._optimizer, self._defaults = optimizer, defaults

    def state_dict(self) -> dict[str, Any]:
        """States over the optimizer's own memory: to be written, or to be read into.

        Stream and capture: allocates; steps an optimizer of the same class over two elements, to see what it keeps.
        """
        self._optimizer.end_trial()
        self._optimizer.flat.wait_for_parameters()
        states = {}
        for group, segments in zip(self._optimizer.param_groups, self._optimizer.segments, strict=True):
            samples: dict[torch.dtype, dict[str, Any]] = {}
            for segment in segments:
                dtype = segment.master.dtype
                if dtype not in samples:
                    samples[dtype] = self._sample(group, segment.master)
                states[segment.name] = self._state_of(segment, samples[dtype])
        return {"state": states, "param_groups": self._groups()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned once it has been read into.

        Raises:
            ValueError: the parameters of a group have different settings there, or none.
        """
        given = {name: group for group in state_dict["param_groups"] for name in group["params"]}
        groups = [_common_settings(group, given) for group in self._groups()]
        segments = [segment for of_group in self._optimizer.segments for segment in of_group]
        self._optimizer.load_parts(
            groups, [_part_of(segment, state_dict["state"][segment.name]) for segment in segments]
        )

    def _groups(self) -> tuple[dict[str, Any], ...]:
        """A tuple is one entry of a file, where a list would be many."""
        names = {id(parameter): name for name, parameter in self._optimizer.flat.named_parameters()}
        return tuple(
            {**settings_of(group), "params": [names[id(parameter)] for parameter in trained]}
            for group, trained in zip(self._optimizer.param_groups, self._optimizer.trained, strict=True)
        )

    def _sample(self, group: dict[str, Any], master: Tensor) -> dict[str, Any]:
        """The state of a parameter [2] that is stepped once by an optimizer with the settings of ``group``.

        Args:
            master: [...], of its dtype and device.
        """
        parameter = nn.Parameter(master.new_zeros(2))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = type(self._optimizer.inner)([{**settings_of(group), "params": [parameter]}], **self._defaults)
        optimizer.step()
        return dict(optimizer.state.get(parameter, {}))

    def _state_of(self, segment: Segment, sample: dict[str, Any]) -> dict[str, Any]:
        state = self._optimizer.inner.state.get(segment.master, {})
        entries = {key: _entry(segment, state.get(key), sample.get(key)) for key in {**sample, **state}}
        if segment.is_copied:
            entries[MASTER] = _entry(segment, segment.master_now(), None)
        return entries


def _common_settings(group: dict[str, Any], given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Those that all parameters of ``group`` have in groups ``given`` by names."""
    names = group["params"]
    for name in names:
        if name not in given:
            raise ValueError(f"FlatOptimizer: expected a checkpoint with a group that has {name}, got none")
        first, other = settings_of(given[names[0]]), settings_of(given[name])
        if other != first:
            differing = sorted(key for key in {**first, **other} if first.get(key) != other.get(key))
            raise ValueError(
                f"FlatOptimizer: expected a checkpoint with equal settings for the parameters of a group, got other "
                f"{', '.join(differing)} for {name} than for {names[0]}"
            )
    return settings_of(given[names[0]]) if names else group


def _entry(segment: Segment, value: Any, sample: Any) -> Any:
    """What a file gets for ``value``; where that is None, a placeholder of the type of ``sample`` to be read into.

    Args:
        sample: the state of a parameter of two elements under the same key; None: there is none.
    """
    kind = value if sample is None else sample
    if not isinstance(kind, Tensor):
        return value
    is_divided = kind.shape == (segment.master.shape if sample is None else (2,))
    if segment.parameter.dim() > 0 and is_divided:
        return TensorPart(value, segment.parameter, segment.begin, segment.end, kind.dtype)
    # Read into other memory: where reading fails the optimizer has what it had.
    values = None if value is None else value.detach().reshape(-1).clone()
    shape = segment.parameter.shape if is_divided else kind.shape
    return TensorPart(values, torch.empty(shape, device=kind.device), 0, shape.numel(), kind.dtype)


def _part_of(segment: Segment, entries: dict[str, Any]) -> dict[str, Any]:
    """The state of the master of ``segment``, which gets its values."""
    part = {}
    for key, entry in entries.items():
        value = entry
        if isinstance(entry, TensorPart):
            is_divided = entry.shape == segment.parameter.shape
            value = entry.values
            if value is not None:
                value = value.view(segment.master.shape if is_divided else entry.shape)
        if key == MASTER:
            segment.master.data.copy_(value)
        elif value is not None:
            part[key] = value
    return part
