"""Random programs of paths: containers within containers, at whose end is what code reads; parts of them are replaced.

What is replaced is let go of first, so that what comes may lie at its place in memory, and a guard that has found a
difference once is asked again and again, which may be when everything is as it was. A program is a text of a module
with a function, which a graphed function and a graphed module call, and statements that change what it reads.
``python tests/graphs/guards/path_programs.py`` runs as many as PATH_PROGRAMS says.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shrinking import fewest
from text_cases import HEADER, importable, made_module, run_text

from te_graph import graphed, make_graphed_callables


@dataclass(frozen=True)
class End:
    """What a path leads to.

    Attributes:
        made: an expression that makes it. ``$``: a random number.
        read: an expression, of a number or a tensor, that is read of it. ``@``: where it is. ``x``: the argument.
        change: a statement that changes it, if there is one.
    """

    made: str
    read: str = "@"
    change: str = ""


@dataclass(frozen=True)
class Container:
    """What holds one thing.

    Attributes:
        made: an expression that makes it, around ``{}``.
        read: what it holds, where it is at ``@``.
        put: a statement that puts ``{}`` into it; empty where that cannot be done.
    """

    made: str
    read: str
    put: str = "{read} = {}"


_SETUP = """
import contextvars, types
class Object:
 def __init__(self, v): self.v = v
 def get(self, x): return x * self.v
class Slots:
 __slots__ = ('v',)
 def __init__(self, v): self.v = v
@dataclasses.dataclass
class Data:
 v: object
@dataclasses.dataclass(frozen=True)
class Frozen:
 v: object
class Called(Object):
 def __call__(self, x): return x * self.v
class Property(Object):
 @property
 def w(self): return self.v
class Mode(enum.Enum):
 A = 1.5
 B = 2.5
class Values(tuple): pass
class Words(dict): pass
class Items(list): pass
Pair = collections.namedtuple('Pair', 'a b')
def with_default(v):
 def h(x, y=v): return x * y
 return h
def with_keyword(v):
 def h(x, *, y=v): return x + y
 return h
def closure(v):
 def h(x): return x * v
 return h
def named(name):
 def h(x): return x
 h.__name__ = name
 return h
def variable(v):
 made = contextvars.ContextVar('made'); made.set(v)
 return made
def module(v):
 made = types.ModuleType('made'); made.v = v
 return made
def layer(v):
 made = nn.Linear(3, 3).requires_grad_(False); made.weight.fill_(v); made.bias.fill_(v)
 return made
