"""fairscale's FlattenParamsWrapper, without the concat of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.common.capture_state import is_captured
from te_graph.common.gradient_state import flat_of, gradient_state, main_grad_of
from te_graph.common.opaque import opaque
from te_graph.common.weak_method import weak_method
from te_graph.flat.backward_ends import BackwardEnds
from te_graph.flat.deferred_sync import DeferredSync
from te_graph.flat.flattened_group import groups_of
from te_graph.flat.flattened_module import FlattenedModule
from te_graph.flat.view_gradients import ViewGradients, hand_over, hand_over_at_end

_MADE_ANEW = ("_gradients", "_backwards", "_checked")  # by _begin


class FlattenParamsWrapper(DeferredSync, FlattenedModule):
    """Makes the parameters of a module one flat parameter, or several, which optimizers and reductions work on; the
    module computes with views of it, made anew whenever its memory is another.

    Views by ``split`` have a concat as their derivative, in each backward. With ``optimize_backward_concat=True`` none
    runs: gradients of views are summed in one buffer over all backwards inside ``no_sync``, stored by the first and
    added by others; the next backward outside of it makes that buffer the gradient of the flat parameter, whose hooks
    run then, once, with the whole sum::

        model = te_graph.FlattenParamsWrapper(model, optimize_backward_concat=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for microbatches in loader:
            for number, batch in enumerate(microbatches):
                with model.no_sync() if number + 1 < len(microbatches) else contextlib.nullcontext():
                    loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    Both ways gradients have the same bits: in the dtype of the parameter, the gradient of one backward is added after
    that of the other. Where the flat parameter has a ``main_grad`` (FlatParameters, Megatron-LM), sums are taken there,
    in its dtype: each backward hands its gradient over.

    Names in state dicts are those of the module; ``parameters()`` are the flat ones, and what is not flattened.
    ``te_graph.FlatParameters`` does without views and without a wrapper: parameters stay what they are.

    Args:
        module: mutated: its parameters become attributes, [...] each.
        param_list: parameters of ``module``, or lists of them, of which each becomes one flat parameter; None: all.
            Those of one list are of one dtype and device, all trained or all frozen. Tied ones lie there once.
        flat_param_names: of each list, behind ``flat_param_``; numbers if None.
        ssd_offload: raises; here for the arguments of fairscale.
        ssd_directory: not used.
        optimize_backward_concat: as above.

    Attributes:
        flat_params: the flat parameters, [n] each. ``flat_param`` is the only one.
        module: the wrapped one, where attributes that the wrapper has not are looked up.
        is_flattened: not inside ``unflatten_params``.

    Raises:
        ValueError, TypeError: an argument, or a parameter, is none of the above; nothing has been changed.
        RuntimeError: with ``optimize_backward_concat=True`` a forward of a training or a backward is captured, or a
            backward has ``create_graph=True``.

    Stream and capture: construction and the first backward after a hand-over allocate as many elements as the flat
        parameter has. Does not synchronize. Inference can be captured. Of a training modules inside can, with
        ``optimize_backward_concat=True``, by ``make_graphed_callables`` and ``graph_layers``.

    Source of the semantics: fairscale's FlattenParamsWrapper, #1180; ``no_sync`` counts at the backward here.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[Tensor] | Sequence[Sequence[Tensor]] | None = None,
        flat_param_names: Sequence[str] | None = None,
        ssd_offload: bool = False,
        ssd_directory: str = "",
        optimize_backward_concat: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"FlattenParamsWrapper: expected a module, got {type(module).__name__}")
        if ssd_offload:
            raise ValueError("FlattenParamsWrapper: ssd_offload=True is not offered: flat parameters stay in memory")
        groups = groups_of(module, param_list)
        names = [str(number) for number in range(len(groups))] if flat_param_names is None else list(flat_param_names)
        if len(names) != len(groups) or len(set(names)) != len(names):
            raise ValueError(
                f"FlattenParamsWrapper: expected names, each another, in flat_param_names for {len(groups)} lists of "
                f"parameters, got {names}"
            )
        super().__init__(module, groups, [f"flat_param_{name}" for name in names])
        self.optimize_backward_concat = bool(optimize_backward_concat)
        self._begin()

    @property
    def flat_param(self) -> nn.Parameter:
        """The only flat parameter, [n].

        Raises:
            RuntimeError: there are several, or none.
        """
        flats = self.flat_params
        if len(flats) != 1:
            raise RuntimeError(f"FlattenParamsWrapper.flat_param: expected one flat parameter, there are {len(flats)}")
        return flats[0]

    def hand_over_gradients(self) -> None:
        """Give the flat parameters the gradients that were kept back, as a backward outside of ``no_sync`` does at its
        end: where no last backward is known beforehand, as in pipeline schedules, or where it reaches no view.

        Stream and capture: on the current stream; must not be captured.
        """
        hand_over(self._gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that were kept back are dropped, which ``optimizer.zero_grad()`` does not see.

        Args:
            set_to_none: as torch's.
        """
        for gradients in self._gradients:
            gradients.drop()
        super().zero_grad(set_to_none)

    def _begin(self) -> None:
        begin, end = weak_method(self, "_before_backward"), weak_method(self, "_after_backward")
        self._backwards = BackwardEnds(begin, end)
        self._gradients = [
            ViewGradients(flat, group, self._backwards.enter)
            for flat, group in zip(self.flat_params, self._groups, strict=True)
        ]
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()  # FlatParameters
        for flat in self.flat_params:
            gradient_state(flat).is_handed_over = self.optimize_backward_concat
        super()._begin()

    @opaque
    def _refresh(self) -> None:
        if self.optimize_backward_concat and torch.is_grad_enabled() and self._is_captured():
            raise RuntimeError(
                "FlattenParamsWrapper: expected a training's forward not to be captured: with "
                "optimize_backward_concat=True gradients pass autograd by. Graph what is inside of the module, or use "
                "te_graph.FlatParameters"
            )
        super()._refresh()

    def _is_captured(self) -> bool:
        return bool(self._flats) and is_captured(self._flats[0].device)

    def _source_of(self, flat: Tensor) -> tuple[Any, ...]:
        source = super()._source_of(flat)
        return source[:-1] if self.optimize_backward_concat else source  # leaves outlive writes

    def _make_views(self, number: int) -> list[Tensor]:
        flat = self._flats[number]
        if not (self.optimize_backward_concat and flat.requires_grad):
            return super()._make_views(number)
        views = [part.requires_grad_() for part in self._groups[number].parts(flat)]
        self._gradients[number].watch(views)
        return views

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        if any(gradients.is_pending for gradients in self._gradients):
            raise RuntimeError(
                "FlattenParamsWrapper: expected no conversion while gradients are kept back: call "
                "hand_over_gradients(), or zero_grad() of the wrapper, before"
            )
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in super().__getstate__().items() if name not in _MADE_ANEW}

    def _before_backward(self) -> None:
        if self._is_captured():
            raise RuntimeError(
                "FlattenParamsWrapper: a backward with optimize_backward_concat=True cannot be captured, for a replay "
                "would not know which gradients are there: graph layers, and the function that clips and steps"
            )
        for flat in self._flats:
            owner = flat_of(flat)
            if owner is not None and owner not in self._checked:
                _check_owner(owner)
                self._checked.add(owner)

    def _after_backward(self) -> None:
        for gradients in self._gradients:
            gradients.end_backward()
        due = [one for one in self._gradients if self._syncs or main_grad_of(one.flat) is not None]
        hand_over_at_end([one for one in due if one.is_pending])


def _check_owner(owner: Any) -> None:
    """Raise unless all parameters of ``owner``, a FlatParameters, get their gradients at once."""
    for name, parameter in owner.named_parameters():
        if not gradient_state(parameter).is_handed_over:
            raise RuntimeError(
                "FlattenParamsWrapper: expected a FlatParameters of flat parameters with optimize_backward_concat=True "
                f"alone, got one that has {name}, too: its gradient comes earlier, and would be reduced twice. Make "
                "another FlatParameters for what is in no wrapper, or leave out the wrappers"
            )
