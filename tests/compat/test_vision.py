"""Models of timm and diffusers with graphed blocks: the bits of eager training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from companions import assert_replayed, state_of
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
STEPS = 3


def assert_trains_as_eager(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> list[str]:
    """``loss_of``: what a model gives in a step. Returns which layers are graphed."""
    twin = copy.deepcopy(model)
    layers = tg.graph_layers(model, lambda: loss_of(model, 0).backward()).layers
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
    assert_replayed([model.get_submodule(name) for name in layers], STEPS)
    return list(layers)


def test_timm_vision_transformer() -> None:
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.1, proj_drop_rate=0.1).train()
    images = torch.randn(STEPS, 2, 3, 16, 16)
    layers = assert_trains_as_eager(model, lambda each, step: each(images[step]).square().mean())
    assert layers == ["blocks.0", "blocks.1"]


@pytest.mark.full
def test_timm_residual_network() -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=5).train()
    images = torch.randn(STEPS, 2, 3, 64, 64)
    layers = assert_trains_as_eager(model, lambda each, step: each(images[step]).square().mean())
    assert layers


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

    layers = assert_trains_as_eager(model, loss_of)
    assert layers
