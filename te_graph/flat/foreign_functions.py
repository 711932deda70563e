"""Functions of torch that drop or clip gradients, and know ``.grad`` alone."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from te_graph.common.gradient_parts import GradientParts, OwnGradients
from te_graph.common.gradient_state import expect_whole_gradients, flat_of, main_grad_of
from te_graph.common.loaded_names import replace_in_modules
from te_graph.common.opaque import opaque
from te_graph.flat.zeros import zero_flat_grads
from te_graph.multi_tensor.clip import clip_grad_norm_

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters


@functools.cache
def include_main_grads() -> None:
    """From now on ``zero_grad`` of a module drops ``main_grad`` of flat parameters, too, and torch's clips do not pass
    over it, nor clip by the part of a gradient that this rank has reduced: ``clip_grad_norm_`` of all parameters of a
    ``FlatParameters``, with others beside them or not, is te_graph's, and all else raises.

    torch has no hooks for these. Its clips stay the objects that they are, so that pickles know them by name and
    whoever has bound one before calls the new one: what they wrap is exchanged. ``zero_grad`` is replaced in its class,
    and not in the model: wrappers, whose own it is, and parts of the model have parameters of it as well, and what is
    put on a model is copied and saved with it. What takes its place changes nothing for parameters that are not flat.
    ``get_total_norm`` is given gradients, not parameters, and stays as it is.
    """
    for one in (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
        _exchange(one, _checked)
    _exchange(clip_grad.clip_grad_norm_, _of_all_gradients)
    nn.Module.zero_grad = _with_main_grads(nn.Module.zero_grad)


def _exchange(clip: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``clip``, which torch has wrapped for ``no_grad``, call ``wrap`` of what it calls. One that is not wrapped,
    as another library's in its place, is replaced under every name that a loaded module has for it."""
    names = clip.__code__.co_freevars if inspect.isfunction(clip) else ()
    if "func" in names:
        cell = clip.__closure__[names.index("func")]
        cell.cell_contents = wrap(cell.cell_contents)
    else:
        replace_in_modules({id(clip): wrap(clip)})


def _with_main_grads(zero_grad: Callable[..., None]) -> Callable[..., None]:
    # One that another library has put in its place may ask a module for more.
    knows_parameters_alone = getattr(zero_grad, "__globals__", None) is vars(nn.modules.module)

    @functools.wraps(zero_grad)
    def zero_all_grads(self: nn.Module, set_to_none: bool = True) -> None:
        if torch.compiler.is_compiling() or not knows_parameters_alone:
            zero_grad(self, set_to_none)
            parameters = list(self.parameters())
            if _may_be_elsewhere(parameters):
                zero_flat_grads(parameters, set_to_none)
            return
        walked = _Walked(self)
        zero_grad(walked, set_to_none)
        if walked.hooked:
            zero_flat_grads(walked.hooked, set_to_none)

    return zero_all_grads


class _Walked:
    """Stands in for a module whose parameters are gone through once, for that costs more than all else.

    Attributes:
        hooked: of the parameters [...], those that have hooks, as flat ones do and few others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.hooked: list[Tensor] = []

    def parameters(self) -> Iterator[Tensor]:
        for parameter in self._module.parameters():
            if parameter._backward_hooks is not None:
                self.hooked.append(parameter)
            yield parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Beside(GradientParts):
    """The gradients of a ``FlatParameters`` and, beside them, of parameters [...] that are not flat."""

    def __init__(self, flat: FlatParameters, others: Sequence[Tensor]) -> None:
        self._flat, self._others = flat, others

    @contextlib.contextmanager
    def gradient_parts(self) -> Iterator[OwnGradients]:
        with self._flat.gradient_parts() as own:
            yield own._replace(beside=self._others)


def _of_all_gradients(clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``clip`` by norm."""

    @functools.wraps(clip)
    def clip_all_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        members = _listed(parameters)
        if not members or not all(isinstance(one, Tensor) for one in members):
            return clip(members or parameters, *args, **kwargs)  # which says what it thinks of these
        if _may_be_elsewhere(members):
            flat = _flat_with_all_gradients(members)
            if flat is not None:
                others = [one for one in members if flat_of(one) is None]
                return clip_grad_norm_(_Beside(flat, others), *args, **kwargs)
            _expect_whole(clip, members)
        return clip(members, *args, **kwargs)

    return clip_all_grad_norm_


def _checked(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked_clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        members = _listed(parameters)
        if all(isinstance(one, Tensor) for one in members) and _may_be_elsewhere(members):
            _expect_whole(clip, members)
        return clip(members, *args, **kwargs)

    return checked_clip


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:  # [...] each
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _may_be_elsewhere(parameters: Iterable[Tensor]) -> bool:  # [...] each
    """Whether it has to be asked, at which a compiler breaks its graph, if gradients are elsewhere or in part."""
    return not torch.compiler.is_compiling() or any(main_grad_of(one) is not None for one in parameters)


@opaque
def _flat_with_all_gradients(parameters: Iterable[Tensor]) -> FlatParameters | None:
    """The one ``FlatParameters`` whose gradients, of which some are elsewhere or in part, are among those of
    ``parameters`` [...]: all that it has."""
    given = {id(parameter): parameter for parameter in parameters}
    flats = {flat_of(parameter) for parameter in given.values()} - {None}
    flat = flats.pop() if len(flats) == 1 else None
    if flat is None or not (flat.sharding_group or any(buffer.has_main_grads for buffer in flat.buffers)):
        return None
    for buffer in flat.buffers:
        missing = set(buffer.all_gradients.missing())
        if any(id(one) not in given and number not in missing for number, one in enumerate(buffer.parameters)):
            return None
    return flat


@opaque
def _expect_whole(clip: Callable[..., Any], parameters: Iterable[Tensor]) -> None:  # [...] each
    expect_whole_gradients(
        f"torch.nn.utils.{clip.__name__.lstrip('_')}",
        parameters,
        "clip those of all parameters, by te_graph.clip_grad_norm_(flat, ...)",
    )
