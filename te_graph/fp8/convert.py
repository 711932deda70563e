"""Turning the linear layers of a model into FP8 ones, and back."""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Any

from torch import Tensor, nn

from te_graph.fp8.conv1d import FP8Conv1D, converted_class, is_conv1d, plain_class
from te_graph.fp8.conversion_report import ConversionReport, report_on
from te_graph.fp8.conversion_rules import ConversionRules, has_own_forward
from te_graph.fp8.layer_state import load_state_, state_of
from te_graph.fp8.linear import Linear
from te_graph.fp8.loaded_state import loaded_modules
from te_graph.fp8.passed_over import passed_over_layers

_log = logging.getLogger("te_graph")


class ConvertedLinear(Linear):
    """What ``convert_to_fp8`` makes of a ``torch.nn.Linear``: keys of its state dict stay those of that."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


_CONVERTED = (Linear, FP8Conv1D)
_MAX_NAMED = 5  # layers, in a message
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes by DistributedDataParallel and torch.compile


def convert_to_fp8(
    model: nn.Module,
    filter: Any = None,
    min_features: int = 512,
    first_last_bf16: bool = False,
    conv1d: bool = False,
    *,
    include: Any = (),
) -> ConversionReport:
    """Convert the linear layers of ``model`` in place, so that they compute in FP8 inside ``fp8_autocast``; return a
    report, not the model.

    Modules and parameters stay the objects that they are, and so do hooks, ties, optimizers, and keys of the state
    dict: a layer gets another class. Left as they are: heads and routers, weights that an embedding or another layer
    uses too, adapters of LoRA, layers of fewer than ``min_features`` features or of numbers of them that 16 does not
    divide, subclasses of ``torch.nn.Linear``, and parametrized or hooked weights. Converting again changes nothing.

    Heads are, outside of numbered blocks ("layers.0."), the last layer with as many outputs as the vocabulary has
    entries (rows of the largest ``torch.nn.Embedding``, ``model.config.vocab_size``) or as there are classes
    (``model.num_classes``, ``model.config.num_labels``); and what is called so, by one part of its path outside of
    blocks, by the last one inside: head, ..._head, embed_out, unembed, unembedding, to_logits, logits, vocab_proj,
    vocab_projector, classifier, score, cls, predictions, pooler; of the model itself also fc, output and out, where
    that is its last linear layer and not square. Routers have a part router, or are called gate and have at most a
    quarter as many outputs as inputs.

    Args:
        model: mutated.
        filter: which layers may be converted: a function ``(name, layer) -> bool``; names as in ``named_modules()``,
            with wildcards as ``*.mlp.*``, of layers or of what they are in; classes of these; or several of them. None:
            all.
        min_features: of inputs and of outputs; casts of smaller layers cost more than their products gain.
        first_last_bf16: leave the first and the last block of each stack of blocks ("layers.0", ...).
        conv1d: convert layers of Hugging Face's ``Conv1D``, too, those of GPT-2; their weight, and its gradient, stay
            [in, out].
        include: layers that are converted although they are heads, routers or adapters, too small, in the first or the
            last block, of a tied weight, ``Conv1D``, or left by ``filter``: as for ``filter``. What cannot be converted
            (16 does not divide its features, a subclass, a parametrized weight) stays and is reported.

    Returns:
        Which layers were converted, and why other matrices were not. Where nothing was, a warning says why, too. Where
        modules around some of the layers read their weights instead of calling them, a warning names these, once, at
        the first step of an optimizer; not where the weights are frozen.

    Raises:
        RuntimeError: a layer is graphed, or the model is wrapped by FSDP or DistributedDataParallel; convert first.
        TypeError: not a module; a ``filter`` or ``include`` of other types.
        ValueError: a name that is that of no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_to_fp8: expected a torch.nn.Module, got {type(model).__name__}")
    _check_can_be_changed("convert_to_fp8", model)
    rules = ConversionRules(model, filter, include, min_features, first_last_bf16, conv1d)
    converted: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _CONVERTED) or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        reason = rules.reason_to_skip(name, module)
        if reason is not None:
            skipped[name] = reason
            continue
        vars(module).pop("forward", None)
        module.__class__ = converted_class() if is_conv1d(module) else ConvertedLinear
        converted[name] = module
    fp8 = [module for module in model.modules() if isinstance(module, _CONVERTED)]
    report = report_on(model, list(converted), skipped, fp8)
    passed_over_layers.watch(converted)
    if not fp8:
        reasons = report.most_frequent_reasons() or "it has no matrices"
        _log.warning("convert_to_fp8: no layer of %s computes in FP8: %s", type(model).__name__, reasons)
    return report


