"""What ``convert_to_fp8`` did, and which matrices of a model stay in high precision."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_graph.common.reasons import said_by_reason

_MAX_SHOWN = 12  # reasons
_NO_MODEL = "convert_to_fp8 converts in place and returns a report; go on with the model itself"


@dataclass(frozen=True)
class ConversionReport:
    """What ``convert_to_fp8`` did.

    Attributes:
        converted: names of the modules that compute in FP8 now.
        skipped: names of the other linear layers, with the reason.
        others: names of the parameters of other modules that are matrices, or several in one tensor, with the reason
            why they stay in high precision: embeddings, experts, convolutions.
        elements: of all matrices of the model, each counted once.
        fp8_elements: of those that FP8 layers have, as before the call included.
        already: how many layers computed in FP8 before.
    """

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    fp8_elements: int = 0
    already: int = 0

    def __str__(self) -> str:
        share = self.fp8_elements / self.elements if self.elements else 0
        already = f" ({self.already} already)" if self.already else ""
        lines = [
            f"{len(self.converted)} layers converted to FP8{already}; FP8 has {share:.0%} of the elements of matrices"
        ]
        reasons = said_by_reason({**self.skipped, **self.others})
        lines += [f"  left: {reason}" for reason in reasons[:_MAX_SHOWN]]
        if len(reasons) > _MAX_SHOWN:
            lines.append(f"  left: {len(reasons) - _MAX_SHOWN} more reasons in skipped and others")
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Where it is taken for the model."""
        raise TypeError(f"ConversionReport: expected no call, got one: {_NO_MODEL}")

    def __getattr__(self, name: str) -> NoReturn:
        """Of what it has not: where it is taken for the model, but for what copy, pickle and others look for."""
        hint = "" if name.startswith("_") else f": {_NO_MODEL}"
        raise AttributeError(f"'ConversionReport' object has no attribute {name!r}{hint}", name=name, obj=self)

    def most_frequent_reasons(self) -> str:
        """Why most layers and matrices are left, in short."""
        counts = Counter(reason.partition(":")[0] for reason in (*self.skipped.values(), *self.others.values()))
        return ", ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))


def report_on(
    model: nn.Module, converted: list[str], skipped: dict[str, str], fp8: list[nn.Module]
) -> ConversionReport:
    """The report of a conversion.

    Args:
        model: converted.
        converted, skipped: of the report.
        fp8: all modules of it that compute in FP8.
    """
    sizes = {
        id(parameter): parameter.numel() for module in model.modules() for parameter in _matrices_of(module).values()
    }
    others = {
        f"{name}.{key}" if name else key: _reason_of(module, parameter)
        for name, module in model.named_modules()
        if module not in fp8 and not any(name == one or name.startswith(f"{one}.") for one in skipped)
        for key, parameter in _matrices_of(module).items()
    }
    in_fp8 = {id(module.weight) for module in fp8}
    fp8_elements = sum(size for key, size in sizes.items() if key in in_fp8)
    return ConversionReport(converted, skipped, others, sum(sizes.values()), fp8_elements, len(fp8) - len(converted))


def _matrices_of(module: nn.Module) -> dict[str, Tensor]:
    """The own parameters of ``module`` that are matrices, or several in one tensor."""
    return {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and not is_lazy(parameter) and sum(size > 1 for size in parameter.shape) > 1
    }


def _reason_of(module: nn.Module, parameter: Tensor) -> str:
    """Why ``parameter`` [..., n, m], which no linear layer has, stays in high precision."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "of a convolution"
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return f"of a {kind}, which multiplies by it itself"
    if parameter.dim() > 2:
        return f"{math.prod(parameter.shape[:-2])} matrices in one parameter of a {kind}, which is no linear layer"
    return f"of a {kind}, which is no linear layer"
