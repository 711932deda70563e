"""Bad input to the FP8 ops: an exception that names op and argument, before anything is written.

``GOOD`` holds a call of each op that works; ``bad_values`` says what else an argument of some kind must not be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp8_references import E4M3, E5M2
from fp8_samples import extras
from tensor_lists import all_same_bits, copies
from torch import Tensor

import te_graph as tg

INF, NAN = torch.inf, torch.nan
M, N = 6, 4


def fp8(*shape: int, device: str, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.ones(shape, device=device).to(dtype)


def cast_arguments(device: str) -> dict[str, Any]:
    return {"x": torch.randn(M, N, device=device), "scale": torch.ones(1, device=device), "dtype": E4M3}


def flags(device: str) -> dict[str, Any]:
    return {"scale_inv": torch.zeros(1, device=device), "noop": torch.zeros(1, device=device)}


def without_dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "dtype"}


def update_arguments(device: str) -> dict[str, Any]:
    return {
        "amax_history": torch.rand(3, N, device=device) + 1,
        "scale": torch.ones(N, device=device),
        "scale_inv": torch.ones(N, device=device),
        "non_weight_mask": torch.ones(N, dtype=torch.bool, device=device),
        "update_weight_scale_inv": torch.ones(1, device=device),
        "fp8_max": 448.0,
        "margin": 0.0,
        "amax_compute_algo": "max",
    }


def weights_arguments(device: str) -> dict[str, Any]:
    return {
        "out": [fp8(M, N, device=device) for _ in range(2)],
        "out_t": [fp8(N, M, device=device) for _ in range(2)],
        "weights": [torch.randn(M, N, device=device) for _ in range(2)],
        "scale": torch.ones(2, device=device),
        "scale_inv": torch.zeros(2, device=device),
        "amax": torch.zeros(2, device=device),
        "counts": torch.zeros(2, 3, dtype=torch.int64, device=device),
        "noop": torch.zeros(1, device=device),
    }


GOOD: dict[str, Callable[[str], dict[str, Any]]] = {
    "fp8_cast": lambda d: {**cast_arguments(d), **extras(d)},
    "fp8_cast_out": lambda d: {"out": fp8(M, N, device=d), **without_dtype(cast_arguments(d)), **extras(d), **flags(d)},
    "fp8_cast_transpose": lambda d: {**cast_arguments(d), **extras(d)},
    "fp8_cast_transpose_dbias": lambda d: {**cast_arguments(d), **extras(d)},
    "fp8_cast_transpose_out": lambda d: {
        "out": fp8(M, N, device=d),
        "out_t": fp8(N, M, device=d),
        **without_dtype(cast_arguments(d)),
        **extras(d),
        **flags(d),
        "dbias": torch.zeros(N, device=d),
    },
    "fp8_current_scale": lambda d: {"x": torch.randn(M, N, device=d), "dtype": E4M3, "eps": 0.0},
    "fp8_scale": lambda d: {"amax": torch.rand(N, device=d), "dtype": E4M3, "margin": 0.0, "eps": 0.0},
    "fp8_dequantize": lambda d: {
        "x": fp8(M, N, device=d),
        "scale_inv": torch.ones(1, device=d),
        "dtype": torch.bfloat16,
    },
    "fp8_dequantize_out": lambda d: {
        "out": torch.zeros(M, N, device=d),
        "x": fp8(M, N, device=d),
        "scale_inv": torch.ones(1, device=d),
    },
    "amax_and_scale_update_inplace": update_arguments,
    "fp8_cast_weights_": weights_arguments,
}

Bad = tuple[str, Any, type[Exception] | tuple[type[Exception], ...]]
EITHER = (TypeError, ValueError)


def other_device(device: str) -> str:
    return "cpu" if device == "cuda" else "meta"


def bad_tensor(good: Tensor, device: str, dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]) -> Iterator[Bad]:
    for dtype in dtypes:
        yield f"of {dtype}", good.float().to(dtype), TypeError
    for shape in shapes:
        yield f"of shape {list(shape)}", torch.ones(shape, device=device).to(good.dtype), ValueError
    yield "on another device", good.to(other_device(device)), ValueError


HALF, DOUBLE, INT32, INT64 = torch.float16, torch.float64, torch.int32, torch.int64


def bad_values(op: str, argument: str, good: Any, device: str) -> Iterator[Bad]:
    """What ``argument`` of ``op`` must not be, in words, and the exception that comes."""
    is_update, is_many = op.startswith("amax"), op == "fp8_cast_weights_"
    if argument == "dtype":
        wrong = (
            [E4M3, torch.float64, INT32] if "dequantize" in op else [torch.float16, torch.uint8, torch.float8_e4m3fnuz]
        )
        yield from ((str(dtype), dtype, EITHER) for dtype in wrong)
    elif argument == "x" and "dequantize" in op:
        yield from bad_tensor(good, device, [HALF, torch.uint8, torch.float8_e4m3fnuz], [])
    elif argument == "x":
        flat = [(N,), (), (2, 3, N)] if "transpose" in op else []
        yield from bad_tensor(good, device, [DOUBLE, INT32, torch.bool, E4M3, torch.complex64], flat)
        yield "sparse", torch.eye(M, N, device=device).to_sparse(), EITHER
    elif argument in ("out", "out_t", "weights") and is_many:
        yield "empty", [], ValueError
        yield "one fewer", good[:1], ValueError
        yield "one more", [*good, good[0].clone()], ValueError
        yield from bad_element(argument, good, device)
    elif argument in ("out", "out_t"):
        wide = op == "fp8_dequantize_out"
        shapes = [(N, M), (M, N + 1), (M * N,), (M, N, 1)] if argument == "out" else [(M, N), (N, M + 1), (M * N,)]
        yield from bad_tensor(
            good, device, [E4M3, DOUBLE] if wide else [torch.uint8, HALF, torch.float8_e4m3fnuz], shapes
        )
        yield "not contiguous", torch.zeros(good.shape[::-1], device=device).to(good.dtype).t(), ValueError
        if argument == "out_t":
            yield "of another format than out", good.float().to(E5M2), TypeError
    elif argument in ("update_weight_scale_inv", "noop"):
        yield from bad_tensor(good, device, [HALF, DOUBLE, INT64, torch.uint8], [(2,), (0,)])
    elif argument == "counts":
        yield from bad_tensor(good, device, [INT32, torch.float32], [(3, 2), (2,), (4,), ()])
    elif argument == "dbias":
        yield from bad_tensor(good, device, [HALF, DOUBLE, INT32], [(M,), (N, 1), (1, N), ()])
    elif argument == "amax_history":
        yield from bad_tensor(good, device, [HALF, DOUBLE, INT32], [(N,), (0, N), (3, N + 1), (1, 3, N)])
    elif argument == "non_weight_mask":
        yield from bad_tensor(good, device, [torch.uint8, INT32, torch.float32], [(N - 1,), (1, N), (1,)])
    elif argument == "amax" and op == "fp8_scale":
        yield from bad_tensor(good, device, [HALF, DOUBLE, INT32], [])
    elif argument in ("scale", "scale_inv", "amax"):
        n = N if is_update else 2
        shapes = [(n + 1,), (n - 1,), (1, n), ()] if is_update or is_many else [(2,), (0,)]
        yield from bad_tensor(good, device, [HALF, DOUBLE, INT32], shapes)
    elif argument == "fp8_max":
        yield from ((str(value), value, ValueError) for value in (0.0, -448.0, INF, NAN))
    elif argument in ("margin", "eps"):
        yield from ((str(value), value, ValueError) for value in (NAN, INF if argument == "margin" else -1.0))
    else:
        assert argument == "amax_compute_algo", argument
        yield from ((repr(value), value, ValueError) for value in ("mean", "", "MAX"))


def bad_element(argument: str, good: list[Tensor], device: str) -> Iterator[Bad]:
    """Lists whose last tensor is wrong."""
    last = good[1]
    replaced: dict[str, tuple[Any, Any]] = {
        "[1] of another shape": (
            torch.zeros(last.shape[0], last.shape[1] + 1, device=device).to(last.dtype),
            ValueError,
        ),
        "[1] of one dimension": (torch.zeros(M * N, device=device).to(last.dtype), ValueError),
        "[1] of int32": (torch.zeros(last.shape, dtype=INT32, device=device), TypeError),
        "[1] of fp64": (torch.zeros(last.shape, dtype=DOUBLE, device=device), TypeError),
        "[1] on another device": (last.to(other_device(device)), ValueError),
    }
    if argument != "weights":
        replaced |= {
            "[1] in fp32": (last.float(), TypeError),
            "[1] not contiguous": (torch.zeros(last.shape[::-1], device=device).to(last.dtype).t(), ValueError),
            "[1] that is [0]": (good[0], ValueError),
        }
    if argument == "out_t":
        replaced["[1] of another format than out"] = (last.float().to(E5M2), TypeError)
    yield from ((name, [good[0], value], error) for name, (value, error) in replaced.items())


def cases() -> list[tuple[str, str, str]]:
    """Op, argument and what is wrong with it."""
    made = [(op, argument, value) for op, make in GOOD.items() for argument, value in make("cpu").items()]
    found = [(op, argument, bad[0]) for op, argument, value in made for bad in bad_values(op, argument, value, "cpu")]
    right = {("fp8_cast_weights_", "out_t", "empty")}  # no transposed copies
    # With a single tensor any device is right.
    right |= {
        (op, argument, "on another device") for op, argument in (("fp8_current_scale", "x"), ("fp8_scale", "amax"))
    }
    return [case for case in found if case not in right]


def named(argument: str, name: str) -> str:
    """What the message calls the argument; where two do not fit each other, it may be the other one."""
    relative = argument in ("x", "weights", "amax_history") and ("shape" in name or "device" in name)
    if relative or argument == "dtype" or name in ("empty", "one fewer", "one more"):
        return r"\w+"
    return argument


def tensors_in(arguments: dict[str, Any]) -> list[Tensor]:
    flat = [t for v in arguments.values() for t in (v if isinstance(v, list) else [v])]
    return [t for t in flat if isinstance(t, Tensor) and t.device.type != "meta" and t.layout == torch.strided]


@pytest.mark.parametrize("op", GOOD)
def test_the_calls_that_are_spoilt_below_work(op, device):
    arguments = GOOD[op](device)
    before = copies(tensors_in(arguments))
    getattr(tg, op)(**arguments)
    mutates = op.endswith(("_", "_out", "inplace")) or ("amax" in arguments and op != "fp8_scale")
    assert all_same_bits(tensors_in(arguments), before) != mutates


@pytest.mark.parametrize(("op", "argument", "name"), cases(), ids=lambda case: str(case))
def test_an_argument_that_does_not_fit_is_named_before_anything_is_written(op, argument, name, device):
    arguments = GOOD[op](device)
    ((value, error),) = ((v, e) for n, v, e in bad_values(op, argument, arguments[argument], device) if n == name)
    arguments[argument] = value
    before = copies(tensors_in(arguments))
    with pytest.raises(error) as caught:
        getattr(tg, op)(**arguments)
    assert all_same_bits(tensors_in(arguments), before)
    words = rf"{op}: expected .*{named(argument, name)}.*(got|overlap)"
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("device_of_all", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_message_says_what_was_expected_and_what_came(device_of_all):
    x = torch.randn(M, N, device=device_of_all)
    place = "cuda:0" if device_of_all == "cuda" else "cpu"
    for call, error, words in (
        (lambda: tg.fp8_cast(x, torch.ones(4, device=device_of_all)), ValueError, "fp8_cast: expected scale .*got .*4"),
        (
            lambda: tg.fp8_cast(x, torch.ones(1, device=device_of_all).half()),
            TypeError,
            "scale .*torch.float32, got torch.float16",
        ),
        (
            lambda: tg.fp8_cast(x, torch.ones(1, device=other_device(device_of_all))),
            ValueError,
            f"scale on {place}, got {other_device(device_of_all)}",
        ),
        (
            lambda: tg.fp8_cast(x, torch.ones(1, device=device_of_all), torch.float16),
            TypeError,
            "^fp8_cast: expected dtype torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16$",
        ),
        (lambda: tg.fp8_cast_transpose(x[0], torch.ones(1, device=device_of_all)), ValueError, r"x .*two.*got .*\[4\]"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("op", ["fp8_cast_transpose_out", "fp8_cast_weights_"])
def test_the_two_copies_must_not_share_memory(op, device):
    memory = torch.zeros(2 * N * N, dtype=torch.uint8, device=device)
    for start in (0, 1, N * N - 1):
        pair = [memory[at : at + N * N].view(E4M3).view(N, N) for at in (0, start)]
        x, one = torch.randn(N, N, device=device), torch.ones(1, device=device)
        for out, out_t in (pair, pair[::-1]):
            with pytest.raises(ValueError, match=f"{op}: .*out.*out_t.*overlap"):
                if op == "fp8_cast_weights_":
                    tg.fp8_cast_weights_([out], [out_t], [x], one, one.clone(), one.clone())
                else:
                    tg.fp8_cast_transpose_out(out, out_t, x, one)
    assert not memory.any()


def test_an_output_in_the_memory_of_the_input_is_refused(device):
    x = torch.randn(N, N, device=device)
    before, one = x.clone(), torch.ones(1, device=device)
    inside = x.view(torch.uint8).flatten()[: N * N].view(E4M3).view(N, N)
    for call in (
        lambda: tg.fp8_cast_out(inside, x, one),
        lambda: tg.fp8_cast_transpose_out(inside, fp8(N, N, device=device), x, one),
        lambda: tg.fp8_cast_transpose_out(fp8(N, N, device=device), inside, x, one),
        lambda: tg.fp8_dequantize_out(x, inside, one),
    ):
        with pytest.raises(ValueError, match="overlap"):
            call()
    assert torch.equal(x, before)


@pytest.mark.parametrize("op", ["fp8_cast", "fp8_cast_transpose", "fp8_cast_transpose_dbias", "fp8_dequantize"])
def test_no_gradient_flows_through_a_cast_and_asking_for_one_says_so(op, device):
    one = torch.ones(1, device=device, requires_grad=True)
    x = torch.randn(M, N, device=device, requires_grad=True)
    made = tg.fp8_dequantize(fp8(M, N, device=device), one) if op == "fp8_dequantize" else getattr(tg, op)(x, one)[-1]
    with pytest.raises(RuntimeError, match=f"{op}.*not implemented|{op}"):
        made.sum().backward()
