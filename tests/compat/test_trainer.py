"""Hugging Face's Trainer, and PEFT's adapters, over models with graphed layers: the bits of eager training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from companions import assert_replayed, state_of
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
WORDS = 31


def llama(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, attention_dropout=0.1, use_cache=False, **sizes)
    return LlamaForCausalLM(config).train()


def text(count: int) -> Tensor:  # [count, 5]
    return torch.randint(WORDS, (count, 5))


class Graphs(TrainerCallback):
    """Captures the layers when training begins, with a batch as Trainer gives it."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        batch = {"input_ids": self._batch, "labels": self._batch, "num_items_in_batch": torch.tensor(8.0)}
        tg.graph_layers(model, batch)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.full), True])
def test_trainer(tmp_path: Path, bf16: bool) -> None:
    model, batches = llama(2), text(16)
    outcomes = []
    for each, callbacks in ((model, [Graphs(batches[:2])]), (copy.deepcopy(model), [])):
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            bf16=bf16,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": one, "labels": one} for one in batches]
        trainer = Trainer(each, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        outcomes.append([losses, state_of(each)])
    assert_bitwise_equal(*outcomes)
    assert_replayed(model.model.layers, 8)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the precision of the first Trainer for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Sees(TrainerCallback):
    """Keeps the gradients that each step gets."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.seen: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.append([parameter.main_grad.clone() for parameter in self._model.parameters()])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("max_grad_norm", [0, 1e-2])
def test_a_bf16_model_with_flat_parameters(tmp_path: Path, max_grad_norm: float) -> None:
    """What Trainer calls, ``model.zero_grad()`` and torch's clip, knows gradients in main_grad: where nothing is
    stepped, all steps have the same ones, with the same norm."""
    model = llama(1).bfloat16()
    model.model.layers[0].self_attn.attention_dropout = 0.0
    flat = tg.FlatParameters(model)
    optimizer, sees, one = flat.optimizer(torch.optim.SGD, lr=0.0), Sees(model), text(1)[0]
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        max_grad_norm=max_grad_norm,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": one, "labels": one}] * 12
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[sees], optimizers=(optimizer, None))
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == len(sees.seen) == 3 and norms[0] > 1e-2 and len(set(norms)) == 1
    for gradients in sees.seen:
        assert_bitwise_equal(gradients, sees.seen[0])
        norm = torch.stack([grad.norm() for grad in gradients]).norm()
        torch.testing.assert_close(norm.item(), max_grad_norm or norms[0], rtol=1e-3, atol=0)
    flat.close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_adapters_switched_and_merged() -> None:
    import peft

    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(llama(1), peft.LoraConfig(r=2, lora_dropout=0.1, **options))
    model.add_adapter("other", peft.LoraConfig(r=3, **options))
    twin, tokens = copy.deepcopy(model.train()), text(2)
    layer = model.base_model.model.model.layers[0]
    tg.graph_layers(model, {"input_ids": tokens}, layers=type(layer))

    def both(change: Any) -> None:
        seen = []
        for each in (model, twin):
            change(each)
            torch.manual_seed(7)
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            for _ in range(2):
                loss = each(input_ids=tokens, labels=tokens).loss
                if loss.requires_grad:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach())
            seen.append(state_of(each))
        assert_bitwise_equal(seen[:3], seen[3:])

    both(lambda each: None)
    both(lambda each: each.set_adapter("other"))
    both(lambda each: each.merge_adapter())
    both(lambda each: each.unmerge_adapter())
    info = layer.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (8, 6, {})
