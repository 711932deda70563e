"""A module whose parameters are views of flat ones, under its own names in state dicts."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.common.gradient_state import gradient_state
from te_graph.common.opaque import opaque
from te_graph.flat.flattened_group import FlattenedGroup

_MODULE = "_fpw_module"
_MADE_ANEW = ("_views", "_sources", "_flats")  # by _begin


class FlattenedModule(nn.Module):
    """What FlattenParamsWrapper is, but for gradients; made by its constructor, and by ``_begin`` then.

    Attributes:
        flat_param_names: of the flat parameters.
        is_flattened: not inside ``unflatten_params``.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[tuple[FlattenedGroup, Sequence[Tensor]]], names: Sequence[str]
    ) -> None:
        """
        Args:
            module: mutated: the parameters become attributes.
            groups: each with its parameters, [...].
            names: of each.
        """
        super().__init__()
        self.is_flattened = True
        self.flat_param_names = list(names)
        self._groups = [group for group, _ in groups]
        self.add_module(_MODULE, module)
        self.register_load_state_dict_post_hook(_find_module_again)
        for name, (group, parameters) in zip(self.flat_param_names, groups, strict=True):
            data = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
            self.register_parameter(name, nn.Parameter(data, requires_grad=parameters[0].requires_grad))
            group.remove()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._modules[_MODULE]

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The flat parameters, [n] each; none inside ``unflatten_params``."""
        return [self._parameters[name] for name in self.flat_param_names] if self.is_flattened else []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if _MODULE not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make views if the memory of the flat parameters is another, and call the module.

        Args:
            args: of the module, as ``kwargs``.

        Returns:
            What the module returns.
        """
        if self.is_flattened:
            self._refresh()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor | None] | None = None) -> Iterator[None]:
        """While it is open the module has its parameters, over the memory of the flat ones, which the wrapper has not.
        Parameters that are exchanged meanwhile are copied back.

        Args:
            flat_params: [n] each, or None, in the place of the flat parameters meanwhile; nothing is copied back.

        Raises:
            ValueError: one of ``flat_params`` has not as many elements.

        Stream and capture: launches nothing but the copies.
        """
        if not self.is_flattened:
            yield
            return
        values = [group.parts(data) for group, data in zip(self._groups, self._data(flat_params), strict=True)]
        with self._unflattened(values, copies_back=flat_params is None):
            yield

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Views of all parameters, of all flat parameters.

        Args:
            external_data_list: [n] each, of which views are made instead; None: of the flat parameter.

        Returns:
            Views [...], by ``split``.

        Raises:
            ValueError: one has not as many elements as the flat parameter.

        Stream and capture: launches nothing.
        """
        data = self._data(external_data_list)
        return itertools.chain(*(group.split(one) for group, one in zip(self._groups, data, strict=True)))

    def metadata(self, flat_param_idx: int) -> tuple[list[str], list[torch.Size], list[int]]:
        """What lies in a flat parameter.

        Args:
            flat_param_idx: its number.

        Returns:
            Names, shapes and numbers of elements of the parameters.
        """
        group = self._groups[flat_param_idx]
        return list(group.names), list(group.shapes), group.numels

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of the module: names, order and shapes are those without a wrapper. Each parameter has a storage of its
        own over its part of the memory, so that files hold it alone.

        Args:
            args: as torch's, as ``kwargs``.

        Returns:
            As torch's.
        """
        if not self.is_flattened:
            return self.module.state_dict(*args, **kwargs)
        values = [
            group.parts(flat) if flat.is_meta else group.own_storages(flat)
            for group, flat in zip(self._groups, self.flat_params, strict=True)
        ]
        with self._unflattened(values, copies_back=False):
            return self.module.state_dict(*args, **kwargs)

    def flat_state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """The flat parameters, and of the module what is not flattened; ``load_state_dict`` takes it, too.

        Args:
            args: as of ``state_dict``, as ``prefix`` and ``kwargs``.

        Returns:
            As torch's.
        """
        state = self.module.state_dict(*args, prefix=prefix, **kwargs)
        for name, flat in zip(self.flat_param_names, self.flat_params, strict=True):
            state[prefix + name] = flat.detach()
        return state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the module by the names that it has without the wrapper. Torch, which would go on to it by another name,
        does not find it until the load ends (``_find_module_again``)."""
        own = OrderedDict((key[len(prefix) :], one) for key, one in state_dict.items() if key.startswith(prefix))
        own._metadata = getattr(state_dict, "_metadata", {"": local_metadata})
        is_flat = bool(self.flat_params) and all(name in own for name in self.flat_param_names)
        if is_flat:
            flat = {name: own.pop(name) for name in self.flat_param_names}
            of_flat = ({prefix + name: one for name, one in flat.items()}, prefix, {}, strict)
            super()._load_from_state_dict(*of_flat, missing_keys, unexpected_keys, error_msgs)
        try:
            with contextlib.nullcontext() if is_flat else self.unflatten_params():
                assign = local_metadata.get("assign_to_params_buffers", False)
                missing, unexpected = self.module.load_state_dict(own, strict=False, assign=assign)
        except RuntimeError as error:
            error_msgs.append(str(error))
        else:
            missing_keys.extend(prefix + key for key in missing)
            unexpected_keys.extend(prefix + key for key in unexpected)
        self.__dict__["_hidden"] = self._modules.pop(_MODULE)

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenedModule:
        super()._apply(fn, recurse)
        if self.is_flattened:
            self._begin()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenedModule:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        for group in self._groups:
            group.remove()
        try:
            state = copy.deepcopy(self.__getstate__(), memo)
        finally:
            self._install()
        copied.__setstate__(state)
        return copied

    def _begin(self) -> None:
        """Make what belongs to the flat parameters that there are now."""
        self._flats = self.flat_params
        self._views: list[list[Tensor]] = [[] for _ in self._flats]
        self._sources: list[Any] = [None] * len(self._flats)
        for flat in self._flats:
            gradient_state(flat).is_flattened = True
        self._refresh()

    @opaque
    def _refresh(self) -> None:
        """Make views anew where what they are made of has changed.

        Those that are there go on: uses of one view in several forwards are uses of one tensor for autograd, as of the
        parameter whose place it has. They track gradients in any grad mode, as parameters do.
        """
        for number, (flat, own) in enumerate(zip(self.flat_params, self._flats, strict=True)):
            if flat is not own:  # torch.func.functional_call
                self._views[number], self._sources[number] = self._groups[number].split(flat), None
                self._groups[number].install(self._views[number])
                continue
            source = self._source_of(flat)
            if source != self._sources[number]:
                with torch.inference_mode(False), torch.enable_grad():
                    self._views[number] = self._make_views(number)
                self._sources[number] = source
                self._groups[number].install(self._views[number])

    def _install(self) -> None:
        for group, views in zip(self._groups, self._views, strict=True):
            group.install(views)

    def _source_of(self, flat: Tensor) -> tuple[Any, ...]:
        """Views of ``flat`` [n] stay valid for as long as this stays equal."""
        return flat.data_ptr(), flat.dtype, flat.device, flat.requires_grad, flat._version

    def _make_views(self, number: int) -> list[Tensor]:
        """Views [...] of flat parameter ``number``."""
        return self._groups[number].split(self._flats[number])

    def _data(self, given: Sequence[Tensor | None] | None) -> list[Tensor]:
        """``given`` [n] each, flat parameters where it is None."""
        given = [None] * len(self._groups) if given is None else list(given)
        if len(given) != len(self._groups):
            raise ValueError(
                f"FlattenParamsWrapper: expected one tensor for each of {len(self._groups)} flat parameters, got "
                f"{len(given)}"
            )
        return [flat if one is None else one for flat, one in zip(self.flat_params, given, strict=True)]

    @contextlib.contextmanager
    def _unflattened(self, values: Sequence[Sequence[Tensor]], copies_back: bool) -> Iterator[None]:
        """While it is open the module has parameters over ``values``, [...] each."""
        flats = self.flat_params
        registered = [
            group.register(own, flat.requires_grad)
            for group, own, flat in zip(self._groups, values, flats, strict=True)
        ]
        self.is_flattened = False
        for name in self.flat_param_names:
            del self._parameters[name]
        try:
            yield
        finally:
            for group, parameters, flat in zip(self._groups, registered, flats, strict=True):
                if copies_back:
                    group.fetch(parameters, flat)
                group.remove()
            self._parameters.update(zip(self.flat_param_names, flats, strict=True))
            self.is_flattened = True
            self._install()


def _find_module_again(wrapper: FlattenedModule, _: Any) -> None:
    wrapper._modules[_MODULE] = wrapper.__dict__.pop("_hidden")
