"""A random program as text: what is printed is what is run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .shapes import HEADER, Shape, Spot
from .statements import Statements, indented
from .tensors import Batch, Computation

_TRAINERS = {
    "plain": "class Trainer:\n    pass",
    "dataclass": "@dataclass\nclass Trainer:\n    total: Any = None",
    "slots": "class Trainer:\n    __slots__ = ({names})",
}


@dataclass(frozen=True)
class Program:
    """A function, its state, and a loop that calls it.

    Attributes:
        setup: statements that make the state.
        variables: global ones among it.
        body: statements of the function.
        result: the statement that it ends with.
        inner: how many statements are those of a function that it calls.
        is_inner_graphed: that one is, too.
        before, after: statements around each call, which may keep what they find in ``log``; ``i`` is its number.
        keeps_results: in ``log``.
        alternates: the function is called with two signatures in turn.
        batch: what it is given.
        keeps_batches: in ``log``.
    """

    seed: int
    setup: tuple[str, ...]
    variables: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    inner: int
    is_inner_graphed: bool
    before: tuple[str, ...]
    after: tuple[str, ...]
    keeps_results: bool
    alternates: bool
    batch: Batch
    keeps_batches: bool

    def text(self) -> str:
        """Python that defines the state, ``step``, ``before`` and ``after``."""
        head = [f"global {', '.join(self.variables)}"] if self.variables else []
        reads = [*head, f"x = {self.batch.x}"]
        inner, outer = self.body[: self.inner], self.body[self.inner :]
        functions = []
        if inner:
            functions.append(indented("def inner(tr, batch, flag):", [*reads, *inner]))
            functions += ["inner = graphed(inner)"] if self.is_inner_graphed else []
            outer = ("inner(tr, batch, flag)", *outer)
        functions.append(indented("def step(tr, batch, flag):", [*reads, *outer, self.result]))
        for name in ("before", "after"):
            functions.append(indented(f"def {name}(i):", [*head, *getattr(self, name)]))
        roots = ", ".join(("tr", "vars_of(held)", *self.variables, "batch", "log"))
        functions.append(f"def roots():\n    return [{roots}]\n")
        return "\n".join([HEADER, *self.setup, f"batch = {self.batch.made}", "log = []", *functions])

    def __str__(self) -> str:
        text = self.text().removeprefix(HEADER).replace("DEVICE", "'cpu'")
        flag = "i % 2 == 0" if self.alternates else "False"
        loop = [f"batch = {self.batch.made}"] if self.batch.is_new else []
        loop += ["log.append(batch)"] if self.keeps_batches else []
        loop += ["before(i)", "x.fill_(i)", f"result = step(tr, batch, {flag})"]
        loop += ["log.append(result)"] if self.keeps_results else []
        return f"# seed {self.seed}\n{text}\n{indented('for i in range(8):', [*loop, 'after(i)'])}\n"

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less."""
        for name in ("before", "after", "body"):
            statements = getattr(self, name)
            for number in range(len(statements)):
                inner = self.inner - (name == "body" and number < self.inner)
                yield replace(self, **{name: statements[:number] + statements[number + 1 :]}, inner=inner)
        for name in ("keeps_results", "keeps_batches"):
            if getattr(self, name):
                yield replace(self, **{name: False})
        if self.is_inner_graphed:
            yield replace(self, is_inner_graphed=False)
        elif self.inner:
            yield replace(self, inner=0)
        if self.alternates:
            yield replace(self, alternates=False)


def generate(seed: int) -> Program:
    """The program of ``seed``."""
    rng = random.Random(seed)
    fields = _fields(rng)
    spots = [spot for field in fields for spot in field.shape.spots(field.path)]
    variables = tuple(field.path for field in fields if field.path.startswith("g_"))
    computation, batch = Computation.draw(rng), Batch.draw(rng)
    given = Shape.draw(rng, 1)
    batch = replace(batch, made=batch.made.replace("*", given.made(rng, is_first=True)))
    in_batch = given.spots(batch.part) if batch.part else ()
    statements = Statements(rng, [*spots, *in_batch], computation.statements)
    body = list(computation.first)
    body += [one for _ in range(rng.randint(1, 5)) for one in statements.of_function()]
    # What was changed is often given new, as a replay could do it.
    body += [f"{field.path} = {field.shape.made(rng, is_first=True)}" for field in fields if rng.random() < 0.5]
    # The variables of a function that is called are none of the caller's.
    is_split = rng.random() < 0.25 and all(not spot.path.startswith("v") for spot in statements.spots)
    return Program(
        seed=seed,
        setup=_setup(rng, fields, computation),
        variables=variables,
        body=tuple(body),
        result=statements.result(),
        inner=rng.randint(1, len(body) - 1) if is_split and len(body) > 1 else 0,
        is_inner_graphed=rng.random() < 0.3,
        before=_around(rng, spots),
        after=_around(rng, spots),
        keeps_results=rng.random() < 0.5,
        alternates=rng.random() < 0.3,
        batch=batch,
        keeps_batches=rng.random() < 0.3,
    )


def _fields(rng: random.Random) -> list[Spot]:
    """Where the state is: attributes of the trainer, of an object besides, and global variables."""
    fields: list[Spot] = []
    for name in "abcd"[: rng.randint(1, 4)]:
        again = fields and rng.random() < 0.4  # so that things can move
        shape = rng.choice(fields).shape if again else Shape.draw(rng, rng.randint(1, 2))
        fields.append(Spot(rng.choice(("tr.", "tr.", "tr.", "held.", "g_")) + name, shape))
    return fields


def _setup(rng: random.Random, fields: list[Spot], computation: Computation) -> tuple[str, ...]:
    own = [field.path.removeprefix("tr.") for field in fields if field.path.startswith("tr.")]
    names = ", ".join(f"{name!r}" for name in (*computation.names, *own))
    trainer = rng.choice(tuple(_TRAINERS.values())).replace("{names}", names)
    made = [f"{field.path} = {field.shape.made(rng, is_first=True)}" for field in fields]
    first = ("torch.manual_seed(0)", "class held:\n    pass", "tr = Trainer()", "x = torch.ones(3, device=DEVICE)")
    return (trainer, *first, *computation.setup, *made)


def _around(rng: random.Random, spots: list[Spot]) -> tuple[str, ...]:
    statements = Statements(rng, spots)
    return tuple(one for _ in range(rng.choice((0, 1, 1, 2))) for one in statements.of_caller())
