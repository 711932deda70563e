"""convert_to_fp8: models of others, in place, and back."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import transformers
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
CURRENT = tg.Float8CurrentScaling()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def qwen() -> nn.Module:
    config = transformers.Qwen2Config(**SMALL, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, intermediate_size=48))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config)


MODELS = {"llama": llama, "qwen": qwen, "bert": bert, "vit": vit, "mixtral": mixtral}
# What is left, with the first words of the reason; all other linear layers are converted.
LEFT = {
    "llama": {"lm_head": "a head: its outputs are the vocabulary (64)"},
    "qwen": {"lm_head": "its weight is that of"},
    "bert": {
        "bert.pooler.dense": "a head or a router, by its name",
        "classifier": "16 does not divide [2, 32]",
    },
    "vit": {"classifier": "16 does not divide [2, 32]"},
    "mixtral": {"lm_head": "a head: its outputs are the vocabulary"},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_converted_in_place_and_back(name: str) -> None:
    model = MODELS[name]()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
    handle = layers[0].register_forward_hook(lambda *arguments: None)
    layers[0].requires_grad_(False)
    before = [dict(vars(layer)) for layer in layers]
    report = tg.convert_to_fp8(model, min_features=16)
    assert list(map(id, model.parameters())) == parameters
    assert list(model.state_dict()) == keys
    assert [isinstance(layer, nn.Linear) for layer in layers] == [True] * len(layers)
    assert {each: reason[: len(LEFT[name].get(each, reason))] for each, reason in report.skipped.items()} == LEFT[name]
    assert len(report.converted) + len(report.skipped) == len(layers) >= 9
    assert set(report.converted) == {n for n, m in model.named_modules() if isinstance(m, tg.Linear)}
    assert str(report).startswith(f"{len(report.converted)} layers converted to FP8")
    again = tg.convert_to_fp8(model, min_features=16)
    assert (again.converted, again.already) == ([], len(report.converted))
    assert str(again).startswith(f"0 layers converted to FP8 ({again.already} already); FP8 has ")
    with tg.fp8_autocast(recipe=CURRENT):
        layers[0](torch.randn(3, layers[0].in_features))
    assert sorted(tg.unconvert(model)) == sorted(report.converted)
    assert [type(layer) for layer in layers] == [nn.Linear] * len(layers)
    assert [dict(vars(layer)) for layer in layers] == before
    handle.remove()


@pytest.mark.parametrize("by", ["unconvert", "others"])
def test_a_model_with_a_state_that_is_converted_back_is_in_no_optimizers_way(by: str) -> None:
    """Nor in that of models that load: a copy for an export, say, whose original trains on."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tg.convert_to_fp8(model, min_features=16)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 32)
    with tg.fp8_autocast():
        model(x).square().mean().backward()
    export = copy.deepcopy(model)
    assert export[0].loaded_state is not None
    if by == "unconvert":
        tg.unconvert(export)
    else:
        for layer in export:
            vars(layer).pop("loaded_state")
            layer.__class__ = nn.Linear
    optimizer.step()
    other = tg.Linear(32, 32)
    other.weight = export[0].weight
    other.load_state_dict(export[0].state_dict(), strict=False)
    assert same_bits(export(x), nn.functional.linear(export[0](x), export[1].weight, export[1].bias))


def test_small_layers_are_left_by_default() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256), nn.Linear(1024, 520), nn.Linear(2048, 1024))
    report = tg.convert_to_fp8(model)
    assert report.converted == ["0", "3"]
    assert report.skipped == {"1": "fewer than 512 features: [256, 512]", "2": "16 does not divide [520, 1024]"}


def test_filter_and_first_and_last_blocks() -> None:
    model = llama()
    report = tg.convert_to_fp8(model, lambda name, module: "mlp" in name, min_features=16)
    assert len(report.converted) == 6
    assert all("mlp" in name for name in report.converted)
    assert report.skipped["model.layers.0.self_attn.q_proj"] == "left by filter"
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 4}, intermediate_size=48)
    model = transformers.LlamaForCausalLM(config)
    report = tg.convert_to_fp8(model, min_features=16, first_last_bf16=True)
    assert {name.split(".")[2] for name in report.converted} == {"1", "2"}
    assert report.skipped["model.layers.3.mlp.up_proj"] == "in the first or the last block"


