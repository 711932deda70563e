"""What comes of a random program that trains eagerly and by ``graph_layers``."""

from __future__ import annotations

import logging
import os
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from program_outcomes import Outcome, tally
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import te_graph as tg
from te_graph.testing import deterministic, find_differences


def outcome_of(train: Callable[[bool], tuple[list[Any], int]]) -> Outcome:
    """Call ``train(is_graphed)``, which returns what it saw and how many forwards were replays, both ways. Not wrong is
    "invalid", where the eager run raises."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager, _ = train(False)
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        if not all(tensor.isfinite().all() for tensor in pytree.tree_leaves(eager) if isinstance(tensor, Tensor)):
            return Outcome("invalid", "values left the range of their dtype: the sign of NaN is not defined")
        try:
            graphed, replays = train(True)
        except Exception:
            return Outcome("raised", traceback.format_exc(limit=-6))
    differences = find_differences(graphed, eager)
    return Outcome("differs" if differences else "same", "\n".join(differences[:3]), replays)


def graph(model: nn.Module, step: Any, **options: Any) -> Any:
    """Call ``graph_layers``; None where it can capture nothing, after which the model is to train as it did before."""
    try:
        return tg.graph_layers(model, step, show_progress=False, **options)
    except RuntimeError as error:
        if "graph_layers: could not capture a layer" in str(error) or "graph_layers: found no layers" in str(error):
            return None
        raise


def replays_of(model: nn.Module) -> int:
    """Of all forwards."""
    handles = [vars(module).get("te_graph") for module in model.modules()]
    return sum(handle.info()["forward_replays"] for handle in handles if handle is not None)


def rarely(rng: random.Random, usual: Any, *others: Any) -> Any:
    """``usual`` in most cases."""
    return rng.choice((usual, *others)) if rng.random() < 0.25 else usual


def run_many(program: Callable[[int], Any], seeds: str = "0:50") -> None:
    """Run the programs of ``seeds``, first:end, and print what is wrong and what came of all."""
    os.environ.setdefault("TE_GRAPH_POISON", "1")
    torch.set_num_threads(1)
    logging.getLogger("te_graph").setLevel(logging.ERROR)
    outcomes = []
    for seed in range(*map(int, seeds.split(":"))):
        outcomes.append(program(seed).outcome())
        if outcomes[-1].is_wrong:
            print(f"{seed} {outcomes[-1].verdict}: {outcomes[-1].detail}\n{program(seed)}", flush=True)
        elif outcomes[-1].verdict == "invalid":
            print(f"{seed} invalid: {outcomes[-1].detail[:200]}", flush=True)
    print(dict(tally(outcomes)))
