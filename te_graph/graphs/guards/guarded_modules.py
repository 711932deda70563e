"""How the guard of a callable sees a module: its flag, hooks, tables of parameters, buffers and submodules."""

from __future__ import annotations

from torch import nn

from te_graph import _C
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.pure_hooks import is_pure_hook, settings_of
from te_graph.graphs.guards.recording_hooks import REMOVAL_OF_RECORDING, is_recording_hook
from te_graph.graphs.guards.sources import HOOK_DICTS, Source, name_of, submodules

_Kind = _C.StepKind


def guard_module(source: Source, callable_guard: CallableGuard, is_callable: bool) -> None:
    """Guard the training flag of a module, which submodules it has, and, but for the callable itself, its forward."""
    members = source.attributes()
    name = source.name or type(source.obj).__name__
    guard_training(source, callable_guard)
    table = members.item("_modules", f"number of submodules of {name}")
    callable_guard.enter(table.child(table.obj, table.name, _Kind.LENGTH, index=len(table.obj)))
    for child in submodules(source):
        callable_guard.enter(child)
    if is_callable:
        return  # its forward is what replays
    if "forward" in members.obj:
        callable_guard.enter(members.item("forward", f"forward of {name}"))
    else:
        callable_guard.enter(members.child(members.obj, f"forward of {name}", _Kind.ABSENT, "forward"))


def check_hooks(module: nn.Module, name: str, may_capture: bool) -> None:
    """Raise RuntimeError, calling ``module`` ``name``, if it has hooks that a replay would not run, and that
    ``may_capture`` does not let freeze, or whose work would be lost then."""
    for key, what in HOOK_DICTS.items():
        hooks = [hook for hook in vars(module)[key].values() if not is_pure_hook(hook)]
        if (recording := next(filter(is_recording_hook, hooks), None)) is not None:
            raise RuntimeError(
                f"{name} has {what} that do something only while a context variable is set, as "
                f"{recording.__qualname__} does, and a replay would never do it: remove them before the capture. "
                f"{REMOVAL_OF_RECORDING}"
            )
        if hooks and not may_capture:
            raise RuntimeError(
                f"{name} has {what}, which a replay would not run: remove them before the capture (hooks on the "
                'graphed module itself do run), or freeze what they compute into the graph with hooks="captured"'
            )


def guard_training(source: Source, callable_guard: CallableGuard) -> None:
    """Guard the training flag of a module; what torch.compile made has that of its original."""
    if "training" in source.attributes().obj:
        name = source.name or type(source.obj).__name__
        callable_guard.enter(source.attributes().item("training", f"training flag of {name}"))


def guard_number_of_hooks(source: Source, callable_guard: CallableGuard, key: str) -> Source:
    """Guard how many hooks of one of the kinds of ``HOOK_DICTS`` a module has; returns where they are."""
    hooks = source.attributes().item(key, f"{HOOK_DICTS[key]} of {source.name or type(source.obj).__name__}")
    callable_guard.enter(hooks.child(hooks.obj, hooks.name, _Kind.LENGTH, index=len(hooks.obj)))
    return hooks


def guard_hooks(source: Source, callable_guard: CallableGuard, may_capture_hooks: bool) -> None:
    name = source.name or type(source.obj).__name__
    check_hooks(source.obj, name, may_capture_hooks)
    for key in HOOK_DICTS:
        hooks = guard_number_of_hooks(source, callable_guard, key)
        for number in hooks.obj:
            hook = hooks.item(number, hooks.name)
            callable_guard.enter(hook)
            for setting in settings_of(hook.obj) if is_pure_hook(hook.obj) else ():
                kind = type(hook.obj).__name__
                callable_guard.expect_value(hook.attributes().item(setting, f"{setting} of {kind} of {name}"))


def guard_tables(source: Source, callable_guard: CallableGuard, in_order: bool) -> None:
    """Which parameters, buffers and submodules there are, and which of them are None."""
    members = source.attributes()
    name = source.name or type(source.obj).__name__
    for key, what in (("_modules", "submodules"), ("_parameters", "parameters"), ("_buffers", "buffers")):
        table = members.item(key, f"{what} of {name}")
        for entry in [entry for entry, value in table.obj.items() if value is None]:
            callable_guard.expect_value(table.item(entry, name_of(entry, source.name)))
        kind, entries = (_Kind.KEYS, tuple(table.obj)) if in_order else (_Kind.LENGTH, None)
        what = "order of " if in_order else "number of "
        callable_guard.enter(table.child(table.obj, what + table.name, kind, entries, index=len(table.obj)))
