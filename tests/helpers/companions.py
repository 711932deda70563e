"""What tests share that graph layers of models of other libraries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_replayed(layers: Sequence[nn.Module], count: int) -> None:
    """Every layer was called ``count`` times, forward and backward, and replayed each time."""
    for layer in layers:
        info = layer.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (count, count, {}), info
