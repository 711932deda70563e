"""Random programs of ops over views of few storages, beside plain PyTorch on copies of these.

    PYTHONPATH=tests/helpers python tests/multi_tensor/op_programs.py --seeds 0:2000

A program is drawn once and run several times: as it is, in inference mode, under autocast, compiled, by a recorder's
replays and by ``graphed``. Views have any strides, offsets and dtypes, and lie among each other in one storage; values
are NaN, infinite, subnormal and of all magnitudes. After each run every storage and result has the bits of the
reference, but for those of NaNs. A statement that is refused has written nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from fp8_references import FP8_MAX, ScaleState, reference_cast, reference_dequantize, reference_scale, reference_update
from references import coefficient, product, reference_norm, wide_dtype
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

ops = torch.ops.te_graph
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
ADDED = {"f32": ("f32", "f16", "bf16"), "f64": ("f64",), "f16": ("f16",), "bf16": ("bf16",)}
LENGTHS = {"f32": 600, "f64": 300, "f16": 300, "bf16": 300, "flags": 24}
POWERS = (0.0, 0.5, 1.0, 2.0, 3.0, math.inf)
WAYS = ("eager", "no grad", "inference", "autocast", "recorded", "graphed", "compiled")
Memory = dict[str, Tensor]  # [LENGTHS] each
Results = list[Tensor]


@dataclass(frozen=True)
class View:
    """Elements of a storage: ``has_bit`` if they are to be negated."""

    storage: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    has_bit: bool = False

    def of(self, memory: Memory) -> Tensor:
        view = memory[self.storage].as_strided(self.shape, self.strides, self.offset)
        return torch._neg_view(view) if self.has_bit else view

    def places(self) -> list[tuple[str, int]]:
        steps = [[i * stride for i in range(size)] for size, stride in zip(self.shape, self.strides, strict=True)]
        return [(self.storage, self.offset + sum(step)) for step in itertools.product(*steps)]


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.1:
        return (rng.randrange(40, 90),)
    return tuple(rng.choice((0, 1, 2, 3, 5, 7)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))[: rng.choice((2, 3))]


def draw_view(rng: random.Random, storage: str, shape: tuple[int, ...], is_read: bool = False) -> View:
    """Anywhere in the storage, in any order of dimensions, with gaps; what is only read may repeat elements."""
    strides, step = [0] * len(shape), rng.choice((1, 1, 1, 2, 3))
    for dim in rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.5 else reversed(range(len(shape))):
        strides[dim] = step
        step = step * max(1, shape[dim]) + rng.choice((0, 0, 0, 1, 4))
    if is_read and rng.random() < 0.2:
        strides = [stride * (rng.random() < 0.5) for stride in strides]
    span = sum((max(1, size) - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if span > LENGTHS[storage]:
        return draw_view(rng, storage, shape, is_read)
    return View(storage, shape, tuple(strides), rng.randrange(LENGTHS[storage] - span + 1))


@dataclass
class Statement:
    """One call.

    Attributes:
        run: the call on memory; it returns new results.
        reference: the same in plain PyTorch.
        read, written: the views that it reads alone, and writes.
        text: for messages.
    """

    run: Callable[[Memory], Results]
    reference: Callable[[Memory], Results]
    read: Sequence[View]
    written: Sequence[View]
    text: str

    def is_well_defined(self) -> bool:
        """Whether no element is written twice, or written and read."""
        written = [place for view in self.written for place in view.places()]
        read = {place for view in self.read for place in view.places()}
        return len(set(written)) == len(written) and not read.intersection(written)


@dataclass
class Program:
    seed: int
    statements: list[Statement] = field(default_factory=list)

    def memory(self, turn: int) -> Memory:
        """Storages of fresh values; scales and norms are mostly positive numbers, flags mostly 0."""
        generator = torch.Generator().manual_seed(self.seed * 10 + turn)
        memory = {}
        for name, length in LENGTHS.items():
            values = torch.randn(length, generator=generator, dtype=torch.float64)
            values *= 10 ** (8 * torch.rand(length, generator=generator, dtype=torch.float64) - 4)
            for share, special in ((0.05, 0.0), (0.02, -0.0), (0.01, 1e-310), (0.02, 1e-40), (0.01, 6e-8)):
                values[torch.rand(length, generator=generator) < share] = special
            if self.seed % 3 == 0:  # else norms would hardly ever be finite
                for special in (math.nan, math.inf, -math.inf):
                    values[torch.rand(length, generator=generator) < 0.01] = special
            memory[name] = values.to(DTYPES.get(name, torch.float32))
        memory["flags"][:8] = (torch.rand(8, generator=generator) < 0.15).float()
        memory["flags"][8:] = memory["flags"][8:].abs()
        return memory


def one_of(rng: random.Random, first: int, end: int) -> View:
    """[] or [1], an element of the flags."""
    return View("flags", *rng.choice((((), ()), ((1,), (1,)), ((1,), (5,)))), rng.randrange(first, end))


def maybe(rng: random.Random, view: View) -> View | None:
    return view if rng.random() < 0.5 else None


def at(view: View | None, memory: Memory) -> Tensor | None:
    return None if view is None else view.of(memory)


def given(*views: View | None) -> list[View]:
    return [view for view in views if view is not None]


def apart(tensor: Tensor) -> Tensor:
    """``tensor`` [...] in memory of its own, in the order in which an op goes through it."""
    copy = tensor.resolve_neg().clone()
    return copy if copy.stride() == tensor.stride() else copy.contiguous()


def mark(flag: Tensor | None, tensors: Sequence[Tensor]) -> None:
    """Reference: the flag [] or [1] of what was written."""
    if flag is not None and not all(bool(tensor.isfinite().all()) for tensor in tensors):
        flag.fill_(1)


def draw_list(rng: random.Random) -> list[View]:
    return [draw_view(rng, rng.choice(list(DTYPES)), draw_shape(rng)) for _ in range(rng.choice((1, 1, 2, 3, 5)))]


def draw_norm(rng: random.Random) -> Statement:
    views, p = draw_list(rng), rng.choice(POWERS)
    views = [replace(view, has_bit=rng.random() < 0.05) for view in views]
    which = rng.choice((ops.multi_tensor_norm, ops.multi_tensor_norms))

    def reference(memory: Memory) -> Results:
        tensors = [view.of(memory).resolve_neg() for view in views]
        lists = [[tensor] for tensor in tensors] if which is ops.multi_tensor_norms else [tensors]
        norms = [reference_norm(one, p) for one in lists]
        found = which([apart(tensor) for tensor in tensors], p)  # the bits are those of the same elements elsewhere
        for got, expected in zip(found.reshape(-1).tolist(), norms, strict=True):
            largest = torch.finfo(found.dtype).max
            if math.isfinite(expected) and 1e-30 < expected < largest / 2:
                assert abs(got - expected) <= (0 if p == 0 else 1e-6 * max(1.0, 2 / p)) * expected, (got, expected, p)
        return [found]

    return Statement(
        lambda memory: [which([view.of(memory) for view in views], p)], reference, views, [], f"{which}({views}, {p})"
    )


def draw_scale(rng: random.Random) -> Statement:
    views, found = draw_list(rng), maybe(rng, one_of(rng, 0, 8))
    factor = rng.choice((None, one_of(rng, 8, 24)))
    number = rng.choice((1.0, 0.0, -0.5, 0.77, 3e38))

    def run(memory: Memory) -> Results:
        by = number if factor is None else factor.of(memory)
        ops.multi_tensor_scale_([view.of(memory) for view in views], by, found_inf=at(found, memory))
        return []

    def reference(memory: Memory) -> Results:
        tensors = [view.of(memory) for view in views]
        by = torch.tensor(number, dtype=torch.float64) if factor is None else factor.of(memory).reshape(())
        for tensor in tensors:
            tensor.copy_(product(tensor, by))
        mark(at(found, memory), tensors)
        return []

    return Statement(run, reference, given(factor), [*views, *given(found)], f"scale_({views}, {factor or number})")


def clip(tensors: list[Tensor], norm: Tensor, max_norm: float, flag: Tensor | None) -> None:
    """Reference of a clip by norm []."""
    if flag is not None:
        if not bool(norm.isfinite()):
            flag.fill_(1)
        if flag.item() != 0:
            return
    factor = coefficient(norm, max_norm)
    if factor != 1:
        for tensor in tensors:
            tensor.copy_(product(tensor, factor))


def draw_clip(rng: random.Random) -> Statement:
    views, found, max_norm = draw_list(rng), maybe(rng, one_of(rng, 0, 8)), rng.choice((0.0, 1e-3, 1.0, 1e4, math.inf))
    norm, p = maybe(rng, one_of(rng, 8, 24)), rng.choice(POWERS)

    def run(memory: Memory) -> Results:
        tensors, flag = [view.of(memory) for view in views], at(found, memory)
        if norm is None:
            return [ops.multi_tensor_clip_norm_(tensors, max_norm, p, found_inf=flag)]
        ops.multi_tensor_clip_(tensors, norm.of(memory), max_norm, found_inf=flag)
        return []

    def reference(memory: Memory) -> Results:
        tensors, flag = [view.of(memory) for view in views], at(found, memory)
        total = ops.multi_tensor_norm([apart(t) for t in tensors], p) if norm is None else norm.of(memory).reshape(())
        clip(tensors, total, max_norm, flag)
        return [total.clone()] if norm is None else []

    return Statement(run, reference, given(norm), [*views, *given(found)], f"clip({views}, {norm}, {max_norm}, {p})")


def draw_zero(rng: random.Random) -> Statement:
    views = draw_list(rng)

    def run(memory: Memory) -> Results:
        ops.multi_tensor_zero_([view.of(memory) for view in views])
        return []

    def reference(memory: Memory) -> Results:
        for view in views:
            view.of(memory).zero_()
        return []

    return Statement(run, reference, [], views, f"zero_({views})")


def draw_accumulate(rng: random.Random) -> Statement:
    is_copy = rng.random() < 0.4
    targets = draw_list(rng)
    zero_source, store = not is_copy and rng.random() < 0.3, is_copy or rng.random() < 0.3
    sources = []
    for target in targets:
        names = ADDED[target.storage] if not is_copy else ADDED[target.storage] + ("f32",) * (target.storage != "f64")
        sources.append(draw_view(rng, rng.choice(names), target.shape))
        if is_copy and rng.random() < 0.1:
            sources[-1] = replace(sources[-1], has_bit=True)
    scale, found = maybe(rng, one_of(rng, 8, 24)), maybe(rng, one_of(rng, 0, 8))
    noop = None if is_copy else maybe(rng, one_of(rng, 0, 8))
    has_sum = not is_copy and rng.random() < 0.3

    def run(memory: Memory) -> Results:
        to, come = [view.of(memory) for view in targets], [view.of(memory) for view in sources]
        options = {"scale": at(scale, memory), "found_inf": at(found, memory)}
        if is_copy:
            ops.multi_tensor_copy_(to, come, **options)
            return []
        squares = torch.zeros(72, dtype=torch.int64) if has_sum else None
        options |= {"store": store, "zero_source": zero_source, "noop": at(noop, memory), "sum_squares": squares}
        ops.multi_tensor_accumulate_(to, come, **options)
        return [ops.multi_tensor_norm_finish(squares, 2.0, torch.float64)] if has_sum else []

    def reference(memory: Memory) -> Results:
        to, come = [view.of(memory) for view in targets], [view.of(memory) for view in sources]
        is_off = noop is not None and noop.of(memory).item() != 0
        for target, source in zip(to, come, strict=True):
            if is_off:
                break
            wide = wide_dtype(target, source)
            value = source.to(wide) if scale is None else source.to(wide) * scale.of(memory).reshape(()).to(wide)
            target.copy_((value if store else target.to(wide) + value).to(target.dtype))
            if zero_source:
                source.zero_()
        if not is_off:
            mark(at(found, memory), to)
        counted = [] if is_off else [apart(target) for target in to]
        partial = ops.multi_tensor_norm_partial(counted) if counted else torch.zeros(72, dtype=torch.int64)
        return [ops.multi_tensor_norm_finish(partial, 2.0, torch.float64)] if has_sum else []

    written = [*targets, *given(found), *(sources if zero_source else [])]
    read = given(scale, noop, *([] if zero_source else sources))
    text = f"accumulate({targets}, {sources}, {is_copy=}, {store=}, {zero_source=}, {scale=}, {found=}, {noop=})"
    return Statement(run, reference, read, written, text)


def draw_cast(rng: random.Random) -> Statement:
    x = draw_view(rng, rng.choice(("f32", "f16", "bf16")), draw_shape(rng), is_read=True)
    dtype, scale, amax = rng.choice(list(FP8_MAX)), one_of(rng, 8, 24), maybe(rng, one_of(rng, 8, 24))

    def run(memory: Memory) -> Results:
        out, scale_inv = tg.fp8_cast(x.of(memory), scale.of(memory), dtype, amax=at(amax, memory))
        return [out, scale_inv, tg.fp8_dequantize(out, scale_inv, torch.bfloat16)]

    def reference(memory: Memory) -> Results:
        cast = reference_cast(x.of(memory), scale.of(memory), dtype)
        if amax is not None:
            place = amax.of(memory)
            place.copy_(torch.maximum(place, cast.amax.reshape(place.shape)))
        return [cast.out, cast.scale_inv, reference_dequantize(cast.out, cast.scale_inv, torch.bfloat16)]

    return Statement(run, reference, [x, scale], given(amax), f"fp8_cast({x}, {scale}, {dtype}, {amax})")


def draw_update(rng: random.Random) -> Statement:
    height, n = rng.choice((1, 2, 5)), rng.choice((0, 1, 4))
    history = draw_view(rng, "f32", (height, n))
    scale, inverse = draw_view(rng, "f32", (n,)), draw_view(rng, "f32", (n,))
    flag = rng.choice((True, False, one_of(rng, 0, 8)))
    mask = [rng.random() < 0.5 for _ in range(n)] if rng.random() < 0.5 else []
    options = (rng.choice((448.0, 57344.0)), rng.choice((0.0, 2.0)), rng.choice(("max", "most_recent")))
    skip = rng.random() < 0.5

    def run(memory: Memory) -> Results:
        vectors = [view.of(memory) for view in (history, scale, inverse)]
        vectors[0].abs_()
        when = flag.of(memory) if isinstance(flag, View) else flag
        which = torch.tensor(mask, dtype=torch.bool)
        tg.amax_and_scale_update_inplace(*vectors, which, when, *options, skip_nonfinite=skip)
        return []

    def reference(memory: Memory) -> Results:
        vectors = [view.of(memory) for view in (history, scale, inverse)]
        vectors[0].abs_()
        when = bool(flag.of(memory).item() != 0) if isinstance(flag, View) else flag
        state = reference_update(ScaleState(*vectors), torch.tensor(mask, dtype=torch.bool), when, *options, skip)
        for vector, value in zip(vectors, state.tensors(), strict=True):
            vector.copy_(value)
        return []

    read = [flag] if isinstance(flag, View) else []
    return Statement(run, reference, read, [history, scale, inverse], f"update({history}, {scale}, {inverse}, {flag})")


def draw_current_scale(rng: random.Random) -> Statement:
    x = draw_view(rng, rng.choice(("f32", "f16", "bf16")), draw_shape(rng), is_read=True)
    dtype = rng.choice(list(FP8_MAX))

    def run(memory: Memory) -> Results:
        return list(tg.fp8_current_scale(x.of(memory), dtype))

    def reference(memory: Memory) -> Results:
        amax = torch.cat([torch.zeros(1), x.of(memory).float().abs().flatten()]).amax().reshape(1)
        return [amax, reference_scale(amax, dtype)]

    return Statement(run, reference, [x], [], f"fp8_current_scale({x}, {dtype})")


def draw_torch(rng: random.Random) -> Statement:
    """What users do between: torch's own ops in place."""
    view, by = draw_view(rng, rng.choice(list(DTYPES)), draw_shape(rng)), rng.choice((0.5, -1.0, 1e-3))

    def run(memory: Memory) -> Results:
        view.of(memory).mul_(by)
        return []

    return Statement(run, run, [], [view], f"{view} *= {by}")


