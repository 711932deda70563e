"""Heads and routers, which convert_to_fp8 leaves: by the structure of the model, and by names."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from torch import nn

import te_graph as tg

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def model_of(shapes: dict[str, tuple[int, int]]) -> nn.Module:
    """A model with linear layers of these names and shapes (in, out), in their order."""
    model = nn.Module()
    for path, shape in shapes.items():
        *parents, name = path.split(".")
        owner = model
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(name, nn.Linear(*shape))
    return model


def left_of(model: nn.Module) -> set[str]:
    return set(tg.convert_to_fp8(model, min_features=16).skipped)


@pytest.mark.parametrize(
    "name",
    [
        *("head", "head.fc", "lm_head.dense", "model.value_head", "embed_out", "unembed", "to_logits", "logits"),
        *("vocab_proj", "vocab_projector", "classifier.out_proj", "score", "cls.predictions.transform.dense"),
        *("encoder.pooler.dense", "layers.0.mlp.router", "layers.0.router.layer", "layers.0.mlp.gate", "fc", "output"),
    ],
)
def test_names_of_heads_and_routers_are_left(name: str) -> None:
    assert left_of(model_of({"layers.0.up": (32, 64), name: (128, 32)})) == {name}


@pytest.mark.parametrize(
    "name",
    [
        *("w_gate", "ffn_gate", "gate_up_proj", "layers.0.mlp.gate", "layers.0.mlp.output", "layers.0.output.dense"),
        *("multihead", "head_mixer", "blocks.0.attn.head.query", "attn.multi_head.query", "fc", "output", "decoder"),
    ],
)
def test_layers_inside_are_converted_whatever_they_are_called(name: str) -> None:
    assert left_of(model_of({name: (64, 64), "last": (64, 64)})) == set()
    assert left_of(model_of({name: (32, 64), "last": (64, 64)})) == set()


def test_square_layers_are_no_heads_by_a_common_name() -> None:
    for name in ("output", "fc", "gate"):
        assert left_of(model_of({name: (64, 64)})) == set()


def test_a_head_is_known_by_the_vocabulary() -> None:
    model = model_of({"up": (32, 64), "down": (64, 32), "anything": (32, 64)})
    model.embed = nn.Embedding(64, 32)
    report = tg.convert_to_fp8(model, min_features=16)
    assert report.skipped == {"anything": "a head: its outputs are the vocabulary (64)"}


def test_an_ffn_as_wide_as_the_vocabulary_is_no_head_where_there_is_another() -> None:
    model = model_of({"unembed": (32, 64), "layers.0.up": (32, 64), "ffn_gate": (32, 64)})
    model.embed = nn.Embedding(64, 32)
    assert left_of(model) == {"unembed"}
    model = model_of({"layers.0.up": (32, 64), "layers.0.down": (64, 32), "layers.1.up": (32, 64)})
    model.embed = nn.Embedding(64, 32)
    assert left_of(model) == set()


def test_positions_are_no_vocabulary() -> None:
    model = model_of({"up": (32, 32), "down": (32, 32)})
    model.positions = nn.Embedding(32, 32)
    assert left_of(model) == set()


def test_a_head_is_known_by_the_number_of_classes() -> None:
    model = model_of({"up": (32, 64), "anything": (64, 48)})
    model.num_classes = 48
    assert tg.convert_to_fp8(model, min_features=16).skipped == {"anything": "a head: its outputs are the classes (48)"}


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "convnext_atto", "vit_tiny_patch16_224"])
def test_heads_of_timm_are_left(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=512)
    head = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    report = tg.convert_to_fp8(model, min_features=16)
    assert report.skipped[head] == "a head: its outputs are the classes (512)"
    assert all("mlp" not in each for each in report.skipped)


def test_heads_of_transformers_are_left() -> None:
    for name, heads in (
        ("GPTNeoXForCausalLM", {"lm_head"}),
        ("RobertaForSequenceClassification", {"classifier.dense", "classifier.out_proj"}),
        ("BertForPreTraining", {"bert.pooler.dense", "cls.predictions.transform.dense", "cls.predictions.decoder"}),
        ("LlamaForSequenceClassification", {"score"}),
    ):
        kind = getattr(transformers, name)
        config = kind.config_class(**SMALL, intermediate_size=64, tie_word_embeddings=False, num_labels=16)
        config.pad_token_id = 0
        with torch.device("meta"):
            left = left_of(kind(config))
        assert heads <= left
        assert all(each.split(".")[0] in ("bert", "classifier", "cls", "lm_head", "score") for each in left)
