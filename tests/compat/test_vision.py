"""Models of timm and diffusers with graphed blocks: the bits of eager training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from companions import assert_replayed, capture_in_place, state_of
from torch import Tensor, nn

from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
STEPS = 3


def assert_trains_as_eager(
    model: nn.Module, blocks: Callable[[nn.Module], Sequence[nn.Module]], loss_of: Callable[[nn.Module, int], Tensor]
) -> None:
    """``loss_of``: what a model gives in a step."""
    with torch.random.fork_rng():
        capture_in_place(blocks(model), lambda: loss_of(model, 0))
    twin = copy.deepcopy(model)  # eager, with the running statistics that the call above has moved
    seen = []
    for each in (model, twin):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss = loss_of(each, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        seen.append(state_of(each))
    assert_bitwise_equal(seen[: STEPS + 1], seen[STEPS + 1 :])
    assert_replayed(blocks(model), STEPS)


def test_timm_vision_transformer() -> None:
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.1, proj_drop_rate=0.1).train()
    images = torch.randn(STEPS, 2, 3, 16, 16)
    assert_trains_as_eager(model, lambda each: each.blocks, lambda each, step: each(images[step]).square().mean())


@pytest.mark.full
def test_timm_residual_network() -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=5).train()
    images = torch.randn(STEPS, 2, 3, 64, 64)
    blocks = lambda each: [each.layer1, each.layer2]  # noqa: E731
    assert_trains_as_eager(model, blocks, lambda each, step: each(images[step]).square().mean())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_diffusers_unet() -> None:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    ).train()
    schedule = diffusers.DDPMScheduler(10)
    images, times = torch.randn(STEPS, 2, 1, 8, 8), torch.randint(10, (STEPS, 2))

    def loss_of(each: nn.Module, step: int) -> Tensor:
        noise = torch.randn_like(images[step])
        noisy = schedule.add_noise(images[step], noise, times[step])
        return F.mse_loss(each(noisy, times[step]).sample, noise)

    assert_trains_as_eager(model, lambda each: [each.down_blocks[1], each.mid_block], loss_of)
