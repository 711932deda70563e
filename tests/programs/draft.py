"""A program while it is drawn: what is there by now, and the steps of forwards, losses and backwards."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from . import functions, pieces, prelude
from .program import Group, Piece, Step
from .zoo import ZOO

# With these, gradients or inputs lie otherwise than samples did, and eager kernels may round otherwise.
TURNING = {"transposed", "turned", "with_turned", "with_view_of_argument", "one_of_negative", "ReturnsParameter"}


@functools.cache
def parameter_facts(name: str) -> tuple[tuple[bool, bool], ...]:
    """For each parameter of a piece: whether it requires a gradient, and whether it is a plain float64 [4, 4]."""
    namespace: dict[str, Any] = {**vars(prelude), **vars(pieces), **vars(functions)}
    exec(ZOO[name].build.format(o="o", m="m"), namespace)
    found = prelude.params(namespace["o"])
    return tuple(
        (p.requires_grad, p.shape == (4, 4) and p.is_contiguous() and str(p.dtype) == "torch.float64") for p in found
    )


@dataclass
class Batch:
    """A micro-batch whose backward has not run.

    Attributes:
        values: [4, 4] tensors with gradients that pieces may take.
        ends: results that nothing has used yet, by name: whether they are [4, 4].
        calls: how often each piece was called.
        shared: values that may be one tensor, or one memory, with another value in eager execution.
        used: ends that the loss depends on.
        loss: its name, once there is one.
    """

    leaves: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    ends: dict[str, bool] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    shared: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    loss: str = ""


class Draft:
    """Draws steps. ``is_ordered``: every value is used once, so sums have one order; see ``Program.is_exact``."""

    def __init__(self, rng: random.Random, is_exact: bool, is_ordered: bool, device: str) -> None:
        self.rng, self.is_exact, self.is_ordered, self.device = rng, is_exact, is_ordered, device
        self.pieces: list[Piece] = []
        self.groups: list[Group] = []
        self.steps: list[Step] = []
        self.pending: list[Batch] = []
        self.done: list[Batch] = []
        self.busy: Counter[int] = Counter()
        self.optimizer = ""
        self.late: list[tuple[str, str]] = []  # losses of eager code whose backward waits, with their inputs
        self.may_turn = True
        self.tied: set[int] = set()  # pieces that share a parameter
        self.main_grads: set[int] = set()
        self.hooked: set[str] = set()
        self.retained: set[str] = set()
        self._count = 0

    # Small things.

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def number(self) -> int:
        return self.rng.randrange(1, 1000)

    def data(self) -> str:
        return f"data({self.number()}, DEV)"

    def add(self, kind: str, code: str, is_early: bool = False) -> None:
        self.steps.append(Step(code, kind, is_early))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def slots(self, piece: int) -> int:
        return next((dict(g.options).get("max_in_flight", 1) for g in self.groups if piece in g.pieces), 99)

    def sharing(self, piece: int) -> set[int]:
        """The pieces that use the parameters of ``piece``."""
        return {piece} | (self.tied if piece in self.tied else set())

    def accumulates(self, piece: int) -> bool:
        """True when graphs accumulate the gradients of ``piece``, not autograd, also if others use its parameters."""
        able = {n for g in self.groups if dict(g.options).get("accumulate_grads", True) for n in g.pieces}
        return self.sharing(piece) <= able

    def captures_hooks(self, piece: int) -> bool:
        """True when hooks of modules that ``piece`` calls are captured with it."""
        return any(piece in g.pieces and dict(g.options).get("hooks") == "captured" for g in self.groups)

    def with_parameters(self) -> list[Piece]:
        return [piece for piece in self.pieces if any(requires for requires, _ in parameter_facts(piece.name))]

    def some_parameter(self, is_plain: bool = False) -> tuple[str, int] | None:
        """Source of a parameter with a gradient, and its piece; None where there is none."""
        found = [
            (f"params(o{piece.number})[{i}]", piece.number)
            for piece in self.pieces
            for i, (requires, plain) in enumerate(parameter_facts(piece.name))
            if requires and (plain or not is_plain)
        ]
        return self.rng.choice(found) if found else None

    # Forwards.

    def forward(self) -> None:
        """A new micro-batch through one to four pieces."""
        rng, batch = self.rng, Batch()
        leaf = self.name("x")
        self.add("leaf", f"{leaf} = leaf({self.number()}, DEV)")
        batch.leaves.append(leaf)
        batch.values.append(leaf)
        if self.chance(0.1):
            self.add("hook on an input", f"{leaf}.register_hook(lambda g: see('{leaf} hook', g))")
        if self.chance(0.4):
            hidden = self.name("h")
            stem = rng.choice(("{} * 1", "{} + 1", "{} * 3", "{}.clone()"))
            self.add("stem", f"{hidden} = {stem.format(leaf)}")
            batch.values = [hidden]
            if self.chance(0.1):
                self.add("hook on a hidden input", f"{hidden}.register_hook(lambda g: see('{hidden} hook', g))")
        path = self._path()
        for number in path:
            self._call(batch, number)
            if self.chance(0.15) and not self.is_ordered:
                self._between(batch)
        if batch.ends:
            self.pending.append(batch)

    def _path(self) -> list[int]:
        chains = [group.pieces for group in self.groups if dict(group.options).get("chain")]
        if chains and self.chance(0.8):
            return list(self.rng.choice(chains))
        return [self.rng.choice(self.pieces).number for _ in range(self.rng.choice((1, 2, 2, 3, 3, 4)))]

    def _call(self, batch: Batch, number: int) -> None:
        piece = next(piece for piece in self.pieces if piece.number == number)
        if self.busy[number] + batch.calls[number] >= self.slots(number) and not self.chance(0.03):
            return
        able = [value for value in batch.values if not (piece.kind.aliases and value in self.hooked | self.retained)]
        if self.is_ordered and (batch.calls[number] or piece.kind.takes > len(able)):
            return
        arguments = []
        for _ in range(piece.kind.takes):
            others = [value for value in able if value not in arguments]
            if not others:
                extra = self.name("x")
                self.add("leaf", f"{extra} = leaf({self.number()}, DEV)")
                batch.leaves.append(extra)
                others = [extra]
            arguments.append(others[-1] if self.chance(0.6) else self.rng.choice(others))
        for argument in arguments:
            batch.ends.pop(argument, None)
            if self.is_ordered:
                batch.values.remove(argument)
        results = [self.name("y") for _ in piece.kind.gives]
        call = f"{', '.join(results)} = m{number}({', '.join(arguments)})"
        if self.chance(0.2) and piece.kind.call != "{o}":
            look = f"see('o{number} written', written_since(before, o{number}))"
            call = f"before = versions(o{number})\n{call}\n{look}"
        self.add(f"call {piece.name}", call)
        batch.calls[number] += 1
        if piece.kind.aliases:
            batch.shared.update(arguments, results)
        for result, letter in zip(results, piece.kind.gives, strict=True):
            self._look(result, letter, may_keep=not piece.name.startswith("Returns") or result == results[0])
            if letter == "d":
                batch.values.append(result)
            if letter != "n":
                batch.ends[result] = letter == "d"
                # Which results backward(inputs=...) goes through cannot be told inside a callable (docs/limits.md).
                hangs_on_all = piece.kind.takes == 1 or len(results) == 1
                if hangs_on_all and not piece.kind.aliases:
                    self._hook(batch, result)

    def _look(self, result: str, letter: str, may_keep: bool) -> None:
        views = (f"{result}.detach()[0]", f"{result}.detach().t()") if letter == "d" else ()
        what = self.rng.choice((f"{result}.detach()", result, *views))
        if self.chance(0.5):
            self.add("see a result", f"see('{result}', {result})")
        if self.chance(0.06):  # torch keeps the Python object of a storage as long as that lives
            self.add("storage of a result", f"{result}.untyped_storage()")
        if not may_keep:
            return
        if self.chance(0.3):
            self.add("keep a result", f"keep('{result} kept', {what})")
        if self.chance(0.12):
            exports = ["{}.tolist()", "{}.clone()", "torch.from_dlpack({})", "{}.cpu()", "{}[None]"]
            exports += ["{}.numpy()", "np.from_dlpack({})", "np.asarray({})"] if self.device == "cpu" else []
            export = self.rng.choice(exports).format(f"{result}.detach()")
            self.add(f"export {export.split('(')[0].split('.')[-1]}", f"keep('{result} exported', {export})")

    def _hook(self, batch: Batch, result: str) -> None:
        if self.chance(0.08):
            self.add("retain_grad", f"{result}.retain_grad()")
            batch.shared.add(result)
            self.retained.add(result)
            self.done.append(Batch(leaves=[result]))
        if self.chance(0.08):
            body = self.rng.choice((f"see('{result} hook', g)", "g * 2", f"keep('{result} hook', g)"))
            self.add("hook on a result", f"{result}.register_hook(lambda g: {body})")
            # Whether it runs after a change in place, or before autograd.grad looks, depends on the nodes inside.
            self.hooked.add(result)
            batch.shared.add(result)

    def _between(self, batch: Batch) -> None:
        """Eager operations on results."""
        rng, value = self.rng, self.rng.choice(batch.values)
        if value[0] in "yh" and value not in batch.shared and self.chance(0.4):
            edit = rng.choice(("{}.mul_(2)", "{}.add_(1)", "{}[0].zero_()", "{}.relu_()", "{}.detach().add_(1)"))
            self.add("edit a result in place", edit.format(value))
            if "detach" in edit:
                # Of a result that is a view inside, torch makes another node then, and the old one's gradient is None.
                batch.shared.add(value)
            return
        result = self.name("z")
        turned = "{}.t()" if self.may_turn else "{} - 1"
        eager = rng.choice(("{} * 2", turned, "{} + 1", "{}.relu()", "{0} + {1}", "{0} * {1}", "{}.detach() + {}"))
        if eager == "{}.detach() + {}":
            eager = "{0}.detach() + {0}"
        self.add("eager operation", f"{result} = {eager.format(value, rng.choice(batch.values))}")
        batch.values.append(result)
        batch.ends[result] = True

    # Losses and backwards.

    def _loss(self, batch: Batch) -> str:
        rng, ends = self.rng, dict(batch.ends)
        while len(ends) > 1 and not self.is_ordered and self.chance(0.25):
            ends.pop(rng.choice(list(ends)))
        terms = []
        batch.used = set(ends)
        for name, is_square in ends.items():
            kinds = [f"({name} * {name}).sum()"]
            kinds += [f"({name} * {self.data()}).sum()"] * 2 if is_square else []
            kinds += [f"{name}.sum()", f"{name}.t().square().sum()"] if not self.is_ordered and is_square else []
            terms.append(rng.choice(kinds))
        if self.chance(0.3) and not self.is_ordered:
            inner = rng.choice(batch.values)
            batch.used.add(inner)
            terms.append(f"({inner} * {self.data()}).sum()")
        parameter = self.some_parameter(is_plain=True)
        if parameter and parameter[1] not in self.main_grads and self.chance(0.08) and not self.is_ordered:
            terms.append(f"({parameter[0]} * 2).sum()")
        loss = self.name("l")
        self.add("loss", f"{loss} = {' + '.join(terms)}")
        return loss

    def backward(self) -> None:
        """The backward of a micro-batch that waits, or of two at once."""
        batch = self.pending.pop(self.rng.randrange(len(self.pending)))
        loss = self._loss(batch)
        leaf = self.rng.choice(batch.leaves)
        way = self.rng.random()  # where something retains its gradient, not those that run some nodes only
        if way < 0.55:
            self.add("backward", f"{loss}.backward()")
        elif way < 0.65:
            self.add("backward twice", f"{loss}.backward(retain_graph=True)\n{loss}.backward()")
        elif way < 0.72:
            self.add("backward retains", f"{loss}.backward(retain_graph=True)")
            self._observe(batch)
            if self.chance(0.5) and not self.is_ordered:
                self.forward()
            self.add("backward again", f"{loss}.backward()")
        elif way < 0.84 and not self.retained:
            able = [value for value in batch.values if value not in batch.shared]
            wanted = [leaf, *self.rng.sample(able, min(len(able), 2))]
            names = ", ".join(dict.fromkeys(wanted))
            grads = self.name("g")
            self.add("autograd.grad", f"{grads} = torch.autograd.grad({loss}, [{names}], allow_unused=True)")
            look = f"for i, g in enumerate({grads}): keep(f'{grads}[{{i}}]', g)"
            self.add("keep gradients", look)
        elif way < 0.9 and not self.retained:
            self.add("backward to inputs", f"{loss}.backward(inputs=[{leaf}])")
        elif self.pending and not self.is_ordered:
            other = self.pending.pop()
            self.add("backward of two", f"({loss} + {self._loss(other)}).backward()")
            self._free(other)
        else:
            self.add("backward from a gradient", f"{loss}.backward(gradient=torch.full_like({loss}, 2))")
        self._free(batch)
        self._observe(batch)

    def _free(self, batch: Batch) -> None:
        self.busy.subtract(batch.calls)
        self.done.append(batch)
        for name in batch.ends:
            if name not in batch.used and not any(name in other.leaves for other in self.done):
                self.add("let go of a result", f"del {name}")

    def wait(self) -> None:
        """Let the last forward's slots count as busy."""
        for batch in self.pending:
            if not batch.loss:
                batch.loss = "waits"
                self.busy.update(batch.calls)

    def _observe(self, batch: Batch) -> None:
        for leaf in batch.leaves:
            verb = "keep" if self.chance(0.3) else "see"
            self.add(f"{verb} an input gradient", f"{verb}('{leaf}.grad', {leaf}.grad)")
            if self.chance(0.05):
                export = f"if {leaf}.grad is not None: keep('{leaf}.grad exported', {leaf}.grad.numpy(force=True))"
                self.add("export a gradient", export)
        for number in batch.calls:
            piece = next(piece for piece in self.pieces if piece.number == number)
            if parameter_facts(piece.name):
                self.add("see parameter gradients", f"grads('o{number}', o{number})")
        if self.chance(0.15) and (parameter := self.some_parameter()):
            code = f"if {parameter[0]}.grad is not None: {parameter[0]}.grad.untyped_storage()"
            self.add("storage of a gradient", code)
        if self.chance(0.15) and (parameter := self.some_parameter()):
            view = self.rng.choice(("", ".detach()", ".detach().view(-1)", ".detach()[0]"))
            code = f"if {parameter[0]}.grad is not None: keep('{parameter[0]}.grad kept', {parameter[0]}.grad{view})"
            self.add("keep a parameter gradient", code)
