"""The table of all pieces: how each is built, what it takes and gives, and what may be done to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from . import functions, pieces

# Changes between calls that eager execution notices: lines over the owner ``{o}``, by the name of the piece.
CHANGES = {
    "NoBias": ("{o}.bias = nn.Parameter(data({n}, DEV, 4))", "{o}.mask = data({n}, DEV)"),
    "Attribute": ("{o}.factor = 3.0", "{o}.flags['shift'] = not {o}.flags['shift']", "{o}.flags = {{'shift': False}}"),
    "Inner": (
        "{o}.act = nn.Identity()",
        "{o}.drop.p = 0.5",
        "{o}.drop.eval()",
        "{o}.parts.append(nn.ReLU())",
        "{o}.parts[0] = nn.ReLU()",
        "{o}.act.register_forward_hook(lambda module, args, result: result * 2)",
        "{o}.parts[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,))",
        "{o}.act.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))",
    ),
    "ParameterRow": (
        "{o}.row.append(nn.Parameter(data({n}, DEV, 4)))",
        "{o}.row[0], {o}.row[1] = {o}.row[1], {o}.row[0]",
        "{o}.row[0] = nn.Parameter(data({n}, DEV, 4))",
    ),
    "Counter": ("{o}.seen = data({n}, DEV)", "{o}.seen.zero_()", "{o}.seen.data = data({n}, DEV)"),
    "ListCounter": ("{o}.seen = data({n}, DEV)", "{o}.seen.zero_()", "{o}.seen, {o}.calls = {o}.calls, {o}.seen"),
    "ListOut": ("{o}.last = {o}.last.clone()", "{o}.before.add_(1)"),
    "ReturnsBuffer": ("{o}.mask = data({n}, DEV)", "{o}.mask.add_(1)"),
    "ReturnsChangedBuffer": ("{o}.mask = data({n}, DEV)", "{o}.mask.zero_()"),
    "ColumnViews": ("{o}.fused.add_(1)", "{o}.p.data = data({n}, DEV)[:, 1:]"),
    "Drop": ("{o}.p = 0.25", "{o}.inplace = True"),
    "Sequence": (
        "{o}[1] = nn.Identity()",
        "{o}.append(nn.ReLU())",
        "first = {o}._modules.pop('0'); {o}._modules['0'] = first",
    ),
    "Norms": ("{o}.batch.momentum = 0.5", "{o}.norm.eps = 0.5", "{o}.batch.eval()", "{o}.batch.reset_running_stats()"),
    "Attention": ("{o}.attention.batch_first = False", "{o}.attention.dropout = 0.5"),
    "Layer": ("{o}.dropout1.p = 0.75", "{o}.norm_first = True", "{o}.activation = nn.functional.gelu"),
}


@dataclass(frozen=True)
class Kind:
    """One kind of piece.

    Attributes:
        build: line that makes the owner ``{o}``, which is the callable as well, unless ``call`` makes one from it.
        takes: number of [4, 4] arguments.
        gives: a letter for each result: d: [4, 4] with a gradient, s: of another shape, n: without a gradient.
        exact: computes without rounding on whole numbers.
        whole: its parameters are to be given whole numbers.
        random: draws random numbers.
        aliases: results may be an argument or a buffer, or share its memory. Those of a replay are tensors of their
            own, so programs neither edit such a result or argument in place nor ask for its own gradient.
        weight: how often it is drawn.
        sources: objects whose source the lines need.
    """

    build: str
    takes: int = 1
    gives: str = "d"
    exact: bool = True
    whole: bool = False
    random: bool = False
    aliases: bool = False
    weight: int = 2
    call: str = ""
    sources: tuple = ()

    @property
    def is_function(self) -> bool:
        return not self.build.startswith("{o} =") or bool(self.call)


def _own(cls: type[nn.Module], gives: str = "d", args: str = "", **facts: object) -> Kind:
    return Kind(f"{{o}} = {cls.__name__}({args})", gives=gives, sources=(cls,), **facts)


def _torch(build: str, **facts: object) -> Kind:
    return Kind("{o} = " + build, **facts)


def _function(function: object, gives: str = "d", takes: int = 1, *sources: object, **facts: object) -> Kind:
    build = f"{{o}} = {function.__name__}"
    return Kind(build, call="{o}", gives=gives, takes=takes, sources=(function, *sources), **facts)


_F64 = "dtype=torch.float64"

ZOO: dict[str, Kind] = {
    "Line": _torch(f"nn.Linear(4, 4, {_F64})", whole=True, weight=6),
    "Same": _torch("nn.Identity()", weight=4, aliases=True),
    "Flat": _torch("nn.Flatten()", aliases=True),
    "Drop0": _torch("nn.Dropout(0.0)", aliases=True),
    "Drop": _torch("nn.Dropout(0.5)", random=True),
    "Relu": _torch("nn.ReLU(inplace=True)", weight=1, aliases=True),
    "Sequence": _torch(f"nn.Sequential(nn.Linear(4, 4, {_F64}), nn.ReLU(inplace=True), nn.Dropout(0.0))", whole=True),
    "Residual": _own(pieces.Residual, whole=True, weight=4),
    "Scale": _own(pieces.Scale, weight=4),
    "Pos": _own(pieces.Pos, weight=6),
    "Tied": _own(pieces.Tied),
    "ColumnViews": _own(pieces.ColumnViews),
    "Expanded": _own(pieces.Expanded),
    "Transposed": _own(pieces.Transposed),
    "Complex": _own(pieces.Complex),
    "ConjugateView": _own(pieces.ConjugateView),
    "ConjugateGrad": _own(pieces.ConjugateGrad),
    "NegativeGrad": _own(pieces.NegativeGrad),
    "NegativeView": _own(pieces.NegativeView),
    "Half": _own(pieces.Half, exact=False),
    "HalfWideGrad": _own(pieces.Half, args="torch.float32", exact=False),
    "SmallGrad": _own(pieces.SmallGrad),
    "Frozen": _own(pieces.Frozen),
    "NoBias": _own(pieces.NoBias),
    "Attribute": _own(pieces.Attribute),
    "Inner": _own(pieces.Inner, weight=4),
    "ParameterRow": _own(pieces.ParameterRow),
    "Counter": _own(pieces.Counter),
    "ReturnsBuffer": _own(pieces.ReturnsBuffer, "dn", aliases=True),
    "ReturnsChangedBuffer": _own(pieces.ReturnsChangedBuffer, "dn", aliases=True),
    "ReturnsParameter": _own(pieces.ReturnsParameter, "dd", aliases=True),
    "Scores": _own(pieces.Scores, "dd"),
    "Nest": Kind("{o} = Picker(Dictionary())", gives="dd", sources=(pieces.Dictionary, pieces.Picker), weight=1),
    "Checkpointed": _own(pieces.Checkpointed),
    "Table": _own(pieces.Table),
    "Convolution": _own(pieces.Convolution, whole=True),
    "ChannelsLast": _own(pieces.Convolution, args="torch.channels_last", whole=True),
    "Cross": _own(pieces.Cross, takes=2),
    "TwoOfTwo": _own(pieces.TwoOfTwo, "dd", takes=2),
    "Closure": Kind(f"{{o}} = nn.Linear(4, 4, {_F64})", call="scaled_by({o})", whole=True, sources=(pieces.scaled_by,)),
    "Method": Kind("{o} = Pos()", call="{o}.forward", sources=(pieces.Pos,), weight=1),
    "SavedGrad": Kind("{o} = SavedGrad()", sources=(functions.GradInForward, functions.SavedGrad)),
    "FusedHead": Kind("{o} = FusedHead()", gives="s", sources=(functions.FusedLoss, functions.FusedHead)),
    "grad_in_forward": _function(functions.grad_in_forward, "d", 1, functions.GradInForward),
    "masked": _function(functions.masked, "dn", 1, functions.Half2),
    "dirty": _function(functions.dirty, "d", 1, functions.Doubled),
    "straight_through": _function(functions.straight_through, "d", 1, functions.StraightThrough),
    "flat_view": _function(functions.flat_view, aliases=True),
    "transposed": _function(functions.transposed, aliases=True),
    "turned": _function(functions.turned),
    "halves": _function(functions.halves),
    "itself": _function(functions.itself, weight=1, aliases=True),
    "twice": _function(functions.twice),
    "square": _function(functions.square),
    "with_argument": _function(functions.with_argument, "dd", aliases=True),
    "with_view_of_argument": _function(functions.with_view_of_argument, "dd", aliases=True),
    "with_row": _function(functions.with_row, "ds"),
    "with_itself": _function(functions.with_itself, "dd"),
    "with_turned": _function(functions.with_turned, "dd"),
    "with_detached": _function(functions.with_detached, "dn"),
    "with_successor": _function(functions.with_successor, "dd"),
    "with_constant": _function(functions.with_constant, "dn", weight=1, aliases=True),
    "split_in_two": _function(functions.split_in_two, "ss"),
    "edited_inside": _function(functions.edited_inside),
    "edited_view": _function(functions.edited_view),
    "one_of_negative": _function(functions.one_of_negative),
    "plus": _function(functions.plus, takes=2, weight=4),
    "times": _function(functions.times, takes=2),
    "plus_and_both": _function(functions.plus_and_both, "dd", 2, aliases=True),
    "beside_detached": _function(functions.beside_detached, takes=2),
    "joined": _function(functions.joined, takes=2),
    "list_inside": _function(functions.list_inside),
    "mapped": _function(functions.mapped),
    "scripted": Kind("{o} = torch.jit.script(polynomial)", call="{o}", sources=(functions.polynomial,), weight=1),
    "ListCounter": _own(functions.ListCounter, weight=4),
    "ListOut": _own(functions.ListOut),
    "Attention": _own(functions.Attention, "dd", exact=False, weight=4),
    "Lstm": _own(functions.Recurrent, args="nn.LSTM", exact=False),
    "Gru": _own(functions.Recurrent, args="nn.GRU", exact=False),
    "Norms": _own(functions.Norms, exact=False, weight=4),
    "Softmax": _own(functions.Softmax, "dd", exact=False, weight=4),
    "third": _function(functions.third, exact=False),
    "Layer": Kind("{o} = layer()", exact=False, random=True, sources=(functions.layer,), weight=4),
}
