"""Hugging Face models graphed by ``graph_layers``: three steps equal eager ones, all calls replay."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from twins import eager_copy, gradients_of

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

BATCH, TOKENS, VOCABULARY = 2, 8, 61
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **SIZES}


def tokens(device: str, length: int = TOKENS) -> Tensor:  # int64 [BATCH, length]
    return torch.randint(1, VOCABULARY, (BATCH, length), device=device)


def causal(device: str, length: int = TOKENS) -> dict[str, Any]:
    text = tokens(device, length)
    return {"input_ids": text, "labels": text, "use_cache": False}


def padded(device: str) -> dict[str, Any]:
    mask = (torch.arange(TOKENS, device=device) < torch.randint(3, TOKENS, (BATCH, 1), device=device)).long()
    return {"input_ids": tokens(device), "labels": tokens(device), "attention_mask": mask}


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes))


def permuted_whisper() -> nn.Module:
    sizes = {f"{part}_{of}": n for part in ("encoder", "decoder") for of, n in (("layers", 2), ("attention_heads", 4))}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": TOKENS, "max_target_positions": TOKENS, "num_mel_bins": 8}
    width = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **special, **lengths, **width))


def whisper() -> nn.Module:
    model = permuted_whisper()
    # What its convolutions leave is permuted, and a gradient that comes otherwise makes a warning, and other rounding.
    model.model.encoder.layers[0].register_forward_pre_hook(contiguous)
    return model


def contiguous(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0].contiguous(), *args[1:]


@dataclass(frozen=True)
class Case:
    """A model with random weights, its layers, and a batch for it."""

    model: Callable[[], nn.Module]
    layers: Callable[[Any], list[nn.Module]]
    batch: Callable[[str], dict[str, Any]]


CASES = {
    "Llama": Case(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **TEXT)),
        lambda model: [*model.model.layers],
        causal,
    ),
    "GPT-2": Case(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0)
        ),
        lambda model: [*model.transformer.h],
        causal,
    ),
    "BERT": Case(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
        lambda model: [*model.bert.encoder.layer],
        padded,
    ),
    "T5": Case(
        t5,
        lambda model: [*model.encoder.block, *model.decoder.block],
        lambda device: {"input_ids": tokens(device), "labels": tokens(device), "use_cache": False},
    ),
    "Whisper": Case(
        whisper,
        lambda model: [*model.model.encoder.layers, *model.model.decoder.layers],
        lambda device: {
            "input_features": torch.randn(BATCH, 8, 2 * TOKENS, device=device),
            "labels": tokens(device),
            "use_cache": False,
        },
    ),
}


def graphed_and_twin(case: Case, device: str) -> tuple[nn.Module, nn.Module]:
    """A model whose layers are graphed, and its eager twin."""
    model = case.model().to(device).train()
    twin = eager_copy(model)
    report = tg.graph_layers(model, case.batch(device))
    assert [model.get_submodule(name) for name in report.layers] == case.layers(model)
    assert report.left_out == {}
    return model, twin


def train_both(models: tuple[nn.Module, nn.Module], batches: list[dict[str, Any]]) -> None:
    """One step for each batch: the same losses, gradients and weights, with the same random numbers."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for number, batch in enumerate(batches):
        seen = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            loss = model(**batch).loss
            loss.backward()
            seen.append([loss.detach(), gradients_of([*model.parameters()]), torch.rand(1, device=loss.device)])
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise_equal(*seen)
    assert_bitwise_equal(*(dict(model.state_dict()) for model in models))


@pytest.mark.parametrize("name", CASES)
def test_layers_train_as_eager_ones_and_all_calls_replay(device: str, name: str) -> None:
    case = CASES[name]
    models = graphed_and_twin(case, device)
    train_both(models, [case.batch(device) for _ in range(3)])
    for layer in case.layers(models[0]):
        info = layer.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"]) == (3, 3)
        assert (info["recaptures"], info["eager_calls"]) == (0, {})


def test_a_gradient_of_another_layout_than_its_result_is_told_of_once(device: str) -> None:
    case = CASES["Whisper"]
    model, _ = graphed_and_twin(replace(case, model=permuted_whisper), device)
    words = r"encoder\.layers\.1 \(WhisperEncoderLayer\): the gradient of output 0 has strides \[256, 32, 1\]"
    with pytest.warns(UserWarning, match=words):
        model(**case.batch(device)).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**case.batch(device)).loss.backward()


def test_other_lengths_and_masks_are_captured_and_generation_is_eager(device: str) -> None:
    case = CASES["Llama"]
    model, _ = models = graphed_and_twin(case, device)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long, device=device)
    mask[1, -2:] = 0
    train_both(models, [causal(device), causal(device, 5), {**causal(device), "attention_mask": mask}, causal(device)])
    written = [each.eval().generate(tokens(device)[:1] * 0 + 3, max_new_tokens=3, do_sample=False) for each in models]
    assert_bitwise_equal(*written)
    info = model.model.layers[0].te_graph.info()
    assert (info["forward_replays"], info["recaptures"]) == (4, 2)
    assert info["eager_calls"] == {"called in eval mode, captured in training mode": 3}


def test_a_cache_that_is_forgotten_runs_eagerly_and_is_named_with_the_cure(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    models = graphed_and_twin(CASES["Llama"], device)
    batches = [{name: value for name, value in causal(device).items() if name != "use_cache"} for _ in range(2)]
    with caplog.at_level(logging.WARNING, "te_graph"):
        train_both(models, batches)
    assert len(caplog.records) == 2  # layers
    assert all("DynamicCache" in one.message and "use_cache=False" in one.message for one in caplog.records)


def test_a_cache_in_the_step_is_named_with_the_cure(device: str) -> None:
    model = CASES["Llama"].model().to(device)
    with pytest.raises(RuntimeError, match=r"layer: .*DynamicCache.*model\.config\.use_cache = False"):
        tg.graph_layers(model, {"input_ids": tokens(device)})


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    return hf.ViTForImageClassification(
        hf.ViTConfig(image_size=16, patch_size=4, num_attention_heads=4, num_labels=5, **sizes)
    )


def test_a_step_under_autocast_with_checkpoints_inside_the_layers(device: str) -> None:
    def loss(one: nn.Module) -> Tensor:
        torch.manual_seed(1)
        with torch.autocast(device, torch.bfloat16):
            pixels = torch.randn(BATCH, 3, 16, 16, device=device)
            return one(pixel_values=pixels, labels=torch.arange(BATCH, device=device)).loss

    model = vit().to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    twin = eager_copy(model)
    report = tg.graph_layers(model, lambda: loss(model).backward())
    assert len(report.layers) == 2
    seen = []
    for one in (model, twin):
        value = loss(one)
        value.backward()
        seen.append([value.detach(), gradients_of([*one.parameters()])])
    assert_bitwise_equal(*seen)
    assert [model.get_submodule(name).te_graph.info()["eager_calls"] for name in report.layers] == [{}, {}]
