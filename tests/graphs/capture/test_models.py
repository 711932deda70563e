"""Models of other projects: Hugging Face decoder layers and language models, torch's own layers and cells.

The reference is eager execution of a copy of the same model on the same inputs, from the same generator state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaRotaryEmbedding
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2RotaryEmbedding
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3RotaryEmbedding
from twins import eager_copy, leaf_copy, run, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 8, 32, 4, 61


class Scaled(nn.Module):
    """``model`` with results scaled down, or the steps of ``twins.train`` would diverge: it sums over all elements."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t / 64, self.model(*args))


def graph_in_place(model: nn.Module, parts: Sequence[str], batch: tuple, **options: Any) -> list[nn.Module]:
    """Graph the submodules ``parts`` of ``model`` with the arguments that they get when a copy of it sees ``batch``."""
    probe = eager_copy(model)
    calls: dict[str, tuple[tuple, dict]] = {}
    for name in parts:

        def note(_, args: tuple, kwargs: dict, name: str = name) -> None:
            calls.setdefault(name, leaf_copy((args, kwargs)))

        probe.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    probe(*leaf_copy(batch))
    graphed = [model.get_submodule(name) for name in parts]
    args, kwargs = zip(*(calls[name] for name in parts), strict=True)
    make_graphed_callables(tuple(graphed), args, sample_kwargs=kwargs, **options)
    return graphed


def train_from(seed: int, model: nn.Module, steps: Sequence[Sequence[tuple]]) -> list[Any]:
    """What ``twins.train`` sees when the generators start from ``seed``, and what they draw afterwards."""
    torch.manual_seed(seed)
    seen = train(Scaled(model), steps)
    assert all(t.abs().max() < 100 for t in pytree.tree_leaves(seen) if isinstance(t, Tensor))
    return [seen, torch.rand(3, device=next(model.parameters()).device)]


def assert_trains_as_eager(
    model: nn.Module,
    parts: Sequence[str],
    make_batch: Callable[[], tuple],
    seed: int,
    *,
    draws: bool,
    calls: int = 1,
    **options: Any,
) -> None:
    """Three steps of two micro-batches of ``model`` with its ``parts`` graphed equal those of its eager copy.

    ``draws``: it uses random numbers. ``calls``: how often it calls each part.
    """
    twin = eager_copy(model)
    steps = [[make_batch() for _ in range(2)] for _ in range(3)]
    graphed = graph_in_place(model, parts, make_batch(), **options)
    seen = train_from(seed, model, steps)
    assert_bitwise_equal(seen, train_from(seed, twin, steps))
    torch.manual_seed(seed)
    assert torch.equal(seen[-1], torch.rand_like(seen[-1])) is not draws
    for part in graphed:
        info = part.te_graph.info()
        replays = (info["forward_replays"], info["backward_replays"], info["eager_calls"])
        assert replays == (6 * calls, 6 * calls, {}), info


def causal_mask(device: str, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """[BATCH, 1, TOKENS, TOKENS]: bool, True to attend; else 0 to attend. The last sequence ends in ``padding``."""
    attend = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).tril_()
    if padding:
        attend[-1, :, :, -padding:] = False
    if dtype == torch.bool:
        return attend
    return torch.zeros_like(attend, dtype=dtype).masked_fill_(~attend, torch.finfo(dtype).min)


# Hugging Face: one decoder layer, called as its model calls it.


