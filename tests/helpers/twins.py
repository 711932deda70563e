"""What tests share that compare graphed callables with eager execution bit for bit."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# cuBLAS reads it once, when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def mlp(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small model: [n, 7] -> [n, 5]."""
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5)).to(device, dtype)


def sample(device: str, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    """A batch for ``mlp``: [3, 7]."""
    return torch.randn(3, 7, device=device, dtype=dtype, requires_grad=requires_grad)


def eager_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that runs eagerly: make it before ``model`` is graphed."""
    return copy.deepcopy(model)


def leaf_copy(nest: Any) -> Any:
    """``nest`` with each tensor [...] replaced by a leaf of its own: same values, same requires_grad."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), nest)


def backward_of(result: Any, retain_graph: bool = False) -> None:
    """Run the backward from all differentiable tensors of ``result``; their gradients depend on their values."""
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [t.detach() * 2 + 1 for t in outputs], retain_graph=retain_graph)


def gradients_of(nest: Any) -> Any:
    """The ``.grad`` of each tensor of ``nest``, copied; None for other leaves."""
    return pytree.tree_map(lambda t: _copied(t.grad) if isinstance(t, Tensor) else None, nest)


def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """One forward and backward on leaf copies of the arguments: the result, and the gradients of the arguments."""
    args, kwargs = leaf_copy((args, kwargs))
    result = call(*args, **kwargs)
    backward_of(result)
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), result), gradients_of((args, kwargs))


def train(model: nn.Module, steps: Sequence[Sequence[tuple]], set_to_none: bool = True) -> list[Any]:
    """Train by SGD with momentum; ``steps`` holds the arguments of each micro-batch of each step.

    Returns everything seen on the way: results, gradients of arguments and parameters, parameters and buffers.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if list(model.parameters()) else None
    seen: list[Any] = []
    for micro_batches in steps:
        model.zero_grad(set_to_none=set_to_none)
        seen += [run(model, *args) for args in micro_batches]
        seen.append(gradients_of(dict(model.named_parameters())))
        if optimizer is not None:
            optimizer.step()
        seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return seen


@dataclass(frozen=True, eq=False)
class Itself:
    """Equal to nothing but a wrapper of the very same object."""

    obj: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.obj is other.obj

    __hash__ = None


def snapshot(*modules: nn.Module) -> dict[str, Any]:
    """Everything that a capture leaves as it was: compare two of them with ``assert_bitwise_equal``."""
    kinds = ("cpu", "cuda")
    return {
        "rng": torch.get_rng_state(),
        "cuda rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "garbage collection": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "modules": [[_module_state(part) for part in module.modules()] for module in modules],
    }


def _module_state(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {
        "class": Itself(type(module)),
        "training": module.training,
        "attributes": sorted(vars(module)),
        "hooks": [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)],
        "tensors": {
            name: [Itself(t), t.data_ptr(), t.requires_grad, _copied(t), Itself(t.grad), _copied(t.grad)]
            for name, t in tensors.items()
        },
        "main_grads": {name: _copied(getattr(t, "main_grad", None)) for name, t in tensors.items()},
    }


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
