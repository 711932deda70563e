"""Lightning's Trainer over a model whose layers a callback graphs: the bits of eager training."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from companions import assert_replayed, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Encoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.1, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [n, 5, 6] -> [n, 5, 16]
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Graphs(lightning.Callback):
    """Captures the layers when training begins."""

    def on_train_start(self, trainer: Any, module: Encoder) -> None:
        tg.graph_layers(module, torch.zeros(2, 5, 6))


@pytest.mark.filterwarnings("ignore")  # about loggers, workers and deprecations of its own
def test_fit() -> None:
    model, data = Encoder(), torch.randn(8, 5, 6)
    twin = copy.deepcopy(model)
    for each, callbacks in ((model, [Graphs()]), (twin, [])):
        trainer = lightning.Trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(6)
        trainer.fit(each, DataLoader(TensorDataset(data), batch_size=2))
    assert_bitwise_equal(state_of(model), state_of(twin))
    assert_replayed(model.layers, 8)


class Flat(Encoder):
    """In bf16, stepped by an optimizer of flat parameters, which steps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        self.flats: list[tg.FlatParameters] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        self.flats.append(tg.FlatParameters(self))
        return self.flats[0].optimizer(torch.optim.SGD, lr=0.0)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.layers.eval()  # without dropout
        return self(torch.ones_like(batch[0])).float().square().mean() * 100

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if self.flats[0].parameters[0].main_grad.any():
            self.norms.append(torch.stack([one.main_grad.norm() for one in self.parameters()]).norm().item())


@pytest.mark.filterwarnings("ignore")  # about loggers, workers and deprecations of its own
def test_a_bf16_model_with_flat_parameters() -> None:
    """Its clip finds gradients in main_grad, and its optimizer drops them: all steps have the same ones."""
    model = Flat()
    trainer = lightning.Trainer(
        max_steps=3,
        gradient_clip_val=0.25,
        precision="bf16-true",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 5, 6, dtype=torch.bfloat16)), batch_size=2))
    assert len(model.norms) >= 2 and model.norms == [pytest.approx(0.25, rel=1e-3)] * len(model.norms)
    model.flats[0].close()
