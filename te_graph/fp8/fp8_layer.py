"""What layers that compute in FP8 have in common, beside the module that they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.before_capture import ReadyForCapture
from te_graph.common.fake_mode import is_in_fake_mode
from te_graph.common.gradient_state import has_gradient_hooks
from te_graph.fp8.autocast import current_region, is_in_region
from te_graph.fp8.layer_state import has_state, load_state_, state_of
from te_graph.fp8.loaded_state import are_equal, mark_again, marked_members, recorded_mark_of
from te_graph.fp8.marked_state import MarkedState
from te_graph.fp8.member import Member
from te_graph.fp8.membership import member_of
from te_graph.fp8.weight_mark import is_marked, mark_of_plain, plain_weight


class FP8Layer(ReadyForCapture):
    """Stands behind a class of modules among the bases of a layer: Python lets a module get and lose the layer's class
    where the module's comes first, and where this one has no slots. So what ``torch.nn.Module`` has, too, a layer names
    in its own body.
    """

    __slots__ = ()
    inputs_first = False
    fuse_wgrad_accumulation = False
    fp8: Member | None = None
    fp8_evaluated: Member | None = None
    loaded_state: MarkedState | None = None
    has_told_misfit = False

    def make_ready_for_capture(self) -> None:
        """Become a member of the present scope, with a cast weight, whose amax replays record. Where it has trained in
        another one, which what is captured may not lead to, it stays there: it can evaluate here, unless it does so in
        another one yet, and train after a call. So it stays where a call that trains has led it in a capture's first
        steps, of which nothing else is left: blocks enter regions of their own."""
        region, weight = current_region(), plain_weight(self)
        if region is not None and region.enabled and weight is not None:
            member = self.fp8
            is_led_elsewhere = member is not None and member.scope is not region.scope_on(weight.device)
            is_free = not is_led_elsewhere or not (member.trains or member.was_called_to_train)
            if is_free or (member.trains and self.fp8_evaluated is None):
                member_of(self, region, is_free and torch.is_grad_enabled())
        for member in (self.fp8, self.fp8_evaluated):
            if member is not None and weight is not None and member.fits(weight):
                member.own_weight = weakref.ref(weight)
                member.scope.cast_weights(member, records_amax=False)

    def adds_to_main_grad(self, parameter: Tensor) -> bool:
        """So it is of the weight, [out, in] or [in, out], in FP8, where no hook asks for its gradient."""
        is_weight = parameter is plain_weight(self)
        return is_weight and self.fuse_wgrad_accumulation and is_in_region() and not has_gradient_hooks(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has scales and FP8 weights of its own, if it has values."""
        is_kept = has_state(self) and not is_in_fake_mode()
        loaded = MarkedState(state_of(self), None) if is_kept else None
        return {**self.__dict__, "fp8": None, "fp8_evaluated": None, "loaded_state": loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose weight is that with which the state goes."""
        nn.Module.__setstate__(self, state)
        if self.loaded_state is not None:
            load_state_(self, self.loaded_state.state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Layer:
        """A weight that moves to other memory, with its values, is still the one that a loaded state goes with."""
        weight = plain_weight(self)
        before = weight.detach() if is_marked(recorded_mark_of(self), weight) else None
        members = marked_members(self)
        unwritten = None if before is None else _C.WeightMark(before)
        nn.Module._apply(self, fn, recurse)
        if before is not None and unwritten.is_of_storage(before):
            weight = plain_weight(self)
            if mark_of_plain(weight) is not None and are_equal(before, weight):
                mark_again(self, members)
        return self
