"""Let Lightning train with the layers of a module replayed from graphs: a callback, and a training that uses it.

    python examples/lightning_callback.py    # runs eagerly and graphed; fails unless equal bit for bit

Exit status: 0 the two are equal, 1 they differ.
"""

import sys
from functools import partial
from typing import Any

import lightning
import torch
from hf_models import Sequences, build_model, make_config
from text_data import load_text
from torch import Tensor
from torch.utils.data import DataLoader

import te_graph as tg
from te_graph.testing import eager_twin

SEQ_LEN, BATCH_SIZE, STEPS = 32, 4, 12


class GraphLayers(lightning.Callback):
    """Captures the layers of a module by its first training step, as Lightning runs it: device, precision."""

    layers = None

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.layers is None:
            step = partial(trainer.strategy.training_step, batch, batch_idx)
            self.layers = tg.graph_layers(module, step)


class LanguageModel(lightning.LightningModule):
    """A Llama over bytes, made from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(make_config("llama", layers=2, hidden=32, heads=2, seq_len=SEQ_LEN), seed=0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def train(accelerator: str) -> dict[str, Any]:
    """What is to be equal: the last loss, and the weights."""
    text = torch.frombuffer(bytearray(load_text(None)), dtype=torch.uint8)  # [bytes]
    module, graphing = LanguageModel(), GraphLayers()
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=STEPS,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[graphing],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Sequences(text, SEQ_LEN), BATCH_SIZE, shuffle=True))
    print(graphing.layers)
    return {"loss": trainer.callback_metrics["loss"], "weights": module.state_dict()}


def main(accelerator: str = "auto") -> int:
    """Run the example on what Lightning calls `accelerator`, a GPU where there is one; returns the exit status."""
    try:
        loss = eager_twin(partial(train, accelerator))["loss"].item()
    except AssertionError as error:
        print(f"error: graph and eager differ: {error}", file=sys.stderr)
        return 1
    print(f"loss {loss:.4f}; it and the weights are those of eager execution, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
