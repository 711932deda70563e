"""graph_layers: find the layers of a model by one of its steps, and capture them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_graph.common.held_signals import signals_held
from te_graph.common.reasons import said_by_reason
from te_graph.common.whole_layer import wholes_of
from te_graph.graphs.capture.options import Options, chosen_parameters
from te_graph.graphs.capture.request import check_circumstances
from te_graph.graphs.capture.wrappers import reason_to_refuse_module, without_wrappers
from te_graph.graphs.layers.choice import Selection
from te_graph.graphs.layers.layer_calls import LayerCall, LayerCalls
from te_graph.graphs.layers.layer_captures import LayerCaptures
from te_graph.graphs.layers.report import GraphedLayers
from te_graph.graphs.layers.watched_step import Use, attributes_kept, watched
from te_graph.graphs.step_state import check_step_state
from te_graph.graphs.tracing.open_checkpoints import without_open_checkpoints

_NAME = "graph_layers"
_log = logging.getLogger("te_graph")
_OPTIONS = {field.name for field in dataclasses.fields(Options)} | {"step_state"}
_DEFAULTS = {"chain": True, "on_mismatch": "capture", "on_exhausted": "eager", "allow_unused_input": True}
_MAX_REASONS = 3  # in the message when nothing is captured


@signals_held()
def graph_layers(model: nn.Module, batch: Any, *, layers: Any = None, **options: Any) -> GraphedLayers:
    """Capture the layers of a model in place, with the arguments that the model gives them in one step.

    Runs that step once, notes what each module is called with, and captures layers with what
    ``make_graphed_callables`` captures with: replays equal eager execution bit for bit.

    Args:
        model: in training mode, its tensors on one device or its layers each on one. Inside DistributedDataParallel
            and ``torch.compile`` its layers are captured, and the wrapper goes on.
        batch: what the step is. A dictionary (any ``Mapping``, such as a ``BatchEncoding``) is given to the model by
            keyword, a tuple by position, and a function without arguments is called: ``lambda:
            loss_fn(model(x), y).backward()``, or more of a training step, but not the optimizer's step. A step with its
            backward also shows how gradients of results lie in memory, and graphs read them so. Anything else (a
            tensor, a list) is the one argument of the model. The step runs under the autocast and in the
            FP8 region of the caller or its own; layers are captured in those of their calls.
        layers: which modules are captured, the outermost of them: names as in ``named_modules()``, with wildcards as
            ``model.layers.*``; classes; a function ``(name, module) -> bool``; or several of these. None: each run of
            two or more modules of one class that one forward calls once each, in whatever container, the outermost
            first. Where one of those cannot be captured, runs inside of it are. Layers of torch.nn without others
            inside, which are a kernel or two, count only where there is nothing else.
        options: of ``make_graphed_callables``, but for the samples. Other defaults are ``on_mismatch="capture"``
            (other lengths and masks are captured as they come), ``on_exhausted="eager"`` and
            ``allow_unused_input=True``. ``chain=False`` captures no chains; else layers of which each is called with
            the result of the one before are a chain.

    Returns:
        A ``GraphedLayers``: names of the ``layers``, ``chains``, ``left_out`` with reasons, ``graphs``, ``bytes``,
        ``seconds``; ``str()`` of it is a summary, ``reset()`` frees the graphs. What cannot be captured stays eager.
        So does each call in eval mode or under ``torch.no_grad()``, where the step had none of that.

        The step leaves the model as it was: weights, buffers, ``.grad`` and ``main_grad``, attributes, hooks and flags
        of its modules, small arrays there, the scales and histories of FP8 layers, and the random generators of torch,
        Python and NumPy are put back, so training begins as if it had not been. What else the code of the user does
        stays: a batch that it takes from an iterator is gone, a loss is logged, a configuration object has what a first
        call sets, and the first iteration of ``DistributedDataParallel(static_graph=True)`` is over. Gradients that are
        there before are copied for the step, which costs their size: call it after ``zero_grad()``. Results and
        activations of the step are freed before the first capture.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, what was expected and what came.
        RuntimeError: the step calls an optimizer or changes weights, which it then has not; nothing can be captured,
            with the reasons. Everything is then as it was before, but for what the code of the user did.

        What the step itself raises passes.

    Stream and capture: synchronizes the device. Refused inside another capture.
    """
    started = time.perf_counter()
    arguments = _Arguments(model, batch, layers, options)
    top, uses, computed_again = arguments.watch_step()
    with attributes_kept(arguments.model, only_on_failure=True):
        choice = arguments.selection.choose(top, computed_again)
        captures = LayerCaptures(arguments.names, uses, arguments.options, arguments.step_state)
        captures.left_out.update(choice.left_out)
        try:
            failed = captures.capture(choice.calls)
            while failed:
                inner = [call for one in failed for call in arguments.selection.choose_inside(one).calls]
                failed = captures.capture(inner)
            if not captures.captured:
                raise _nothing_captured(captures, arguments.names)
        except BaseException:
            for call in captures.captured:
                call.module.te_graph.reset()
            raise
        finally:
            captures.errors.clear()  # their tracebacks lead here: a cycle that would keep what the layers computed
    report = _report(captures, arguments.names, started)
    _log.info("graph_layers: %s", report)
    return report


class _Arguments:
    """The arguments of ``graph_layers``, checked.

    Attributes:
        model: without its wrappers.
        names: of its modules, in messages.
        selection: which modules may be captured.
        options: for all captures.
        step_state: as given.
    """

    def __init__(self, model: nn.Module, batch: Any, layers: Any, options: dict[str, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{_NAME}: expected model to be an nn.Module, got {type(model).__name__}")
        self._given, self._batch = model, batch
        self.model = without_wrappers(model)
        _check_model(self.model)
        names = {module: name for name, module in self.model.named_modules()}
        self.names = {module: name or type(module).__name__ for module, name in names.items()}
        self.selection = Selection(layers, names)
        if unknown := sorted(options.keys() - _OPTIONS):
            raise TypeError(f"{_NAME}: got an option {unknown[0]!r}, which make_graphed_callables does not have")
        options = {**_DEFAULTS, **options}
        self.step_state = options.pop("step_state", None)
        check_step_state(self.step_state, _NAME)
        options["autograd_params"] = chosen_parameters(self.model, options.get("autograd_params", ()))
        self.options = Options(**options)

    def watch_step(self) -> tuple[LayerCall, dict[int, list[Use]], set[nn.Module]]:
        """Run the step; returns its calls, the uses of parameters, and the modules that its backward called."""
        parts = wholes_of(self.names)
        modules = [m for m in self.names if m not in parts and not isinstance(m, torch.jit.ScriptModule)]
        calls = LayerCalls(modules, self.selection.is_candidate)
        with watched(self.model, calls) as watch:
            without_open_checkpoints(self._run_step)
        return calls.top, watch.uses, calls.computed_again

    def _run_step(self) -> None:
        batch = self._batch
        if isinstance(batch, Mapping):
            self._call_model(**batch)
        elif isinstance(batch, tuple):
            self._call_model(*batch)
        elif callable(batch) and not isinstance(batch, Tensor | nn.Module):
            batch()
        else:
            self._call_model(batch)

    def _call_model(self, *args: Any, **kwargs: Any) -> None:
        """Run a forward that no backward follows, without DistributedDataParallel preparing for one."""
        alone = getattr(self._given, "no_sync", contextlib.nullcontext)
        synced = vars(self._given).get("require_forward_param_sync")
        with alone() if self._given is not self.model else contextlib.nullcontext():
            self._given(*args, **kwargs)
        if synced is not None:
            self._given.require_forward_param_sync = synced


def _check_model(model: nn.Module) -> None:
    if not model.training:
        raise ValueError(f"{_NAME}: expected model in training mode, got one in eval mode: call model.train() first")
    if not torch.is_grad_enabled():
        raise RuntimeError(f"{_NAME}: called under torch.no_grad(), where no layer has a gradient")
    if vars(model).get("te_graph") is not None:
        raise ValueError(f"{_NAME}: model is graphed already: call model.te_graph.reset() first")
    if (reason := reason_to_refuse_module(model)) is not None:
        kind = type(model).__name__
        raise TypeError(f"{_NAME}: expected a model whose layers can be captured, got a {kind}: {reason}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{_NAME}: {name} is not initialised: call the model once before")
    check_circumstances(next((p.device for p in model.parameters()), torch.device("cpu")), _NAME)


def _nothing_captured(captures: LayerCaptures, names: dict[nn.Module, str]) -> RuntimeError:
    if not captures.left_out:
        return RuntimeError(
            f"{_NAME}: found no layers: expected two or more modules of one class that a forward of the model calls "
            "once each; name them with layers="
        )
    said = said_by_reason({names[module]: reason for module, reason in captures.left_out.items()})
    more = f"; and {len(said) - _MAX_REASONS} more reasons" if len(said) > _MAX_REASONS else ""
    error = RuntimeError(f"{_NAME}: could not capture a layer: {'; '.join(said[:_MAX_REASONS])}{more}")
    error.__cause__ = next(iter(captures.errors.values()), None)
    return error


def _report(captures: LayerCaptures, names: dict[nn.Module, str], started: float) -> GraphedLayers:
    calls = sorted(captures.captured, key=lambda call: call.number)
    infos = [call.module.te_graph.info() for call in calls]
    return GraphedLayers(
        layers=tuple(names[call.module] for call in calls),
        chains=tuple(tuple(names[call.module] for call in chain) for chain in captures.chains),
        left_out={names[module]: reason for module, reason in captures.left_out.items()},
        graphs=sum(info["graphs"] for info in infos),
        fp8=sum(info["fp8_calls"] > 0 for info in infos),
        bytes=sum(info["bytes"] for info in infos),
        seconds=time.perf_counter() - started,
        _modules=[weakref.ref(call.module) for call in calls],
    )
