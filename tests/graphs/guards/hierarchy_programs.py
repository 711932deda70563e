"""Random programs of classes, objects and variables that a forward reads, which are changed between calls.

A program is the text of a module of Python and a list of statements; ``m`` is the graphed module, then the eager one.
``python tests/graphs/guards/hierarchy_programs.py`` runs as many as HIERARCHY_PROGRAMS says.
"""

from __future__ import annotations

import linecache
import logging
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shrinking import fewest
from torch import nn

import te_graph as tg

_LEVELS = 4  # members of a number use those of higher numbers alone
_HEAD = "import functools\nimport operator\nfrom torch import nn\nimport torch\n\n"
# By name: the special methods of S0, S1 and S2, as (arguments, type of results, how code reads an object).
_SPECIAL = {
    "__init__": ("self, k=1.0", "", "type({})().k"),
    "__call__": ("self", "float", "{}()"),
    "__eq__": ("self, other", "bool", "(2.0 if {} == 1 else 1.0)"),
    "__len__": ("self", "int", "len({})"),
    "__repr__": ("self", "str", "len(repr({}))"),
    "__getitem__": ("self, index", "float", "{}[0]"),
}
_FORWARD = """
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.part = P{part}()
        self.table = {{"a": 1.5, "b": [2.0, {{"c": 0.5}}]}}
        self.values = [1.0, 2.0]
        self.v1 = 1.25

    def forward(self, x):
        return torch.tanh(self.layer(x)) * ({first}) + ({second})
"""


