"""The scales, and the FP8 copies of weights, of all modules that compute by one recipe."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.member import Member, WeightCast
from te_graph.fp8.optimizer_step_watch import optimizer_step_watch
from te_graph.fp8.recipes import DelayedScaling, Recipe
from te_graph.fp8.scale_block import FORWARD, Block, Columns, Role, is_shared
from te_graph.fp8.weight_casts import cast_weights_, repeat_casts_
from te_graph.fp8.weight_mark import is_marked

_FIRST_CAPACITY = 32


class ScalingScope(OwnObject):
    """All modules that compute by one recipe on one device, in one amax reduction group.

    One launch updates all scales of a block and a direction. Columns of modules that have not run stay as they are, so
    it does not matter which modules share a scope, but for weights that change twice between two forwards of their
    module.

    Args:
        recipe: how scales are found.
        device: where the modules' weights are.
        group: whose ranks share the scales, or None.

    Attributes:
        blocks: of columns, in the order of their creation.
    """

    def __init__(self, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.recipe, self.device, self.group = recipe, device, group
        self.blocks: list[Block] = []
        # In the order of their creation, which ranks of a group have in common, as that of collectives.
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._count = 0  # of all members so far
        self._lock = threading.RLock()  # of what add() changes
        optimizer_step_watch().watch(self)

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from histories."""
        return isinstance(self.recipe, DelayedScaling)

    @property
    def members(self) -> list[Member]:
        """What the modules have here, in the order of their first calls."""
        with self._lock:
            return list(self._members.values())

    @property
    def weights(self) -> list[Tensor]:
        """[out, in] or [in, out] each, those that the modules have now."""
        return [weight for member in self.members if (weight := member.weight) is not None]

    def add(self, module: FP8Module) -> Member:
        """The member of ``module`` from now on, whose scales are 1 and histories empty."""
        with self._lock:
            return self._add(module)

    def _add(self, module: FP8Module) -> Member:
        block = next((block for block in self.blocks if block.free), None)
        if block is None:
            with torch.inference_mode(False), torch.no_grad():
                capacity = _FIRST_CAPACITY << len(self.blocks)
                block = Block(len(self.blocks), capacity, self.recipe, self.device, self.group)
            self.blocks.append(block)
        with torch.inference_mode(False), torch.no_grad():
            member = Member(module, self, Columns(block))
            member.clear_scales_()  # another module may have had the columns
        self._members[self._count] = member
        self._count += 1
        return member

    def update(self) -> None:
        """Update the scales of what forwards have cast since the last time."""
        for block in self.blocks:
            if block.tables[FORWARD] is not None:
                block.tables[FORWARD].update_if_due()

    def cast_weights(
        self, member: Member, records_amax: bool, *, given: Tensor | None = None, is_before: bool = False
    ) -> None:
        """Cast the weight of ``member``, and all others of its thread that have changed since they were cast.

        A weight whose amax was recorded, which is as it was then, is cast as then, and not recorded again: other
        weights may have taken its place in an evaluation (``torch.func.functional_call``), or a state says so that was
        loaded. Inside a capture, which gets here only where it wrote the weight itself, the cast is captured, and so
        done at each replay.

        Args:
            member: about to be called.
            records_amax: whether the call records amaxes, for delayed scaling. A weight that was cast without is cast
                again. Of modules that only evaluate none is recorded.
            given: the weight of ``member``, [out, in] or [in, out]; None: that which the module has now.
            is_before: not to be captured, as before what is captured, or warmed up.
        """
        records_amax, is_captured = records_amax and self.is_delayed, _C.HostSteps.is_noting() and not is_before
        member.thread = threading.get_ident()  # what others train may be in the middle of a step
        stale = self._stale_weights(member, given, records_amax, is_captured)
        # Before the casts: what another thread writes meanwhile is to be cast again.
        marks = [_C.WeightMark(weight) for _, weight in stale]
        repeated = [_repeats(*pair, records_amax, is_captured) for pair in stale]
        changed = [pair for pair, repeats in zip(stale, repeated, strict=True) if not repeats]
        with torch.inference_mode(False), torch.no_grad():
            self._begin_casts(changed, records_amax, is_captured)
        cast_weights_(changed, self.recipe, self.group, records_amax)
        repeat_casts_([pair for pair, repeats in zip(stale, repeated, strict=True) if repeats], are_recorded=True)
        done = None if is_captured else _C.CastDone(self.device)
        for (other, weight), mark, repeats in zip(stale, marks, repeated, strict=True):
            is_recorded = records_amax or repeats or not self.is_delayed
            _, number = other.products.recorded if repeats else (None, None)
            if is_captured:
                other.products.note_captured_cast(weight, records_amax and not repeats, is_recorded, number)
                continue
            if records_amax and not repeats:
                other.end_cast(Role.WEIGHT)
                other.has_weight_scale = True
            other.products.note_cast(mark, is_recorded, done, number)

    def _stale_weights(
        self, member: Member, given: Tensor | None, records_amax: bool, is_captured: bool
    ) -> list[tuple[Member, Tensor]]:
        """``member`` and others of its thread, with their weights [out, in] or [in, out], as far as these have to be
        cast; where the cast is captured, those of what the capture calls, and of trainings those that it writes, which
        eager execution records as well. ``given``: the weight of ``member``; None: that of the module."""
        return [
            (other, weight)
            for other in self.members
            if (other is member or (other.thread == member.thread and (other.trains or not records_amax)))
            and (weight := given if given is not None and other is member else other.weight) is not None
            and (other is member or not is_captured or _belongs_to_capture(other, weight, records_amax))
            and not other.products.is_cast(weight, records_amax)
            and other.fits(weight)
        ]

    def _begin_casts(self, pairs: Sequence[tuple[Member, Tensor]], records_amax: bool, is_captured: bool) -> None:
        """Before casts of weights, [out, in] or [in, out], by the scales of their columns."""
        # All updates first: one between would forget what was noted of casts that are still to come.
        for member, _ in pairs:
            if is_captured:
                member.products.begin_captured_cast(records_amax)
            elif records_amax:
                member.begin_cast(Role.WEIGHT)
        for member, _ in pairs:
            member.take_scales_()

    def cast_in_backward(self, member: Member, weight: Tensor) -> None:
        """Cast ``weight`` [out, in] or [in, out] for a call that a backward makes which is captured by itself.

        Raises:
            RuntimeError: under delayed scaling.
        """
        if self.is_delayed:
            raise RuntimeError(
                "te_graph.Linear: expected a layer that the backward of a graphed callable calls inside of "
                "torch.utils.checkpoint, which notes by which scales the forward called it, under delayed scaling, got "
                "a call of another autograd.Function: use torch.utils.checkpoint or te_graph.Float8CurrentScaling, or "
                "leave the layer eager"
            )
        if member.products.is_cast(weight, False):
            member.products.note_repeated_cast(weight, None)
        else:
            self.cast_weights(member, records_amax=False, given=weight)

    def cast_again(self, member: Member, weight: Tensor, cast: WeightCast) -> None:
        """Let the FP8 copies of ``member`` be what ``cast`` made of ``weight`` [out, in] or [in, out]. Nothing is
        recorded, and it is then as though no other cast had come since.

        Raises:
            RuntimeError: that would have to be captured, under delayed scaling.
        """
        is_captured = _C.HostSteps.is_noting()
        if member.has_cast(weight, cast):
            if is_captured:
                member.products.note_repeated_cast(weight, cast.scale)
            return
        if is_captured and self.is_delayed:  # it would count as recorded, of which replays know nothing
            raise RuntimeError(
                "te_graph.Linear: expected a layer that has one weight from its call in a checkpoint to the backward, "
                "which computes it again, in what is captured under delayed scaling, got one that was called with "
                "another weight in between (torch.func.functional_call): call it so behind the backward, or outside "
                "of the capture, or use te_graph.Float8CurrentScaling"
            )
        mark = _C.WeightMark(weight)
        if self.is_delayed:
            with torch.inference_mode(False), torch.no_grad():
                member.block.weight_scale[member.number : member.number + 1].copy_(cast.scale)
            repeat_casts_([(member, weight)], are_recorded=False)
        else:
            cast_weights_([(member, weight)], self.recipe, self.group, records_amax=False)
        # A parameter that has been written since is yet to be recorded; what hooks compute is as it was.
        is_same = is_marked(cast.recorded, weight) or not isinstance(weight, nn.Parameter)
        is_recorded = not self.is_delayed or (cast.recorded is not None and is_same)
        if is_captured:
            member.products.note_captured_cast(weight, False, is_recorded, cast.number)
            return
        if self.is_delayed and is_recorded:
            with torch.inference_mode(False), torch.no_grad():
                member.block.recorded_weight_scale[member.number : member.number + 1].copy_(cast.scale)
        member.products.note_cast(mark, is_recorded, _C.CastDone(self.device), cast.number)


