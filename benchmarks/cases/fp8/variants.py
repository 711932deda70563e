"""Ways to cast to FP8 and to update scales: te_graph, TransformerEngine, torch, and a copy of as many bytes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lib.rotation import Call
from lib.variants import Variant
from torch import Tensor

from cases.fp8.fused_variants import copy_of_bytes, te_graph_fused
from cases.fp8.parts import TENSORS
from cases.fp8.plain_torch import E4M3, LARGEST, torch_cast, torch_update
from cases.fp8.problems import CastProblem, Found, UpdateProblem, WeightsProblem


def by_kind(**builders: Callable[[Any, str], Call | None]) -> Callable[[Any, str], Call | None]:
    """Builds a call of an operation with the builder for the problem's kind; None where there is none."""

    def build(problem: Any, op: str) -> Call | None:
        builder = builders.get(problem.kind)
        return builder(problem, op) if builder else None

    return build


def te_graph_cast(problem: CastProblem, op: str) -> Call:
    import te_graph as tg

    x, scale, inverse, amax, dbias = problem.x, problem.scale, problem.scale_inv, problem.amax, problem.dbias
    out, out_t = problem.out, problem.out_t
    names = ["out", "scale_inv", *([] if op == "cast" else ["out_t"])]
    names += {"current": [], "cast_transpose_dbias": ["amax", "dbias"]}.get(op, ["amax"])
    found: list[Found] = [{name: getattr(problem, name)[i] for name in names} for i in range(problem.slots)]

    def cast(i: int) -> Found:
        tg.fp8_cast_out(out[i], x[i], scale[i], scale_inv=inverse[i], amax=amax[i])
        return found[i]

    def cast_transpose(i: int) -> Found:
        tg.fp8_cast_transpose_out(out[i], out_t[i], x[i], scale[i], scale_inv=inverse[i], amax=amax[i])
        return found[i]

    def cast_transpose_dbias(i: int) -> Found:
        tg.fp8_cast_transpose_out(out[i], out_t[i], x[i], scale[i], scale_inv=inverse[i], amax=amax[i], dbias=dbias[i])
        return found[i]

    def current(i: int) -> Found:
        largest, current_scale = tg.fp8_current_scale(x[i])
        tg.fp8_cast_transpose_out(out[i], out_t[i], x[i], current_scale, scale_inv=inverse[i])
        return {**found[i], "amax": largest}

    calls = (cast, cast_transpose, cast_transpose_dbias, current)
    return {call.__name__: call for call in calls}[op]


class Prepared:
    """te_graph's copies of all weights, which `clear` zeroes, and as `verify` looks at them."""

    def __init__(self, problem: WeightsProblem) -> None:
        from te_graph import Fp8Weights

        self.weights = Fp8Weights(problem.weights, scale=torch.cat(problem.scale))
        scale_inv, amax = self.weights.scale_inv.split(1), self.weights.amax.split(1)
        buffers = zip(self.weights.data, self.weights.transposed, scale_inv, amax, strict=True)
        self.found = [dict(zip(("out", "out_t", "scale_inv", "amax"), row, strict=True)) for row in buffers]
        problem.written += [tensor for found in self.found for tensor in found.values()]


def te_graph_weights(problem: WeightsProblem, op: str) -> Call:
    prepared = problem.once("te_graph", lambda: Prepared(problem))
    noop = torch.ones(1, dtype=torch.int32, device=problem.device) if op == "weights_skipped" else None

    def call(_: int) -> list[Found]:
        prepared.weights.cast_(noop=noop)
        return prepared.found

    return call


def te_graph_one_by_one(problem: WeightsProblem, op: str) -> Call | None:
    import te_graph as tg

    if op == "weights_skipped":
        return None
    found = problem.once("te_graph", lambda: Prepared(problem)).found
    rows = [(*row.values(), x, scale) for row, x, scale in zip(found, problem.weights, problem.scale, strict=True)]

    def call(_: int) -> list[Found]:
        for out, out_t, scale_inv, amax, x, scale in rows:
            tg.fp8_cast_transpose_out(out, out_t, x, scale, scale_inv=scale_inv, amax=amax)
        return found

    return call