class Draft:
    """The text of a program's module, drawn by ``chance``."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.kinds: dict[str, str] = {}  # of each member, by name: all classes agree
        for number in range(_LEVELS):
            self.kinds[f"n{number}"] = chance.choice(["method", "method", "property", "classmethod", "staticmethod"])
        self.bases = {"P0": [], "P1": ["P0"], "P2": chance.choice([["P1"], ["P0"], ["P1", "Q0"]]), "Q0": []}
        self.bases |= {"K0": [], "K1": chance.choice([["K0"], ["K0", "Q0"]]), "K2": ["K1"]}
        self.order = ["Q0", "P0", "P1", "P2", "K0", "K1", "K2"]
        self.part = chance.randrange(3)
        # Of each of these classes how it has each special method: by code, by an object without code, or not.
        self.special = [{name: self.how(number) for name in _SPECIAL} for number in range(3)]
        self.by_name = chance.choice([[], [], ["K0.v0"], ["P0.v0"]])  # what is named is compared as a whole

    def text(self) -> str:
        parts = [_HEAD, *(f"G{i} = {self.value()}\n" for i in range(2)), "\n\ndef fn(k=2.0):\n    return k * G1\n"]
        for name in self.order:
            below = ", ".join(self.bases[name])
            parts.append(f"\n\nclass {name}({below}):\n    v0 = {self.value()}\n")
            for number in range(_LEVELS):
                is_first = not self.bases[name]
                if is_first or self.chance.random() < 0.5:
                    parts.append(self.member(f"n{number}", number, is_first, name[0] == "K"))
        parts += [self.special_class(number) for number in range(3)]
        parts.append("\n\nOBJECTS = [S0(), S1(), S2()]\n")
        first = " + ".join(self.read(owner, number) for owner in ("self", "self.part") for number in range(_LEVELS))
        second = " + ".join([self.expression(0, True, True), self.expression(0, True, True), self.read_special()])
        parts.append(f"\n\nclass M(K2, nn.Module):{_FORWARD.format(part=self.part, first=first, second=second)}")
        return "".join(parts)

    def value(self) -> float:
        return self.chance.randrange(1, 32) / 8

    def member(self, name: str, number: int, is_first: bool, is_module: bool) -> str:
        kind = self.kinds[name]
        decorator = "" if kind == "method" else f"    @{kind}\n"
        given = {"staticmethod": "", "classmethod": "cls"}.get(kind, "self")
        terms = [self.expression(number + 1, given == "self", is_module)] if given == "self" else [str(self.value())]
        if not is_first and given and self.chance.random() < 0.7:
            terms.append(f"super().{name}" + ("" if kind == "property" else "()"))
        return f"\n{decorator}    def {name}({given}):\n        return {' + '.join(terms)}\n"

    def how(self, number: int) -> str:
        return "code" if number == 0 else self.chance.choice(["code", "partial", "None", "", ""])

    def special_class(self, number: int) -> str:
        below = "" if number == 0 else f"(S{number - 1})"
        members = [
            f"    {name} = {self.special_method(name, how)}\n" for name, how in self.special[number].items() if how
        ]
        return f"\n\nclass S{number}{below}:\n    k = {self.value()}\n{''.join(members)}"

    def special_method(self, name: str, how: str) -> str:
        """What a class may have under ``name``."""
        given, kind, _ = _SPECIAL[name]
        value, others = self.value(), given.removeprefix("self").removeprefix(", ")
        results = {"float": f"{value}", "bool": f"{value > 2}", "int": f"{int(value)}", "str": repr("a" * int(value))}
        result = results.get(kind, f'setattr(self, "k", {value})')
        if how == "code" or name == "__init__":
            return f"lambda {given}: {result}"
        return "None" if how == "None" else f"functools.partial(lambda {others}: {result})"

    def read_special(self) -> str:
        """Of an object by a special method that its class has."""
        name, number = self.chance.choice(list(_SPECIAL)), self.chance.randrange(3)
        hows = [self.special[at][name] for at in range(number, -1, -1)]
        read = "{}.k" if name != "__init__" and next(filter(None, hows)) == "None" else _SPECIAL[name][2]
        return read.format(f"OBJECTS[{number}]")

    def read(self, owner: str, number: int) -> str:
        """Of member ``number``, with its name as it is or put together."""
        name = f"n{number}"
        named = self.chance.choice([f"{owner}.{name}"] * 3 + [f'getattr({owner}, f"n{{{number}}}")'])
        return named if self.kinds[name] == "property" else f"{named}()"

    def expression(self, number: int, has_self: bool, is_module: bool) -> str:
        """Of members from ``number`` on."""
        options = [str(self.value()), "G0", "fn()", "fn(k=G0)"]
        if has_self:
            options += ["self.v0", "type(self).v0", 'getattr(self, "w0", 1.0)', '(2.0 if hasattr(self, "w1") else 1.0)']
            options += ['operator.attrgetter("v0")(self)', 'functools.reduce(getattr, ["v0"], self)']
            options += self.by_name
            if number < _LEVELS:
                options += [self.read("self", self.chance.randrange(number, _LEVELS)) for _ in range(6)]
        if has_self and is_module:
            options += ['self.table["a"]', 'self.table["b"][1]["c"]', "self.values[-1]", "len(self.values)", "self.v1"]
            options += ["sum(self.values)", 'self.table.get("d", 3.0)', "self.part.v0"]
            options += [self.read("self.part", self.chance.randrange(_LEVELS)) for _ in range(3)]
        return f" {self.chance.choice('+*')} ".join(self.chance.sample(options, 2))

    def change(self) -> str:
        """A statement that changes what code may read."""
        value, chance = self.value(), self.chance
        name = f"n{chance.randrange(_LEVELS)}"
        kind, owner = chance.choice(self.order), chance.choice(["m", "m.part"])
        made = {
            "method": f"lambda self: {value}",
            "property": f"property(lambda self: {value})",
            "classmethod": f"classmethod(lambda cls: {value})",
            "staticmethod": f"staticmethod(lambda: {value})",
        }[self.kinds[name]]
        of_instance = f"{value}" if self.kinds[name] == "property" else f"lambda: {value}"
        options = [f"{kind}.{name} = {made}"] * 4
        options += [f"{owner}.{name} = {of_instance}"] * (2 * (self.kinds[name] != "property"))
        options += [f"{kind}.v0 = {value}", f"{owner}.v0 = {value}", f"{owner}.w0 = {value}", f"{owner}.w1 = {value}"]
        options += [f"G0 = {value}", f"G1 = {value}", f"fn.__defaults__ = ({value},)"]
        options += [f"fn.__code__ = (lambda k=2.0: k + {value}).__code__", f"m.part = P{chance.randrange(3)}()"]
        options += [f"m.part.__class__ = P{chance.randrange(3)}", f'm.table["a"] = {value}', "m.values.reverse()"]
        options += [f'm.table["b"][1]["c"] = {value}', f"m.values.append({value})", f'm.table["d"] = {value}']
        options += [f"m.v1 = {value}", f"m.table = {{**m.table, 'a': {value}}}", f"M.unused = {value}", "m.eager = 1"]
        options += [f"fn = lambda k=1.0: k * {value}", "m.layer.weight.data.mul_(0.5)", "m.values = list(m.values)"]
        name, number = chance.choice(list(_SPECIAL)), chance.randrange(3)
        how = chance.choice(["code", "code", "partial", "None"])
        options += [f"S{number}.{name} = {self.special_method(name, how)}"] * 4
        options += [f'delattr(S{number}, "{name}") if "{name}" in vars(S{number}) else None'] * 2
        return chance.choice(options)


def program(seed: int, length: int = 8) -> tuple[str, list[str]]:
    draft = Draft(random.Random(seed))
    return draft.text(), [draft.change() for _ in range(length)]


def _module_of(text: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = str(Path(__file__).with_name(f"{name}.py"))
    linecache.cache[module.__file__] = len(text), None, text.splitlines(keepends=True), module.__file__
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def failure(
    text: str, changes: list[str], on_mismatch: str = "capture", is_kept: bool = True, is_step: bool = False
) -> str:
    """What differs from eager execution; empty where nothing does."""
    module = _module_of(text, "hierarchy")
    # An exchanged method is often kept, and then is not gone.
    kept = [dict(vars(kind)) for kind in vars(module).values() if isinstance(kind, type)] if is_kept else []
    torch.manual_seed(0)
    graphed, eager = module.M(), module.M()
    eager.load_state_dict(graphed.state_dict())
    x = torch.randn(1, 2)
    try:
        if is_step:
            calls = tg.graphed(_step_of(graphed), on_mismatch=on_mismatch), _step_of(eager)
        else:
            tg.make_graphed_callables(
                graphed, (x,), num_warmup_iters=2, on_mismatch=on_mismatch, max_captures=100, allow_unused_input=True
            )
            calls = graphed, eager
    except Exception as error:
        return f"capture: {type(error).__name__}: {error}"
    info = calls[0].info if is_step else graphed.te_graph.info
    last = 2 if is_step else 1  # a function is captured at its second call
    for change in ["", *changes]:
        for m in (graphed, eager) if "m." in change else (None,):
            exec(change, vars(module) if m is None else {**vars(module), "m": m})
        for count in range(last + 1):
            before = info()["forward_replays"]
            seen = [_seen(call, x) for call in calls]
            if seen[0] != seen[1]:
                return f"after {change!r}: {seen[0]}, eager execution {seen[1]}"
            is_replayed = info()["forward_replays"] > before
            if on_mismatch == "capture" and count == last and not (is_replayed or isinstance(seen[1], str)):
                return f"after {change!r}: runs eagerly: {info()['eager_calls']}"
    kept.clear()
    return ""


def _step_of(m: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that a step may call: [1, 2] -> [1, 2]."""

    def step(x: torch.Tensor) -> torch.Tensor:  # [1, 2]
        with torch.no_grad():
            return m(x)

    return step


def _seen(call: Callable, x: torch.Tensor) -> Any:  # [1, 2]
    try:
        result = call(x)
        if result.requires_grad:
            result.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}"
    return result.tolist()


def check(seed: int) -> None:
    """Run the program of ``seed``; where it fails, leave changes out for as long as it does, and show what is left."""
    text, changes = program(seed)
    chance = random.Random(seed)
    how = chance.choice(["capture", "capture", "eager"]), chance.random() < 0.7, chance.random() < 0.5
    changes, error = fewest(changes, lambda some: failure(text, some, *how))
    assert not error, f"seed {seed}: {error}\nafter {changes}\n{text}"


def main() -> None:
    logging.getLogger("te_graph").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    first = int(os.environ.get("HIERARCHY_SEED") or int.from_bytes(os.urandom(4), "little"))
    count = int(os.environ.get("HIERARCHY_PROGRAMS", "1000"))
    for seed in range(first, first + count):
        check(seed)
    print(count, "programs, seeds from", first)


if __name__ == "__main__":
    main()