class RotaryCaller(nn.Module):
    """A decoder layer with rotary positions, and what its model does before it calls the layer."""

    def __init__(self, config: Any, layer: type[nn.Module], rotary: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.rotary = layer(config, 0), rotary(config)

    def forward(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Any:
        # [BATCH, TOKENS, WIDTH], see causal_mask, int64 [1, TOKENS]
        return self.layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
            use_cache=False,
            position_embeddings=self.rotary(hidden, positions),
        )


class GPT2Caller(nn.Module):
    """A GPT-2 block; its model adds positions before the first one."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.layer = GPT2Block(config, layer_idx=0)

    def forward(self, hidden: Tensor, mask: Tensor | None, _: Tensor) -> Any:  # as RotaryCaller
        return self.layer(hidden, attention_mask=mask, use_cache=False)


def gpt2_config(attention: str, dropout: float) -> GPT2Config:
    pdrop = {"embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2Config(
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=2,
        n_positions=TOKENS,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        **pdrop,
    )


def rotary_config(kind: type, attention: str, dropout: float) -> Any:
    """Two key-value heads for four query heads, as the large models of the family have."""
    head_dim = {} if kind is Qwen2Config else {"head_dim": WIDTH // HEADS}
    return kind(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=TOKENS,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
        attn_implementation=attention,
        **head_dim,
    )


def rotary_caller(kind: type, layer: type[nn.Module], rotary: type[nn.Module]) -> Callable[[str, float], nn.Module]:
    return lambda attention, dropout: RotaryCaller(rotary_config(kind, attention, dropout), layer, rotary)


LAYERS = {
    "GPT-2": lambda attention, dropout: GPT2Caller(gpt2_config(attention, dropout)),
    "Llama": rotary_caller(LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "Qwen2": rotary_caller(Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "Qwen3": rotary_caller(Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


def layer_batch(
    device: str, mask_dtype: torch.dtype | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None, Tensor]:  # as RotaryCaller takes them
    hidden = torch.randn(BATCH, TOKENS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    mask = None if mask_dtype is None else causal_mask(device, mask_dtype, int(torch.randint(1, TOKENS - 1, ())))
    return hidden, mask, torch.arange(TOKENS, device=device)[None] + torch.randint(50, (), device=device)


# Attention, dtype of the mask (None: no mask, the layer is causal by itself), dropout.
ATTENTION = {
    "sdpa": ("sdpa", None, 0.0),
    "sdpa with dropout": ("sdpa", None, 0.2),
    "sdpa with a padding mask": ("sdpa", torch.bool, 0.0),
    "matmul with an additive mask and dropout": ("eager", torch.float32, 0.2),
}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.one_of(5)
def test_a_hugging_face_decoder_layer_trains_as_eager(device: str, name: str, attention: str, seed: int) -> None:
    implementation, mask_dtype, dropout = ATTENTION[attention]
    model = LAYERS[name](implementation, dropout).to(device)
    assert_trains_as_eager(model, ["layer"], lambda: layer_batch(device, mask_dtype), seed, draws=dropout > 0)


@pytest.mark.parametrize("name", LAYERS)
def test_a_hugging_face_decoder_layer_in_bfloat16_trains_as_eager(device: str, name: str, seed: int) -> None:
    model = LAYERS[name]("sdpa", 0.2).to(device, torch.bfloat16)
    assert_trains_as_eager(model, ["layer"], lambda: layer_batch(device, None, torch.bfloat16), seed, draws=True)


# Hugging Face: a whole language model whose layers are graphed where they are.


class LanguageModel(nn.Module):
    """A causal language model with its loss on its own input."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.lm = causal_lm

    def forward(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        # int64 [BATCH, TOKENS], int64 [BATCH, TOKENS] with 0 at padding -> loss [], logits
        out = self.lm(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False)
        return out.loss, out.logits.detach()


def rotary_model(kind: type, model: type[nn.Module]) -> tuple[Callable[[], nn.Module], str]:
    return lambda: model(rotary_config(kind, "sdpa", 0.2)), "lm.model.layers"


MODELS = {
    "GPT-2": (lambda: GPT2LMHeadModel(gpt2_config("sdpa", 0.2)), "lm.transformer.h"),
    "Llama": rotary_model(LlamaConfig, LlamaForCausalLM),
    "Qwen2": rotary_model(Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": rotary_model(Qwen3Config, Qwen3ForCausalLM),
}


def language_model(name: str, device: str) -> tuple[LanguageModel, list[str]]:
    """The model in training mode, and the names of its layers."""
    make, layers = MODELS[name]
    return LanguageModel(make()).to(device).train(), [f"{layers}.0", f"{layers}.1"]


def text(device: str, padded: bool = False) -> tuple[Tensor, Tensor | None]:  # see LanguageModel
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device)
    if not padded:
        return tokens, None
    length = torch.randint(2, TOKENS, (BATCH, 1), device=device)
    return tokens, (torch.arange(TOKENS, device=device) < length).long()


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_a_language_model_with_graphed_layers_trains_as_eager(device: str, name: str, padded: bool, seed: int) -> None:
    model, layers = language_model(name, device)
    assert_trains_as_eager(model, layers, lambda: text(device, padded), seed, draws=True)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("on_mismatch", "reentrant"),
    [("capture", False), pytest.param("eager", False, marks=pytest.mark.full), ("eager", True)],
)
@pytest.mark.parametrize("name", [pytest.param("GPT-2", marks=pytest.mark.full), "Llama"])
def test_gradient_checkpointing_that_is_switched_on_later_goes_inside_or_runs_eagerly(
    device: str, name: str, on_mismatch: str, reentrant: bool, seed: int
) -> None:
    model, layers = language_model(name, device)
    twin = eager_copy(model)
    steps = [[text(device) for _ in range(2)] for _ in range(3)]
    graphed = graph_in_place(model, layers, text(device), on_mismatch=on_mismatch)
    ops = [layer.te_graph.info()["nodes"] for layer in graphed]
    for each in (model, twin):
        each.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_bitwise_equal(train_from(seed, model, steps), train_from(seed, twin, steps))
    for layer, before in zip(graphed, ops, strict=True):
        info = layer.te_graph.info()
        if on_mismatch == "capture":  # with the checkpoint inside, whose forward is computed again in the backward
            assert (info["backward_replays"], info["eager_calls"], info["nodes"] > before) == (6, {}, True)
        else:
            assert info["forward_replays"] == 0


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_that_is_switched_on_later_is_refused_by_name(device: str) -> None:
    model, layers = language_model("Llama", device)
    graph_in_place(model, layers, text(device))
    model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    words = r"gradient_checkpointing changed .*checkpoint inside the callable, capture after gradient_checkpointing"
    with pytest.raises(RuntimeError, match=words):
        model(*text(device))


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_language_model_evaluates_eagerly_between_training_steps(device: str, name: str) -> None:
    model, layers = language_model(name, device)
    twin = eager_copy(model)
    graph_in_place(model, layers, text(device))
    short = torch.randint(VOCABULARY, (1, TOKENS // 2), device=device)
    for batch in (text(device), text(device)):
        results = []
        for each in (model, twin):
            torch.manual_seed(0)
            seen = run(each, *batch)
            each.eval()
            with torch.no_grad():
                results.append([seen, each(short, None)])
            each.train()
        assert_bitwise_equal(*results)


# torch's own layers.


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.one_of(3)
def test_a_transformer_encoder_layer_trains_as_eager(
    device: str, dropout: float, norm_first: bool, masked: bool, seed: int
) -> None:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout, "gelu", batch_first=True, norm_first=norm_first, device=device
    )

    def batch() -> tuple:
        hidden = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
        if not masked:
            return (hidden,)
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu_(1)
        length = torch.randint(2, TOKENS, (BATCH, 1), device=device)
        return hidden, causal, torch.arange(TOKENS, device=device) >= length

    assert_trains_as_eager(layer, [""], batch, seed, draws=dropout > 0)


def test_a_transformer_encoder_with_graphed_layers_trains_as_eager(device: str, seed: int) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.2, batch_first=True, device=device)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=device)

    def batch() -> tuple:
        return torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True), causal

    assert_trains_as_eager(encoder, [f"layers.{i}" for i in range(3)], batch, seed, draws=True)


