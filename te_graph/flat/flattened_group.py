"""Parameters of a module that lie behind each other in one flat parameter, and where the module has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.gradient_state import flat_of, gradient_state, has_gradient_hooks, main_grad_of


@dataclass(frozen=True)
class FlattenedGroup:
    """What a flat parameter was made of.

    Attributes:
        names: of the parameters in the module, of tied ones the first.
        places: of each parameter, all modules that have it, each with the name by which it does and with the names of
            all its parameters, in their order.
        shapes: of the parameters.
    """

    names: tuple[str, ...]
    places: tuple[tuple[tuple[nn.Module, str, tuple[str, ...]], ...], ...]
    shapes: tuple[torch.Size, ...]

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [shape.numel() for shape in self.shapes]

    @property
    def offsets(self) -> list[int]:
        """The first element of each parameter."""
        return list(itertools.accumulate(self.numels, initial=0))[:-1]

    def split(self, data: Tensor) -> list[Tensor]:
        """Views [...] of ``data`` [n], one for each parameter; their derivative is one concat."""
        self._check_numel(data)
        return [part.view(shape) for part, shape in zip(data.split(self.numels), self.shapes, strict=True)]

    def parts(self, data: Tensor) -> list[Tensor]:
        """Leaves [...] over the memory of ``data`` [n], that share its version counter: unlike results of a split they
        may be written."""
        self._check_numel(data)
        places = zip(self.offsets, self.numels, self.shapes, strict=True)
        return [data.detach()[begin : begin + numel].view(shape).detach() for begin, numel, shape in places]

    def own_storages(self, data: Tensor) -> list[Tensor]:
        """As ``parts``, [...] each, with storages that are theirs alone, over the memory of ``data`` [n]."""
        places = zip(self.offsets, self.parts(data), strict=True)
        return [_C.view_in_buffer(data.detach(), begin, part) for begin, part in places]

    def _check_numel(self, data: Tensor) -> None:
        if data.numel() != sum(self.numels):
            raise ValueError(
                f"FlattenParamsWrapper: expected {sum(self.numels)} elements for {self.names[0]} and those behind it, "
                f"got {data.numel()}"
            )

    def install(self, views: Sequence[Tensor]) -> None:
        """Make ``views`` [...] attributes of the modules, where the parameters were."""
        for view, places in zip(views, self.places, strict=True):
            for owner, name, _ in places:
                setattr(owner, name, view)

    def remove(self) -> None:
        """Take the attributes away."""
        for places in self.places:
            for owner, name, _ in places:
                delattr(owner, name)

    def register(self, values: Sequence[Tensor], requires_grad: bool) -> list[nn.Parameter]:
        """Make parameters over ``values`` [...] take the places of the attributes, in the order they always had."""
        self.remove()
        parameters = [nn.Parameter(value, requires_grad=requires_grad) for value in values]
        for parameter, places in zip(parameters, self.places, strict=True):
            for owner, name, order in places:
                owner.register_parameter(name, parameter)
                for one in (one for one in order if one in owner._parameters):
                    owner._parameters[one] = owner._parameters.pop(one)
        return parameters

    @torch.no_grad()
    def fetch(self, registered: Sequence[nn.Parameter], data: Tensor) -> None:
        """Copy what has taken the place of ``registered`` [...] since into ``data`` [n]."""
        for before, part, places in zip(registered, self.parts(data), self.places, strict=True):
            for owner, name, _ in places:
                now = owner._parameters[name]
                if now is not before or now.data_ptr() != part.data_ptr():
                    part.copy_(now)


def groups_of(module: nn.Module, param_list: Any) -> list[tuple[FlattenedGroup, list[Tensor]]]:
    """The groups of ``param_list``, each with its parameters [...].

    Args:
        param_list: parameters of ``module``, or lists of them; None: all parameters, in one group.

    Raises:
        ValueError, TypeError: a parameter cannot be flattened, or not with the others; nothing has been changed.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    group_of: dict[int, int] = {}
    for number, members in enumerate(_lists_of(param_list, named)):
        for parameter in members:
            if id(parameter) not in names:
                raise ValueError(
                    "FlattenParamsWrapper: expected param_list to have parameters of the module, got another one, of "
                    f"shape {list(parameter.shape)}"
                )
            if group_of.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"FlattenParamsWrapper: expected each parameter in one list of param_list, got "
                    f"{names[id(parameter)]} in two"
                )
    found: dict[int, tuple[list[str], list[Any], list[Tensor]]] = {}
    for name, parameter in named:
        if id(parameter) not in group_of or names[id(parameter)] != name:
            continue
        of_group = found.setdefault(group_of[id(parameter)], ([], [], []))
        for values, value in zip(of_group, (name, tuple(_places_of(module, parameter)), parameter), strict=True):
            values.append(value)
    groups = []
    for _, (own_names, places, parameters) in sorted(found.items()):
        _check(own_names, parameters)
        shapes = tuple(parameter.shape for parameter in parameters)
        groups.append((FlattenedGroup(tuple(own_names), tuple(places), shapes), parameters))
    return groups


