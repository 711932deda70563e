"""The state of a module that checkpoints keep: that of its member, or what was loaded before it had one."""

from __future__ import annotations

import torch
from torch import Tensor

from te_graph.common.fake_mode import has_no_values, is_in_fake_mode
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.loaded_state import loaded_modules, members_of, untrained_state_of
from te_graph.fp8.marked_state import MarkedState
from te_graph.fp8.state_form import check_state, new_state, without_cast
from te_graph.fp8.weight_mark import is_marked, mark_of_plain, plain_weight


def has_state(module: FP8Module) -> bool:
    """Whether something is known of the scales of ``module``."""
    return module.fp8 is not None or module.loaded_state is not None


def state_of(module: FP8Module) -> Tensor:
    """The scales and histories of ``module``, [3, n] fp32 (``Member.state``); a copy. Where nothing has values it is of
    the form that a module has before its first call."""
    weight, untrained = plain_weight(module), untrained_state_of(module)
    if is_in_fake_mode():
        return new_state(torch.device("cpu") if weight is None else weight.device)
    if untrained is not None:
        return untrained.state.clone() if is_marked(untrained.mark, weight) else without_cast(untrained.state)
    if module.fp8 is not None:
        return module.fp8.state()
    return new_state(torch.device("cpu") if weight is None else weight.device)


def load_state_(module: FP8Module, state: Tensor) -> None:
    """Let ``module`` take a ``state`` that ``state_of`` returned, [3, n] fp32, here or elsewhere."""
    if has_no_values(state):
        return
    check_state(state)
    loaded = MarkedState(state.detach().clone(), mark_of_plain(plain_weight(module)))
    if module.fp8 is None:
        module.loaded_state = loaded
    elif (evaluated := module.fp8_evaluated) not in (None, module.fp8) and evaluated.scope.is_delayed:
        module.fp8_evaluated = None  # whose scales are those of the training, once it goes on
    with torch.no_grad():
        for member in members_of(module):
            member.load_(loaded)
    loaded_modules().add(module)
