"""What one module has in a scope: its columns, FP8 copies of its weight, and the state that goes into checkpoints."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.capture_state import is_capturing_callables
from te_graph.common.dispatch import bypass_modes
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.marked_state import MarkedState
from te_graph.fp8.scale_block import Columns, Role
from te_graph.fp8.state_form import (
    CAST_SCALE,
    DUE,
    HAS_SCALE,
    HEADER,
    IS_CAST,
    IS_DUE,
    LARGEST,
    LENGTH,
    SCALE,
    new_state,
)
from te_graph.fp8.weight_mark import is_marked, plain_weight

if TYPE_CHECKING:
    from te_graph.fp8.scaling_scope import ScalingScope

WEIGHT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class WeightCast:
    """A cast of a weight, by which it can be made again.

    Attributes:
        number: of the cast among those of its member; one that repeats another has the number of that. None: of a cast
            in a replay.
        scale: a copy, [1]; None under current scaling, where all casts of a weight are alike, and in graphs that hold
            the backward as well.
        recorded: the mark of the weight, if its amax was recorded.
    """

    number: int | None
    scale: Tensor | None
    recorded: _C.WeightMark | None


class Member(OwnObject):
    """What one module has in a scope.

    Args:
        module: not kept alive.
        scope: has the block of ``columns``.
        columns: those of the module.

    Attributes:
        number: of the module in ``block``.
        products: what multiplies.
        own_weight: of the module, before what is captured may have put another one in its place.
        kept_mark: of the weight, before what is captured, or warmed up, may have written it; None: nothing is.
        fuses_wgrad_accumulation: as ``module`` had it.
        first_state: where it is to be put back.
        was_called_to_train: by a call, of which a capture may have put back what it has recorded.
        has_weight_scale: that of the block, where the host knows it; False where only casts in graphs have set it.
        data, transposed: FP8 copies of the weight, as it lies and the other way round: [out, in] and [in, out], or
            [in, out] and [out, in] of a module with ``inputs_first``.
    """

    def __init__(self, module: FP8Module, scope: ScalingScope, columns: Columns) -> None:
        weight, formats = module.weight, scope.recipe.fp8_format
        block, number = columns.block, columns.number
        self.scope, self.block, self.number, self.columns = scope, block, number, columns
        self._module = weakref.ref(module)
        self.own_weight: weakref.ref[Tensor] | None = None
        self.kept_mark: _C.WeightMark | None = None
        self.has_weight_scale = False
        self._untrained_state: MarkedState | None = None
        self.first_state: MarkedState | None = None
        self.was_called_to_train = False
        self._leader: weakref.ref[Member] | None = None
        options = {"dtype": formats.forward_dtype, "device": weight.device}
        self.data = torch.zeros(weight.shape, **options)
        self.transposed = torch.zeros(weight.shape[::-1], **options)
        forward, backward = block.tables
        input_column, weight_column, grad_column = (columns.of(role)[1] for role in Role)
        copies = (self.transposed, self.data) if module.inputs_first else (self.data, self.transposed)
        self.products = _C.LinearProducts(
            *copies,
            block.weight_scale_inv[number, :1],
            module.inputs_first,
            forward,
            input_column,
            weight_column,
            backward,
            grad_column,
            formats.backward_dtype,
            columns,
        )
        self.fuses_wgrad_accumulation = module.fuse_wgrad_accumulation
        if module.fuse_wgrad_accumulation:
            self.products.set_main_grad_of(_main_grad_of)
        self.thread = threading.get_ident()
        # By a weak reference, since what C++ holds is not seen by the garbage collector.
        self.products.set_cast_weights(functools.partial(_cast_weights_of, weakref.ref(self)))
        self.products.set_cast_again(functools.partial(_cast_again_of, weakref.ref(self)))

    @property
    def trains(self) -> bool:
        """Whether the module has trained, or been calibrated, since the member was made or took a state."""
        return self.products.trains

    @property
    def untrained_state(self) -> MarkedState | None:
        """That which it was made with, or took last, of which other scopes may keep more; None once it trains."""
        return None if self.trains else self._untrained_state

    @property
    def recorded_mark(self) -> _C.WeightMark | None:
        """Of the weight when its amax was last recorded, here or as a loaded state says; None: that is not known."""
        mark, _ = self.products.recorded
        return mark

    @property
    def known_mark(self) -> _C.WeightMark | None:
        """Of the weight when its amax was last recorded, here or as the state says that it was made with."""
        return self.recorded_mark if self.untrained_state is None else self.untrained_state.mark

    @property
    def thread(self) -> int:
        """The one that called the module last."""
        return self.products.thread

    @thread.setter
    def thread(self, thread: int) -> None:
        self.products.thread = thread

    @property
    def module(self) -> FP8Module | None:
        """That whose member it is, if it is still there."""
        return self._module()

    @property
    def weight(self) -> Tensor | None:
        """[out, in] or [in, out]: that of the module, if both are still there; none that a property computes."""
        module = self.module
        return None if module is None else plain_weight(module)

    def follow(self, leader: Member) -> None:
        """Compute with the scales of ``leader``, what the same module has in another scope, from now on."""
        self._leader = weakref.ref(leader)

    @property
    def follows(self) -> bool:
        """Whether it computes with scales of another member, or did."""
        return self._leader is not None

    def take_scales_(self) -> None:
        """Have the present scales of the member that this one follows, if it follows one and both are delayed."""
        leader = None if self._leader is None else self._leader()
        if leader is None or not (leader.scope.is_delayed and self.scope.is_delayed):
            return
        leader.products.note_scales_read_elsewhere()
        with torch.inference_mode(False), torch.no_grad(), self.block.without_updates():
            for role in (Role.INPUT, Role.WEIGHT):
                self.history(role)[1].copy_(leader.history(role)[1])
            self.block.has_weight_scale[self.number] = leader.block.has_weight_scale[leader.number]
        self.has_weight_scale = leader.has_weight_scale

    def has_recorded_amax(self) -> bool | None:
        """Whether the amax of the weight was recorded when it was cast; None: it is not cast as it is now."""
        weight = self.weight
        if weight is None or not self.products.is_cast(weight, False):
            return None
        return self.products.has_recorded_amax(weight)

    def forget_cast(self) -> None:
        """Let the weight count as one that has not been cast."""
        self.products.note_cast(_C.WeightMark(), False, None, None)

    def last_cast(self, weight: Tensor) -> WeightCast:
        """Of ``weight`` [out, in] or [in, out]."""
        scale = None
        is_captured = _C.HostSteps.is_noting()
        if self.scope.is_delayed and (not is_captured or is_capturing_callables()):
            # Where calls are repeated, others count operators; a recording sees them.
            hidden = contextlib.nullcontext() if is_captured else bypass_modes()
            with hidden, torch.no_grad():
                scale = self.block.weight_scale[self.number : self.number + 1].clone()
        recorded = _C.WeightMark(weight) if self.products.has_recorded_amax(weight) else None
        return WeightCast(self.products.cast_number, scale, recorded)

    def has_cast(self, weight: Tensor, cast: WeightCast) -> bool:
        """Whether the FP8 copies are what ``cast`` made of ``weight`` [out, in] or [in, out]."""
        is_last = cast.number == self.products.cast_number or not self.scope.is_delayed
        return is_last and self.products.holds(weight)

    def fits(self, weight: Tensor) -> bool:
        """Whether ``weight`` [...] can still be cast into the copies: it may have become anything since."""
        is_dispatched_by_python = torch._C._dispatch_keys(weight).has(torch._C.DispatchKey.Python)
        return (
            not is_dispatched_by_python
            and weight.layout is torch.strided
            and not weight.is_nested
            and weight.dtype in WEIGHT_DTYPES
            and self.data.shape == weight.shape
            and self.data.device == weight.device
            and weight.untyped_storage().nbytes() >= weight.numel() * weight.element_size()
            and not weight.is_inference()
        )

    def history(self, role: Role) -> tuple[Tensor, Tensor]:
        """Views of the history [H] and the scale [1] of the tensor with ``role``; of delayed scaling only."""
        direction, column = self.columns.of(role)
        return self.block.history[direction][:, column], self.block.scale[direction][column : column + 1]

    def captured_tensors(self) -> list[Tensor]:
        return [self.data, self.transposed, *self.block.captured_tensors()]

    def state(self) -> Tensor:
        """A copy of the histories and scales, which ``load_`` takes: [3, n] fp32, n at least 1032, for each ``Role``
        the version of the format, the length of the history, the scale, of the WEIGHT the scale of its
        cast, whether it is as it was then, and whether it has a scale, the largest number of the casts' format (0:
        no amax has given the scale), whether an update is due (1; -1: it is not), and the history.
        """
        length = self.scope.recipe.amax_history_len if self.scope.is_delayed else 0
        state = new_state(self.data.device, length)
        for role in Role if length else ():
            history, scale = self.history(role)
            state[role, SCALE : SCALE + 1] = scale
            state[role, LARGEST] = self._largest(role) * self._is_given(role)
            if self._is_due(role):
                state[role, DUE] = IS_DUE
            state[role, HEADER : HEADER + length] = history
        if length:
            state[Role.WEIGHT, HAS_SCALE] = self.block.has_weight_scale[self.number]
        weight = self.weight
        if length and weight is not None and (self.products.has_recorded_amax(weight) or self.is_recorded(weight)):
            scale = self.block.recorded_weight_scale[self.number : self.number + 1]
            state[Role.WEIGHT, CAST_SCALE : CAST_SCALE + 1] = scale
            state[Role.WEIGHT, IS_CAST] = 1
        return state

    def is_recorded(self, weight: Tensor) -> bool:
        """Whether ``weight`` [out, in] or [in, out] is as it was when its amax was last recorded, here or as a loaded
        state says."""
        return is_marked(self.recorded_mark, weight)

    def load_(self, loaded: MarkedState) -> None:
        """Take histories and scales from a state that ``state()`` returned here or elsewhere.

        One of before the first call empties the histories. Of a longer one the newest amaxes are taken. If the
        weight stays as it is, it is cast with the scale of its cast there, and its amax, which is in the history,
        not recorded again. What ``state()`` returns next is what was loaded. What others give is checked before
        (``check_state``).
        """
        state = loaded.state
        saved = int(state[0, LENGTH])
        self._untrained_state, self.products.trains = loaded if saved else None, False
        if not self.scope.is_delayed:
            return
        if not saved:
            self.clear_scales_()
            self.forget_cast()
            self.products.recorded = None, None
            return
        with self.block.without_updates():
            for role in Role:
                history, scale = self.history(role)
                rows = state[role, HEADER : HEADER + saved].to(history)
                kept = min(len(history), saved) - 1  # beside row 0, what was recorded since the last update
                history.zero_()
                history[:1] = rows[:1]
                history[len(history) - kept :] = rows[saved - kept :]
                scale.copy_(state[role, SCALE : SCALE + 1])
                largest = float(state[role, LARGEST])
                if largest not in (0, self._largest(role)):  # of another format
                    scale.mul_(self._largest(role) / largest)
                # No update before: it would roll what other modules have loaded. Where ranks share the scales, values
                # do not tell whether one is due: those of one rank may be zero.
                if state[role, DUE] != 0:
                    self._set_due(role, bool(state[role, DUE] == IS_DUE))
                elif bool(rows[0].any()):
                    self._set_due(role, True)
        self._set_has_weight_scale(bool(state[Role.WEIGHT, HAS_SCALE]))
        is_cast, cast_scale = bool(state[Role.WEIGHT, IS_CAST]), state[Role.WEIGHT, CAST_SCALE]
        # What is cast here is of no use where the state goes on with a cast by another scale, or will record one.
        is_same = is_cast and self.block.weight_scale[self.number] == cast_scale.to(self.block.weight_scale)
        if not (is_same and self.has_recorded_amax()):
            self.forget_cast()
        self.products.recorded = loaded.mark if is_cast else None, None
        self.block.recorded_weight_scale[self.number] = cast_scale

    def clear_scales_(self) -> None:
        """Histories become empty and scales 1."""
        with self.block.without_updates():
            for role in Role if self.scope.is_delayed else ():
                history, scale = self.history(role)
                history.zero_()
                scale.fill_(1)
                self._set_due(role, False)
        self._set_has_weight_scale(False)

    def mark_again(self, mark: _C.WeightMark | None) -> None:
        """The weight is another tensor, of the same values, and has that ``mark``."""
        before, number = self.products.recorded
        if before is not None:
            self.products.recorded = mark, number
        if self.untrained_state is not None:
            self._untrained_state = MarkedState(self.untrained_state.state, mark)

    def _largest(self, role: Role) -> float:
        """Number of the format of casts with ``role``."""
        formats = self.scope.recipe.fp8_format
        return torch.finfo(formats.backward_dtype if role == Role.GRAD else formats.forward_dtype).max

    def _is_given(self, role: Role) -> Tensor:
        """Whether an amax has given the scale, [] bool; infinite ones leave it at 1. Of a scale of 1 that is known for
        as long as the amax that gives it is in the history, which of length 1 has none but the newest."""
        history, scale = self.history(role)
        return (scale[0] != 1) | (history[1:] == self._largest(role) / 2**self.scope.recipe.margin).any()

    def _set_has_weight_scale(self, value: bool) -> None:
        self.block.has_weight_scale[self.number] = self.has_weight_scale = value

    def _is_due(self, role: Role) -> bool:
        direction, column = self.columns.of(role)
        return self.block.tables[direction].is_due(column)

    def _set_due(self, role: Role, is_due: bool) -> None:
        direction, column = self.columns.of(role)
        self.block.tables[direction].set_due(column, is_due)

    def update_if_due(self) -> None:
        """Update the scales of what has been recorded, as the next casts would."""
        for role in Role:
            self.begin_cast(role)

    def begin_cast(self, role: Role) -> None:
        """Update the scale of the tensor with ``role``, which is about to be cast, if it is due."""
        if self.scope.is_delayed:
            direction, column = self.columns.of(role)
            self.block.tables[direction].begin_cast(column)

    def end_cast(self, role: Role) -> None:
        """Say that the tensor with ``role`` has been cast, and its amax recorded."""
        direction, column = self.columns.of(role)
        self.block.tables[direction].end_cast(column)


def _main_grad_of(weight: Tensor) -> tuple[Tensor, _C.MainGradReset]:
    """The ``main_grad`` of ``weight`` [out, in], and what says that it is to be overwritten."""
    main_grad = main_grad_of(weight)
    if main_grad is None:
        raise RuntimeError(
            "te_graph.Linear: expected weight.main_grad, to which fuse_wgrad_accumulation adds the gradient, got none: "
            "make it, or leave fuse_wgrad_accumulation out (FlatParameters of float32 have none, and .grad is added to)"
        )
    return main_grad, gradient_state(weight).main_grad_reset


def _cast_weights_of(reference: weakref.ref[Member], weight: Tensor, records_amax: bool) -> None:
    """Cast the ``weight`` [out, in] or [in, out] of a member that is about to be replayed, if it is still there."""
    member = reference()
    if member is not None:
        member.scope.cast_weights(member, records_amax, given=weight)


def _cast_again_of(
    reference: weakref.ref[Member], weight: Tensor, scale: Tensor | None, recorded: _C.WeightMark | None
) -> None:
    """Cast ``weight`` [out, in] or [in, out] as before, by ``scale`` [1], for a member whose backward is about to be
    replayed; ``recorded``: as in ``WeightCast``."""
    member = reference()
    if member is None:
        raise RuntimeError(
            "te_graph.Linear: expected a layer that goes by the recipe of its forward until the backward, which "
            "computes it again with a weight that was cast or written in between, got one that has gone, or went on by "
            "another recipe: run the backward before"
        )
    member.scope.cast_again(member, weight, WeightCast(None, scale, recorded))