m, part = Object(None), nn.Module()
"""
_TENSOR = "torch.full((3,), $)"
_OF_V = ("Object({})", "Slots({})", "Data({})", "SimpleNamespace(v={})", "type('Made', (), {{'v': {}}})", "module({})")
_VALUES = ("$", _TENSOR)
ENDS = (
    *(End(value) for value in ("$", _TENSOR, "float('$')", "len('a' * (2 + int($)))", "complex($, 1).real")),
    End(_TENSOR, change="@.fill_($)"),
    *(End(made.format(value), "@.v", f"@.v = {value}") for made in _OF_V for value in _VALUES),
    *(End(f"Frozen({value})", "@.v") for value in _VALUES),
    *(End(f"with_default({value})", "@(x)", f"@.__defaults__ = ({value},)") for value in _VALUES),
    *(End(f"with_keyword({value})", "@(x)", f"@.__kwdefaults__['y'] = {value}") for value in _VALUES),
    *(End(f"with_keyword({value})", "@(x)", f"@.__kwdefaults__ = {{'y': {value}}}") for value in _VALUES),
    *(End(f"closure({value})", "@(x)", f"@.__closure__[0].cell_contents = {value}") for value in _VALUES),
    *(End(f"Object({value}).get", "@(x)", f"@.__self__.v = {value}") for value in _VALUES),
    *(End(f"functools.partial(torch.mul, {value})", "@(x)") for value in _VALUES),
    End("functools.partial(torch.mul, other=$)", "@(x)", "@.keywords['other'] = $"),
    End("Called($)", "@(x)", "@.v = $"),
    End("Property($)", "@.w", "@.v = $"),
    *(
        End(f"eval('lambda x: x {sign} 1.0')", "@(x)", f"@.__code__ = (lambda x: x {sign} $).__code__")
        for sign in "+-*"
    ),
    *(End(op, "@(x)") for op in ("torch.relu", "torch.sigmoid", "torch.tanh", "torch.neg")),
    *(End(f"Mode.{mode}", "@.value") for mode in "AB"),
    *(End(f"named({name!r})", "len(@.__name__)", "@.__name__ = 'renamed'") for name in ("p", "pp")),
    End("np.array([$])", "float(@[0])", "@[0] = $"),
    End("np.float64($)", "float(@)"),
    End("bytes([int(10 * $)])", "@[0]"),
    End("range(int(10 * $), 99)", "@[0]"),
    End("frozenset([$])", "sum(@)"),
    End("operator.itemgetter(int($) % 2)", "@((2.0, 3.0))"),
    End("operator.methodcaller('__add__', $)", "@(1.0)"),
    End("layer($)", "@(x)", "@.weight.fill_($)"),
    End("layer($)", "@(x)", "@.bias.data = torch.full((3,), $)"),
    End("layer($)", "@(x)", "@.weight = nn.Parameter(torch.full((3, 3), $), False)"),
)
CONTAINERS = (
    Container("[{}]", "@[0]"),
    Container("Items([{}])", "@[0]"),
    Container("collections.deque([{}])", "@[0]"),
    Container("{{'k': {}}}", "@['k']"),
    Container("Words(k={})", "@['k']"),
    Container("collections.OrderedDict(k={})", "@['k']"),
    Container("collections.defaultdict(int, k={})", "@['k']"),
    Container("({},)", "@[0]", put=""),
    Container("('q', {})", "@[1]", put=""),
    Container("Values([{}])", "@[0]", put=""),
    Container("Pair({}, 1)", "@.a", put=""),
    *(Container(made, "@.v") for made in _OF_V),
    Container("variable({})", "@.get()", put="@.set({})"),
    Container("MappingProxyType({{'k': {}}})", "@['k']", put=""),
    Container("types.CellType({})", "@.cell_contents"),
)
_PLACES = ("m.p#", "part.p#", "p#")


def program(seed: int, length: int = 16) -> tuple[str, str, list[str]]:
    """Setup, expression read, changes."""
    chance = random.Random(seed)
    setup, reads, makers = [_SETUP], [], []

    def drawn(text: str) -> str:
        while "$" in text:
            text = text.replace("$", str(chance.choice((0.5, 1.5, 2.5, 1.25))), 1)
        return text

    for number in range(chance.choice((1, 2, 3, 5))):
        end = chance.choice(ENDS)
        held = [chance.choice(CONTAINERS) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]
        where = [chance.choice(_PLACES).replace("#", str(number))]
        puts = [f"{where[0]} = {{}}"]
        for one in held:
            where.append(one.read.replace("@", where[-1]))
            puts.append(one.put.replace("@", where[-2]).replace("{read}", where[-1]))
        made = [end.made]  # what stands at each place, innermost first
        for one in reversed(held):
            made.append(one.made.format(made[-1]))
        replaced = [(put, text) for put, text in zip(puts, reversed(made), strict=True) if put]
        setup.append(drawn(puts[0].format(made[-1])))
        reads.append(end.read.replace("@", where[-1]))
        # What raises an error in eager execution, as None in the place of something, counts for nothing.
        makers.append((replaced, end.change.replace("@", where[-1])))
    changes = []
    for _ in range(length):
        replaced, change = chance.choice(makers)
        put, text = chance.choice(replaced)
        how = chance.choice(("replaced", "let go", "let go", "twice", "changed", "noise"))
        if how == "changed" and change:
            changes.append(drawn(change))
        elif how == "noise":
            changes.append("junk = [(i,) for i in range(20)]; del junk")
        else:
            first = {"let go": put.format("None"), "twice": drawn(put.format(text))}.get(how, "pass")
            changes.append(f"{first}\n{drawn(put.format(text))}")
    return "\n".join(setup), " + ".join(reads), changes


def failure(setup: str, read: str, changes: list[str]) -> str:
    """How a call after one of ``changes`` differs from eager execution; empty where none does."""
    made = made_module()
    with importable(made):
        run_text(made, f"{HEADER}\n{setup}\ndef fn(x):\n return torch.Tensor.mul(x, {read})")
        run_text(made, "class Net(nn.Module):\n def forward(self, x): return fn(x)")
        x = torch.tensor([0.5, -1.0, 2.0])
        try:
            made.fn(x)
        except Exception:
            return ""  # no program
        function, refused = graphed(made.fn), False
        try:
            net = make_graphed_callables(made.Net(), (x,), num_warmup_iters=2)
        except RuntimeError:  # refused by name
            net = made.fn
        for change in ["", *changes]:
            with contextlib.suppress(AttributeError, TypeError, KeyError, IndexError):
                run_text(made, change)
            for what, call in (("function", function), ("module", net)):
                expected, found = _result(made.fn, x), _result(call, x)
                if found != expected and not (what == "module" and "since capture" in str(found)):
                    return f"after {change!r} a graphed {what} gives {found}, eager execution {expected}"
                is_noise = change.startswith("junk") and what == "module"
                if is_noise and not refused and found != expected:
                    return f"nothing has changed, and a graphed module says {found}"
                refused = found != expected if what == "module" else refused
    return ""


def _result(call: Callable, x: torch.Tensor) -> Any:
    """The numbers of a result of ``x`` [3], or an error."""
    try:
        return call(x).tolist()
    except (RuntimeError, ValueError) as error:
        return str(error) if "since capture" in str(error) else type(error).__name__
    except Exception as error:
        return type(error).__name__


def check(seed: int) -> None:
    """Run the program of ``seed``; where it fails, leave changes out for as long as it does, and show what is left."""
    setup, read, changes = program(seed)
    changes, error = fewest(changes, functools.partial(failure, setup, read))
    made = setup.removeprefix(_SETUP)
    assert not error, f"seed {seed}: {error}\nafter {changes}\nread {read}\n{made}"


def main() -> None:
    first = int(os.environ.get("PATH_SEED") or int.from_bytes(os.urandom(4), "little"))
    count = int(os.environ.get("PATH_PROGRAMS", "1000"))
    logging.getLogger("te_graph").setLevel(logging.CRITICAL)
    for seed in range(first, first + count):
        try:
            check(seed)
        except AssertionError as error:
            print(error, flush=True)
    print(count, "programs, seeds from", first)


if __name__ == "__main__":
    main()