def te_graph_update(problem: UpdateProblem, op: str) -> Call:
    import te_graph as tg

    flag = torch.zeros(1, dtype=torch.int32, device=problem.device)
    return update_by(problem, lambda *state: tg.amax_and_scale_update_inplace(*state, problem.mask, flag, LARGEST))


def torch_update_of(problem: UpdateProblem, op: str) -> Call:
    flag = torch.zeros(1, dtype=torch.int32, device=problem.device)
    return update_by(problem, lambda *state: torch_update(*state, problem.mask, flag))


def update_by(problem: UpdateProblem, update: Callable[[Tensor, Tensor, Tensor], None]) -> Call:
    """A call of `update` with history [H, n], scale [n] and scale_inv [n] of a slot."""
    states = list(zip(problem.history, problem.scale, problem.scale_inv, strict=True))
    found = [dict(zip(("history", "scale", "scale_inv"), state, strict=True)) for state in states]

    def call(i: int) -> Found:
        update(*states[i])
        return found[i]

    return call


class Quantized:
    """A matrix as TransformerEngine casts it, in buffers that `clear` zeroes.

    Args:
        x: [M, N]. scale, amax: [1], as in `plain_torch`; None for current scaling.
    """

    def __init__(self, x: Tensor, scale: Tensor | None, amax: Tensor | None, transpose: bool = True) -> None:
        import transformer_engine_torch as engine
        from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

        usage = {"rowwise": True, "columnwise": transpose}
        if scale is None:
            self.quantizer = Float8CurrentScalingQuantizer(engine.DType.kFloat8E4M3, x.device, **usage)
        else:
            self.quantizer = Float8Quantizer(scale, amax, engine.DType.kFloat8E4M3, **usage)
        self.x, self.out = x, self.quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
        self.amax = {} if amax is None else {"amax": amax}

    def found(self, out: Any = None) -> Found:
        """What is in the buffers, or in another tensor that the quantizer made."""
        out = self.out if out is None else out
        found = {"out": out._data.view(E4M3), "scale_inv": out._scale_inv.view(1), **self.amax}
        return found if out._transpose is None else {**found, "out_t": out._transpose.view(E4M3)}


def transformer_engine_cast(problem: CastProblem, op: str) -> Call:
    import transformer_engine_torch as engine

    nothing = [None] * problem.slots
    scales, amaxes = (nothing, nothing) if op == "current" else (problem.scale, problem.amax)
    vectors = zip(problem.x, scales, amaxes, strict=True)
    casts = [Quantized(x, scale, amax, transpose=op != "cast") for x, scale, amax in vectors]
    problem.written += [tensor for cast in casts for tensor in cast.found().values()]

    def quantize(i: int) -> Callable[[], Found]:
        cast = casts[i]
        engine.quantize(cast.x, cast.quantizer, cast.out, None)
        return cast.found

    def quantize_dbias(i: int) -> Callable[[], Found]:
        dbias, out = engine.bgrad_quantize(casts[i].x, casts[i].quantizer)
        return lambda: {**casts[i].found(out), "dbias": dbias}

    return quantize_dbias if op == "cast_transpose_dbias" else quantize


def transformer_engine_weights(problem: WeightsProblem, op: str) -> Call:
    import transformer_engine_torch as engine

    def quantized() -> list[Quantized]:
        amaxes = torch.zeros(len(problem.weights), 1, device=problem.device)
        vectors = zip(problem.weights, problem.scale, amaxes, strict=True)
        casts = [Quantized(x, scale, amax) for x, scale, amax in vectors]
        problem.written += [tensor for cast in casts for tensor in cast.found().values()]
        return casts

    casts = problem.once("transformer_engine", quantized)
    noop = torch.ones(1, device=problem.device) if op == "weights_skipped" else None

    def call(_: int) -> Callable[[], list[Found]]:
        for cast in casts:
            engine.quantize(cast.x, cast.quantizer, cast.out, noop)
        return lambda: [cast.found() for cast in casts]

    return call


