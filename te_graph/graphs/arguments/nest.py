"""Nests of containers as flat lists, and back: what arguments and results consist of.

Seen into are lists, tuples, dictionaries and their subclasses, deques, sets, dataclasses, ``SimpleNamespace``,
``UserDict`` and ``UserList``, ``functools.partial``, and what is registered with ``torch.utils._pytree``. What is put
together again is of the same type with the same attributes; neither ``__init__`` nor ``__post_init__`` runs, nor what
derived classes make of ``__iter__`` and the like.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from te_graph.common.raw_contents import items_of, members_of
from te_graph.graphs.arguments.attributes import attributes_of, own_attribute
from te_graph.graphs.arguments.constants import MAX_DEPTH, MAX_NESTED, are_same, is_comparable, may_hold_more, referred

# What makes an empty object, whatever the class asks for.
_BASES = (
    *(collections.OrderedDict, collections.defaultdict, dict),
    *(list, tuple, collections.deque, set, types.SimpleNamespace),
)
_MAPPINGS = (dict,)
_SEQUENCES = (list, tuple, collections.deque)
_PLAIN = (list, tuple, dict)
_NAMESPACES = (types.SimpleNamespace, collections.UserDict, collections.UserList)


@dataclass(frozen=True, eq=False)
class Shape:
    """What a nest is without its leaves.

    Attributes:
        kind: type of the container; None for a leaf.
        keys: of a dictionary, in order, else the numbers of the items; then the names of the attributes.
        items: how many of them are no names of attributes.
        context: what else the container needs to be put together again.
        children: one for each child.
        order: names of the attributes as the object has them; those in ``keys`` are sorted, since few look at that.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    items: int = 0
    context: Any = None
    children: tuple[Shape, ...] = ()
    order: tuple[str, ...] = ()

    @property
    def is_leaf(self) -> bool:
        return self.kind is None

    @property
    def is_registered(self) -> bool:
        """True where functions take the container apart, and put it together, that are registered for its class."""
        return self.kind in pytree.SUPPORTED_NODES and self.kind not in _BASES

    @functools.cached_property
    def count(self) -> int:
        """Of the leaves."""
        return 1 if self.is_leaf else sum(child.count for child in self.children)

    def matches(self, other: Shape, in_any_order: bool = False) -> bool:
        """True when nests of the two have the same leaves in the same places; ``in_any_order`` of the keys of
        dictionaries."""
        if self is other:
            return True
        if self.kind is not other.kind or len(self.keys) != len(other.keys) or self.items != other.items:
            return False
        if self.kind is None:
            return True
        if not _are_same_contexts(self.context, other.context):
            return False
        children = other.children
        if in_any_order and issubclass(self.kind, _MAPPINGS):
            found = other.by_place()
            if found.keys() != self.by_place().keys():
                return False
            children = [found[place] for place in self.by_place()]
        elif not all(map(_is_same_key, self.keys, other.keys)):
            return False
        return all(one.matches(two, in_any_order) for one, two in zip(self.children, children, strict=True))

    def by_place(self) -> dict[tuple[bool, Any], Shape]:
        """The children by key; an item and an attribute may have the same."""
        places = [(number < self.items, key) for number, key in enumerate(self.keys)]
        return dict(zip(places, self.children, strict=True))

    def names(self, prefix: str) -> Iterator[str]:
        """The names of the leaves, in order."""
        if self.kind is None:
            yield prefix
        for name, child in self.named_children(prefix):
            yield from child.names(name)

    def container_names(self, prefix: str) -> Iterator[str]:
        """The names of the containers, each behind those that it holds."""
        for name, child in self.named_children(prefix):
            yield from child.container_names(name)
        if self.kind is not None:
            yield prefix

    def named_children(self, prefix: str) -> Iterator[tuple[str, Shape]]:
        """The children of what messages call ``prefix``, with their names."""
        for number, (key, child) in enumerate(zip(self.keys, self.children, strict=True)):
            yield f"{prefix}[{key!r}]" if number < self.items else f"{prefix}.{key}", child

    def held(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """What may hold more than is compared here, with a name: classes of containers, but for Python's plain ones,
        what these need besides, and keys."""
        if self.kind is not None and self.kind not in _PLAIN:
            yield f"class of {prefix}", self.kind
            if self.context not in (None, (None, None)):
                yield f"contents of {prefix}", self.context
        yield from ((f"key of {prefix}", key) for key in self.keys[: self.items] if may_hold_more(key))
        for name, child in self.named_children(prefix):
            yield from child.held(name)

    def reordered_keys(self, other: Shape, prefix: str) -> Iterator[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
        """Of each dictionary that has another order in ``other``: its name, its keys, and those in ``other``."""
        if not all(map(_is_same_key, self.keys, other.keys)):
            yield prefix, self.keys[: self.items], other.keys[: self.items]
        found = other.by_place()
        for (is_item, key), child in self.by_place().items():
            name = f"{prefix}[{key!r}]" if is_item else f"{prefix}.{key}"
            yield from child.reordered_keys(found[is_item, key], name)


_LEAF = Shape(None)
_SHALLOW = 8  # what holds itself is looked for below: few nests are that deep


def flatten(
    nest: Any, kept: Container[int] = (), containers: list[tuple[Any, Shape]] | None = None
) -> tuple[list[Any], Shape]:
    """The leaves of ``nest`` in order, and its shape; objects whose identities are ``kept`` are leaves. The list
    ``containers``, if given, gets each container with its shape, behind those that it holds."""
    leaves: list[Any] = []
    return leaves, _flatten(nest, leaves, kept, containers, 0, ())


def unflatten(
    leaves: list[Any], shape: Shape, made: Mapping[Shape, Any] | None = None, same: Mapping[Shape, Shape] | None = None
) -> Any:
    """The nest of ``shape`` with ``leaves``. Its containers are new, but for those ``made`` already, by their shapes.
    Those that are the ``same`` object become one again: of each but the first, the shape that the first one has."""
    if shape.kind is None:
        (leaf,) = leaves
        return leaf
    following = iter(leaves)
    if made or same:
        nest = _unflatten_known(following, shape, dict(made or {}), same or {})
    else:
        nest = _unflatten(following, shape)
    if next(following, following) is not following:
        raise ValueError("unflatten: more leaves than the shape has places")
    return nest


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether there is a tensor in ``value``: in containers, frozen sets, and what functions refer to."""
    for leaf in flatten(value)[0]:
        inner = members_of(leaf) if isinstance(leaf, frozenset) else referred(leaf)
        if isinstance(leaf, Tensor) or (depth < MAX_DEPTH and any(holds_tensors(one, depth + 1) for one in inner)):
            return True
    return False


def reordered(leaves: list[Any], shape: Shape, wanted: Shape) -> list[Any]:
    """``leaves`` of a nest of ``shape`` in the order of ``wanted``, which matches it but for the order of keys."""
    return _reordered(iter(leaves), shape, wanted)


def _reordered(leaves: Iterator[Any], shape: Shape, wanted: Shape) -> list[Any]:
    if shape.is_leaf:
        return [next(leaves)]
    places = wanted.by_place()
    found = {place: _reordered(leaves, child, places[place]) for place, child in shape.by_place().items()}
    return [leaf for place in places for leaf in found[place]]


def _flatten(
    node: Any,
    leaves: list[Any],
    kept: Container[int],
    containers: list[tuple[Any, Shape]] | None,
    depth: int,
    above: tuple[Any, ...],
) -> Shape:
    kind = type(node)
    if id(node) in kept:
        return _leaf(node, leaves)
    if kind in _PLAIN:
        is_dict = kind is dict
        keys = tuple(node) if is_dict else tuple(range(len(node)))
        items, children, context, order = len(keys), node.values() if is_dict else node, None, ()
    elif kind is torch.Size or not (parts := _parts(node, kind)):
        return _leaf(node, leaves)
    else:
        keys, items, context, children, order = parts
    if depth > _SHALLOW:
        if depth > MAX_NESTED or any(node is one for one in above):
            return _leaf(node, leaves)
        above = (*above, node)
    inside = tuple([_flatten(child, leaves, kept, containers, depth + 1, above) for child in children])
    shape = Shape(kind, keys, items, context, inside, order)
    if containers is not None:
        containers.append((node, shape))
    return shape


def _leaf(node: Any, leaves: list[Any]) -> Shape:
    leaves.append(node)
    return _LEAF


def _parts(node: Any, kind: type) -> tuple[tuple[Any, ...], int, Any, list[Any], tuple[str, ...]] | None:
    """Keys, number of items, context, children and order of attributes of a container; None for a leaf."""
    if isinstance(node, Tensor | nn.Module | enum.Enum | type):
        return None
    if kind in pytree.SUPPORTED_NODES and kind not in _BASES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(node)
        return tuple(range(len(children))), len(children), context, list(children), ()
    if kind is functools.partial:
        attributes, order = _state(node)
        state = {"func": node.func, "args": node.args, "keywords": node.keywords, **attributes}
        return tuple(state), 0, None, [*state.values()], order
    if kind is slice:
        return ("start", "stop", "step"), 0, None, [node.start, node.stop, node.step], ()
    if isinstance(node, set):
        return ((), 0, tuple(node), [], ()) if kind is set and all(map(is_comparable, node)) else None
    if not isinstance(node, (*_MAPPINGS, *_SEQUENCES, *_NAMESPACES)) and not dataclasses.is_dataclass(node):
        return None
    keys: tuple[Any, ...] = ()
    children: list[Any] = []
    if isinstance(node, _MAPPINGS):
        items = list(items_of(node))
        keys, children = tuple(key for key, _ in items), [value for _, value in items]
    elif isinstance(node, _SEQUENCES):
        children = list(members_of(node))
        keys = tuple(range(len(children)))
    state, order = _state(node)
    default_factory = node.default_factory if isinstance(node, collections.defaultdict) else None
    context = (default_factory, node.maxlen if isinstance(node, collections.deque) else None)
    return (*keys, *state), len(keys), context, [*children, *state.values()], order


def _state(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Attributes of an object, those in slots included, sorted by name, and these in its own order."""
    state = attributes_of(node)
    if dataclasses.is_dataclass(node):
        others = [field.name for field in dataclasses.fields(node) if field.name not in state]  # some of the class
        found = ((name, own_attribute(node, name)) for name in others)
        state.update((name, value) for name, value in found if value is not NotImplemented)
    return {name: state[name] for name in sorted(state)}, tuple(state)


def _unflatten(leaves: Iterator[Any], shape: Shape) -> Any:
    children = [next(leaves) if child.kind is None else _unflatten(leaves, child) for child in shape.children]
    return _container(shape, children)


def _unflatten_known(leaves: Iterator[Any], shape: Shape, made: dict[Shape, Any], same: Mapping[Shape, Shape]) -> Any:
    if shape.kind is None:
        return next(leaves)
    if (first := same.get(shape, shape)) in made:
        collections.deque(itertools.islice(leaves, shape.count), maxlen=0)
        return made[first]
    nest = made[shape] = _container(shape, [_unflatten_known(leaves, child, made, same) for child in shape.children])
    return nest


def _container(shape: Shape, children: list[Any]) -> Any:
    kind = shape.kind
    if kind is dict:
        return dict(zip(shape.keys, children, strict=True))
    if kind in _PLAIN:
        return kind(children)
    if shape.is_registered:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, shape.context)
    if kind is functools.partial:
        function, args, keywords, *attributes = children
        found = dict(zip(shape.keys[3:], attributes, strict=True))
        return _with_attributes(functools.partial(function, *args, **keywords), found, shape.order)
    if kind is slice:
        return slice(*children)
    if kind is set:
        return set(shape.context)
    return _put_together(kind, shape, children)


def _put_together(kind: type, shape: Shape, children: list[Any]) -> Any:
    (default_factory, maxlen), keys, count = shape.context, shape.keys, shape.items
    base = next((base for base in _BASES if issubclass(kind, base)), object)
    items = children[:count]
    made = base.__new__(kind, items) if base is tuple else base.__new__(kind)
    if base in (list, collections.deque):
        base.__init__(made, items, *(() if base is list else (maxlen,)))
    elif issubclass(kind, dict):
        for key, value in zip(keys, items, strict=False):
            base.__setitem__(made, key, value)
        if base is collections.defaultdict:
            made.default_factory = default_factory
    return _with_attributes(made, dict(zip(keys[count:], children[count:], strict=True)), shape.order)


def _with_attributes(made: Any, attributes: dict[str, Any], order: tuple[str, ...]) -> Any:
    for name in order:
        object.__setattr__(made, name, attributes[name])  # also where the class is frozen
    return made


def _is_same_key(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or isinstance(one, Tensor):
        return one is other
    return _are_same_contexts(one, other) if type(one) is tuple else are_same(one, other)


def _are_same_contexts(one: Any, other: Any) -> bool:
    if type(one) is type(other) is tuple and len(one) == len(other):
        return all(map(_are_same_contexts, one, other))
    if one is other:
        return True
    if is_comparable(one) and not isinstance(one, types.FunctionType):
        return are_same(one, other)
    return bool(one == other)
