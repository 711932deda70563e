"""Selection thresholds of a group of peers: measured by all ranks, with the same outcome on all."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from te_graph.collectives.peer_group import PeerGroup

# csrc/collectives/protocols.h has the thresholds of these, found by benchmarks/bench_collectives.py.
KNOWN_GPUS = ("H100", "H200")
ALL = 1 << 62
SIZES = tuple(1 << power for power in range(16, 25))  # bytes
CALLS, ROUNDS = 10, 5
BLOCKS = 128
Operation = Callable[["PeerGroup", Tensor], Callable[[], None]]


@dataclass(frozen=True)
class Tuning:
    """Thresholds in bytes.

    Attributes:
        one_shot_bytes: all-reduces up to here are one-shot, larger ones two-shot.
        ll128_bytes: reductions up to here use the LL128 protocol, larger ones the Lamport protocol; bytes that a rank
            sends to each peer in a phase.
        gather_ll128_bytes: all-gathers up to here use the LL128 protocol, larger ones the simple protocol; bytes as
            above.
        blocks: largest number of blocks, a power of two.
    """

    one_shot_bytes: int
    ll128_bytes: int
    gather_ll128_bytes: int
    blocks: int


def is_known(device: torch.device) -> bool:
    """Whether thresholds for this GPU are shipped."""
    return any(name in torch.cuda.get_device_name(device) for name in KNOWN_GPUS)


def threshold(sizes: Sequence[int], below: Sequence[float], above: Sequence[float]) -> int:
    """The bytes up to which the algorithm for small sizes is selected.

    Args:
        sizes: ascending.
        below: time of the algorithm for small sizes at each size.
        above: time of the algorithm for large sizes.

    Returns:
        One of the sizes, the one before the first, or ``ALL``: with it, the sum of all relative losses is least.
    """

    def loss(count: int) -> float:
        selected = [*below[:count], *above[count:]]
        return sum(mine / min(pair) - 1 for mine, *pair in zip(selected, below, above, strict=True))

    count = min(range(len(sizes) + 1), key=loss)
    return ALL if count == len(sizes) else sizes[count - 1] if count else sizes[0] - 1


def tune(group: "PeerGroup") -> Tuning:
    """Measure operations of 64 KB to 16 MB and set the group's thresholds; half a second. All ranks call it.

    Returns:
        The thresholds that all ranks have set.

    Raises:
        RuntimeError: a rank failed; the same error on all ranks.

    Stream and capture: runs on the current stream, synchronizes, must not be captured.
    """

    def best(name: str, operation: Operation, found: Tuning) -> Tuning:
        """``found`` with the best value of one threshold."""
        below, above = (_slowest(group, replace(found, **{name: value}), operation) for value in (ALL, 0))
        return replace(found, **{name: threshold(SIZES, below, above)})

    # One-shot: a rank sends its whole tensor to each peer.
    found = best("ll128_bytes", _all_reduce, Tuning(ALL, 0, 0, blocks_within(group.max_sms)))
    found = best("gather_ll128_bytes", _all_gather, found)
    found = best("one_shot_bytes", _all_reduce, found)
    apply(group._handle, found)
    return found


def blocks_within(max_sms: int | None) -> int:
    """The most blocks, a power of two, that take no more multiprocessors, for each may need one of its own."""
    return BLOCKS if max_sms is None else min(BLOCKS, 1 << (max_sms.bit_length() - 1))


def apply(handle: Any, tuning: Tuning) -> None:
    """Set the thresholds of this rank's handle of a group; those of all ranks must be the same."""
    handle.set_tuning(**asdict(tuning))


def _all_reduce(group: "PeerGroup", x: Tensor) -> Callable[[], None]:
    return lambda: torch.ops.te_graph.all_reduce_.default(x, group.name, "sum")


def _all_gather(group: "PeerGroup", x: Tensor) -> Callable[[], None]:
    out = x.new_empty(x.numel() * group.world_size)
    return lambda: torch.ops.te_graph.all_gather_out.default(out, x, 0, group.world_size, group.name)


def _slowest(group: "PeerGroup", tuning: Tuning, operation: Operation) -> list[float]:
    """Milliseconds of the call that ``operation(group, x)`` returns at each size of x, those of the slowest rank."""
    apply(group._handle, tuning)
    times = group._rendezvous.step(
        "measuring", lambda: [_measure(group, nbytes, operation) for nbytes in SIZES], _parse_times
    )
    return [max(of_ranks) for of_ranks in zip(*times, strict=True)]


def _parse_times(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != len(SIZES) or any(type(time) not in (int, float) for time in value):
        raise ValueError(f"expected {len(SIZES)} times, got {str(value)[:100]}")
    return value


def _measure(group: "PeerGroup", nbytes: int, operation: Operation) -> float:
    call = operation(group, torch.zeros(nbytes // 4, dtype=torch.float32, device=group.device))
    call()
    return statistics.median(_milliseconds(call) for _ in range(ROUNDS))


def _milliseconds(call: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS
