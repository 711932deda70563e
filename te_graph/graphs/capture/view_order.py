"""Where autograd adds the gradients of results that are views, and where a replay does.

Such a result is made anew at each call, outside of the graph, from the input or the result that it is a view of. So its
gradient is added before or after all those that come from inside, whose order among each other is eager execution's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node


@dataclass(frozen=True)
class Position:
    """Of the making of one view among the uses of its base inside the callable.

    Attributes:
        is_first: it is before all of them, so autograd adds its gradient last.
        is_last: it is after all of them.
        is_tangled: the view is used inside, or made on the way to another result, so that autograd adds those gradients
            to its own first; or views of one base are made in another order than they are returned.
    """

    is_first: bool
    is_last: bool
    is_tangled: bool


def positions(views: Mapping[int, tuple[Tensor, Tensor | None]], outputs: list[Tensor]) -> dict[int, Position]:
    """The positions of ``views``, by their numbers.

    Args:
        views: each with its base, [...] each; None: a leaf.
        outputs: what the callable computes, [...] each.
    """
    edges = _edges(outputs)
    makers = {number: nodes for number, (view, base) in views.items() if (nodes := _makers(view, base))}
    return {
        number: _position(nodes, edges, [(other > number, makers[other]) for other in makers if other != number])
        for number, nodes in makers.items()
    }


def _edges(outputs: list[Tensor]) -> list[tuple[Node, Node]]:
    """Those of the autograd graph of ``outputs`` [...]: pairs of a node and one that follows it in a backward."""
    seen, stack, edges = set(), [output.grad_fn for output in outputs if output.grad_fn is not None], []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [one for one, _ in node.next_functions if one is not None]
        edges.extend((node, one) for one in following)
        stack.extend(following)
    return edges


def _makers(view: Tensor, base: Tensor | None) -> list[Node]:
    """The nodes from ``view`` [...] to ``base`` [...], that of the base left out."""
    end = None if base is None else base.grad_fn
    nodes, node = [], view.grad_fn
    while node is not end and node.next_functions and node.next_functions[0][0] is not None:
        nodes.append(node)
        node = node.next_functions[0][0]
    return nodes


def _position(makers: list[Node], edges: list[tuple[Node, Node]], others: list[tuple[bool, list[Node]]]) -> Position:
    """The position of the view that ``makers`` make; ``others`` make other views, returned after it or not."""
    base, own = _base(makers), makers[-1]._sequence_nr()  # of the node whose gradient goes to the base
    uses = [node._sequence_nr() for node, following in edges if following is base and node not in makers]
    later = sum(number > own for number in uses)
    is_tangled = any(following in makers and node not in makers for node, following in edges)
    for is_after, nodes in others:
        is_of_one = nodes[0] is makers[0]  # one tensor, returned twice
        if _base(nodes) is base and not is_of_one:
            is_made_after = nodes[-1]._sequence_nr() > own
            is_tangled |= is_made_after != is_after or not set(nodes).isdisjoint(makers)
    return Position(later == len(uses), later == 0, is_tangled)


def _base(makers: list[Node]) -> Node:
    return makers[-1].next_functions[0][0]