def transformer_engine_update(problem: UpdateProblem, op: str) -> Call:
    """Its state is [H, 3] and [3] for each module; the newest amaxes are in a vector beside it."""
    import transformer_engine_torch as engine

    rows, columns = problem.drawn.shape
    drawn = problem.drawn.view(rows, columns // TENSORS, TENSORS).transpose(0, 1).contiguous()
    histories = [list(state) for state in problem.keep(drawn)]
    scales = [list(state) for state in problem.keep(torch.ones_like(drawn[:, 0]))]
    newest = problem.drawn[0].contiguous()
    update = engine.fused_amax_and_scale_update_after_reduction

    def call(i: int) -> Callable[[], Found]:
        update(newest, histories[i], scales[i], "max", engine.DType.kFloat8E4M3, 0.0)
        return lambda: {"history": torch.cat(histories[i], dim=1), "scale": torch.cat(scales[i])}

    return call


def cast_by(cast: Callable[..., Found], problem: CastProblem, op: str) -> Call:
    return lambda i: cast(problem.x[i], problem.scale[i], problem.amax[i])


def torch_cast_of(problem: CastProblem, op: str) -> Call | None:
    return cast_by(functools.partial(torch_cast, op), problem, op) if op == "cast_transpose" else None


def compiled(op: str) -> Callable[..., Found]:
    """`torch_cast`, compiled for each shape. What was compiled before is forgotten, as torch limits how much there may
    be of one function."""
    torch.compiler.reset()

    def cast(x: Tensor, scale: Tensor, amax: Tensor) -> Found:
        return torch_cast(op, x, scale, amax)

    return torch.compile(cast, dynamic=False, fullgraph=True)


def compiled_cast(problem: CastProblem, op: str) -> Call:
    return cast_by(compiled(op), problem, op)


def compiled_weights(problem: WeightsProblem, op: str) -> Call | None:
    if op == "weights_skipped":
        return None
    cast, amax = compiled("cast_transpose"), torch.zeros(1, device=problem.device)
    return lambda _: [cast(x, scale, amax) for x, scale in zip(problem.weights, problem.scale, strict=True)]


def copy_of(problem: CastProblem, op: str) -> Call | None:
    """Copies in bf16: two bytes read and two written for an element, as in a cast with a transpose."""
    if op != "cast_transpose":
        return None
    targets = [torch.zeros_like(x) for x in problem.x]
    problem.written += targets
    return lambda i: targets[i].copy_(problem.x[i])


# What `build` returns does one operation on the buffers of one slot; None where there is no such operation.
VARIANTS = {
    "te_graph": Variant(
        "te_graph",
        by_kind(cast=te_graph_cast, fused=te_graph_fused, weights=te_graph_weights, update=te_graph_update),
    ),
    "te_graph_one_by_one": Variant("te_graph, one by one", by_kind(weights=te_graph_one_by_one)),
    "transformer_engine": Variant(
        "TransformerEngine",
        by_kind(cast=transformer_engine_cast, weights=transformer_engine_weights, update=transformer_engine_update),
        needs_cuda=True,
        package="transformer_engine",
    ),
    "torch_compiled": Variant(
        "torch, compiled", by_kind(cast=compiled_cast, weights=compiled_weights), needs_cuda=True
    ),
    "torch": Variant("torch", by_kind(cast=torch_cast_of, update=torch_update_of)),
    "copy": Variant("copy of as many bytes", by_kind(cast=copy_of, fused=copy_of_bytes)),
}