class Unrolled(nn.Module):
    """A recurrent cell over the steps of a sequence, from a learned initial state."""

    def __init__(self, cell: nn.RNNCellBase, all_steps: bool) -> None:
        super().__init__()
        self.cell, self.all_steps = cell, all_steps
        self.initial = nn.Parameter(torch.randn(2, cell.hidden_size))

    def forward(self, sequence: Tensor) -> tuple[Any, list[Tensor]]:  # [STEPS, n, INPUTS] -> state, hidden states
        hidden, memory = (state.repeat(sequence.shape[1], 1) for state in self.initial)
        state = (hidden, memory) if isinstance(self.cell, nn.LSTMCell) else hidden
        outputs = []
        for step in sequence:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return state, [output * 1.5 for output in outputs] if self.all_steps else []


STEPS, INPUTS, HIDDEN = 5, 8, 16


def sequence(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor]:  # [STEPS, 8, INPUTS]
    # Each step starts at a multiple of 256 bytes: a matrix product's last bit may depend on the alignment of its input,
    # and inputs that are copied into the graph are aligned.
    return (torch.randn(STEPS, 8, INPUTS, device=device, dtype=dtype, requires_grad=True),)


# A GRU cell uses its state twice. Where other code uses that state too, autograd adds three terms in an order of its
# own, while a graph hands over the sum of its two: equal but for rounding, as the last of these tests says.
@pytest.mark.parametrize("kind, all_steps", [(nn.LSTMCell, False), (nn.LSTMCell, True), (nn.GRUCell, False)])
def test_a_cell_unrolled_over_time_trains_as_eager(
    device: str, kind: type[nn.RNNCellBase], all_steps: bool, seed: int
) -> None:
    model = Unrolled(kind(INPUTS, HIDDEN), all_steps).to(device)
    # Autograd sums the gradients of the calls before it adds the sum to .grad; the graph would add one after the other.
    options = {"max_in_flight": STEPS, "accumulate_grads": False}
    assert_trains_as_eager(model, ["cell"], lambda: sequence(device), seed, draws=False, calls=STEPS, **options)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_an_unrolled_cell_that_accumulates_in_the_graph_differs_from_eager_by_rounding_alone(
    device: str, kind: type[nn.RNNCellBase]
) -> None:
    model = Unrolled(kind(INPUTS, HIDDEN), all_steps=True).to(device, torch.float64)
    twin = eager_copy(model)
    batches = [sequence(device, torch.float64) for _ in range(3)]
    graph_in_place(model, ["cell"], batches[0], max_in_flight=STEPS)
    for batch in batches:
        (result, gradients), (expected, expected_gradients) = run(model, *batch), run(twin, *batch)
        assert_bitwise_equal(result, expected)
        gradients = [gradients, *(p.grad for p in model.parameters())]
        expected_gradients = [expected_gradients, *(p.grad for p in twin.parameters())]
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_block_with_batch_norm_trains_as_eager(
    device: str, memory_format: torch.memory_format, seed: int
) -> None:
    block = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.SiLU(),
    ).to(device, memory_format=memory_format)

    def batch() -> tuple:
        images = torch.randn(2, 3, 9, 9, device=device).to(memory_format=memory_format)
        return (images.requires_grad_(),)

    before = block[4].running_var.clone()
    assert_trains_as_eager(block, [""], batch, seed, draws=False)
    assert not torch.equal(block[4].running_var, before)
    assert block[1].num_batches_tracked.item() == 6