def _belongs_to_capture(member: Member, weight: Tensor, records_amax: bool) -> bool:
    """Whether what is captured calls ``member``, or writes its ``weight``, [out, in] or [in, out], before a cast that
    ``records_amax``."""
    is_written = member.kept_mark is not None and not is_marked(member.kept_mark, weight)
    return member.products.is_noted() or (records_amax and is_written)


def _repeats(member: Member, weight: Tensor, records_amax: bool, is_captured: bool) -> bool:
    """Whether the cast of ``weight`` [out, in] or [in, out], which ``member`` is to have, is that which was recorded.

    A graph casts by one rule at each replay. So an evaluation, before which the weight may or may not have changed,
    always goes by the present scale, also eagerly, but where the layer has yet to train with the state that it has;
    and a call that trains repeats the cast where the same graph has called the layer with that weight before.
    """
    may_repeat = (records_amax and member.products.is_noted()) if is_captured else (records_amax or not member.trains)
    return may_repeat and member.is_recorded(weight)


class ScalingScopes(OwnObject):
    """The scopes of a process; one is there for as long as a module is in it, for ever where ranks share it: when the
    last module goes is up to each one's garbage collector."""

    def __init__(self) -> None:
        self._scopes: weakref.WeakValueDictionary[tuple[Any, ...], ScalingScope] = weakref.WeakValueDictionary()
        self._shared: list[ScalingScope] = []
        self._lock = threading.RLock()  # of what find() changes
        self._remembering: Counter[int] = Counter()  # how often each thread is in remembering_first_states()

    def find(self, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None) -> ScalingScope:
        """The scope of these, made if there is none."""
        key = (recipe, device, group)
        with self._lock:
            scope = self._scopes.get(key)
            if scope is None:
                scope = self._scopes[key] = ScalingScope(recipe, device, group)
                if is_shared(recipe, group):
                    self._shared.append(scope)
            return scope

    def all(self) -> list[ScalingScope]:
        """Those that there are, in the order of their creation."""
        with self._lock:
            return list(self._scopes.values())

    @contextlib.contextmanager
    def remembering_first_states(self) -> Iterator[None]:
        """Members that this thread makes inside remember their first state."""
        thread = threading.get_ident()
        self._remembering[thread] += 1
        try:
            yield
        finally:
            self._remembering[thread] -= 1

    def remembers_first_states(self) -> bool:
        """Whether this thread is inside."""
        return self._remembering[threading.get_ident()] > 0

    def update(self) -> None:
        """Update the scales of all scopes in which forwards have recorded amaxes."""
        for scope in self.all():
            scope.update()


scaling_scopes = ScalingScopes()  # one for the process: modules of several models share a launch
