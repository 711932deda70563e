"""Which linear layers ``convert_to_fp8`` converts."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from te_graph.common.module_names import as_choices, chosen_modules
from te_graph.fp8.conv1d import is_conv1d, plain_class
from te_graph.fp8.heads import Heads
from te_graph.fp8.membership import FEATURES_MULTIPLE
from te_graph.fp8.model_blocks import block_of

_ADAPTERS = re.compile(r"(^|[._])lora_([ab]|embedding_[ab]|magnitude_vector)([._]|$)", re.IGNORECASE)


class ConversionRules:
    """The rules for the layers of one model.

    Args:
        model: not mutated.
        filter, include, min_features, first_last_bf16, conv1d: as of ``convert_to_fp8``.

    Raises:
        TypeError, ValueError: as ``convert_to_fp8``.
    """

    def __init__(
        self, model: nn.Module, filter: Any, include: Any, min_features: int, first_last_bf16: bool, conv1d: bool
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._allowed = None if filter is None else _chosen(filter, names, "filter")
        self._included = _chosen(include, names, "include")
        self._heads = Heads(model)
        self._users = _users_of_weights(model)
        self._edges = _first_and_last_blocks(model) if first_last_bf16 else set()
        self._min_features, self._conv1d = min_features, conv1d

    def reason_to_skip(self, name: str, module: nn.Module) -> str | None:
        """Why ``module``, a linear layer or a ``Conv1D``, stays as it is; None: it does not."""
        reason = _obstacle(module)
        return reason if reason is not None or module in self._included else self._reason_to_leave(name, module)

    def _reason_to_leave(self, name: str, module: nn.Module) -> str | None:
        """Why ``module``, which can be converted, had better not be."""
        if is_conv1d(module) and not self._conv1d:
            return "a Conv1D of transformers, which conv1d=True converts"
        weight = module.weight
        others = [user for user in self._users[id(weight)] if user != name]
        if others:
            return f"its weight is that of {', '.join(others)}, too"
        if isinstance(module, nn.Linear) and (reason := self._heads.reason_to_leave(name, module)) is not None:
            return reason
        if _ADAPTERS.search(name):
            return "an adapter of LoRA"
        if min(weight.shape) < self._min_features:
            return f"fewer than {self._min_features} features: {list(weight.shape)}"
        if block_of(name) in self._edges:
            return "in the first or the last block"
        return "left by filter" if self._allowed is not None and module not in self._allowed else None


def has_own_forward(module: nn.Module) -> bool:
    """Whether calls of ``module`` go to another forward than that of its class."""
    own = vars(module).get("forward")  # accelerate leaves that of the class there where it removes a hook
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _obstacle(module: nn.Module) -> str | None:
    """Why ``module`` cannot be converted; None: it can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "of a MultiheadAttention, which multiplies by it itself"
    if type(module) is not (plain_class() if is_conv1d(module) else nn.Linear):
        return f"of the subclass {type(module).__name__}{_hint_at_base(module)}"
    if has_own_forward(module):
        return "it has a forward of its own, as hooks of accelerate are: convert before they are added"
    weight = module._parameters.get("weight")
    if weight is None or (module._forward_pre_hooks and hasattr(module, "weight_orig")):
        return "its weight is made of other parameters"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is of dtype {weight.dtype}"
    if any(size % FEATURES_MULTIPLE for size in weight.shape):
        return f"{FEATURES_MULTIPLE} does not divide {list(weight.shape)}"
    return None


def _hint_at_base(module: nn.Module) -> str:
    """What lets ``module``, of a subclass, compute in FP8, where that might well be expected of it."""
    if is_parametrized(module) or type(module).forward is not nn.Linear.forward:
        return ""
    return ": that has no forward of its own, so derive it from te_graph.Linear"


def _chosen(choices: Any, names: dict[nn.Module, str], argument: str) -> set[nn.Module]:
    """The modules that ``choices`` stand for, and what is in them."""
    layers = {module: name for module, name in names.items() if isinstance(module, nn.Linear) or is_conv1d(module)}
    chosen: set[nn.Module] = set()
    for one in as_choices(choices):
        is_of_any = isinstance(one, str | type)  # a function is asked about linear layers alone
        for module in chosen_modules(one, names if is_of_any else layers, f"convert_to_fp8: expected {argument}"):
            chosen.update(module.modules())
    return chosen


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter, by its identity."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    return users


def _first_and_last_blocks(model: nn.Module) -> set[tuple[str, int] | None]:
    numbers: dict[str, set[int]] = {}
    for name, _ in model.named_modules():
        if (block := block_of(f"{name}.")) is not None:
            numbers.setdefault(block[0], set()).add(block[1])
    return {(stack, edge) for stack, found in numbers.items() for edge in (min(found), max(found))}
