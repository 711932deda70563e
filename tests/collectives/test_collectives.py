"""Values of the collectives: bits of sums in fp32 in the order of the ranks, rounded once.

All ranks draw the same numbers, so each knows what all others have: the reference needs no communication.
"""

import itertools

import pytest
import torch
from collective_ranks import WORLDS, open_group, reference_reduce
from ranks import Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor
from torch.profiler import profile

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 4096


def spread(shape: tuple[int, ...], rank: Rank, dtype: torch.dtype) -> Tensor:
    """[world, *shape]: what each rank has, of sizes so different that the order of a sum matters."""
    reach = {torch.float16: 5, torch.bfloat16: 12, torch.float32: 12}[dtype]
    x = torch.randn(rank.world, *shape, device=rank.device)
    exponents = torch.randint(-reach, reach + 1, x.shape, device=rank.device)
    return (x * 2.0**exponents).to(dtype)


def scenario_all_reduce(rank: Rank, dtype: torch.dtype, numels: list[int]) -> None:
    with open_group(rank) as group:
        for numel in numels:
            all_ranks = spread((numel,), rank, dtype)
            mine = all_ranks[rank.rank].clone()
            expected = reference_reduce(all_ranks)
            assert same_bits(tg.all_reduce(mine, group), expected), numel
            assert same_bits(mine, all_ranks[rank.rank]), "the input was written"
            out = torch.full_like(mine, float("nan"))
            tg.all_reduce_out(out, mine, group)
            assert same_bits(out, expected), numel
            assert tg.all_reduce_(mine, group) is mine and same_bits(mine, expected), numel
        group.check()


def scenario_order(rank: Rank, dtype: torch.dtype) -> None:
    """Small numbers beside large ones that cancel, so that another order gives other bits."""
    all_ranks = torch.zeros(rank.world, 4096, dtype=dtype, device=rank.device)
    all_ranks[0] = torch.randn(4096, device=rank.device) * 2.0**-10
    all_ranks[rank.world // 2] += 2.0**15
    all_ranks[-1] -= 2.0**15
    if rank.world > 2:
        assert not same_bits(reference_reduce(all_ranks), reference_reduce(all_ranks.flip(0)))
    with open_group(rank) as group:
        assert same_bits(tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks))


def scenario_size_invariance(rank: Rank, dtype: torch.dtype, heights: list[int]) -> None:
    """Rows have the same sums however many others are with them, whatever the algorithm."""
    all_ranks = spread((max(heights), 4096), rank, dtype)
    expected = reference_reduce(all_ranks)
    with open_group(rank) as group:
        for height in heights:
            got = tg.all_reduce(all_ranks[rank.rank, :height], group)
            assert same_bits(got, expected[:height]), height


def odd_tensors(rank: Rank, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """[world, ...] each, with what is odd about what a rank has."""
    base = spread((61, 47), rank, dtype)
    return [
        ("no elements", base[:, :0]),
        ("one element", base[:, 3, 5:6]),
        ("a scalar", base[:, 7, 11]),
        ("one element of a large stride", base[:, 3, 5:6].as_strided((rank.world, 1), (base.stride(0), 2), 148)),
        ("bytes that 16 does not divide", base[:, 0, :45]),
        ("a storage offset of one element", base.flatten(1)[:, 1:1030]),
        ("transposed", base.transpose(1, 2)),
        ("every second column", base[:, :, ::2]),
        ("expanded", base[:, :1].expand(-1, 5, -1)),
        ("reversed dimensions of a cube", base[:, :60, :46].unflatten(1, (6, 10)).permute(0, 3, 1, 2)),
    ]


def scenario_odd_tensors(rank: Rank, dtype: torch.dtype) -> None:
    with open_group(rank) as group:
        for what, all_ranks in odd_tensors(rank, dtype):
            mine = all_ranks[rank.rank]
            expected = reference_reduce(all_ranks)
            got = tg.all_reduce(mine, group)
            assert got.is_contiguous() and got.shape == mine.shape and same_bits(got, expected), what
            if mine.dim() > 0:
                gathered = tg.all_gather(mine, group, dim=-1)
                assert same_bits(gathered, torch.cat(list(all_ranks), -1)), what
            if what == "expanded":
                continue  # cannot be written in place
            target = mine.clone(memory_format=torch.preserve_format)
            assert same_bits(tg.all_reduce_(target, group), expected), what


def scenario_special_values(rank: Rank, dtype: torch.dtype) -> None:
    """Zeros keep their signs, infinities and NaNs are what IEEE makes of them, subnormals stay."""
    limits = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), limits.tiny / 4, limits.max, -limits.max]
    grid = torch.tensor(values, dtype=dtype, device=rank.device)
    pairs = torch.cartesian_prod(grid, grid)  # [n, 2]
    all_ranks = torch.stack([pairs[:, r % 2] for r in range(rank.world)])
    with open_group(rank) as group:
        got, expected = tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks)
        assert torch.equal(got.isnan(), expected.isnan()) and expected.isnan().any()
        assert same_bits(got.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))
        minus = torch.full((7,), -0.0, dtype=dtype, device=rank.device)
        assert tg.all_reduce(minus, group).signbit().all()
        payloads = torch.arange(256, dtype=torch.uint8, device=rank.device).repeat(5) + rank.rank
        expected = torch.cat([payloads - rank.rank + r for r in range(rank.world)])
        assert torch.equal(tg.all_gather(payloads, group), expected)