def _lists_of(param_list: Any, named: list[tuple[str, Tensor]]) -> list[list[Tensor]]:
    if param_list is None:
        return [[parameter for _, parameter in named]]
    lists = list(param_list)
    if lists and isinstance(lists[0], Tensor):
        lists = [lists]
    for members in lists:
        for one in members if isinstance(members, Iterable) else [members]:
            if not isinstance(one, Tensor):
                raise TypeError(
                    f"FlattenParamsWrapper: expected param_list to have parameters, or lists of them, got "
                    f"{type(one).__name__}"
                )
    return [list(members) for members in lists]


def _places_of(module: nn.Module, parameter: Tensor) -> Iterator[tuple[nn.Module, str, tuple[str, ...]]]:
    for owner in module.modules():
        for name, one in owner._parameters.items():
            if one is parameter:
                yield owner, name, tuple(owner._parameters)


def _check(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Raise unless ``parameters`` [...], called ``names``, can be one flat parameter."""
    first = parameters[0]
    for name, parameter in zip(names, parameters, strict=True):
        _check_kind(name, parameter)
        for what in ("dtype", "device", "requires_grad"):
            if getattr(parameter, what) != getattr(first, what):
                raise ValueError(
                    f"FlattenParamsWrapper: expected all parameters of a group to be of one {what}, got {name} of "
                    f"{getattr(parameter, what)} and {names[0]} of {getattr(first, what)}: pass lists of parameters "
                    "that are alike as param_list=[[...], [...]]"
                )


def _check_kind(name: str, parameter: Tensor) -> None:
    if is_flattened(parameter):
        raise ValueError(
            f"FlattenParamsWrapper: {name} is the flat parameter of another FlattenParamsWrapper: pass the other "
            "parameters as param_list"
        )
    if type(parameter) is not nn.Parameter:
        _refuse(name, type(parameter).__name__)
    if parameter.layout != torch.strided:
        _refuse(name, f"one of layout {parameter.layout}")
    if parameter.is_inference():
        _refuse(name, "an inference tensor")
    if flat_of(parameter) is not None:
        raise ValueError(
            f"FlattenParamsWrapper: {name} is in a FlatParameters already, and needs no views: leave out the wrapper, "
            "or give FlatParameters what it returns"
        )
    if gradient_state(parameter).users:
        raise ValueError(f"FlattenParamsWrapper: {name} is a parameter of a graphed callable: wrap before that is made")
    if has_gradient_hooks(parameter):
        raise ValueError(f"FlattenParamsWrapper: {name} has hooks, which would be lost: put them on the flat parameter")
    if parameter.grad is not None or main_grad_of(parameter) is not None:
        raise ValueError(f"FlattenParamsWrapper: {name} has a gradient, which would be lost: set it to None before")


def _refuse(name: str, got: str) -> NoReturn:
    raise TypeError(f"FlattenParamsWrapper: expected {name} to be a dense torch.nn.Parameter, got {got}")


def is_flattened(parameter: Tensor) -> bool:
    """Whether ``parameter`` [...] is the flat parameter of a FlattenParamsWrapper."""
    return gradient_state(parameter).is_flattened