DRAWS = (
    *(draw_norm, draw_scale, draw_clip, draw_clip, draw_zero, draw_accumulate, draw_accumulate, draw_accumulate),
    *(draw_cast, draw_cast, draw_update, draw_current_scale, draw_torch),
)


def draw_program(seed: int, length: int = 8) -> Program:
    rng = random.Random(seed)
    return Program(seed, [rng.choice(DRAWS)(rng) for _ in range(length)])


def alike(actual: Tensor, expected: Tensor) -> bool:
    """The same bits, but for those of NaNs."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    actual, expected = actual.detach(), expected.detach()
    if actual.dtype.itemsize == 1 and actual.is_floating_point():
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
        return torch.equal(actual, expected)
    both = actual.isnan() & expected.isnan()
    return same_bits(actual.masked_fill(both, 0), expected.masked_fill(both, 0))


def compare(program: Program, what: str, actual: tuple[Memory, Results], expected: tuple[Memory, Results]) -> None:
    place = f"program {program.seed}, {what}:\n" + "\n".join(statement.text for statement in program.statements)
    for name, tensor in expected[0].items():
        assert alike(actual[0][name], tensor), f"{name} in {place}"
    assert len(actual[1]) == len(expected[1]), place
    for number, (got, wanted) in enumerate(zip(actual[1], expected[1], strict=True)):
        assert alike(got, wanted), f"result {number}: {got}, expected {wanted} in {place}"


def check_eagerly(program: Program) -> list[Statement]:
    """Run each statement by itself; the statements that are well defined. Others may be refused, without a write."""
    memory, expected, fine = program.memory(0), program.memory(0), []
    for statement in program.statements:
        alone = Program(program.seed, [statement])
        if not statement.is_well_defined():
            try:
                statement.run(memory)
            except (ValueError, TypeError, RuntimeError):
                before = [view for view in statement.written if statement.text.startswith("update(")]
                if not before:  # there abs_() was before
                    compare(alone, "refused", (memory, []), (expected, []))
            memory = {name: tensor.clone() for name, tensor in expected.items()}
            continue
        results = statement.run(memory)
        compare(alone, "eager", (memory, results), (expected, statement.reference(expected)))
        fine.append(statement)
    return fine


def run_program(seed: int, ways: Sequence[str] = WAYS[:-1]) -> None:
    """Draw and run one program in several ways."""
    program = draw_program(seed)
    program.statements = check_eagerly(program)

    def run(memory: Memory) -> Results:
        return [result for statement in program.statements for result in statement.run(memory)]

    def expected(turn: int) -> tuple[Memory, Results]:
        memory = program.memory(turn)
        return memory, [result for statement in program.statements for result in statement.reference(memory)]

    contexts = {
        "no grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    for way in ways:
        if way in contexts:
            with contexts[way]():
                memory = program.memory(1)
                results = run(memory)
            compare(program, way, (memory, results), expected(1))
        elif way == "recorded":
            memory, recorder = program.memory(1), tg.Recorder(poison=True)
            with recorder.capture():
                results = run(memory)
            for turn in (2, 3):
                for name, values in program.memory(turn).items():
                    memory[name].copy_(values)
                recorder.replay()
                compare(program, way, (memory, results), expected(turn))
        elif way == "graphed":
            memory, step = program.memory(1), tg.graphed(run)
            for turn in range(1, 5):
                for name, values in program.memory(turn).items():
                    memory[name].copy_(values)
                compare(program, way, (memory, step(memory)), expected(turn))
        elif way == "compiled":
            torch._dynamo.reset()
            memory = program.memory(1)
            results = torch.compile(run, backend="aot_eager")(memory)
            compare(program, way, (memory, results), expected(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--ways", default=",".join(WAYS[:-1]), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--keep-going", action="store_true")
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    failed = 0
    for seed in range(first, end):
        try:
            run_program(seed, arguments.ways.split(","))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:3000]}", flush=True)
            if not arguments.keep_going:
                raise
    print(f"{end - first} programs of seeds {arguments.seeds}: {failed} differ")


if __name__ == "__main__":
    main()
