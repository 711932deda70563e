"""Draws a program from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .backwards import WAYS
from .model import SOMETIMES
from .program import Program, Setup, Step
from .reference import OPTIMIZERS

ROUNDS = 6
PARTED_WIDTH = 140
_DTYPES = (
    (("float32",), "float32"),
    (("float32", "bfloat16"), "float32"),
    (("bfloat16", "float16"), "float32"),
    (("bfloat16",), "float32"),
    (("bfloat16",), "bfloat16"),
)
_CLIPS = ("te_graph", "torch")
_HOOKS = ("tensor", "after", "node")


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    setup = _setup(rng)
    return Program(seed, setup, tuple(step for _ in range(ROUNDS) for step in _round(rng, setup)))


def _setup(rng: random.Random) -> Setup:
    dtypes, grad_dtype = rng.choice(_DTYPES)
    shard = rng.choice(("none", "none", "optimizer"))
    graphed = len(dtypes) == 1 and rng.random() < 0.2
    optimizer = rng.choice(list(OPTIMIZERS))
    return Setup(
        width=PARTED_WIDTH if shard == "optimizer" and rng.random() < 0.5 else rng.choice((5, 12)),
        blocks=rng.randint(1, 3),
        dtypes=dtypes,
        ties=tuple(tie for tie in ("head", "blocks") if rng.random() < 0.3 and not graphed),
        has_conv=rng.random() < 0.3,
        has_head_bias=rng.random() < 0.7,
        frozen=rng.random() < 0.3,
        left_over=rng.random() < 0.7,
        grad_dtype=grad_dtype,
        shard=shard,
        gradient_scale=rng.choice((1.0, 0.5, 0.3)),
        overlap=rng.random() < 0.7,
        bucket_bytes=rng.choice((1, 64, 2048, 1 << 27)),
        optimizer=optimizer,
        graphed=graphed,
        scaled=grad_dtype == "float32" and "fused" not in optimizer and rng.random() < 0.3,
        sends_bf16=grad_dtype == "float32" and rng.random() < 0.2,
        gathers_late=shard == "optimizer" and rng.random() < 0.5,
    )


def _round(rng: random.Random, setup: Setup) -> Iterator[Step]:
    """What the user does between, some micro-batches, often a step."""
    if rng.random() < 0.5:
        yield _between(rng, setup)
    micro_batches = rng.randint(1, 3)
    for number in range(micro_batches):
        is_last = number + 1 == micro_batches
        yield Step("backward", _backward(rng, setup, syncs=rng.random() < (0.9 if is_last else 0.2)))
        if rng.random() < 0.1:
            yield _between(rng, setup)
    if rng.random() < 0.8:
        yield _step(rng, setup)
        yield from rng.choices(([_drop(rng)], [_zero(rng)], []), (6, 1, 3))[0]


def _backward(rng: random.Random, setup: Setup, syncs: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"syncs": syncs}
    # One gradient of two uses where a graph adds twice, and graphs of gradients, are other sums.
    ways = ("plain", "in_thread") if setup.graphed else [way.__name__ for way in WAYS]
    arguments["way"] = rng.choice(ways) if rng.random() < 0.5 else "plain"
    arguments["uses"] = tuple(tuple(rng.random() < 0.6 for _ in range(SOMETIMES)) for _ in range(2))
    if not setup.graphed and "blocks" not in setup.ties and rng.random() < 0.4:
        # Not for torch.autograd.grad and inputs=; and autograd rounds the sum of what comes from two of them.
        is_other = arguments["way"] in ("with_inputs", "behind_grad", "of_two_losses")
        kinds = ("", "other") if is_other else ("", "other", "reentrant")
        arguments["checkpoints"] = tuple(rng.choice(kinds) for _ in range(setup.blocks))
    # Before the first gradient a failure is not seen on several ranks.
    if setup.has_head_bias and arguments["way"] in ("plain", "in_thread") and rng.random() < 0.15:
        arguments["fails"] = rng.choice(("forward", "backward"))
    return arguments


def _between(rng: random.Random, setup: Setup) -> Step:
    number = rng.randrange(100)
    steps = [
        _drop(rng),
        _zero(rng),
        Step("reduce_gradients"),
        Step("keep"),
        Step("unhook"),
        Step("write", {"number": number}),
        Step("clip", {"max_norm": 0.5, "poisoned": number, "by": rng.choice(_CLIPS)}),
        Step("save_and_load"),
    ]
    if not (setup.graphed and setup.has_main_grads):  # a graph does not add to .grad of the user's
        steps.append(Step("replace", {"number": number}))
        steps.append(Step("set_alone", {"number": number, "by": rng.choice(("flat", "optimizer"))}))
    if not setup.graphed:
        steps += [Step("hook", {"kind": kind, "number": number}) for kind in _HOOKS]
        steps += [Step("flatten_again", {"way": way}) for way in ("close", "file", "forget")]
        steps.append(Step("flatten_again", {"way": "close", "sets_to_none": rng.random() < 0.5}))
    return rng.choice(steps)


def _step(rng: random.Random, setup: Setup) -> Step:
    arguments: dict[str, Any] = {"max_norm": rng.choice((None, 0.05, 1.0)), "clips": rng.choice(_CLIPS)}
    if setup.scaled and rng.random() < 0.4:
        arguments["overflows"] = rng.randrange(100)
    return Step("step", arguments)


def _drop(rng: random.Random) -> Step:
    by = rng.choice(("flat", "optimizer", "module", "user"))
    return Step("drop", {"by": by, "number": rng.randrange(100)} if by == "user" and rng.random() < 0.5 else {"by": by})


def _zero(rng: random.Random) -> Step:
    return Step("zero", {"by": rng.choice(("optimizer", "module", "block", "user", "foreach"))})
