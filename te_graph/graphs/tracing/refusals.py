"""What a graph cannot hold, seen while a region is recorded: each refusal names the operation and the user's line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_graph.common.dispatch import (
    base_name,
    bypass_modes,
    is_operator,
    is_shape_of_zero,
    is_strided,
    leaves,
    tensors_in,
)
from te_graph.graphs.tracing.advice import advice
from te_graph.graphs.tracing.source_lines import user_site

READS_VALUE = "it reads a tensor's value on the host, and a replay would go on with the value of the capture"
READS_HOST_TENSOR = (
    "it uses a CPU tensor from outside, and a replay would go on with its value of the capture, or not run the "
    "operation at all: make it a tensor on the device"
)
_SHAPE_FOLLOWS_DATA = "the shape of its result depends on data, and a graph's shapes are fixed"
IS_NESTED = (
    "the sizes of nested tensors are data on the host, and a graph's shapes are fixed: use padded ones "
    "(nn.TransformerEncoder(..., enable_nested_tensor=False))"
)
_MOVES_STORAGE = "it gives a tensor another storage, and a graph's addresses are fixed"
LEAVES_DEVICE = "it copies between host and device, and a graph holds the work of one device"
BUILDS_ON_HOST = "it copies Python data to the device, and a graph holds the work of the device alone: make it before"
SETS_GENERATOR = (
    "the state of the default random generator was set inside the region (torch.manual_seed, torch.set_rng_state, "
    "activation checkpointing with dropout, which make_graphed_callables alone captures); a replay draws on from the "
    "generator's present state"
)

COPIES = frozenset({"copy_", "_to_copy"})
MOVING = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_INDEX_READS = frozenset({"index", "_unsafe_index"})
_INDEX_WRITES = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
# They read a value by an operator, which a dispatch mode sees, but where torch makes a tensor of a list of tensors.
NUMBER_METHODS = ("__bool__", "__int__", "__index__", "__float__", "__complex__")
_NUMBERS = frozenset(getattr(torch.Tensor, name) for name in NUMBER_METHODS)
_FUNCTIONS = {
    torch.Tensor.tolist: READS_VALUE,
    torch.Tensor.numpy: READS_VALUE,
    torch.Tensor.__array__: READS_VALUE,
    torch.Tensor.__dlpack__: READS_VALUE,
    torch.Tensor.__repr__: READS_VALUE,
    torch.Tensor.__reduce_ex__: READS_VALUE,  # pickle, torch.save
    torch.Tensor.cpu: LEAVES_DEVICE,
    torch.Tensor.cuda: LEAVES_DEVICE,
    torch.Tensor.data.__set__: _MOVES_STORAGE,
}
# They read a tensor among their arguments that lies on the CPU, by no operator.
READERS = ((torch.Tensor, "tensor_split"), (torch, "tensor_split"), (torch._VF, "_pad_packed_sequence"))
_READERS = frozenset(getattr(owner, name) for owner, name in READERS)
_TO, _TO_CUDA, _TO_DLPACK = torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.__dlpack__
_FUNCTION_NAMES = {torch.Tensor.data.__set__: "Tensor.data = ..."}


class CaptureError(RuntimeError):
    """A region does something that a graph cannot hold; the message names the operation and the user's line."""


@dataclass(frozen=True)
class Refusal:
    """What no graph can hold: an operation, why not, whose line it is, and what to say besides."""

    operation: str
    reason: str
    site: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.operation} cannot be captured: {self.reason}; at {self.site}{self.advice}"


class Refusals:
    """The refusals of one capture. ``first`` keeps the first message, for a region that swallows the exception."""

    def __init__(self) -> None:
        self.first: str | None = None

    def error(self, operation: str, reason: str) -> CaptureError:
        """Make, and remember, the exception that refuses ``operation`` at the user's present line."""
        message = str(Refusal(operation, reason, user_site(), advice()))
        self.first = self.first or message
        return CaptureError(message)