def unconvert(model: nn.Module) -> list[str]:
    """Make of what ``convert_to_fp8`` converted again what it was.

    Args:
        model: mutated.

    Returns:
        Names of the modules.

    Raises:
        RuntimeError: a layer is graphed, or has got a ``forward`` of its own meanwhile.
    """
    _check_can_be_changed("unconvert", model)
    converted = {n: module for n, module in model.named_modules() if isinstance(module, ConvertedLinear | FP8Conv1D)}
    for name, module in converted.items():
        if has_own_forward(module):
            raise RuntimeError(
                f"unconvert: {name} has a forward of its own, as hooks of accelerate are: remove it first"
            )
    for module in converted.values():
        for attribute in ("fp8", "fp8_evaluated", "loaded_state", "has_told_misfit", "forward"):
            vars(module).pop(attribute, None)
        loaded_modules().discard(module)
        module.__class__ = plain_class() if isinstance(module, FP8Conv1D) else nn.Linear
    return list(converted)


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The scales and histories of FP8 layers: what a resumed training needs beside the state dict.

    Args:
        model: with layers that are ``te_graph.Linear``, or were converted.

    Returns:
        [3, n] fp32 by the name of each layer; copies. Rows are those of the input, the weight and the gradient of the
        result. Columns are the version of the format; the length of the history, 0 before the first call and under
        current scaling; the scale; of the weight the scale of its last cast, 1 if it is as it was then, and 1 if it has
        a scale; the largest number of the casts' format, 0 if no amax has given the scale; 1 if an update of the scale
        is due, -1 if none is (0 in states of versions that did not say); then the history, first what has been recorded
        since the last update, then the others, the newest last. Zeros fill it up, so that n is 1032 or, for histories
        of more than 1024, more. Ranks that share scales (``amax_reduction_group``) save one each: what has been
        recorded since the last update is their own. The
        newest amaxes are there before or after the update that the next cast makes of them: states with which trainings
        go on alike may differ in that, and so in the scale. To compare trainings, take losses and parameters.

    Stream and capture: small copies on the current stream; not inside a capture.
    """
    return {name: state_of(module) for name, module in model.named_modules() if isinstance(module, _CONVERTED)}


def load_fp8_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Take what ``fp8_state_dict`` returned of a model with the same FP8 layers.

    Args:
        model: mutated. Its weights have been loaded.
        state: [3, n] fp32 each. Copied.

    Raises:
        KeyError: the names are not those of the model's FP8 layers.
        ValueError: a state is of another form, dtype (a cast one) or has scales that are none.

    Stream and capture: small copies, which are waited for; not inside a capture.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _CONVERTED)}
    if modules.keys() != state.keys():
        raise KeyError(f"load_fp8_state_dict: {_difference_of(modules.keys(), state.keys())}")
    for name, module in modules.items():
        load_state_(module, state[name])


def _difference_of(names: Set[str], given: Set[str]) -> str:
    """Between the ``names`` of the FP8 layers of a model and those ``given``."""
    if not names:
        return (
            f"expected a model with FP8 layers, got one without any: convert it first (convert_to_fp8), as that of the "
            f"state was, which has {_some(given)}"
        )
    sides = [(names - given, "missing in the state"), (given - names, "of no FP8 layer of the model")]
    differing = "; ".join(f"{what}: {_some(odd)}" for odd, what in sides if odd)
    hint = _hint_at_wrapper(set(names), set(given))
    return f"expected the names of the model's FP8 layers, got others: {differing}{hint}"


def _some(names: Set[str]) -> str:
    """The first of ``names``, and how many others there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{sorted(names)[:_MAX_NAMED]}{more}"


def _hint_at_wrapper(names: set[str], given: set[str]) -> str:
    """What to do where a wrapper makes the difference between the ``names`` of a model and those ``given``."""
    if prefix := _prefix_of(given, names):
        return f" (a prefix {prefix!r}: save the state of the unwrapped model)"
    if prefix := _prefix_of(names, given):
        return f" (a prefix {prefix!r}: load into the unwrapped model)"
    return ""


def _prefix_of(wrapped: set[str], plain: set[str]) -> str:
    """What wrappers have put before all of the ``plain`` names; empty if that is not how ``wrapped`` ones differ."""
    prefix = ""
    while wrapped and wrapped != plain:
        added = next((one for one in _WRAPPERS if all(name.startswith(one) for name in wrapped)), None)
        if added is None:
            return ""
        prefix += added
        wrapped = {name.removeprefix(added) for name in wrapped}
    return prefix if wrapped else ""


def _check_can_be_changed(function: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        label = name or "the model"
        if getattr(module, "te_graph", None) is not None:
            raise RuntimeError(f"{function}: {label} is graphed: call its te_graph.reset() first, or {function} before")
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"}:
            raise RuntimeError(
                f"{function}: {label} is wrapped by {type(module).__name__}: {function} before it is wrapped"
            )
