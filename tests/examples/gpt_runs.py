"""Runs of examples/train_gpt.py with tiny sizes.

Files of tests make them fixtures by ``text, run = pytest.fixture(text_file), pytest.fixture(tiny_run)``.
"""

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
train_gpt = importlib.import_module("train_gpt")
trainer = importlib.import_module("trainer")
text_data = importlib.import_module("text_data")
gpt = importlib.import_module("gpt")

TINY = {
    "--layers": 2,
    "--hidden": 32,
    "--heads": 2,
    "--seq-len": 32,
    "--batch-size": 2,
    "--micro-batches": 2,
    "--steps": 6,
    "--device": "cpu",
}


def text_file(rng: random.Random, tmp_path: Path) -> Path:
    """A file with a part of the default text: its held-out tenth is walked through faster than that of the whole."""
    content = text_data.load_text(None)
    start = rng.randrange(len(content) - 10000)
    path = tmp_path / "some text"
    path.write_bytes(content[start : start + 10000])
    return path


def tiny_run(seed: int, text: Path) -> Callable[..., int]:
    """Calls main() with tiny sizes, a seed of the test's own and `options`; returns the exit status."""

    def run(*options: object) -> int:
        defaults = [f"{name}={value}" for name, value in (TINY | {"--seed": seed, "--data": text}).items()]
        try:
            return train_gpt.main([*defaults, *map(str, options)])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return run


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)
