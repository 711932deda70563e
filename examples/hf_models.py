"""Small language models of Hugging Face, made from a configuration, and text in the form that they take."""

import torch
from text_data import VOCABULARY
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

MODELS = ("llama", "gpt2", "qwen")


def make_config(name: str, *, layers: int, hidden: int, heads: int, seq_len: int) -> PreTrainedConfig:
    """Configuration of a model over bytes.

    Args:
        name: one of `MODELS`.
        layers: number of blocks.
        hidden: width of the model.
        heads: attention heads; they divide `hidden`.
        seq_len: longest sequence.
    """
    # Bytes have no special tokens, and training has no use for keys and values of earlier calls.
    common = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        return GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=seq_len, **common)
    kind = {"llama": LlamaConfig, "qwen": Qwen3Config}[name]
    return kind(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=seq_len,
        **common,
    )


def build_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model in training mode, on the CPU, whose fp32 weights depend on `config` and `seed` alone.

    Seeds the global generators of the CPU and of every GPU.
    """
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


class Sequences(Dataset):
    """Text cut into sequences, each with itself as labels: the models compare a prediction with the byte after it.

    Args:
        data: [bytes] uint8; a rest that fills no sequence is left out.
        seq_len: bytes in a sequence.
    """

    def __init__(self, data: Tensor, seq_len: int) -> None:
        self._windows = data.unfold(0, seq_len, seq_len)  # [sequences, seq_len]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:  # [seq_len] int64 each
        tokens = self._windows[number].long()
        return {"input_ids": tokens, "labels": tokens}
