"""Text as bytes: where it comes from, how it is split, how batches are drawn from it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # every value a byte can have
VALIDATION_FRACTION = 10  # one byte in ten is held out
VALIDATION_LIMIT = 65536  # bytes; keeps the evaluation of a large file short


@dataclass(frozen=True)
class Corpus:
    """Text split into the part that is trained on and the end of it, which is held out.

    Attributes:
        training: [bytes] uint8.
        validation: [bytes] uint8.
        digest: SHA-256 of the whole text, hexadecimal.
    """

    training: Tensor
    validation: Tensor
    digest: str


def load_text(path: Path | None) -> bytes:
    """Bytes of the file at `path`; of Python's own `pydoc_data.topics` (help texts, 0.5 MB of English) if it is None.

    Raises:
        ValueError: `path` is no file, or an empty one.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values()).encode()
    if not path.is_file():
        raise ValueError(f"--data: expected a text file, got {path}, which is not a file")
    text = path.read_bytes()
    if not text:
        raise ValueError(f"--data: expected a text file, got {path}, which is empty")
    return text


def split_text(text: bytes, seq_len: int) -> Corpus:
    """Hold out the last tenth of `text`, at least one sequence and at most 64 KiB or one sequence.

    Raises:
        ValueError: `text` is too short to give each part one sequence of `seq_len` bytes and the byte after it.
    """
    window = seq_len + 1
    if len(text) < 2 * window:
        raise ValueError(
            f"--data: expected at least {2 * window} bytes (--seq-len {seq_len} plus 1, for training and for "
            f"validation), got {len(text)}"
        )
    held_out = max(window, min(len(text) // VALIDATION_FRACTION, VALIDATION_LIMIT))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # [bytes]
    return Corpus(data[:-held_out], data[-held_out:], hashlib.sha256(text).hexdigest())


def draw_batches(
    data: Tensor, count: int, batch_size: int, seq_len: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw `count` micro-batches of sequences that start at random places.

    Args:
        data: [bytes] uint8, on the device where the batches are wanted.
        generator: CPU generator; its state is the position in the data.

    Returns:
        Iterator of (tokens, targets), each [batch_size, seq_len] int64 on the device of `data`.
    """
    starts = torch.randint(len(data) - seq_len, (count, batch_size), generator=generator)  # [count, batch_size]
    offsets = torch.arange(seq_len + 1)  # [seq_len + 1]
    windows = data[(starts[..., None] + offsets).to(data.device)].long()  # [count, batch_size, seq_len + 1]
    return ((window[:, :-1], window[:, 1:]) for window in windows)


def all_batches(data: Tensor, batch_size: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk through `data` ([bytes] uint8) once, sequence after sequence.

    Returns:
        Iterator of (tokens, targets), each [at most batch_size, seq_len] int64; the rest that fills no sequence is
        left out.
    """
    windows = data.unfold(0, seq_len + 1, seq_len).long()  # [sequences, seq_len + 1]
    return ((window[:, :-1], window[:, 1:]) for window in windows.split(batch_size))
