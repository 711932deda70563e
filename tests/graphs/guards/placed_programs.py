"""Random programs of Python state: where it is held, how code reads it, and how it changes later.

A program is a text of a module with a function, which a graphed function and a graphed module call, and statements that
change what it reads. ``python tests/graphs/guards/placed_programs.py`` runs as many as PLACED_PROGRAMS says.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass

from shrinking import fewest
from text_cases import importable, made_module, outcomes_of_changes


@dataclass(frozen=True)
class Held:
    """What is held.

    Attributes:
        made: an expression that makes it. ``$``: a random number.
        read: an expression of a number that is read of it. ``@``: where it is.
        changes: statements that change it.
    """

    made: str
    read: str
    changes: tuple[str, ...] = ()


_SETUP = """
import json, string
TABLE = {'k': 2.0}
KEPT = Plain(); KEPT.k = 2.0
Pair = collections.namedtuple('Pair', 'a b')
class Base:
 scale = 2.0
 def get(self): return self.scale
 @property
 def shown(self): return self.scale
class Middle(Base): pass
class Low(Middle):
 def get(self): return super().get() + 1.0
class Slots:
 __slots__ = ('a', 'b')
 def __init__(self, a): self.a = a
@dataclasses.dataclass
class Data:
 a: object = 1.0
 b: object = None
@dataclasses.dataclass(frozen=True)
class Frozen:
 a: object = 1.0
class Mode(enum.Enum):
 A = 2.0
 B = 3.0
class Text(str):
 extra = 1.0
class Words(dict):
 extra = 1.0
class Part(nn.Module):
 scale = 2.0
 def __init__(self, a):
  super().__init__(); self.a = a
class Meta(type):
 scale = 2.0
class Holder: pass
def first(held): return held[0]
def tried(held):
 try: return held.gain
 except AttributeError: return 1.5
def taken(held, name='a'): return getattr(held, name)
def matched(held):
 match held:
  case Data(a=found): return found
  case _: return 0.5
