"""Turning the linear layers of a model into FP8 ones, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from te_graph.fp8.conv1d import FP8Conv1D, converted_class, is_conv1d, plain_class
from te_graph.fp8.heads import Heads
from te_graph.fp8.linear import Linear
from te_graph.fp8.product import MULTIPLE, load_state_, state_of

_ADAPTERS = re.compile(r"(^|[._])lora_([ab]|embedding_[ab]|magnitude_vector)([._]|$)", re.IGNORECASE)
_BLOCK = re.compile(r"^(.*?[._]|)(?:layers?|blocks?|h)[._](\d+)[._]")


class ConvertedLinear(Linear):
    """What ``convert_to_fp8`` makes of a ``torch.nn.Linear``: keys of its state dict stay those of that."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


_CONVERTED = (Linear, FP8Conv1D)


@dataclass(frozen=True)
class ConversionReport:
    """What ``convert_to_fp8`` did.

    Attributes:
        converted: names of the modules that compute in FP8 now.
        skipped: names of the other linear layers, with the reason.
    """

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers converted to FP8, {len(self.skipped)} left as they are"]
        return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in self.skipped.items())])


def convert_to_fp8(
    model: nn.Module,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    min_features: int = 512,
    first_last_bf16: bool = False,
    conv1d: bool = False,
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
        filter: called with the name of each layer that would be converted and the layer; False leaves it.
        min_features: of inputs and of outputs; casts of smaller layers cost more than their products gain.
        first_last_bf16: leave the first and the last block of each stack of blocks ("layers.0", ...).
        conv1d: convert layers of Hugging Face's ``Conv1D``, too, those of GPT-2. Their weight is [in, out], so each
            backward launches a copy that transposes its gradient.

    Returns:
        Which layers were converted, and why the others were not.

    Raises:
        RuntimeError: a layer is graphed, or the model is wrapped by FSDP or DistributedDataParallel; convert first.
        TypeError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_to_fp8: expected a torch.nn.Module, got {type(model).__name__}")
    _check_can_be_changed("convert_to_fp8", model)
    users = _users_of_weights(model)
    heads = Heads(model)
    edges = _first_and_last_blocks(model) if first_last_bf16 else set()
    report = ConversionReport()
    for name, module in model.named_modules():
        if isinstance(module, _CONVERTED) or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        reason = _reason_to_skip(name, module, users, heads, min_features, conv1d)
        if reason is None and _block_of(name) in edges:
            reason = "in the first or the last block"
        if reason is None and filter is not None and not filter(name, module):
            reason = "left by filter"
        if reason is not None:
            report.skipped[name] = reason
            continue
        module.__class__ = converted_class() if is_conv1d(module) else ConvertedLinear
        report.converted.append(name)
    return report


def unconvert(model: nn.Module) -> list[str]:
    """Make of what ``convert_to_fp8`` converted again what it was.

    Args:
        model: mutated.

    Returns:
        Names of the modules.

    Raises:
        RuntimeError: a layer is graphed.
    """
    _check_can_be_changed("unconvert", model)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, ConvertedLinear | FP8Conv1D):
            for attribute in ("fp8", "fp8_evaluated", "loaded_state", "has_told_misfit"):
                module.__dict__.pop(attribute, None)
            module.__class__ = plain_class() if isinstance(module, FP8Conv1D) else nn.Linear
            names.append(name)
    return names


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The scales and histories of FP8 layers: what a resumed training needs beside the state dict.

    Args:
        model: with layers that are ``te_graph.Linear``, or were converted.

    Returns:
        [3, n] fp32 by the name of each layer; copies. Rows are those of the input, the weight and the gradient of the
        result. Columns are the version of the format; the length of the history, 0 before the first call and under
        current scaling; the scale; of the weight the scale of its last cast, and 1 if it is as it was then; three
        zeros; then the history, first what has been recorded since the last update, then the others, the newest last.
        Zeros fill it up, so that n is 1032 or, for histories of more than 1024, more. Ranks that share scales
        (``amax_reduction_group``) save one each: what has been recorded since the last update is their own.
    """
    return {name: state_of(module) for name, module in model.named_modules() if isinstance(module, _CONVERTED)}


def load_fp8_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Take what ``fp8_state_dict`` returned of a model with the same FP8 layers.

    Args:
        model: mutated. Its weights have been loaded.
        state: [3, n] fp32 each. Copied.

    Raises:
        KeyError: the names are not those of the model's FP8 layers.
        ValueError: a state is of another form.

    Stream and capture: small copies, which are waited for; not inside a capture.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _CONVERTED)}
    if modules.keys() != state.keys():
        odd = sorted(modules.keys() ^ state.keys())
        raise KeyError(f"load_fp8_state_dict: expected the names of the model's FP8 layers, differing are {odd[:5]}")
    for name, module in modules.items():
        load_state_(module, state[name])


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


def _users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter, by its identity."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    return users


def _reason_to_skip(
    name: str, module: nn.Module, users: dict[int, list[str]], heads: Heads, min_features: int, conv1d: bool
) -> str | None:
    """Why ``module`` stays as it is; None: it does not."""
    if is_conv1d(module) and not conv1d:
        return "a Conv1D of transformers: converted with conv1d=True"
    if type(module) not in (nn.Linear, *((plain_class(),) if is_conv1d(module) else ())):
        return f"of the subclass {type(module).__name__}"
    if "weight" not in module._parameters or module._parameters["weight"] is None:
        return "its weight is made of other parameters"
    weight = module.weight
    others = [user for user in users[id(weight)] if user != name]
    head = heads.reason_to_leave(name, module) if isinstance(module, nn.Linear) else None
    reasons: Iterator[tuple[bool, str]] = iter(
        (
            (type(weight) is not nn.Parameter, f"its weight is a {type(weight).__name__}"),
            (bool(others), f"its weight is that of {', '.join(others)}, too"),
            (head is not None, str(head)),
            (bool(_ADAPTERS.search(name)), "an adapter of LoRA"),
            (not weight.is_floating_point(), f"its weight is of dtype {weight.dtype}"),
            (any(size % MULTIPLE for size in weight.shape), f"{MULTIPLE} does not divide {list(weight.shape)}"),
            (min(weight.shape) < min_features, f"fewer than {min_features} features: {list(weight.shape)}"),
            (bool(module._forward_pre_hooks and hasattr(module, "weight_orig")), "its weight is made by a hook"),
        )
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def _block_of(name: str) -> tuple[str, int] | None:
    """The stack and the number of the block that a module of ``name`` is in."""
    found = _BLOCK.match(name)
    return None if found is None else (found[1], int(found[2]))


def _first_and_last_blocks(model: nn.Module) -> set[tuple[str, int] | None]:
    numbers: dict[str, set[int]] = {}
    for name, _ in model.named_modules():
        if (block := _block_of(f"{name}.")) is not None:
            numbers.setdefault(block[0], set()).add(block[1])
    return {(stack, edge) for stack, found in numbers.items() for edge in (min(found), max(found))}
