"""Which layers are captured: runs of modules of one class, or those that the user names."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from te_graph.common.module_names import as_choices, chosen_modules
from te_graph.common.whole_layer import wholes_of
from te_graph.graphs.layers.layer_calls import LayerCall

_NAME = "graph_layers"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class Choice:
    """The calls that are to be captured, in their order, and why others are not."""

    calls: list[LayerCall] = field(default_factory=list)
    left_out: dict[nn.Module, str] = field(default_factory=dict)


def _is_small(module: nn.Module) -> bool:
    """Whether ``module`` launches a kernel or two: a layer of torch's without modules inside."""
    is_torchs = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.RNNBase)
    return is_torchs and not any(module.children())


class Selection:
    """Which modules may be captured, as the user's ``layers`` say.

    Args:
        layers: as documented in ``graph_layers``.
        names: of all modules of the model.

    Raises:
        TypeError: they are neither names, nor classes, nor a function.
        ValueError: they choose no module of the model.
    """

    def __init__(self, layers: Any, names: dict[nn.Module, str]) -> None:
        self._names = names
        self.is_default = layers is None
        self._chosen: set[nn.Module] = set()
        if self.is_default:
            return
        for one in as_choices(layers):
            found = chosen_modules(one, names, f"{_NAME}: expected layers")
            self._chosen.update(found)
            if isinstance(one, str):  # nobody calls a container: its members are meant
                self._chosen.update(member for module in found for member in _members(module))
        if not self._chosen:
            raise ValueError(f"{_NAME}: expected layers to choose modules of the model, got none for {layers!r}")

    def is_candidate(self, module: nn.Module) -> bool:
        """Whether ``module`` may be captured, for all that is known before the step."""
        return self.is_default or module in self._chosen

    def choose(self, top: LayerCall, computed_again: set[nn.Module]) -> Choice:
        """Of the calls below ``top`` those to capture.

        Args:
            computed_again: modules that the backward of the step called.
        """
        counts = Counter(call.module for call in top.below())
        if self.is_default:
            choice = Choice()
            for is_large in (True, False):
                _choose_runs(top, counts, choice, lambda module, large=is_large: _is_small(module) is not large)
                if choice.calls:
                    break
        else:
            choice = self._choose_named(top, counts)
        for call in choice.calls:
            if call.module in computed_again and call.obstacle is None:
                call.obstacle = "a backward calls it again"
        return choice

    def choose_inside(self, call: LayerCall) -> Choice:
        """Of the calls below ``call``, which could not be captured, those to capture instead."""
        choice = Choice()
        if self.is_default:
            counts = Counter(inner.module for inner in call.below())
            _choose_runs(call, counts, choice, lambda module: any(module.children()))
        return choice

    def _choose_named(self, top: LayerCall, counts: Counter[nn.Module]) -> Choice:
        choice = Choice()
        covered: set[nn.Module] = set()
        for call in _outermost(top, self._chosen.__contains__):
            covered.update(call.module.modules())
            if counts[call.module] > 1:
                choice.left_out[call.module] = _called(counts[call.module])
            else:
                choice.calls.append(call)
        wholes = wholes_of(self._names)
        for module in self._names:
            if module in self._chosen and module not in covered and not isinstance(module, _CONTAINERS):
                whole = wholes.get(module)
                choice.left_out[module] = (
                    "the step does not call it"
                    if whole is None
                    else f"{self._names[whole]}, a {type(whole).__name__}, computes with it at once: choose that"
                )
        return choice


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children() if isinstance(container, _CONTAINERS) else ():
        yield child
        yield from _members(child)


def _outermost(call: LayerCall, is_chosen: Callable[[nn.Module], bool]) -> Iterator[LayerCall]:
    for inner in call.inner:
        if is_chosen(inner.module):
            yield inner
        else:
            yield from _outermost(inner, is_chosen)


def _choose_runs(
    top: LayerCall, counts: Counter[nn.Module], choice: Choice, is_wanted: Callable[[nn.Module], bool]
) -> None:
    """Add to ``choice`` the runs below ``top``: two or more modules of one class that one forward calls once each. What
    is in no run is searched for runs inside.

    Where the modules of a run do not feed each other (an encoder and a decoder) and each holds chains, the chains are
    chosen instead.
    """
    by_class: dict[type, list[LayerCall]] = {}
    for call in top.inner:
        if is_wanted(call.module):
            by_class.setdefault(type(call.module), []).append(call)
    runs = set()
    for calls in by_class.values():
        once = [call for call in calls if counts[call.module] == 1]
        several = {call.module for call in calls} - {call.module for call in once}
        if len(once) + len(several) > 1:
            choice.left_out.update({module: _called(counts[module]) for module in several})
        if len(once) > 1 and (_feed_each_other(once) or not all(_hold_chains(call) for call in once)):
            runs.update(once)
    for call in top.inner:
        if call in runs:
            choice.calls.append(call)
        elif call.module not in choice.left_out:
            _choose_runs(call, counts, choice, is_wanted)


def _feed_each_other(calls: list[LayerCall]) -> bool:
    return any(call in following.fed_by for call, following in itertools.pairwise(calls))


def _hold_chains(call: LayerCall) -> bool:
    by_class: dict[type, list[LayerCall]] = {}
    for inner in call.inner:
        if any(inner.module.children()):
            by_class.setdefault(type(inner.module), []).append(inner)
    return any(map(_feed_each_other, by_class.values())) or any(map(_hold_chains, call.inner))


def _called(times: int) -> str:
    return f"the step calls it {times} times"