"""
_OBJECT = ("@.a = $", "@.b = $", "@.gain = $", "type(@).gain = $", "type(@).a = $", "type(@).unused = $")
_A_READERS = (
    *("@.a", "taken(@)", "getattr(@, 'A'.lower())", "operator.attrgetter('a')(@)", 'float(f"{@.a}")'),
    *(
        "float('{0.a}'.format(@))",
        "copy.copy(@).a",
        "getattr(@, 'gain', @.a)",
        "tried(@) + @.a",
        "[o.a for o in [@]][0]",
    ),
    *("max([@], key=lambda o: o.a).a", "next(map(operator.attrgetter('a'), [@]))", "(lambda o: o.a)(@)"),
)
_CLASSES = ("Base", "Middle", "Low")
_DERIVED = tuple(f"{kind}.{change}" for kind in _CLASSES for change in ("scale = $", "gain = $", "unused = $"))
_DERIVED += tuple(f"{kind}.get = lambda self: $" for kind in _CLASSES)
_DERIVED += tuple(f"{kind}.shown = property(lambda self: $)" for kind in _CLASSES)


def _each(made: str, reads: tuple[str, ...], changes: tuple[str, ...]) -> tuple[Held, ...]:
    return tuple(Held(made, read, changes) for read in reads)


HELD = (
    Held("$", "@"),
    *_each(
        "Data($)", (*_A_READERS, "matched(@)", "dataclasses.asdict(@)['a']", "dataclasses.replace(@, b=1.0).a"), _OBJECT
    ),
    *_each("Slots($)", _A_READERS, ("@.a = $", "Slots.unused = $")),
    *_each("SimpleNamespace(a=$)", _A_READERS, ("@.a = $", "@.gain = $", "@.b = $")),
    *_each("Part($)", (*_A_READERS[:5], "@.scale + @.a"), (*_OBJECT, "@.scale = $", "Part.scale = $", "@.eval()")),
    *_each("Low()", ("@.get()", "@.scale", "@.shown", "tried(@)", "super(Low, @).get()", "type(@).scale"), _DERIVED),
    *_each("Low", ("@.scale", "@().get()", "@.__mro__[1].scale", "tried(@)", "next(iter([@])).scale"), _DERIVED),
    Held("Frozen($)", "@.a", ("object.__setattr__(@, 'a', $)",)),
    *_each(
        "[$, $]", ("@[0]", "first(@)", "sum(@)", "sorted(@)[0]", "(lambda a, b: a)(*@)"), ("@[0] = $", "@.reverse()")
    ),
    *_each("{'a': $}", ("@['a']", "sum(@.values())", "(lambda a: a)(**@)", "float('%(a)s' % @)"), ("@['a'] = $",)),
    *_each(
        "{'a': [$]}", ("@['a'][0]", "next(iter(@.values()))[-1]"), ("@['a'][0] = $", "@['a'] = [$]", "@['a'].append($)")
    ),
    *_each("collections.deque([$, $], 2)", ("@[0]", "sum(@)"), ("@.append($)", "@.rotate(1)", "@[0] = $")),
    Held("collections.deque([SimpleNamespace(a=$)])", "@[0].a", ("@[0].a = $", "@.appendleft(Data($))")),
    Held("functools.partial(float, $)", "@()", ("@.__setstate__((float, ($,), {}, {}))",)),
    Held("functools.partial(first, [$])", "@()", ("@.args[0][0] = $",)),
    Held("nn.Dropout(0.5)", "@.p", ("@.p = 0.25", "@.eval()")),
    Held("nn.Dropout(0.5)", "(2.0 if @.training else 3.0)", ("@.eval()", "@.train()")),
    Held("nn.Sequential(nn.Dropout(0.5))", "@[0].p", ("@[0].p = 0.25", "@[0] = nn.Dropout(0.75)")),
    Held("Pair([$], 1)", "@.a[0]", ("@.a[0] = $",)),
    *_each(
        "Mode.A",
        ("@.value", "getattr(@, 'gain', 1.5)", "sum(m.value for m in type(@))"),
        ("@.gain = $", "Mode.gain = $"),
    ),
    *_each(
        "Text('ab')", ("len(@) + @.extra", "getattr(@, 'gain', 1.5)"), ("@.extra = $", "Text.extra = $", "@.gain = $")
    ),
    *_each("Words(k=$)", ("@['k'] + @.extra", "@.get('z', 1.5)"), ("@['k'] = $", "@.extra = $", "@['z'] = $")),
    Held("MappingProxyType(TABLE)", "@['k']", ("TABLE['k'] = $",)),
    Held("operator.attrgetter('k')", "@(KEPT)", ("KEPT.k = $",)),
    Held("operator.itemgetter('k')", "@(TABLE)", ("TABLE['k'] = $",)),
    Held("weakref.ref(KEPT)", "@().k", ("KEPT.k = $", "Plain.k = $")),
    Held("np.array([$, $])", "float(@[0])", ("@[0] = $",)),
    Held("torch.tensor($)", "@", ("@.mul_(2)", "@.data = torch.tensor($)")),
    Held("Meta('Made', (), {})", "@.scale", ("Meta.scale = $", "@.scale = $")),
)
PLACES = (  # what holds it, and how code gets there
    ("P# = {}", "P#"),
    ("class C#:\n o = {}\nclass D#(C#): pass\nh# = D#()", "h#.o"),
    ("class C#(nn.Module):\n o = {}\nclass D#(C#): pass\nh# = D#()", "h#.o"),
    ("class C#:\n o = {}\nclass D#(C#): pass", "D#.o"),
    ("class C#(type):\n o = {}\nclass D#(metaclass=C#): pass", "D#.o"),
    ("class C#:\n class I:\n  o = {}", "C#.I.o"),
    ("def mk#():\n v = {}\n return lambda: v\nget# = mk#()", "get#()"),
    ("def get#(v={}): return v", "get#()"),
    ("def get#(*, v={}): return v", "get#()"),
    ("P# = {{'q': [0, {}]}}", "P#['q'][1]"),
    ("P# = Data({})", "P#.a"),
    ("P# = Slots({})", "P#.a"),
    ("P# = Holder(); P#.o = {}", "P#.o"),
    ("P# = Pair(1, {})", "P#.b"),
    ("P# = Part({})", "P#.a"),
    ("P# = nn.Sequential(Part({}))", "P#[0].a"),
    ("class C#(enum.Enum):\n A = ({}, 1)", "C#.A.value[0]"),
    ("P# = functools.partial(lambda v: v, {})", "P#()"),
    ("def P#(): pass\nP#.o = {}", "P#.o"),
    ("P# = collections.deque([0, {}])", "P#[-1]"),
    ("P# = collections.UserDict(k={})", "P#['k']"),
    ("v# = {}\nclass C#:\n @property\n def o(self): return v#\nh# = C#()", "h#.o"),
    ("v# = {}\nclass C#:\n def __getattr__(self, name): return v#\nh# = C#()", "h#.o"),
    ("v# = {}\nclass C#:\n def __get__(self, obj, kind): return v#\nclass D#:\n o = C#()\nh# = D#()", "h#.o"),
    ("v# = {}\nclass C#:\n def __call__(self): return v#\nP# = C#()", "P#()"),
    ("v# = {}\nclass C#:\n def __getitem__(self, key): return v#\nP# = C#()", "P#[0]"),
    ("v# = {}\nclass C#:\n def __init__(self): self.o = v#", "C#().o"),
    ("v# = {}\n@contextlib.contextmanager\ndef cm#():\n yield v#\ndef get#():\n with cm#() as v: return v", "get#()"),
    ("v# = {}\nclass C#(typing.Generic[typing.TypeVar('T')]):\n def get(self): return v#", "C#[int]().get()"),
    ("import contextvars\nV# = contextvars.ContextVar('v'); V#.set({})", "V#.get()"),
    ("P# = threading.local(); P#.o = {}", "P#.o"),
)


def program(seed: int, places: int = 2, length: int = 4) -> tuple[str, str, list[str]]:
    """Setup, expression read, changes."""
    chance = random.Random(seed)
    setup, reads, options = [_SETUP], [], []

    def drawn(text: str, at: str = "", number: int = 0) -> str:
        text = text.replace("@", at).replace("#", str(number))
        while "$" in text:
            text = text.replace("$", str(chance.randrange(1, 32) / 8), 1)
        return text

    for number in range(places):
        place, at = chance.choice(PLACES)
        held = chance.choice(HELD)
        at = at.replace("#", str(number))
        setup.append(drawn(place.format(held.made), "@", number))
        reads.append(drawn(held.read, at, number))
        options += [drawn(change, at, number) for change in held.changes * 2]
        # Another one in its place.
        options.append(drawn(f"{at} = {held.made}" if not at.endswith(")") else "Base.scale = $", at, number))
    return "\n".join(setup), " + ".join(reads), chance.sample(options, min(length, len(options)))


def failure(setup: str, read: str, changes: list[str]) -> str:
    module = made_module()
    with importable(module):
        return outcomes_of_changes(module, setup, read, changes)


def check(seed: int) -> None:
    """Run the program of ``seed``; where it fails, leave changes out for as long as it does, and show what is left."""
    setup, read, changes = program(seed)
    changes, error = fewest(changes, functools.partial(failure, setup, read))
    made = setup.removeprefix(_SETUP)
    assert not error, f"seed {seed}: {error}\nafter {changes}\nread {read}\n{made}"


def main() -> None:
    first = int(os.environ.get("PLACED_SEED") or int.from_bytes(os.urandom(4), "little"))
    count = int(os.environ.get("PLACED_PROGRAMS", "1000"))
    for seed in range(first, first + count):
        try:
            check(seed)
        except AssertionError as error:
            print(error)
    print(count, "programs, seeds from", first)


if __name__ == "__main__":
    main()
