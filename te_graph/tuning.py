"""Which algorithm a group of peers takes for which size: measured by all ranks, decided by all alike."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from te_graph.peer_group import PeerGroup

# csrc/collectives/tuning.h has the thresholds of these, found by benchmarks/bench_collectives.py.
KNOWN_GPUS = ("H100", "H200")
ALL = 1 << 62
SIZES = tuple(1 << power for power in range(16, 25))  # bytes
CALLS, ROUNDS = 10, 5


@dataclass(frozen=True)
class Tuning:
    """Up to how many bytes.

    Attributes:
        one_step_bytes: all-reduces are done in one step, where each rank sends all to all; larger ones in two.
        line_bytes: data goes in lines that bear their flags; larger operations by tiles. Of the larger one of input and
            output.
        line_blocks, tile_blocks: at most, powers of two.
    """

    one_step_bytes: int
    line_bytes: int
    line_blocks: int
    tile_blocks: int


def is_known(device: torch.device) -> bool:
    """Whether thresholds for this GPU are shipped."""
    return any(name in torch.cuda.get_device_name(device) for name in KNOWN_GPUS)


def threshold(sizes: Sequence[int], below: Sequence[float], above: Sequence[float]) -> int:
    """The bytes up to which the one of two algorithms is taken that is made for small sizes.

    Args:
        sizes: ascending.
        below: time of the algorithm for small sizes at each of them.
        above: time of the other one.

    Returns:
        One of the sizes, the one before the first, or `ALL`: with it, the sum of all relative losses is least.
    """

    def loss(count: int) -> float:
        taken = [*below[:count], *above[count:]]
        return sum(mine / min(pair) - 1 for mine, *pair in zip(taken, below, above, strict=True))

    count = min(range(len(sizes) + 1), key=loss)
    return ALL if count == len(sizes) else sizes[count - 1] if count else sizes[0] - 1


def tune(group: "PeerGroup") -> Tuning:
    """Measure all-reduces of 64 KB to 16 MB and set the group's thresholds; half a second. All ranks call it.

    Returns:
        What all ranks have set.

    Raises:
        RuntimeError: something failed on a rank; the same on all.

    Stream and capture: runs on the current stream, synchronizes, must not be captured.
    """
    blocks = (128, 128)
    steps = [(ALL, 0), (0, 0)] if group.world_size > 2 else []
    one_step, two_steps = (
        [_slowest(group, Tuning(*choice, *blocks)) for choice in steps] if steps else ([0.0] * len(SIZES),) * 2
    )
    one_step_bytes = threshold(SIZES, one_step, two_steps) if steps else ALL
    lines, tiles = (_slowest(group, Tuning(one_step_bytes, line_bytes, *blocks)) for line_bytes in (ALL, 0))
    found = Tuning(one_step_bytes, threshold(SIZES, lines, tiles), *blocks)
    apply(group, found)
    return found


def apply(group: "PeerGroup", tuning: Tuning) -> None:
    """Set the thresholds of this rank; those of all ranks must be the same."""
    group._handle.set_tuning(tuning.one_step_bytes, tuning.line_bytes, tuning.line_blocks, tuning.tile_blocks)


def _slowest(group: "PeerGroup", tuning: Tuning) -> list[float]:
    """Milliseconds at each size, those of the slowest rank."""
    apply(group, tuning)
    times = group._agreement.step("measuring", lambda: [_measure(group, nbytes) for nbytes in SIZES])
    return [max(of_ranks) for of_ranks in zip(*times, strict=True)]


def _measure(group: "PeerGroup", nbytes: int) -> float:
    x = torch.zeros(nbytes // 4, device=group.device)
    out = torch.empty_like(x)

    def call() -> None:
        torch.ops.te_graph.all_reduce_out.default(out, x, group.name, "sum")

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
