"""What torch runs for all modules and optimizers, and what it computes once for all parametrizations."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from te_graph import _C
from te_graph.graphs.guards import parametrizations
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_Kind = _C.StepKind
_HOOKS_OF_ALL = {
    "torch.nn.modules.module": tuple(
        name for name, hooks in vars(nn.modules.module).items() if name.endswith("_hooks") and isinstance(hooks, dict)
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


def hooks_of_all(root: GuardedSource) -> Iterator[GuardedSource]:
    """The hooks of all modules and of all optimizers, and the cache of all parametrizations."""
    modules = root.child(sys.modules, "", _Kind.CONSTANT, sys.modules)
    for name, kinds in _HOOKS_OF_ALL.items():
        members = modules.item(name, f"module {name}").attributes()
        for kind in kinds:
            hooks = members.item(kind, f"{kind.strip('_').replace('_', ' ')} of torch")
            if hooks.obj:
                yield hooks
            else:
                yield hooks.child(None, f"number of {hooks.name}", _Kind.LENGTH, index=0)
    cache = modules.item(parametrizations.WHERE, "").attributes().item(parametrizations.NAME, parametrizations.WHAT)
    yield root.never(f"{cache.name} is on") if cache.obj else cache
