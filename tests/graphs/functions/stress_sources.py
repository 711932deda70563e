"""Where the functions of the stress test of graphed() read numbers and tensors from, and how those are changed.

In the templates ``#`` is the number of the source, ``$`` a random number as Python writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS = ("2.0", "0.5", "-0.0", "0.0", "1", "True", "1.0", "3", "-1.5", "False", "0")


@dataclass(frozen=True)
class Source:
    """One place that a function reads.

    Attributes:
        setup: statements that make it.
        read: an expression of a number or a tensor.
        changes: statements.
    """

    setup: str
    read: str
    changes: tuple[str, ...]


def _holder(body: str) -> str:
    return f"class K#:\n{body}\nO# = K#()"


SOURCES = (
    Source("G# = $", "G#", ("G# = $", "G# = $")),
    Source(
        "L# = [$, [$, $]]", "L#[1][0]", ("L#[1][0] = $", "L# = [$, [$, $]]", "L#[1].insert(0, $)", "L#[1].reverse()")
    ),
    Source("D# = {'a': $, 'b': {'c': $}}", "D#['b']['c']", ("D#['b']['c'] = $", "D#['b'] = {'c': $}", "D#['z'] = $")),
    Source("D# = {'a': $, 'b': $}", "fold(D#.values())", ("D#['a'] = D#.pop('a')", "D#['b'] = $", "D#['n'] = $")),
    Source("D# = {$: 2.0, 'b': 3.0}", "fold(D#)if 0 else number(next(iter(D#)))", ("D# = {$: 2.0, 'b': 3.0}",)),
    Source("D# = {(1, $): 2.0}", "number(next(iter(D#))[1])", ("D# = {(1, $): 2.0}",)),
    Source("class C#:\n    scale = $", "C#.scale", ("C#.scale = $", "C#.scale = $", "C#.other = $")),
    Source("class B#:\n    scale = $\nclass C#(B#):\n    pass", "C#.scale", ("B#.scale = $", "C#.scale = $")),
    Source(
        "class B#:\n    scale = $\nclass C#(B#):\n    pass\nO# = C#()", "O#.scale", ("B#.scale = $", "O#.scale = $")
    ),
    Source(
        "H# = $\n"
        + _holder(
            "    def __init__(self):\n        self.scale = $\n    def get(self):\n        return self.scale + H#"
        ),
        "O#.get()",
        ("O#.scale = $", "H# = $", "K#.get = lambda self: $", "O#.get = lambda: $", "O# = K#()"),
    ),
    Source("def fn#():\n    return fn#.scale\nfn#.scale = $", "fn#()", ("fn#.scale = $", "fn#.other = $")),
    Source(
        "H# = $\n" + _holder("    @property\n    def scale(self):\n        return H#"),
        "O#.scale",
        ("H# = $", "K#.scale = property(lambda self: $)"),
    ),
    Source(
        "H# = $\n"
        + _holder(
            "    @staticmethod\n    def get():\n        return H#\n    @classmethod\n"
            "    def more(cls):\n        return H#"
        ),
        "O#.get() + K#.more()",
        ("H# = $", "K#.get = staticmethod(lambda: $)"),
    ),
    Source("@dataclass\nclass K#:\n    scale: float = $\nO# = K#()", "O#.scale", ("O#.scale = $", "O# = K#($)")),
    Source(
        "@dataclass(slots=True)\nclass K#:\n    scale: float = $\nO# = K#()", "O#.scale", ("O#.scale = $", "O# = K#($)")
    ),
    Source("class K#:\n    __slots__ = ('scale',)\nO# = K#()\nO#.scale = $", "O#.scale", ("O#.scale = $",)),
    Source("class E#(enum.Enum):\n    A = 2.0\n    B = 0.5\nS# = E#.A", "S#.value", ("S# = E#.B", "S# = E#.A")),
    Source("N# = np.float32($)", "N#", ("N# = np.float32($)", "N# = np.float64($)", "N# = np.int64(int($))")),
    Source("N# = Decimal(str(float($)))", "N#", ("N# = Decimal(str(float($)))",)),
    Source("N# = Fraction(int($), 4)", "N#", ("N# = Fraction(int($), 4)",)),
    Source("N# = timedelta(seconds=$)", "N#.total_seconds()", ("N# = timedelta(seconds=$)",)),
    Source("Q# = deque([$, $], maxlen=3)", "Q#[-1]", ("Q#.append($)", "Q#.appendleft($)", "Q#.rotate(1)")),
    Source("Q# = deque([$, tensor(2)], maxlen=3)", "Q#[0] * 1.0", ("Q#.appendleft($)", "Q#[0] = $")),
    Source(
        "W# = OrderedDict(a=$, b=$, c=$)", "fold(W#.values())", ("W#.move_to_end('a')", "W#.move_to_end('c', False)")
    ),
    Source(
        "W# = OrderedDict(a=tensor(1), b=tensor(2))",
        "tensors(W#.values())",
        ("W#.move_to_end('a')", "W#['a'] = tensor(3)", "W#['b'].add_(1)"),
    ),
    Source(
        "Point# = namedtuple('Point', 'x y')\nP# = Point#($, $)",
        "P#.x",
        ("P# = P#._replace(x=$)", "P# = Point#(P#.y, P#.x)"),
    ),
    Source("S# = {1, 2, 3}", "fold(S#)", ("S#.add(4)", "S#.discard(1)", "S# = {8, 0, 16}", "S# = {0, 8, 16}")),
    Source("S# = frozenset([$, 5])", "fold(S#)", ("S# = frozenset([$, 5])",)),
    Source("def f#(a=[$]):\n    return a[0]", "f#()", ("f#.__defaults__[0][0] = $", "f#.__defaults__ = ([$],)")),
    Source("def f#(*, a=$):\n    return a", "f#()", ("f#.__kwdefaults__ = {'a': $}",)),
    Source(
        "def make#():\n    v = $\n    def get():\n        return v\n    def put(n):\n"
        "        nonlocal v\n        v = n\n"
        "    return get, put\nget#, put# = make#()",
        "get#()",
        ("put#($)", "put#($)"),
    ),
    Source("T# = threading.local()\nT#.scale = $", "T#.scale", ("T#.scale = $",)),
    Source("V# = ContextVar('v')\nV#.set($)", "V#.get()", ("V#.set($)",)),
    Source("V# = ContextVar('v')", "V#.get(1.5)", ("V#.set($)",)),
    Source("U# = UserDict(a=$)", "U#['a']", ("U#['a'] = $",)),
    Source("R# = {'a': $}\nM# = MappingProxyType(R#)", "M#['a']", ("R#['a'] = $",)),
    Source("U# = SimpleNamespace(a=$)", "U#.a", ("U#.a = $",)),
    Source("R# = {'a': $}\nU# = ChainMap({}, R#)", "U#['a']", ("R#['a'] = $", "U#['a'] = $")),
    Source(
        "class X#:\n    def __set_name__(self, owner, name):\n        self.name = '_' + name\n"
        "    def __get__(self, obj, kind):\n        return getattr(obj, self.name, self.default)\n    default = $\n"
        "class K#:\n    scale = X#()\nO# = K#()",
        "O#.scale",
        ("O#._scale = $", "X#.default = $"),
    ),
    Source("CFG.x# = $\ndef f#():\n    import CFG as m\n    return m.x#", "f#()", ("CFG.x# = $",)),
    Source("CFG.x# = $\ndef f#():\n    from CFG import x#\n    return x#", "f#()", ("CFG.x# = $",)),
    Source("PT# = partial(number, $)", "PT#()", ("PT# = partial(number, $)",)),
    Source("A# = np.array([$, 2.0])", "A#[0]", ("A#[0] = $", "A# = np.array([$, 2.0])")),
    Source("A# = array.array('d', [$])", "A#[0]", ("A#[0] = $",)),
    Source("Z# = 'abc'", "len(Z#)", ("Z# = 'abcd'", "Z# = 'ab'")),
    Source(_holder("    pass"), "getattr(O#, 'gain', 1.5)", ("O#.gain = $", "K#.gain = $", "vars(O#).pop('gain', 0)")),
    Source(
        _holder(
            "    def get(self):\n        try:\n            return self.gain\n"
            "        except AttributeError:\n            return 1.5"
        ),
        "O#.get()",
        ("O#.gain = $", "vars(O#).pop('gain', 0)"),
    ),
    Source("F# = lambda: $", "F#()", ("F# = lambda: $",)),
    Source("H# = $\n@torch.no_grad()\ndef f#():\n    return H#", "f#()", ("H# = $",)),
    Source(
        "H# = $\n@contextmanager\ndef c#():\n    yield H#\ndef f#():\n    with c#() as v:\n        return v",
        "f#()",
        ("H# = $",),
    ),
    Source(
        "H# = $\ndef deco#(f):\n    @wraps(f)\n    def inner():\n        return f() + H#\n"
        "    return inner\n@deco#\ndef f#():\n    return H#",
        "f#()",
        ("H# = $",),
    ),
    Source(_holder("    scale = $") + "\nR# = weakref.ref(O#)", "R#().scale", ("O#.scale = $", "K#.scale = $")),
    Source(
        "class Dyn#:\n    def __getattr__(self, name):\n        return H#\nH# = $\nO# = Dyn#()",
        "O#.any",
        ("H# = $", "O#.any = $"),
    ),
    Source(
        "class M#(dict):\n    pass\nO# = M#(a=$)\nO#.scale = $", "O#['a'] + O#.scale", ("O#['a'] = $", "O#.scale = $")
    ),
    Source("class M#(list):\n    pass\nO# = M#([$])\nO#.scale = $", "O#[0] + O#.scale", ("O#[0] = $", "O#.scale = $")),
    Source("J# = defaultdict(lambda: 2.0, a=$)", "J#['a']", ("J#['a'] = $",)),
    Source("B# = [[[[[[[[$]]]]]]]]", "B#[0][0][0][0][0][0][0][0]", ("B#[0][0][0][0][0][0][0][0] = $",)),
    Source(
        "class Y#:\n    pass\nO# = Y#()\nn = O#\nfor _ in range(9):\n    n.next = Y#()\n    n = n.next\n"
        "n.scale = $\nn# = n",
        "O#.next.next.next.next.next.next.next.next.next.scale",
        ("n#.scale = $",),
    ),
    Source("I# = complex($, $)", "I#.imag", ("I# = complex($, $)",)),
    Source("I# = slice(0, 2)", "I#.stop", ("I# = slice(0, 3)", "I# = slice(0, True)")),
    Source("I# = range(0, 3, 2)", "I#.stop", ("I# = range(0, 4, 2)",)),
    Source(
        "DR# = nn.Dropout(0.5)", "2.0 if DR#.training else 0.5", ("DR#.eval()", "DR#.train()", "DR# = nn.Dropout(0.25)")
    ),
    Source("DR# = nn.Dropout(0.5)\nDL# = [DR#]", "DL#[0].p", ("DR#.p = $", "DL#[0] = nn.Dropout(0.25)")),
    Source("X# = tensor(1)", "X#", ("X# = tensor(2)", "X#.add_(1)", "X#.data = tensor(3)")),
    Source(
        "X# = [tensor(1), tensor(2)]",
        "tensors(X#)",
        ("X#.append(tensor(3))", "X#.reverse()", "X#[0].mul_(2)", "X#.pop()"),
    ),
    Source("X# = {'a': tensor(1)}", "tensors(X#.values())", ("X#['b'] = tensor(3)", "X#['a'] = tensor(4)")),
    Source(
        "LN# = nn.Linear(3, 3)\nfill(LN#)",
        "LN#(x).detach()",
        ("fill(LN#, 2)", "LN#.weight = nn.Parameter(torch.ones(3, 3))"),
    ),
    Source(
        "LN# = nn.Linear(3, 3)\nfill(LN#)",
        "tensors(p.detach() for p in LN#.parameters())",
        ("LN#.bias = None", "fill(LN#, 3)"),
    ),
    Source("BF# = nn.Module()\nBF#.register_buffer('b', tensor(1))", "BF#.b", ("BF#.b = tensor(2)", "BF#.b.add_(1)")),
    Source("def f#():\n    return len('abc')", "f#()", ("len = lambda text: $", "globals().pop('len', 0)")),
    Source("f# = [$].__getitem__\ng# = f#.__self__", "f#(0)", ("g#[0] = $",)),
    Source("H# = $\nclass K#:\n    def __init__(self):\n        self.scale = H#", "K#().scale", ("H# = $",)),
    Source(
        "H# = $\nclass K#(nn.Identity):\n    def forward(self, x):\n        return super().forward(x) * H#\nO# = K#()",
        "O#(x)",
        ("H# = $", "O#.forward = lambda x: x * $", "K#.forward = lambda self, x: x * $"),
    ),
    Source(
        "H# = $\nclass K#(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * H#",
        "K#.apply(x)",
        ("H# = $", "K#.forward = staticmethod(lambda ctx, x: x * $)"),
    ),
    Source("class K#:\n    __slots__ = ('k',)\nO# = K#()", "getattr(O#, 'k', 1.5)", ("O#.k = $",)),
    Source("U# = SimpleNamespace()", "getattr(U#, 'k', 1.5)", ("U#.k = $", "vars(U#).pop('k', 0)")),
    Source(
        _holder("    pass") + "\nO#.k = $\nD# = {O#: $}",
        "sum(o.k * v for o, v in D#.items())",
        ("O#.k = $", "D#[O#] = $"),
    ),
    Source(_holder("    pass") + "\nO#.k = $\nS# = weakref.WeakSet([O#])", "sum(o.k for o in S#)", ("O#.k = $",)),
    Source(
        "class B#:\n    def get(self):\n        return $\nclass K#(B#):\n    def get(self):\n"
        "        return super().get()\nO# = K#()",
        "O#.get()",
        ("B#.get = lambda self: $", "K#.get = lambda self: $"),
    ),
    Source("class E#(enum.Enum):\n    A = 1\n    def get(self):\n        return H#\nH# = $", "E#.A.get()", ("H# = $",)),
    Source("A# = np.ones((3, 3))\nP# = A#[::2, 1]", "P#.sum()", ("A#[2, 1] = $", "A#[1, 1] = $")),
    Source("T# = threading.Event()", "1.0 + T#.is_set()", ("T#.set()", "T#.clear()")),
    Source("T# = threading.Event()\nT#.scale = $", "T#.scale", ("T#.scale = $", "T#.other = $")),
    Source("T# = tg.StepState('cpu')\nT#.scale = $", "T#.scale", ("T#.scale = $", "T#.set_(False)")),
    Source("T# = tg.graphed(tensor)\nT#.scale = $", "T#.scale", ("T#.scale = $",)),
    Source("G# = $", "torch.func.vmap(lambda row: row * G#)(x)", ("G# = $",)),
    Source("G# = $", "checkpoint(lambda y: y * G#, x, use_reentrant=False)", ("G# = $",)),
    Source("T# = torch.jit.trace(torch.square, (torch.ones(3),))\nG# = $", "T#(x) * G#", ("G# = $",)),
)