class Odd(nn.Module):
    """Layers that are to be left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)
        self.normed = nn.utils.weight_norm(nn.Linear(32, 32))
        self.parametrized = parametrizations.weight_norm(nn.Linear(32, 32))
        self.tied, self.embedding = nn.Linear(32, 64), nn.Embedding(64, 32)
        self.tied.weight = self.embedding.weight
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})
        self.router = nn.Linear(32, 16)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_odd_layers_are_left_and_a_warning_says_that_nothing_was_converted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "te_graph"):
        report = tg.convert_to_fp8(Odd(), min_features=16)
    assert report.converted == []
    assert report.others == {
        "attention.in_proj_weight": "of a MultiheadAttention, which multiplies by it itself",
        "embedding.weight": "an embedding",
    }
    (record,) = caplog.records
    assert record.getMessage() == (
        "convert_to_fp8: no layer of Odd computes in FP8: 2 x of a MultiheadAttention, which multiplies by it itself, "
        "1 x its weight is made of other parameters, 1 x of the subclass ParametrizedLinear"
    )
    assert report.skipped == {
        "attention.out_proj": "of a MultiheadAttention, which multiplies by it itself",
        "normed": "its weight is made of other parameters",
        "parametrized": "of the subclass ParametrizedLinear",
        "tied": "its weight is that of embedding, too",
        "lora_A.default": "an adapter of LoRA",
        "router": "a head or a router, by its name",
    }


def test_all_matrices_are_reported() -> None:
    report = tg.convert_to_fp8(mixtral(), min_features=16)
    router, experts = (f"of a Mixtral{kind}, which is no linear layer" for kind in ("TopKRouter", "Experts"))
    assert report.others == {"model.embed_tokens.weight": "an embedding"} | {
        f"model.layers.{number}.mlp.{name}": reason
        for number in range(2)
        for name, reason in (
            ("gate.weight", router),
            ("experts.gate_up_proj", f"2 matrices in one parameter {experts}"),
            ("experts.down_proj", f"2 matrices in one parameter {experts}"),
        )
    }
    attention, ffn, gate, table = 4 * 32 * 32, 2 * 3 * 32 * 48, 2 * 32, 64 * 32
    assert report.fp8_elements == 2 * attention
    assert report.elements == 2 * (attention + ffn + gate + table)
    assert str(report).splitlines()[:3] == [
        "8 layers converted to FP8; FP8 has 27% of the elements of matrices",
        "  left: lm_head: a head: its outputs are the vocabulary (64)",
        "  left: model.embed_tokens.weight: an embedding",
    ]
    assert len(str(report).splitlines()) == 5


def test_tied_matrices_are_counted_once() -> None:
    model = qwen()
    report = tg.convert_to_fp8(model, min_features=16)
    assert report.elements == sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert tg.convert_to_fp8(model, min_features=16).fp8_elements == report.fp8_elements > 0


def test_what_is_hooked_by_accelerate_is_left() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    reason = "it has a forward of its own, as hooks of accelerate are: convert before they are added"
    assert tg.convert_to_fp8(model, min_features=16).skipped == {"0": reason}
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    x = torch.randn(4, 32)
    with torch.no_grad(), tg.fp8_autocast(recipe=CURRENT):
        assert not same_bits(model[1](x), nn.functional.linear(x, model[1].weight, model[1].bias))
    with pytest.raises(RuntimeError, match=r"unconvert: 1 has a forward of its own, as hooks of accelerate are"):
        tg.unconvert(model)
    hooks.remove_hook_from_module(model[1])
    assert tg.unconvert(model) == ["1"]


def test_layers_are_named_for_filter_and_include() -> None:
    report = tg.convert_to_fp8(llama(), "*.mlp", min_features=16)
    assert {name.split(".")[3] for name in report.converted} == {"mlp"}
    assert len(report.converted) == 6
    report = tg.convert_to_fp8(llama(), ["model.layers.0", lambda name, layer: layer.out_features == 48], 16)
    assert sorted({name.split(".")[2] for name in report.converted}) == ["0", "1"]
    assert len(report.converted) == 7 + 2
    report = tg.convert_to_fp8(llama(), include="model.layers.*.mlp.*_proj")  # all are too small
    assert len(report.converted) == 6
    report = tg.convert_to_fp8(llama(), lambda name, layer: False, include=("lm_head", "*.0.self_attn"))
    assert len(report.converted) == 5
    report = tg.convert_to_fp8(nn.Sequential(nn.Linear(24, 32)), include="0")
    assert report.skipped == {"0": "16 does not divide [32, 24]"}


def test_a_tied_head_that_is_included_trains() -> None:
    model = qwen()
    assert "lm_head" in tg.convert_to_fp8(model, min_features=16, include="lm_head").converted
    tokens = torch.randint(0, 64, (2, 8))
    with tg.fp8_autocast(recipe=CURRENT):
        model(tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.grad is not None


def test_wrong_names_are_refused() -> None:
    for argument in ("filter", "include"):
        with pytest.raises(
            ValueError,
            match=rf"convert_to_fp8: expected {argument} to name modules of the model, got 'lm_hed': perhaps",
        ):
            tg.convert_to_fp8(llama(), **{argument: "lm_hed"})
        with pytest.raises(
            TypeError,
            match=rf"expected {argument} to be names, classes, or a function \(name, module\) -> bool, got int",
        ):
            tg.convert_to_fp8(llama(), **{argument: 3})


def test_wrong_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got int"):
        tg.convert_to_fp8(1)
    model = nn.Sequential(nn.Linear(32, 32))
    tg.make_graphed_callables(model[0], (torch.randn(2, 32),))
    with pytest.raises(RuntimeError, match=r"0 is graphed: call its te_graph.reset\(\) first, or convert_to_fp8"):
        tg.convert_to_fp8(model, min_features=16)
    model[0].te_graph.reset()
    assert tg.convert_to_fp8(model, min_features=16).converted == ["0"]


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_trains_on_a_converted_base(order: str) -> None:
    """The base is frozen: no weight gradient; adapters are left in high precision, and can be merged."""
    torch.manual_seed(0)
    model = llama()
    if order == "before":
        tg.convert_to_fp8(model, min_features=16)
        model = lora(model)
    else:
        model = lora(model)
        tg.convert_to_fp8(model, min_features=16)
    converted = [name for name, module in model.named_modules() if isinstance(module, tg.Linear)]
    assert any("q_proj" in name for name in converted)
    assert not any("lora" in name for name in converted)
    tokens = torch.randint(0, 64, (2, 8))
    with tg.fp8_autocast(recipe=CURRENT):
        model(tokens, labels=tokens).loss.backward()
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients
    assert all("lora" in name for name in gradients)
    plain = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        difference = (plain(tokens).logits - model(tokens).logits).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("recipe", [CURRENT, tg.DelayedScaling(amax_history_len=4)])
def test_a_converted_model_learns(device: str, recipe: Any) -> None:
    torch.manual_seed(0)
    model = llama().to(device, torch.bfloat16)
    tg.convert_to_fp8(model, min_features=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(64, device=device).view(4, 16)
    losses: list[Tensor] = []
    for _ in range(30):
        with tg.fp8_autocast(recipe=recipe):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1] < 0.6 * losses[0]


def step(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of tokens [n, length], whose gradients are added; each time under a new recipe, equal to the others."""
    with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=4)):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def test_graphed_layers_of_a_converted_model_are_bit_equal(device: str) -> None:
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = llama().to(device, torch.bfloat16)
        model.config.use_cache = False
        tg.convert_to_fp8(model, min_features=16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.arange(64, device=device).view(4, 16)
        if graphed:
            tg.graph_layers(model, functools.partial(step, model, tokens))
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            found.append(step(model, tokens))
            optimizer.step()
        if graphed:
            assert all(layer.te_graph.info()["forward_replays"] == 4 for layer in model.model.layers)
        results.append([*found, *model.parameters()])
    assert all(map(same_bits, *results))


def test_a_report_that_is_taken_for_the_model_says_so() -> None:
    report = tg.convert_to_fp8(llama(), min_features=16)
    hint = "convert_to_fp8 converts in place and returns a report; go on with the model itself"
    with pytest.raises(TypeError, match=f"^ConversionReport: expected no call, got one: {hint}$"):
        report(torch.zeros(1, 8, dtype=torch.int64))
    for name in ("parameters", "train", "to", "state_dict", "config"):
        with pytest.raises(AttributeError, match=f"^'ConversionReport' object has no attribute '{name}': {hint}$"):
            getattr(report, name)
    assert not hasattr(report, "parameters")
    assert not hasattr(report, "_repr_html_")
    for twin in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert twin == report
        assert str(twin) == str(report)


class Plain(nn.Linear):
    """Nothing of its own."""


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_subclasses_are_left_and_told_what_helps() -> None:
    model = nn.Sequential(Plain(32, 32), Doubled(32, 32))
    for include in ((), ("0", "1")):
        report = tg.convert_to_fp8(model, min_features=16, include=include)
        assert report.skipped == {
            "0": "of the subclass Plain: that has no forward of its own, so derive it from te_graph.Linear",
            "1": "of the subclass Doubled",
        }
    derived = type("Plain", (tg.Linear,), {})(32, 32)
    x = torch.randn(4, 32)
    with torch.no_grad(), tg.fp8_autocast(recipe=CURRENT):
        assert not same_bits(derived(x), nn.functional.linear(x, derived.weight, derived.bias))
