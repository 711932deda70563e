"""What tests share that graph layers of models of other libraries by ``make_graphed_callables``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from te_graph import make_graphed_callables


def capture_in_place(layers: Sequence[nn.Module], call: Callable[[], Any], **options: Any) -> None:
    """Capture ``layers`` where they are, with the arguments that they get in ``call``."""
    seen: dict[nn.Module, tuple[tuple, dict]] = {}

    def note(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.setdefault(layer, pytree.tree_map_only(Tensor, like, (args, kwargs)))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    call()
    for hook in hooks:
        hook.remove()
    args, kwargs = zip(*(seen[layer] for layer in layers), strict=True)
    make_graphed_callables(tuple(layers), args, sample_kwargs=kwargs, **options)


def like(tensor: Tensor) -> Tensor:
    """A leaf [...] of its own that requires a gradient where ``tensor`` does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_replayed(layers: Sequence[nn.Module], count: int) -> None:
    """Every layer was called ``count`` times, forward and backward, and replayed each time."""
    for layer in layers:
        info = layer.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (count, count, {}), info
