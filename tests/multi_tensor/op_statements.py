"""The statements of random programs of ops: each a call on views of few storages, and the same in plain PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from fp8_references import FP8_MAX, ScaleState, reference_cast, reference_dequantize, reference_scale, reference_update
from references import coefficient, product, reference_norm, wide_dtype
from torch import Tensor

import te_graph as tg

ops = torch.ops.te_graph
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
ADDED = {"f32": ("f32", "f16", "bf16"), "f64": ("f64",), "f16": ("f16",), "bf16": ("bf16",)}
LENGTHS = {"f32": 600, "f64": 400, "f16": 400, "bf16": 400, "flags": 24}  # any of the shapes fits in all but flags
POWERS = (0.0, 0.5, 1.0, 2.0, 3.0, math.inf)
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
        largest = math.log(min(torch.finfo(torch.promote_types(one.dtype, torch.float32)).max / 2 for one in tensors))
        for got, expected in zip(found.reshape(-1).tolist(), norms, strict=True):
            size = abs(math.log(expected)) if 0 < expected < math.inf else math.inf
            if size * (1.0 if p == math.inf else max(p, 1.0)) < largest:  # else powers leave the range
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
