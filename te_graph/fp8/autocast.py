"""Regions in which te_graph's modules compute in FP8."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from te_graph import _C
from te_graph.common.dispatch import is_in_backward
from te_graph.common.fake_mode import is_in_fake_mode
from te_graph.common.fp8_calls import tell_region_by
from te_graph.common.kept_state import keep_by
from te_graph.common.opaque import opaque
from te_graph.fp8.flops import let_flops_be_counted
from te_graph.fp8.kept_scales import scales_kept
from te_graph.fp8.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from te_graph.fp8.region_numbers import region_numbers
from te_graph.fp8.scaling_scope import ScalingScope, scaling_scopes

keep_by(scales_kept)
_log = logging.getLogger("te_graph")


class fp8_autocast(contextlib.ContextDecorator):
    """A region in which ``te_graph.Linear`` multiplies in FP8.

    Backwards run outside of it, as under ``torch.autocast``, and go by what their forwards noted. Of nested regions the
    inner one counts; an outer one that is left before, by a generator that ends, is taken out from around it. An object
    may be entered again, and is a decorator, too. A copy, and what is pickled and loaded elsewhere, is an equal region;
    one of a group is copied with that, and not pickled. Where a training leaves a region and no layer has computed in
    FP8 yet, a warning says so, once.

    Scales of delayed scaling are 1 until the first update (calibrate with a batch before, to begin with others), but
    for weights, whose first casts go by their own amaxes. They are updated when the outermost region is left, or right
    before the tensor is cast again, those of gradients always then: a whole loop in one region trains with the bits of
    a region in each step. Forwards under ``torch.no_grad`` are evaluations, which record nothing, those of checkpoint
    functions other than ``torch.utils.checkpoint`` too.

    Args:
        enabled: False computes in high precision, inside a region that is on, too.
        calibrating: with ``enabled=False``, record amaxes for delayed scaling all the same. Not inside a capture.
        recipe: a ``DelayedScaling`` or ``Float8CurrentScaling``; ``DelayedScaling()`` if None. Equal ones are the same,
            so that one may be made in each step. Another one is in force from the next call of a module on.
        amax_reduction_group: process group whose ranks share the scales of delayed scaling. All of them call the same
            modules in the same order. Columns of scales that a module leaves are not used again there.
        fp8_recipe, fp8_group: older names of the last two.

    Raises:
        TypeError: an argument is of another type, or given by both of its names.
        ValueError: this rank is not in the group.

    Stream and capture: leaving the outermost region launches an update of the scales if a module has recorded
        amaxes in it, and, with a group, a collective; not where gradients are off, but for calibration.
    """

    @opaque
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        *,
        fp8_recipe: Recipe | None = None,
        fp8_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                raise TypeError(f"fp8_autocast: expected {name} to be a bool, got {type(value).__name__}{_hint(value)}")
        for name, old, new in (
            ("recipe", fp8_recipe, recipe),
            ("amax_reduction_group", fp8_group, amax_reduction_group),
        ):
            if old is not None and new is not None:
                raise TypeError(f"fp8_autocast: expected {name} by one of its names, got both")
        self.enabled, self.calibrating = enabled, calibrating
        given = fp8_recipe if recipe is None else recipe
        self.recipe = DelayedScaling() if given is None else given
        if not isinstance(self.recipe, DelayedScaling | Float8CurrentScaling):
            raise TypeError(
                "fp8_autocast: expected recipe to be a te_graph.DelayedScaling or te_graph.Float8CurrentScaling, got "
                f"{type(self.recipe).__name__}"
            )
        self.group = fp8_group if amax_reduction_group is None else amax_reduction_group
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup) and not _is_of_others(self.group):
            raise TypeError(
                "fp8_autocast: expected amax_reduction_group to be a torch.distributed.ProcessGroup, got "
                f"{type(self.group).__name__}"
            )
        if self.group is not None and (_is_of_others(self.group) or dist.get_rank(self.group) < 0):
            raise ValueError("fp8_autocast: expected an amax_reduction_group that this rank is in, got one without it")
        self._begin()

    def _begin(self) -> None:
        """Be a region of this process, in which none has used the object yet."""
        self.number = region_numbers.number_of(self.enabled, self.calibrating, self.recipe, self.group)
        self._scopes: dict[torch.device, ScalingScope] = {}
        let_flops_be_counted()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: without what is this process's, its numbers and scopes, which have locks and memory."""
        return {name: value for name, value in vars(self).items() if name not in ("number", "_scopes")}

    @opaque
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> fp8_autocast:
        """One with the same group: ranks go on sharing scales."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    @opaque
    def __enter__(self) -> fp8_autocast:
        _regions.enter(self)
        return self

    @opaque
    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        outer = _regions.leave(self)
        # What an exception left unfinished is updated where a module is called again; so is what is captured, before
        # its replays, or where an evaluation follows. An evaluation updates nothing, nor does what a backward computes
        # again, on a GPU on a thread of autograd's that does not know of the regions around, nor what has no values.
        is_evaluation = not (torch.is_grad_enabled() or self.calibrating)
        if kind is not None or is_evaluation or is_in_backward() or is_in_fake_mode():
            return
        if _C.HostSteps.is_noting():
            if not any(is_captured for _, is_captured in _regions.entered):
                _C.note_fp8_region_exit(is_inside=outer is not None)
        elif outer is None:
            scaling_scopes.update()
            if self.enabled and region_numbers.note_unused(self.number):
                _log.warning(
                    "fp8_autocast: nothing has computed in FP8: no te_graph.Linear whose features fit was called in "
                    "it, nor a layer that te_graph.convert_to_fp8 converted"
                )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """What runs inside is in the region. Its end is that of no step: it updates no scales, and warns of nothing."""
        _regions.enter(self)
        try:
            yield
        finally:
            _regions.leave(self)

    def scope_on(self, device: torch.device) -> ScalingScope:
        """The scales of this region's recipe and group.

        Args:
            device: where the weights are.

        Returns:
            Their scope, the same for equal regions.
        """
        scope = self._scopes.get(device)
        if scope is None:
            scope = self._scopes[device] = scaling_scopes.find(self.recipe, device, self.group)
        return scope


def _hint(value: Any) -> str:
    """What to write instead of a positional ``value``."""
    return ": give it by name, recipe=..." if isinstance(value, Recipe) else ""


def _is_of_others(group: Any) -> bool:
    """Whether ``group`` is what ``torch.distributed.new_group`` returns on ranks that are not in it."""
    return group is dist.GroupMember.NON_GROUP_MEMBER


class _Regions(threading.local):
    """The regions that a thread is in, outermost first, and whether it entered them inside a capture."""

    def __init__(self) -> None:
        self.entered: list[tuple[fp8_autocast, bool]] = []

    def enter(self, region: fp8_autocast) -> None:
        self.entered.append((region, _C.HostSteps.is_noting()))
        _C.set_fp8_region(region.number)

    def leave(self, region: fp8_autocast) -> fp8_autocast | None:
        """Take out the innermost entry of ``region``, wherever that is: generators leave theirs when they end.

        Returns:
            The region that the thread is in now.
        """
        for position in range(len(self.entered) - 1, -1, -1):
            if self.entered[position][0] is region:
                del self.entered[position]
                outer = current_region()
                _C.set_fp8_region(0 if outer is None else outer.number)
                return outer
        raise RuntimeError(
            "fp8_autocast: expected a region to be left once, by the thread that entered it, got one that this thread "
            "is not in: a generator that others close, for instance, is to enter none around a yield"
        )


_regions = _Regions()


def current_region() -> fp8_autocast | None:
    """The innermost region that this thread is in."""
    return _regions.entered[-1][0] if _regions.entered else None


tell_region_by(current_region)


def is_in_region() -> bool:
    """Whether this thread is in a region that is on."""
    region = current_region()
    return region is not None and region.enabled


def note_call() -> None:
    """Called by modules that compute as the present region says: what is captured does so as well, and is right in
    such regions alone, unless the region began in what is captured; and only where no checkpoint calls it."""
    _C.note_fp8_call(not (_regions.entered and _regions.entered[-1][1]))
