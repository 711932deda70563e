"""The examples of docs/fp8.md run as they stand, and equal eager execution and uninterrupted training bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from companions import state_of
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal, eager_twin

pytestmark = pytest.mark.usefixtures("repeatable")
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "fp8.md").read_text()
LOOP, RESUMED, TRAINER, ACCELERATE, LIGHTNING = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def run(*codes: str) -> dict[str, Any]:
    """The names that these examples define, one after the other."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for code in codes:
        exec(code, names)
    return names


def around(*codes: str) -> dict[str, Any]:
    """As ``run``, behind the loop, whose training is left out."""
    return run(LOOP.partition("blocks = ")[0] + "recipe = tg.DelayedScaling(amax_history_len=16)", *codes)


def assert_graphed_ones_replayed(layers: Iterable[nn.Module], count: int, recaptures: int = 0) -> None:
    """Unless the run is the eager one of two."""
    for info in (layer.te_graph.info() for layer in layers):
        if info["backend"] is not None:
            found = info["recaptures"], info["forward_replays"], info["backward_replays"]
            assert found == (recaptures, count, count), info


def fp8_layers(model: nn.Module) -> int:
    return len(tg.fp8_state_dict(model))


def test_the_loop_is_short_and_replays_and_has_the_bits_of_eager_execution() -> None:
    assert len([line for line in LOOP.splitlines() if line.strip()]) <= 25

    def train() -> Any:
        names = run(LOOP)
        assert fp8_layers(names["model"]) == 4
        assert_graphed_ones_replayed(names["blocks"], 6)
        return names["state"]

    eager_twin(train)


def test_the_loop_resumes_with_the_bits_of_one_that_went_on() -> None:
    begin, rest = LOOP.split("for step in range(3):")
    rest = "for step in range(3):" + rest.partition("with torch.no_grad()")[0]
    state = f"state = {LOOP.partition('state = ')[2]}"
    whole = run(begin, rest, state, "torch.manual_seed(1)", rest, state)["state"]
    run(begin, rest, state)
    resumed = run(begin, RESUMED, "torch.manual_seed(1)", rest, state)["state"]
    assert_bitwise_equal(resumed, whole)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as the example asks
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}

    def train() -> Any:
        trainer = around(TRAINER)["new_trainer"](**options)
        trainer.train()
        assert fp8_layers(trainer.model) == 14
        assert_graphed_ones_replayed(trainer.model.model.layers, 8, recaptures=1)  # what is saved changes the config
        return {"weights": state_of(trainer.model), "scales": tg.fp8_state_dict(trainer.model)}

    whole = eager_twin(train)
    torch.manual_seed(9)  # the initial values are not those of the training
    trainer = around(TRAINER)["new_trainer"](**options)
    trainer.train(resume_from_checkpoint="trained/checkpoint-2")
    assert_bitwise_equal({"weights": state_of(trainer.model), "scales": tg.fp8_state_dict(trainer.model)}, whole)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [n, 512] -> [n, 512]
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_accelerate(on_the_cpu: None, tmp_path: Path) -> None:
    def train() -> Any:
        names = around(ACCELERATE)
        model, batches = Net(), torch.randn(6, 4, 512).unbind()
        names["train"](model, batches, tmp_path / "state")
        assert fp8_layers(model) == 2
        assert_graphed_ones_replayed(model.layers, 6)
        saved = torch.load(tmp_path / "state" / "custom_checkpoint_0.pkl", weights_only=True)
        assert_bitwise_equal(saved, tg.fp8_state_dict(model))
        return {"weights": state_of(model), "scales": saved}

    eager_twin(train)


@pytest.mark.filterwarnings("ignore")  # about loggers, workers and deprecations of its own
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lightning(precision: str) -> None:
    import lightning

    def fit(epochs: int, path: str | None = None, save: str | None = None) -> Any:
        names = around("from functools import partial", LIGHTNING)
        module, graphs = names["FP8Module"](Net()), names["Graphs"]()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            precision=precision,
            callbacks=[graphs],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.randn(2, 2, 512, generator=torch.Generator().manual_seed(1))  # an epoch is two steps
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=path)
        if save is not None:
            trainer.save_checkpoint(save)
        assert fp8_layers(module) == 2
        again = int(precision == "bf16-true")  # the strategy's step, which is captured, lets the default dtype be
        assert_graphed_ones_replayed(module.model.layers, 2 * epochs if path is None else 2, again)
        return {"weights": state_of(module), "scales": tg.fp8_state_dict(module)}

    whole = eager_twin(lambda: fit(2))
    fit(1, save="one.ckpt")
    assert_bitwise_equal(fit(2, path="one.ckpt"), whole)
