"""The op that a captured backward ends with: results against torch, and bad input.

Its reference is ``accumulated``: the sum in fp32 (fp64 for fp64), rounded once.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from te_graph import _C  # registers the ops
from te_graph.testing import same_bits

SKIP, STORE, ADD = 0, 1, 2
CHUNK = 8192
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
PAIRS = [
    *((dtype, dtype) for dtype in DTYPE_CODES),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]

accumulate_table_ = torch.ops.te_graph.multi_tensor_accumulate_table_.default


def accumulated(source: Tensor, destination: Tensor, mode: int) -> Tensor:
    """Reference: what ``destination`` [n] holds after ``source`` [n] has been skipped, stored or added."""
    if mode == SKIP:
        return destination.clone()
    if mode == STORE:
        return source.to(destination.dtype)
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    return (destination.to(wide) + source.to(wide)).to(destination.dtype)


@dataclass
class Problem:
    """Random tensors with the table that describes them, packed by hand as csrc/multi_tensor/accumulate.h lays it out.

    Attributes:
        device: of all tensors.
        shapes: (source dtype, destination dtype, mode, elements) of each entry.
        offset: elements by which sources and destinations are displaced from their storages' start.
    """

    device: str
    shapes: list[tuple[torch.dtype, torch.dtype, int, int]]
    offset: int = 0
    sources: list[Tensor] = field(init=False)
    destinations: list[Tensor] = field(init=False)
    table: Tensor = field(init=False)  # [entries, 4] int64
    chunks: Tensor = field(init=False)  # [chunks, 2] int32

    def __post_init__(self) -> None:
        self.sources, self.destinations, rows, chunks = [], [], [], []
        for entry, (from_dtype, to_dtype, mode, numel) in enumerate(self.shapes):
            source, destination = (
                torch.randn(numel + self.offset, device=self.device).to(dtype)[self.offset :]
                for dtype in (from_dtype, to_dtype)
            )
            codes = DTYPE_CODES[from_dtype], DTYPE_CODES[to_dtype], mode
            rows.append(struct.pack("=QQq3B5x", source.data_ptr(), destination.data_ptr(), numel, *codes))
            chunks += [(entry, index) for index in range(-(-numel // CHUNK))]
            self.sources.append(source)
            self.destinations.append(destination)
        words = struct.unpack(f"={4 * len(rows)}q", b"".join(rows))
        self.table = torch.tensor(words, dtype=torch.int64, device=self.device).view(-1, 4)
        self.chunks = torch.tensor(chunks, dtype=torch.int32, device=self.device).view(-1, 2)

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        return self.table, self.chunks

    def expected(self) -> list[Tensor]:
        """What the destinations hold after one call."""
        modes = [mode for _, _, mode, _ in self.shapes]
        return [accumulated(*entry) for entry in zip(self.sources, self.destinations, modes, strict=True)]


def mixed_problem(device: str) -> Problem:
    sizes = [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 13, 0]
    shapes = [(*pair, mode, numel) for pair in PAIRS for mode in (SKIP, STORE, ADD) for numel in sizes]
    return Problem(device, shapes)


def small_problem(device: str) -> Problem:
    return Problem(device, [(torch.float32, torch.float32, STORE, 10), (torch.bfloat16, torch.float32, ADD, 9000)])


def test_entries_of_all_pairs_modes_and_sizes_get_the_reference_bits_in_one_call(device):
    problem = mixed_problem(device)
    expected, sources = problem.expected(), [source.clone() for source in problem.sources]
    table, chunks = problem.table.clone(), problem.chunks.clone()
    assert accumulate_table_(*problem.arguments) is None
    for shape, got, want in zip(problem.shapes, problem.destinations, expected, strict=True):
        assert same_bits(got, want), shape
    assert all(map(same_bits, problem.sources, sources))
    assert torch.equal(problem.table, table)
    assert torch.equal(problem.chunks, chunks)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_tensors_that_are_not_aligned_to_16_bytes_get_the_same_bits(pair, device):
    problem = Problem(device, [(*pair, mode, 2 * CHUNK + 5) for mode in (STORE, ADD)], offset=1)
    expected = problem.expected()
    accumulate_table_(*problem.arguments)
    assert all(map(same_bits, problem.destinations, expected))


def test_elements_around_a_destination_stay_as_they_are(device):
    problem = Problem(device, [(torch.float32, torch.float32, STORE, CHUNK)])
    whole = torch.full((CHUNK + 2,), torch.nan, device=device)
    problem.table[0, 1] = whole.data_ptr() + whole.element_size()
    accumulate_table_(*problem.arguments)
    assert torch.equal(whole[1:-1], problem.sources[0])
    assert whole[[0, -1]].isnan().all()


def test_adding_twice_adds_twice_and_storing_twice_stores_once(device):
    problem = Problem(device, [(torch.float32, torch.float32, mode, 100) for mode in (STORE, ADD)])
    stored, added = problem.expected()
    added = accumulated(problem.sources[1], added, ADD)
    for _ in range(2):
        accumulate_table_(*problem.arguments)
    assert same_bits(problem.destinations[0], stored)
    assert same_bits(problem.destinations[1], added)


def test_an_empty_table_does_nothing(device):
    problem = Problem(device, [])
    assert problem.table.shape == (0, 4)
    accumulate_table_(*problem.arguments)


@pytest.mark.parametrize("sizes", [[], [0], [CHUNK + 1, 0, 3]], ids=str)
def test_a_gradient_table_lists_the_chunks_of_its_entries_and_skips_them_all(sizes, device):
    problem = Problem(device, [(torch.bfloat16, torch.float32, SKIP, size) for size in sizes])
    dtypes = [torch.bfloat16] * len(sizes), [torch.float32] * len(sizes)
    table = _C.GradientTable(sizes, *dtypes, torch.device(device))
    table.bind(problem.sources)
    assert torch.equal(table.chunks, problem.chunks)
    # A skipped entry has no destination yet; all else is as packed by hand.
    problem.table[:, 1] = 0
    assert torch.equal(table.entries, problem.table)
    accumulate_table_(table.entries, table.chunks)
    assert table.uploads == 0


# What is wrong, the exception, and what the message says after the name of the op.
BAD_INPUT: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], type[Exception], str]] = {
    "dtype of table": (
        lambda table, chunks: (table.to(torch.int32), chunks),
        TypeError,
        "expected table of dtype torch.int64, got torch.int32",
    ),
    "dtype of chunks": (
        lambda table, chunks: (table, chunks.to(torch.int64)),
        TypeError,
        "expected chunks of dtype torch.int32, got torch.int64",
    ),
    "columns of table": (
        lambda table, chunks: (table[:, :3].contiguous(), chunks),
        ValueError,
        "expected table to be contiguous of shape [n, 4], got [2, 3]",
    ),
    "columns of chunks": (
        lambda table, chunks: (table, chunks[:, :1].contiguous()),
        ValueError,
        "expected chunks to be contiguous of shape [n, 2], got [3, 1]",
    ),
    "dimensions of table": (
        lambda table, chunks: (table.flatten(), chunks),
        ValueError,
        "expected table to be contiguous of shape [n, 4], got [8]",
    ),
    "dimensions of chunks": (
        lambda table, chunks: (table, chunks[None]),
        ValueError,
        "expected chunks to be contiguous of shape [n, 2], got [1, 3, 2]",
    ),
    "strides of table": (
        lambda table, chunks: (table.t().contiguous().t(), chunks),
        ValueError,
        "expected table to be contiguous of shape [n, 4], got [2, 4]",
    ),
    "strides of chunks": (
        lambda table, chunks: (table, chunks.repeat(1, 2)[:, :2]),
        ValueError,
        "expected chunks to be contiguous of shape [n, 2], got [3, 2]",
    ),
}


def assert_refused(problem: Problem, arguments: tuple[Tensor, Tensor], error: type[Exception], message: str) -> None:
    """The op raises ``error`` with a message that begins as given, and writes nothing."""
    before = [destination.clone() for destination in problem.destinations]
    with pytest.raises(error, match="^" + re.escape(f"multi_tensor_accumulate_table_: {message}")):
        accumulate_table_(*arguments)
    assert all(map(same_bits, problem.destinations, before))


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_with_op_argument_expected_and_got(case, device):
    spoil, error, message = BAD_INPUT[case]
    problem = small_problem(device)
    assert_refused(problem, spoil(*problem.arguments), error, message)


@pytest.mark.gpu
def test_table_and_chunks_on_different_devices_are_refused():
    problem = small_problem("cuda")
    table, chunks = problem.arguments
    assert_refused(problem, (table, chunks.cpu()), ValueError, f"expected chunks on {table.device}, got cpu")
    assert_refused(problem, (table.cpu(), chunks), ValueError, f"expected chunks on cpu, got {chunks.device}")


@pytest.mark.gpu
def test_a_captured_call_follows_the_table_without_host_sync():
    problem = Problem("cuda", [(torch.bfloat16, torch.float32, SKIP, CHUNK + 1)])
    skipped, added = problem.table.clone(), problem.table.clone()
    added[0, 3] += ADD << 16
    expected = accumulated(problem.sources[0], problem.destinations[0], ADD)
    accumulate_table_(*problem.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate_table_(*problem.arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for table in (skipped, added, skipped):
            problem.table.copy_(table)
            graph.replay()
        accumulate_table_(*problem.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(problem.destinations[0], expected)
