"""What bench_fp8.py measures: parts, their operations, and the shapes that these work on."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from cases.multi_tensor.tensor_sets import Shape, gpt_shapes, llama_shapes

MODULES, TENSORS = 100, 3  # of the update of scales: input, weight and output of each module


@dataclass(frozen=True)
class Case:
    """Shapes of one problem: of a matrix, of the weights of a model, or [history, columns] of an update."""

    label: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes))


@dataclass(frozen=True)
class Part:
    """Operations, by what rows call them, and cases; `small` ones have the same names and are for a quick look."""

    kind: str
    ops: dict[str, str]
    cases: dict[str, Case]
    small: dict[str, Case]


def matrices(sizes: Iterable[Shape]) -> dict[str, Case]:
    return {f"{rows}x{columns}": Case(f"{rows} x {columns}", ((rows, columns),)) for rows, columns in sizes}


def scaled_down(cases: dict[str, Case], by: int) -> dict[str, Case]:
    """The same names for matrices of so much less rows and columns."""
    small = {name: tuple(size // by for size in case.shapes[0]) for name, case in cases.items()}
    return {name: Case(f"{shape[0]} x {shape[1]}", (shape,)) for name, shape in small.items()}


def models(gpt: str, of_gpt: Iterable[Shape], llama: str, of_llama: Iterable[Shape]) -> dict[str, Case]:
    """The weights of linear layers in the blocks, of parameters as tensor_sets lists them: GPT's two embeddings come
    before the blocks, Llama's embedding before and its head behind them."""
    return {"gpt3-1.3b": linear(gpt, list(of_gpt)[2:]), "llama3-8b": linear(llama, list(of_llama)[1:-1])}


def linear(label: str, shapes: Iterable[Shape]) -> Case:
    found = tuple(shape for shape in shapes if len(shape) == 2)
    return Case(f"{label}, {len(found)} weights", found)


def updates(modules: int, histories: dict[str, int]) -> dict[str, Case]:
    return {
        name: Case(f"{modules} modules x {TENSORS}, history {rows}", ((rows, modules * TENSORS),))
        for name, rows in histories.items()
    }


_CAST = {"cast_transpose": "cast + transpose + amax"}
_WEIGHTS = matrices(((4096, 4096), (14336, 4096), (28672, 4096), (8192, 2048)))
_ACTIVATIONS = matrices((tokens, hidden) for hidden in (2048, 8192) for tokens in (512, 2048, 8192))
_FUSED = matrices(((8192, 2048), (8192, 4096), (16384, 4096), (8192, 8192)))  # from 32 MB on
PARTS = {
    "weight": Part("cast", _CAST, _WEIGHTS, scaled_down(_WEIGHTS, 64)),
    "model": Part(
        "weights",
        {"weights": "cast + transpose + amax", "weights_skipped": "skipped by a flag"},
        models(
            "GPT-3 1.3B",
            gpt_shapes(layers=24, hidden=2048, vocabulary=50304, positions=2048),
            "Llama-3 8B",
            llama_shapes(layers=32, hidden=4096, inner=14336, keys=1024, vocabulary=128256),
        ),
        models(
            "GPT of h 64",
            gpt_shapes(layers=2, hidden=64, vocabulary=500, positions=64),
            "Llama of h 64",
            llama_shapes(layers=2, hidden=64, inner=224, keys=16, vocabulary=500),
        ),
    ),
    "activation": Part(
        "cast",
        {
            "cast": "cast + amax",
            **_CAST,
            "cast_transpose_dbias": "cast + transpose + amax + column sums",
            "current": "current scaling, cast + transpose",
        },
        _ACTIVATIONS,
        scaled_down(_ACTIVATIONS, 32),
    ),
    "fused": Part(
        "fused",
        {
            "plain": "cast + transpose",
            "norm": "norm + cast + transpose",
            "add_norm": "add + norm + cast + transpose",
            "gelu": "GELU + cast + transpose",
            "swiglu": "SwiGLU + cast + transpose",
            "plain_sums": "cast + transpose + column sums",
            "gelu_backward": "gradient of GELU + cast + transpose + column sums",
            "norm_backward": "gradient of add + norm + cast + transpose + column sums",
        },
        _FUSED,
        scaled_down(_FUSED, 32),
    ),
    "update": Part(
        "update",
        {"update": "amax and scale update"},
        updates(MODULES, {"history-16": 16, "history-1024": 1024}),
        updates(MODULES // 10, {"history-16": 4, "history-1024": 8}),
    ),
}

# Bytes that must move for an element: it is read in bf16 once, and written once or, with its transpose, twice. Current
# scaling, and norms for the statistics of their rows, have to read twice what does not fit into a cache, which is not
# counted. Sums of x and a residual, and gradients of norms, are written in bf16, too.
BYTES = {
    **{"cast": 3, "cast_transpose": 4, "cast_transpose_dbias": 4, "current": 4, "weights": 4},
    **{"plain": 4, "norm": 4, "add_norm": 8, "gelu": 4, "swiglu": 6},
    **{"plain_sums": 4, "gelu_backward": 6, "norm_backward": 10},
}
