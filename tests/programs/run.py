"""Run a program eagerly and graphed, and compare everything that was seen."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import random
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph.testing import same_bits

from . import functions, pieces, prelude
from .program import Program

_LIBRARY = {
    **{name: value for module in (prelude, pieces, functions) for name, value in vars(module).items()},
    **dict(nn=nn, torch=torch, F=F, np=np, tg=tg, copy=copy, threading=threading, checkpoint=checkpoint),
}
_HONEST = re.compile(r"^callable \d+ \(\w+\)|te_graph|make_graphed_callables|cannot be captured")
_ROUNDING = 1e-9
_COARSE = 1e-2  # of dtypes of fewer bits, and of what is computed from them
_SPARE_BITS = 8  # of the mantissa: what is seen is the end of sums whose parts may be larger
_CONJUGATE = {"Complex", "ConjugateView", "ConjugateGrad", "NegativeGrad", "NegativeView", "one_of_negative"}
_EDITED = re.compile(
    "modified by an inplace operation|is a view and (its base|is being modified)|operand type.* for .: 'NoneType'"
)


@dataclass(frozen=True)
class Observation:
    """What is seen of a tensor: its bits, not the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: torch.layout
    requires_grad: bool
    values: Tensor = field(compare=False)  # dense, of ``shape``

    @classmethod
    def of(cls, tensor: Tensor) -> Observation:
        with torch.no_grad():
            values = tensor.detach()
            values = values.to_dense() if values.layout != torch.strided else values
            values = values.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return cls(tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.requires_grad, values)

    @property
    def is_large(self) -> bool:
        """Whether sums of numbers of this size are rounded, however whole these are."""
        if not (self.dtype.is_floating_point or self.dtype.is_complex) or not self.values.numel():
            return False
        return self.values.abs().max().item() > 2.0**-_SPARE_BITS / torch.finfo(self.dtype).eps


class World:
    """What one run of a program has seen. ``seen``: by name, in order. ``kept``: what is looked at again at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}
        self.kept: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.failed_at = ""
        self.position = -1
        self.replays = (0, 0)
        self.labels: set[str] = set()

    def see(self, name: str, value: Any) -> None:
        """``value``: a tensor [...], an array, numbers, None."""
        if value is None and name.removesuffix(", at the end").endswith("hook"):
            return  # a replay calls hooks of what gets no gradient, too, with None (docs/limits.md)
        if isinstance(value, np.ndarray | list):
            value = torch.from_numpy(np.array(value))
        if isinstance(value, Tensor):
            value = Observation.of(value)
        self.seen.setdefault(name, []).append(value)

    def keep(self, name: str, value: Any) -> None:
        """See ``value`` now, and at the end of the program."""
        self.see(name, value)
        self.kept[name] = value

    def grads(self, name: str, owner: Any) -> None:
        """See the gradients of a module's parameters: ``main_grad`` where there is one."""
        for number, parameter in enumerate(prelude.params(owner)):
            self.see(f"{name}[{number}].grad", getattr(parameter, "main_grad", parameter.grad))

    @property
    def has_large_numbers(self) -> bool:
        return any(isinstance(fact, Observation) and fact.is_large for facts in self.seen.values() for fact in facts)

    def run(self, program: Program, graph: bool, parts: int | None = None) -> None:
        """Run ``program``, or only so many of its parts."""
        namespace = dict(_LIBRARY, DEV=program.device, graph=graph, see=self.see, keep=self.keep, grads=self.grads)
        try:
            for self.position, (self.failed_at, code) in enumerate(itertools.islice(program.parts(), parts)):
                exec(_compiled(code), namespace)
            self.failed_at = ""
            self.see("random state", _random_state(program.device))
        except Exception as error:
            self.error = error.with_traceback(None)  # it would hold the program's tensors
        for name, value in self.kept.items():
            self.see(f"{name}, at the end", value)
        callables = [value for name, value in namespace.items() if re.fullmatch(r"m\d+", name)]
        self.replays = _replays(callables)
        self.labels = {label for one in callables for label in (type(one).__name__, getattr(one, "__name__", ""))}


