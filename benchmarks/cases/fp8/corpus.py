"""What a training reads: the sources of Python's standard library, as bytes."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

OTHERS = ("site-packages", "dist-packages")  # folders there that are no part of it
LONGEST_HELD_OUT = 2**15  # so that what is held out is of many files


@dataclass(frozen=True)
class Corpus:
    """Windows, of which no two have a byte in common, of files that are not in both parts.

    Attributes:
        training, validation: [windows, length] uint8.
        files: how many were read.
        size: their bytes.
        digest: SHA-256 of these, hexadecimal.
    """

    training: Tensor
    validation: Tensor
    files: int
    size: int
    digest: str


def read_corpus(training: int, validation: int, length: int, least_bytes: int) -> Corpus:
    """Read as many files as it takes, in an order that the names of all files decide on.

    Args:
        training, validation: how many windows of each there are to be.
        length: of a window.
        least_bytes: that are read in any case.

    Raises:
        ValueError: there are not enough bytes.
    """
    held_out, trained, digest = bytearray(), bytearray(), hashlib.sha256()
    for files, text in enumerate(_distinct_files(), start=1):
        is_held_out = len(held_out) < validation * length and len(text) <= LONGEST_HELD_OUT
        if is_held_out:
            held_out += text
        else:
            trained += text
        digest.update(text)
        size = len(held_out) + len(trained)
        if len(held_out) >= validation * length and len(trained) >= training * length and size >= least_bytes:
            windows = (_windows(data, count, length) for data, count in ((trained, training), (held_out, validation)))
            return Corpus(*windows, files, size, digest.hexdigest())
    raise ValueError(
        f"expected {max(least_bytes, (training + validation) * length)} bytes of .py files, no two of them alike, in "
        f"{_folder()}, got {len(held_out) + len(trained)}"
    )


def _folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _distinct_files() -> Iterator[bytes]:
    """The .py files, shuffled, without those that are like an earlier one."""
    paths = [path for path in _folder().rglob("*.py") if not set(OTHERS) & set(path.parts)]
    paths.sort(key=lambda path: path.relative_to(_folder()).as_posix())
    random.Random(0).shuffle(paths)
    seen = set()
    for path in paths:
        text = path.read_bytes()
        if text not in seen:
            seen.add(text)
            yield text


def _windows(data: bytearray, count: int, length: int) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)[: count * length].view(count, length)
