"""Arguments and results as flat lists: what a capture fixes and what a call must match."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    type(Ellipsis),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_constant(value: Any) -> bool:
    """True for immutable values that can be compared: they are part of a signature."""
    return isinstance(value, _CONSTANTS)


def _first_of_each(tensors: list[Tensor]) -> tuple[int, ...]:
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(id(tensor), number) for number, tensor in enumerate(tensors))


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


@dataclass(frozen=True)
class Signature:
    """The arguments of a call: the shape of their nest, the constants in it, and where its tensors are.

    Attributes:
        spec: nest of ``(args, kwargs)``, keyword arguments by name.
        leaves: constants in order; tensors are replaced by None.
        names: name of each leaf, such as ``args[0]`` or ``kwargs['mask']``.
        tensors: positions of the tensors among the leaves.
        first: for each of those, which of them is the first with the same object: code may tell by ``is``.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tensors: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any]) -> tuple[Signature, list[Tensor]]:
        """The signature of sample arguments, and their tensors in order, each once.

        Raises:
            TypeError: a leaf is neither a tensor nor a constant.
        """
        paths, spec = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
        leaves, names, positions, tensors = [], [], [], []
        for position, (path, leaf) in enumerate(paths):
            name = ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])
            names.append(name)
            if isinstance(leaf, Tensor):
                positions.append(position)
                tensors.append(leaf)
            elif not is_constant(leaf):
                raise TypeError(
                    f"sample {name}: expected tensors, nested containers of tensors, or constants, got "
                    f"{type(leaf).__name__}"
                )
            leaves.append(None if isinstance(leaf, Tensor) else leaf)
        first = _first_of_each(tensors)
        signature = cls(spec, tuple(leaves), tuple(names), tuple(positions), first)
        return signature, signature.distinct(tensors)

    def distinct(self, tensors: list[Tensor]) -> list[Tensor]:
        """``tensors`` [...] in order, without those that are the same object as an earlier one."""
        return [tensor for number, tensor in enumerate(tensors) if self.first[number] == number]

    @property
    def distinct_names(self) -> list[str]:
        """The names of the distinct tensors."""
        return [self.names[position] for n, position in enumerate(self.tensors) if self.first[n] == n]

    def unflatten(self, distinct: list[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Arguments with ``distinct`` tensors [...] in their places."""
        by_number = dict(zip([n for n, first in enumerate(self.first) if n == first], distinct, strict=True))
        leaves = list(self.leaves)
        for position, first in zip(self.tensors, self.first, strict=True):
            leaves[position] = by_number[first]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def is_flat(self) -> bool:
        """True when all arguments are positional tensors, all distinct: a call needs no flattening."""
        args, kwargs = self.spec.children() if hasattr(self.spec, "children") else self.spec.children_specs
        if len(set(self.first)) < len(self.first):
            return False
        return kwargs.num_leaves == 0 and args.num_leaves == args.num_children == len(self.tensors)

    def is_plain(self, args: tuple) -> bool:
        """True when ``args``, of a flat signature, are the tensors of the call as they stand."""
        if len(args) == 1:
            return isinstance(args[0], Tensor)
        return all(isinstance(argument, Tensor) for argument in args) and len({*map(id, args)}) == len(args)

    def flatten(self, label: str, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """The distinct tensors of a call, in order.

        Raises:
            ValueError: the call has other arguments than the capture; names the first.
        """
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        if spec != self.spec:
            raise ValueError(f"{label}: {self._difference(args, kwargs)}")
        for position, (expected, got, name) in enumerate(zip(self.leaves, leaves, self.names, strict=True)):
            if position in self.tensors:
                if not isinstance(got, Tensor):
                    raise ValueError(f"{label}: expected {name} to be a tensor as at capture, got {got!r}")
            elif isinstance(got, Tensor) or not _same(expected, got):
                kind = "tensor" if isinstance(got, Tensor) else repr(got)
                raise ValueError(f"{label}: expected {name} to be {expected!r} as at capture, got {kind}")
        tensors = [leaves[position] for position in self.tensors]
        if (first := _first_of_each(tensors)) != self.first:
            number = next(n for n, one in enumerate(first) if one != self.first[n])
            name, same, not_same = (self.names[self.tensors[n]] for n in (number, self.first[number], first[number]))
            if first[number] == number:
                raise ValueError(f"{label}: expected {name} to be the same tensor as {same}, as at capture")
            raise ValueError(f"{label}: expected {name} to be another tensor than {not_same}, as at capture")
        return self.distinct(tensors)

    def _difference(self, args: tuple, kwargs: dict[str, Any]) -> str:
        sample_args, sample_kwargs = pytree.tree_unflatten(list(self.leaves), self.spec)
        if len(args) != len(sample_args):
            return f"expected {len(sample_args)} positional arguments as at capture, got {len(args)}"
        if missing := sorted(set(sample_kwargs) - set(kwargs)):
            return f"expected keyword argument {missing[0]}, which was given at capture"
        if extra := sorted(set(kwargs) - set(sample_kwargs)):
            return f"got keyword argument {extra[0]}, which was not given at capture"
        pairs = [(f"args[{i}]", a, b) for i, (a, b) in enumerate(zip(sample_args, args, strict=True))]
        pairs += [(f"kwargs[{key!r}]", sample_kwargs[key], kwargs[key]) for key in kwargs]
        for name, expected, got in pairs:
            if pytree.tree_structure(expected) != pytree.tree_structure(got):
                return f"expected {name} nested as at capture, got a {type(got).__name__} of another structure"
        return "the arguments are nested in another way than at capture"


@dataclass(frozen=True)
class ResultSpec:
    """The nest of a callable's results: tensors at ``tensors``, constants elsewhere."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, label: str, result: Any) -> tuple[ResultSpec, list[Tensor]]:
        """The nest of ``result`` and its tensors in order; ``label`` is what messages call its callable.

        Raises:
            TypeError: a leaf is neither a tensor nor a constant.
        """
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and not is_constant(leaf):
                raise TypeError(
                    f"{label}: result: expected tensors, nested containers of tensors, or constants, got "
                    f"{type(leaf).__name__}"
                )
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, constants, tensors), [leaves[i] for i in tensors]

    @property
    def is_tensor(self) -> bool:
        """True when the result is one tensor."""
        return self.spec.is_leaf() and len(self.tensors) == 1

    def unflatten(self, tensors: list[Tensor]) -> Any:
        """The result with ``tensors`` [...] in their places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.spec)
