"""An optimizer over this rank's part of flat parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.gradient_state import flat_of
from te_graph.common.opaque import opaque
from te_graph.common.uncopyable import Uncopyable
from te_graph.flat.flat_buffer import gradient_of
from te_graph.flat.optimizer_state import PartStates, check_shapes, load_part, settings_of, whole_states
from te_graph.flat.segments import ParameterVersions, segments_of
from te_graph.flat.zeros import set_to_zero_, zero_flat_grads

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters
    from te_graph.flat.sharded_state import ShardedState

# They treat each element by itself, so a part of a parameter is stepped as the whole would be.
_ELEMENT_WISE = frozenset(
    (
        *("torch.optim.adadelta.Adadelta", "torch.optim.adagrad.Adagrad", "torch.optim.adam.Adam"),
        *("torch.optim.adamax.Adamax", "torch.optim.adamw.AdamW", "torch.optim.asgd.ASGD", "torch.optim.nadam.NAdam"),
        *("torch.optim.radam.RAdam", "torch.optim.rmsprop.RMSprop", "torch.optim.rprop.Rprop", "torch.optim.sgd.SGD"),
    )
)


class FlatOptimizer(Uncopyable, Optimizer):
    """What ``FlatParameters.optimizer`` returns: an optimizer of torch over the parts of parameters of this rank.

    ``param_groups`` hold the parameters themselves, and whatever is set there, as schedulers do, holds for the step.
    ``state[parameter]`` is that of this rank's part. ``step`` takes gradients from where they lie, ``.grad`` or
    ``main_grad``, steps float32 masters, writes parameters, and gathers them over the ranks. ``zero_grad`` drops
    gradients of both kinds. What is written into a parameter of lower precision, as ``load_state_dict`` of the model
    does, is read by the next step, not by a captured one: call ``read_parameters`` before.

    Attributes:
        flat: the FlatParameters.
        inner: the optimizer of the masters.
        trained: of each group, the parameters [...] that are flat; the others are frozen, and passed over.
        segments: of each group, the parts of its parameters that this rank steps.
        is_scaled_over_ranks: it is being stepped by a ``FlatGradScaler``.
    """

    copy_advice = "make one by FlatParameters.optimizer, and load this one's state_dict()"
    is_scaled_over_ranks = False

    def __init__(
        self,
        flat: FlatParameters,
        cls: type[Optimizer],
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        elementwise: bool,
    ) -> None:
        _check_class(cls, elementwise)
        self.flat, self._arguments = flat, defaults
        if params is None:
            params = flat.parameters
        super().__init__(params, dict(defaults))
        _check_members(flat, self.param_groups)
        self.trained = [[one for one in group["params"] if flat_of(one) is flat] for group in self.param_groups]
        self.segments = [segments_of(flat, parameters) for parameters in self.trained]
        self._all_segments = [segment for segments in self.segments for segment in segments]
        self._copied = [segment for segment in self._all_segments if segment.is_copied]
        self._gradients = _C.FlatGradients([gradient_of(parameter) for parameter in self._parameters()])
        self.inner = cls(
            [
                {**settings_of(group), "params": [segment.master for segment in segments]}
                for group, segments in zip(self.param_groups, self.segments, strict=True)
            ],
            **defaults,
        )
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(settings_of(inner))
        self.defaults = self.inner.defaults
        self.state = PartStates(self._members(), self._all_segments, self.inner)
        trained = set(map(id, self._parameters()))
        self._frozen = [one for one in self._members() if id(one) not in trained]
        self._of_frozen: dict[Tensor, dict[str, Any]] = {}  # what was loaded for these, whose training may go on later
        self._before_trial: dict[Tensor, dict[str, Any]] | None = None
        self._versions = ParameterVersions(self._copied)

    @torch.no_grad()
    @opaque
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients.

        Args:
            closure: computes gradients and returns a loss, before the step.

        Returns:
            What ``closure`` returns.

        Raises:
            RuntimeError: a parameter has moved, or was frozen; gradients have come since the last reduction, sharded or
                with a ``gradient_scale``; or, sharded, one was set by hand where none was.

        Stream and capture: what the optimizer's own step does (capture with ``capturable=True``, on a CPU with
            ``fused=True``), a copy where parameters are not of float32, and the collectives. Allocates gradients of
            float32 where they are of another dtype. No host sync of its own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_eager = not is_captured(self.flat.buffers[0].data.device)
        is_trial = is_eager and not self.state.are_made and self._is_trial()
        self.flat.reducer.check_gradients("FlatOptimizer.step", are_zeros=is_trial)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(settings_of(group))
        for name in ("found_inf", "grad_scale"):
            setattr(self.inner, name, getattr(self, name, None))
        self.end_trial()
        if is_eager:
            if self._versions.have_changed():
                self.read_parameters()
            if is_trial:
                self._before_trial = {master: copy.deepcopy(state) for master, state in self.inner.state.items()}
        self._settle_()
        for segment in self._all_segments:
            segment.set_grad()
        self.inner.step()
        if self._copied:
            torch._foreach_copy_([one.data for one in self._copied], [one.master for one in self._copied])
        for segment in self._all_segments:
            segment.master.grad = None
        self.flat.gather.run_()
        self._gradients.note_stepped()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(settings_of(inner))  # which an optimizer may count in
        self.state.are_made = True
        if is_eager:
            self._versions.note()
        return loss

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters of ``param_groups``, ``main_grad`` included: the next backward stores.
        Also of frozen ones, and of all that are no longer flat.

        Args:
            set_to_none: False: set those that are there to zero instead; the next step has momentum and decay act.
        """
        self.flat.reducer.finish_failed_backward()
        if self.flat.reducer.is_closed or any(one.grad is not None or flat_of(one) is not None for one in self._frozen):
            super().zero_grad(set_to_none)
            zero_flat_grads(self._members(), set_to_none)
            return
        if set_to_none:
            self._gradients.drop()
            return
        set_to_zero_(self.flat, self._parameters(), self._gradients)

    @contextlib.contextmanager
    def own_gradients(self, op: str) -> Iterator[list[Tensor]]:
        """For ``op``: the gradients that are there, [...] each, which may be changed meanwhile; of those in the buffers
        the parts of this rank."""
        self.flat.reducer.check_gradients(op)
        self._settle_()
        found = []
        for segment in self._all_segments:
            if not segment.gradient.is_missing():
                elsewhere = segment.gradient.elsewhere()
                found.append(segment.grad if elsewhere is None else elsewhere)
        yield found
        self._gradients.note_written()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by ``GradScaler.step``, before all else: whether ``step`` unscales, and skips, by ``grad_scale`` and
        ``found_inf``."""
        is_parted = any(group.size() > 1 for group in self.flat.parting_groups)
        if not self.is_scaled_over_ranks and (is_parted or any(one.has_main_grads for one in self.flat.buffers)):
            where = "in part on each rank" if is_parted else "in main_grad"
            raise RuntimeError(
                f"GradScaler.step: expected gradients that are all in .grad, got those of a FlatParameters {where}: "
                "make a te_graph.FlatGradScaler instead, which looks for infinities there"
            )
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state of whole parameters in their shapes, ``master`` among it where parameters are not
        of float32. All ranks call it; what they get can be loaded by any number of ranks, and by the optimizer's own
        class. Each rank has all of it then: ``sharded`` is for what is too large for that.

        Raises:
            RuntimeError: sharded, and another rank does not call it, within the timeout of the group or two minutes.

        Stream and capture: allocates, synchronizes.
        """
        self.flat.wait_for_parameters()
        self.flat.meet("FlatOptimizer.state_dict")
        states = self.state
        whole = whole_states(self._parameters(), self._all_segments, self.inner, self.flat.sharding_group)
        self.state = {**whole, **self._of_frozen}
        try:
            return super().state_dict()
        finally:
            self.state = states

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class, at any number of ranks, or of the optimizer's own class returned.

        Load the parameters before: without ``master`` masters are copies of them.

        Raises:
            ValueError: it has other groups, or is of other parameters.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("FlatOptimizer.load_state_dict: expected groups of as many parameters as there are here")
        keys = {
            id(parameter): key
            for group, given in zip(self.param_groups, groups, strict=True)
            for parameter, key in zip(group["params"], given["params"], strict=True)
        }
        states = [state_dict["state"].get(keys[id(one.parameter)], {}) for one in self._all_segments]
        for segment, state in zip(self._all_segments, states, strict=True):
            check_shapes(segment, state)
        self.flat.wait_for_parameters()
        # What has no states, as of an optimizer that has not stepped, leaves them to be made.
        are_made = bool(state_dict["state"])
        given = state_dict["state"]
        self._of_frozen = {one: copy.deepcopy(given[keys[id(one)]]) for one in self._frozen if keys[id(one)] in given}
        self.load_parts(groups, list(map(load_part, self._all_segments, states)), are_made)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def sharded(self) -> ShardedState:
        """This, for ``torch.distributed.checkpoint``: each rank writes and reads its parts alone, by the names of the
        parameters, at any number of ranks::

            dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=path)
            dcp.load({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=path)
        """
        # Imported here: torch.distributed.checkpoint takes as long as te_graph.
        from te_graph.flat.sharded_state import ShardedState

        return ShardedState(self, self._arguments)

    def load_parts(
        self, groups: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]], are_made: bool = True
    ) -> None:
        """Take settings and states.

        Args:
            groups: settings of each group.
            parts: the state of each segment's master, in the order of ``segments``; empty: it has none.
            are_made: there are states, on whichever rank.
        """
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings_of(given)))
        first, packed = 0, []
        for group, segments in zip(self.param_groups, self.segments, strict=True):
            packed.append({**settings_of(group), "params": list(range(first, first := first + len(segments)))})
        states = {number: part for number, part in enumerate(parts) if part}
        # By the class itself, which knows on which device and of which dtype it wants what.
        self.inner.load_state_dict({"state": states, "param_groups": packed})
        self._before_trial, self.state.are_made = None, are_made
        self._versions.note()

    @torch.no_grad()
    def read_parameters(self) -> None:
        """Let float32 masters have the values of parameters of lower precision, where these are not their own, rounded.

        Stream and capture: allocates.
        """
        self.flat.wait_for_parameters()
        for segment in self._copied:
            segment.read_parameter()

    def end_trial(self) -> None:
        """Forget the states that a step without an effect has made: they were to be loaded into.

        ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` of torch.distributed.checkpoint call ``step`` of
        an optimizer without a state with zeros in each ``.grad`` and a learning rate of 0.
        """
        if self._before_trial is not None:
            self.inner.state.clear()
            self.inner.state.update(self._before_trial)
            self._before_trial = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; once the optimizer is made, an error: the masters are laid out by then.

        Raises:
            RuntimeError: the optimizer is made.
        """
        if hasattr(self, "inner"):
            raise RuntimeError("FlatOptimizer: expected all groups when it is made, got another one later")
        super().add_param_group(param_group)

    def _settle_(self) -> None:
        """Called before gradients are read: what autograd has left in ``.grad`` becomes ``main_grad``."""
        self._gradients.note_read()
        for buffer in self.flat.buffers:
            buffer.settle_()

    def _members(self) -> list[Tensor]:  # [...] each
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _parameters(self) -> list[Tensor]:  # [...] each
        return [parameter for parameters in self.trained for parameter in parameters]

    def _is_trial(self) -> bool:
        rates = [group["lr"] for group in self.param_groups if "lr" in group]
        if any((isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0 for rate in rates):
            return False
        elsewhere = [grad for _, grad in self._gradients.elsewhere() if grad.numel() > 0]
        # What has no elements lies nowhere.
        count = sum(parameter.numel() > 0 for parameter in self._parameters())
        return len(elsewhere) == count and not any(grad.any() for grad in elsewhere)


def _check_members(flat: FlatParameters, groups: Sequence[dict[str, Any]]) -> None:
    """Raise unless all parameters of ``groups`` are those of ``flat``, or frozen ones beside them."""
    for number, group in enumerate(groups):
        places = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
        for name, parameter in zip(group.get("param_names", places), group["params"], strict=True):
            if flat_of(parameter) is not flat and parameter not in flat.frozen:
                raise ValueError(
                    f"FlatParameters.optimizer: expected parameters of {flat!r}, got {name} of shape "
                    f"{list(parameter.shape)} that is not in it: give it an optimizer of its own"
                )
    flat.frozen.check()


def _check_class(cls: type[Optimizer], elementwise: bool) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"FlatParameters.optimizer: expected a class of torch.optim.Optimizer, got {cls!r}")
    if not elementwise and f"{cls.__module__}.{cls.__qualname__}" not in _ELEMENT_WISE:
        raise ValueError(
            f"FlatParameters.optimizer: expected an optimizer that treats each element by itself, such as AdamW, got "
            f"{cls.__name__}: it would be stepped with parts of parameters. If it is one, pass elementwise=True"
        )