@functools.lru_cache(maxsize=4096)
def _compiled(code: str) -> Any:
    return compile(code, "<program>", "exec")


def _random_state(device: str) -> Tensor:  # [bytes], uint8
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def _replays(callables: list[Any]) -> tuple[int, int]:
    """Forward and backward replays of those of ``callables`` that are graphed."""
    infos = [one.te_graph.info() for one in callables if getattr(one, "te_graph", None) is not None]
    return sum(info["forward_replays"] for info in infos), sum(info["backward_replays"] for info in infos)


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        verdict: "same" | "eager raised" | "lenient" (only eager raises, since it saved what was edited) | "refused" |
            "rounded" | "failed" | "crashed".
        kind: of a failure or refusal: what tells it from others.
        detail: the first difference, or the message.
        replays: of forward and backward graphs.
    """

    verdict: str
    kind: str = ""
    detail: str = ""
    replays: tuple[int, int] = (0, 0)


def run(program: Program) -> Outcome:
    """Run both worlds. What the program sets globally is as before afterwards."""
    eager, graphed = (_world(program, graph) for graph in (False, True))
    return _compare(program, eager, graphed)


def _world(program: Program, graph: bool, parts: int | None = None) -> World:
    world = World()
    with _settings():
        world.run(program, graph, parts)
    return world


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Repeatable operations, and every setting that programs change put back."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled, dtype = torch.utils.deterministic.fill_uninitialized_memory, torch.get_default_dtype()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    numbers, arrays = random.getstate(), np.random.get_state()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    random.seed(0), np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.set_default_dtype(dtype)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_grad_enabled(True)
        random.setstate(numbers), np.random.set_state(arrays)


def _compare(program: Program, eager: World, graphed: World) -> Outcome:
    replays = graphed.replays
    is_late = graphed.error is None or graphed.position > eager.position
    if eager.error is not None and is_late:
        detail = f"at {eager.failed_at}: eager raises {_told(eager.error)}"
        verdict = "lenient" if _EDITED.search(detail) else "failed"
        return Outcome(verdict, f"no error ({eager.failed_at})", detail, replays)
    is_refused = graphed.error is not None and (eager.error is None or graphed.position < eager.position)
    until_then = _world(program, False, graphed.position) if is_refused else eager
    if any(len(piece.kind.gives) > 1 for piece in program.pieces):
        _forget_calls_of_hooks(until_then, graphed)
    difference = _first_difference(until_then, graphed)
    if difference is not None:
        kind, detail, is_rounding = difference
        verdict = "rounded" if is_rounding and not _must_be_equal(program, kind, until_then) else "failed"
        return Outcome(verdict, kind, detail, replays)
    if is_refused:
        message = _told(graphed.error)
        kind = f"{graphed.failed_at}: {_template(message)}"
        is_documented = _is_honest(graphed.error, graphed.labels) or _EDITED.search(message)
        return Outcome("refused" if is_documented else "failed", kind, message, replays)
    return Outcome("eager raised" if eager.error is not None else "same", eager.failed_at, "", replays)


def _must_be_equal(program: Program, kind: str, eager: World) -> bool:
    """Whether a difference that may be rounding is none: no sum has another order, or all are of whole numbers, which
    repeated squares let grow until they are rounded.

    A result without a gradient counts as one with a zero gradient, so a sum may end in 0 instead of -0. So may a
    gradient that autograd keeps as a conjugate view, where the addition negates twice; and those of the first call of a
    TorchScript function, which profiles it, are other zeros than those of its next ones. Gradients of a callable that
    is called several times before one backward are added one after the other, to what was there.
    """
    if kind == "sign of zero":
        return not any(len(p.kind.gives) > 1 or p.name in _CONJUGATE or p.name == "scripted" for p in program.pieces)
    if all(piece.is_exact for piece in program.pieces):
        return program.is_exact and not eager.has_large_numbers
    code = "\n".join(step.code for step in program.steps)
    calls = (len(re.findall(rf"\bm{piece.number}\(", code)) for piece in program.pieces)
    return program.is_exact and max(calls) <= 1


def _is_honest(error: BaseException, labels: set[str]) -> bool:
    """A refusal names what refuses: te_graph, or the callable by its label, which is a class's or a function's name."""
    is_named = _HONEST.search(str(error)) or str(error).split(":")[0] in labels
    return isinstance(error, RuntimeError | ValueError | TypeError) and bool(is_named)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _template(message: str) -> str:
    """``message`` without numbers and names of pieces, so that messages of one kind are counted together."""
    message = re.sub(r"callable \d+ \(\w+\)", "callable", message.split("; at ")[0])
    return re.sub(r"\d+", "#", message)[:150]


def _forget_calls_of_hooks(eager: World, graphed: World) -> None:
    """Forget what hooks saw in replays alone: of several results each leads to all that the others do, see
    docs/limits.md."""
    for name in graphed.seen:
        if name.endswith("hook"):
            expected, same = eager.seen.get(name, []), []
            for value in graphed.seen[name]:
                if len(same) < len(expected) and _difference(expected[len(same)], value) is None:
                    same.append(value)
            if len(same) == len(expected):
                graphed.seen[name] = same
    graphed.seen = {name: values for name, values in graphed.seen.items() if values}


def _first_difference(eager: World, graphed: World) -> tuple[str, str, bool] | None:
    """Kind, description, and whether it may be rounding, of the first difference between what both have seen."""
    whole = eager.error is None and graphed.error is None
    interrupted = not whole and any(word in graphed.failed_at for word in ("backward", "threads"))
    roundings = []
    # What is computed from numbers of 16 bits is rounded as they are, in whatever dtype.
    seen = (value for values in eager.seen.values() for value in values if isinstance(value, Observation))
    tolerance = _COARSE if any(fact.dtype in (torch.float16, torch.bfloat16) for fact in seen) else _ROUNDING
    for name, expected in eager.seen.items():
        got = graphed.seen.get(name, [])
        if whole and len(got) != len(expected):
            return "seen another number of times", f"{name}: eager {len(expected)} times, graphed {len(got)}", False
        if interrupted and name.endswith("at the end") and ("grad" in name or "hook" in name):
            continue  # an interrupted backward leaves what it had done, also in tensors that it gave to hooks
        for number, (one, other) in enumerate(zip(expected, got, strict=False)):
            found = _difference(one, other, tolerance)
            if found is None:
                continue
            what, is_rounding = found
            difference = (what.split(":")[0], f"{name}, number {number}: {what}", is_rounding)
            if not is_rounding:
                return difference
            roundings.append(difference)
    extra = set(graphed.seen) - set(eager.seen)
    if extra and whole:
        return "seen by the graphed world only", str(sorted(extra)), False
    return roundings[0] if roundings else None


def _difference(expected: Any, got: Any, tolerance: float = 0.0) -> tuple[str, bool] | None:
    """What differs between two observations, and whether it may be rounding, which ``tolerance`` bounds."""
    if not (isinstance(expected, Observation) and isinstance(got, Observation)):
        if type(expected) is not type(got):
            return f"type: eager {_short(expected)}, graphed {_short(got)}", False
        return None if expected == got else (f"value: eager {_short(expected)}, graphed {_short(got)}", False)
    if expected != got:
        return f"facts: eager {expected}, graphed {got}", False
    a, b = expected.values.contiguous(), got.values.contiguous()
    if same_bits(a, b):
        return None
    told = f"eager {a.flatten().tolist()[:8]}, graphed {b.flatten().tolist()[:8]}"
    if torch.equal(a, b):
        return f"sign of zero: {told}", True
    a, b = (t.to(torch.complex128) for t in (a, b))
    largest = (a - b).abs().max().item()
    if expected.dtype not in (torch.float64, torch.complex128):
        tolerance = _COARSE
    return f"value: {told}", largest <= tolerance * max(a.abs().max().item(), 1.0)


def _short(value: Any) -> str:
    return str(value)[:160]


def quiet_collector() -> None:
    """Collections of garbage scan what this process has at the start no more: programs are small, torch is not."""
    gc.collect()
    gc.freeze()