def scenario_guards(rank: Rank, dtype: torch.dtype) -> None:
    """What lies around input and output stays as it was."""
    with open_group(rank) as group:
        for numel in (1, 13, 1000, 70001):
            all_ranks = spread((numel,), rank, dtype)
            pad = GUARD // all_ranks.element_size()
            whole = torch.full((2, numel + 2 * pad), 7.0, dtype=dtype, device=rank.device)
            whole[0, pad : pad + numel] = all_ranks[rank.rank]
            before = whole.clone()
            tg.all_reduce_out(whole[1, pad : pad + numel], whole[0, pad : pad + numel], group)
            before[1, pad : pad + numel] = reference_reduce(all_ranks)
            assert same_bits(whole, before), numel


def scenario_oversize(rank: Rank, dtype: torch.dtype) -> None:
    """Operations around, above and far above what the buffer holds at once."""
    with open_group(rank, buffer_bytes=1 << 20) as group:
        for nbytes in ((1 << 19) - 16, 1 << 19, (1 << 19) + 16, 5 << 20):
            all_ranks = spread((nbytes // dtype.itemsize + 3,), rank, dtype)
            mine = all_ranks[rank.rank]
            assert same_bits(tg.all_reduce(mine, group), reference_reduce(all_ranks)), nbytes
            assert same_bits(tg.all_gather(mine, group), all_ranks.flatten()), nbytes
            shared = mine.repeat(rank.world)
            expected = reference_reduce(all_ranks)
            assert same_bits(tg.reduce_scatter(shared, group), expected), nbytes


def scenario_empty_words(rank: Rank) -> None:
    """NaNs with all bits set, the sentinel of the Lamport protocol."""
    with open_group(rank, timeout=5.0) as group:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.full((300_001,), -1, dtype=torch.int32, device=rank.device).view(dtype)
            x[1::3] = rank.rank
            got = tg.all_reduce(x, group)
            assert got.isnan().sum() == got.numel() - got[1::3].numel()
            assert (got[1::3] == sum(range(rank.world))).all()
        group.check()


def scenario_max(rank: Rank) -> None:
    with open_group(rank) as group:
        all_ranks = spread((1001,), rank, torch.float32)
        assert same_bits(tg.all_reduce(all_ranks[rank.rank], group, "max"), all_ranks.amax(0))
        all_ranks[rank.world - 1, 17] = float("nan")
        got = tg.all_reduce(all_ranks[rank.rank], group, "max")
        assert got.isnan().nonzero().flatten().tolist() == [17]
        zeros = torch.zeros(4, device=rank.device) * (-1.0 if rank.rank == 0 and rank.world > 1 else 1.0)
        assert not tg.all_reduce(zeros, group, "max").signbit().any()
        rows = spread((3 * rank.world, 5), rank, torch.float32)
        mine = tg.reduce_scatter(rows[rank.rank], group, reduction="max")
        assert same_bits(mine, rows.amax(0).chunk(rank.world)[rank.rank])


def scenario_scatter_and_gather(rank: Rank, dtype: torch.dtype) -> None:
    """Along every dimension, into new and given tensors."""
    with open_group(rank) as group:
        shape = (2 * rank.world, 3, 5 * rank.world)
        all_ranks = spread(shape, rank, dtype)
        mine, total = all_ranks[rank.rank], reference_reduce(all_ranks)
        for dim in (0, 2, -1, -3):
            expected = total.chunk(rank.world, dim)[rank.rank].contiguous()
            assert same_bits(tg.reduce_scatter(mine, group, dim), expected), dim
            out = torch.full_like(expected, float("nan"))
            tg.reduce_scatter_out(out, mine, group, dim)
            assert same_bits(out, expected), dim
        for dim in (0, 1, 2, -1, -2):
            expected = torch.cat(list(all_ranks), dim)
            assert same_bits(tg.all_gather(mine, group, dim), expected), dim
            out = torch.full_like(expected.transpose(0, 2), float("nan")).transpose(0, 2)
            tg.all_gather_out(out, mine, group, dim)
            assert same_bits(out, expected), dim


def is_copied_before(out: Tensor, x: Tensor, group: tg.PeerGroup) -> bool:
    """Gathers x [n] into out [world * n]; whether that is of a copy of x."""
    with profile(acc_events=True) as profiler:
        tg.all_gather_out(out, x, group)
    return any(event.name == "aten::clone" for event in profiler.events())


def scenario_gather_own_part(rank: Rank, numels: list[int]) -> None:
    """From where the output has it, nothing is copied before; from elsewhere in the output x is."""
    with open_group(rank) as group:
        for numel, dtype, offset in itertools.product(numels, (torch.bfloat16, torch.float32), (0, 1)):
            all_ranks = spread((numel,), rank, dtype)
            memory = torch.full((offset + all_ranks.numel() + 1,), 7.0, dtype=dtype, device=rank.device)
            out = memory[offset:-1]
            own = out[rank.rank * numel :][:numel].copy_(all_ranks[rank.rank])
            assert not is_copied_before(out, own, group)
            assert same_bits(out, all_ranks.flatten()), (numel, dtype, offset)
            assert memory[:offset].eq(7).all() and memory[-1] == 7
            x = out[(rank.rank + 1) % rank.world * numel :][:numel].copy_(all_ranks[rank.rank])
            assert is_copied_before(out, x, group) is (rank.world > 1 and numel > 0)
            assert same_bits(out, all_ranks.flatten()), (numel, dtype, offset)
        group.check()


def scenario_any_dtype(rank: Rank) -> None:
    with open_group(rank) as group:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool, torch.int64, torch.float64):
            all_ranks = torch.randint(0, 2, (rank.world, 37), device=rank.device).to(dtype)
            assert same_bits(tg.all_gather(all_ranks[rank.rank], group), all_ranks.flatten()), dtype


def scenario_repeats(rank: Rank, times: int) -> None:
    """The same input gives the same bits every time."""
    all_ranks = spread((5000,), rank, torch.bfloat16)
    expected = reference_reduce(all_ranks)
    with open_group(rank) as group:
        wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        for _ in range(times):
            got = tg.all_reduce(all_ranks[rank.rank], group)
            wrong += (got.view(torch.int16) != expected.view(torch.int16)).sum()
        assert wrong.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_the_reference_at_any_size(ranks, seed, dtype):
    sizes = [8, 16, 64, 1024, 1040, 4096, 32768, 262152] + ([] if ranks.is_cpu else [1 << 20, 1 << 21, 1 << 24])
    ranks.run(scenario_all_reduce, seed, dtype, sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_the_sum_is_that_of_the_ranks(ranks, seed, dtype):
    ranks.run(scenario_order, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_sums_at_any_height(ranks, seed, dtype):
    heights = [1, 32, 127, 128, 256] + ([] if ranks.is_cpu else [512, 1000, 3000])
    ranks.run(scenario_size_invariance, seed, dtype, heights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes_and_strides(ranks, seed, dtype):
    ranks.run(scenario_odd_tensors, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(ranks, seed, dtype):
    ranks.run(scenario_special_values, seed, dtype)


def test_numbers_that_equal_the_sentinel_are_nans(ranks, seed):
    ranks.run(scenario_empty_words, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_around_the_output_is_written(ranks, seed, dtype):
    ranks.run(scenario_guards, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_of(2)
def test_operations_larger_than_the_buffer(ranks, seed, dtype):
    ranks.run(scenario_oversize, seed, dtype)


def test_the_largest_of_all_ranks(ranks, seed):
    ranks.run(scenario_max, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_and_wholes_along_every_dimension(ranks, seed, dtype):
    ranks.run(scenario_scatter_and_gather, seed, dtype)


def test_a_part_is_gathered_from_where_the_output_has_it(ranks, seed):
    ranks.run(scenario_gather_own_part, seed, [0, 1, 13, 70_001] + ([] if ranks.is_cpu else [600_000, 9_000_011]))


def test_bytes_of_any_dtype_are_gathered(ranks, seed):
    ranks.run(scenario_any_dtype, seed)


def test_repetitions_find_the_same_bits(ranks, seed):
    ranks.run(scenario_repeats, seed, 50 if ranks.is_cpu else 10_000)