def refuse_plan() -> NoReturn:
    """Refuse that a callable computes with a ``MultiTensorPlan``.

    Raises:
        CaptureError: names the user's present line.
    """
    reason = (
        "replays of callables do not look whether its tensors are where they were: give the list itself to te_graph's "
        "functions (te_graph.clip_tensors_by_global_norm), or capture it by te_graph.graphed"
    )
    raise CaptureError(str(Refusal("MultiTensorPlan", reason, user_site())))


def is_about_captures(error: Exception) -> bool:
    """True for what CUDA, or torch, says of something that a capture does not allow, in whichever words."""
    return type(error) in (RuntimeError, torch.AcceleratorError) and "captur" in str(error)


def first_line(error: Exception) -> str:
    """Of several, the rest being advice on how to debug CUDA."""
    return str(error).partition("\n")[0]


class HostAccessMode(TorchFunctionMode):
    """Function mode that refuses host reads and moves which do not reach the dispatcher on a CPU tensor.

    ``tolist``, ``numpy``, ``cpu``, ``cuda``, printing, assigning ``.data``, and ``to`` another device type.
    """

    def __init__(self, refusals: Refusals) -> None:
        super().__init__()
        self._refusals = refusals

    def __torch_function__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_host_access(self._refusals, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def refuse_host_access(refusals: Refusals, func: Any, args: tuple, kwargs: dict) -> None:
    """Raise CaptureError where ``func``, a function of ``torch.Tensor``, takes a tensor of the region to the host."""
    if (found := host_access(func, args, kwargs)) is not None:
        raise refusals.error(*found)


def host_access(func: Any, args: tuple, kwargs: dict) -> tuple[str, str] | None:
    """What messages call ``func``, and why no graph can hold it; None if it takes no tensor to the host."""
    func = inspect.unwrap(func)  # of torch: host_access.py and exports.py put functions around some
    # Another library may launch kernels on what DLPack gives it of a GPU, on the stream that is captured.
    stays = func in (_TO_CUDA, _TO_DLPACK) and args[0].is_cuda
    if func in _FUNCTIONS and not stays:
        return _FUNCTION_NAMES.get(func, f"Tensor.{func.__name__}"), _FUNCTIONS[func]
    if func in _NUMBERS and torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        return f"Tensor.{func.__name__}", READS_VALUE
    if func in _READERS and _is_given_tensor(*args[1:], **kwargs):
        return f"torch.{func.__name__}", f"{READS_VALUE}: give it numbers"
    device = _device_in(*args[1:], **kwargs) if func is _TO else None
    if device is not None and device.type != args[0].device.type:
        return f"Tensor.to({str(device)!r})", LEAVES_DEVICE
    return None


def _is_given_tensor(*args: Any, input: Any = None, **kwargs: Any) -> bool:
    """Whether a tensor is among the arguments but for the first, called ``input``."""
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def _device_in(*args: Any, copy: bool = False, **kwargs: Any) -> torch.device | None:
    """The device that ``Tensor.to`` is given, in whichever form."""
    first = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(first, Tensor):
        return first.device
    if first is None or isinstance(first, torch.dtype):
        return kwargs.get("device") and torch.device(kwargs["device"])
    return torch.device(first)


_SEED_BYTES = 8  # at the beginning of the state of a CPU generator: what initial_seed() tells


class GeneratorWatch:
    """Context in which the default CPU generator runs from a state of its own, so that setting its state is seen.

    Any state that the region sets, even the one from before the region, differs from this private one. On exit the
    generator is back in the state it had on entry: like the capture of a CUDA graph, a recording draws nothing.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._generator = torch.default_generator

    def __enter__(self) -> GeneratorWatch:
        self._entry = self._generator.get_state()
        self._generator.manual_seed(int.from_bytes(os.urandom(7), "little"))
        self._expected = self._generator.get_state()
        with bypass_modes():
            self._expected[:_SEED_BYTES] = self._entry[:_SEED_BYTES]
        self._generator.set_state(self._expected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with bypass_modes():
            left_as_drawn = torch.equal(self._generator.get_state(), self._expected)
        self._generator.set_state(self._entry)
        if kind is None and not left_as_drawn:
            raise self._refusals.error("the region", SETS_GENERATOR)

    def expect(self, state: Tensor) -> None:
        """The generator is about to be set to ``state``, uint8 [state size], and a replay will do so, too."""
        self._expected = state

    def state(self) -> Tensor:
        """The generator's present state: uint8 [state size] on the CPU, a copy."""
        return self._generator.get_state()

    def check(self, operation: str, before: Tensor) -> None:
        """Refuse a random call if the state was set since the last one; ``before`` [state size] preceded it.

        A call is random when it moved the generator. Schema tags do not tell: an attention without dropout bears the
        same tag as one with dropout, and a checkpoint that draws nothing may set and restore the state.
        """
        after = self._generator.get_state()
        if torch.equal(before, after):
            return
        if not torch.equal(before, self._expected):
            raise self._refusals.error(operation, SETS_GENERATOR)
        self._expected = after


def reason_to_refuse(func: Any, args: tuple, kwargs: dict) -> str | None:
    """Why the recorder cannot hold this dispatcher call, judged by its arguments; None when it can."""
    return reason_for_no_graph(func, args, kwargs, torch.device("cpu")) or reason_to_refuse_tensors((args, kwargs))


def reason_for_no_graph(func: Any, args: tuple, kwargs: dict, device: torch.device) -> str | None:
    """Why no graph of ``device`` can hold this dispatcher call; None when it can."""
    if not is_operator(func):
        return "it is a higher-order operator, whose branches and loops a graph does not follow"
    if base_name(func) in MOVING:
        return _MOVES_STORAGE
    if uses_nested(func, args, kwargs):
        return IS_NESTED
    if torch.Tag.data_dependent_output in func.tags:
        return READS_VALUE + " (.item(), bool(), int(), float(), a comparison of whole tensors)"
    if _shape_follows_data(func, args, kwargs):
        return _SHAPE_FOLLOWS_DATA
    generators = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    # Each call brings a Python object of its own around the generator.
    if any(given._cdata != generator._cdata for given in generators):
        return "it draws from a generator of its own; only the default generator goes on from replay to replay"
    return None


def reason_to_refuse_tensors(tree: Any) -> str | None:
    """Why the recorder cannot hold the tensors of ``tree``; None when all are dense and on the CPU."""
    for tensor in tensors_in(tree):
        if tensor.device.type != "cpu" and not is_shape_of_zero(tensor):
            return f"{LEAVES_DEVICE} (expected tensors on cpu, got one on {tensor.device})"
        if tensor.is_nested:
            return IS_NESTED
        if not is_strided(tensor):
            return f"expected dense (strided) tensors, got one of layout {tensor.layout}"
    return None


def uses_nested(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call takes nested tensors, or makes some, or looks whether some can be made: its name tells that."""
    is_named = is_operator(func) and func.namespace == "aten" and "nested" in base_name(func)
    return is_named or any(tensor.is_nested for tensor in tensors_in((args, kwargs)))


def _shape_follows_data(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    name = base_name(func)
    if name in _INDEX_READS:
        return bool(_masks(args[1]))
    if name in _INDEX_WRITES:
        return _mask_write_needs_positions(*args, **kwargs)
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags or name == "_pack_padded_sequence"  # which torch has not tagged


def _masks(indices: Sequence[Tensor | None]) -> list[Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _mask_write_needs_positions(
    destination: Tensor,  # [...]
    indices: Sequence[Tensor | None],
    values: Tensor,  # broadcastable to destination[indices]
    accumulate: bool = False,
    unsafe: bool = False,
) -> bool:
    """True for ``x[mask] = values`` unless it is one value under one mask, which is a ``masked_fill_``, as long as the
    value is on the CPU, where Python's numbers are."""
    given = [index for index in indices if index is not None]
    is_number = values.numel() == 1 and values.device.type == "cpu"
    return bool(_masks(indices)) and (len(given) > 1 or not is_number or accumulate)
