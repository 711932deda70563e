"""The collectives as operators: opcheck, fakes, aliases, versions, and bad input that is refused before it is sent.

The reference of a shape or dtype is the real operator, that of a value the numbers that all ranks draw alike. Whether a
refused call sent something is seen from the next one: only one rank makes the bad call, so that ranks which are out of
step could not go on.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_ranks import calls, open_group, reference_reduce
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
ops = torch.ops.te_graph
OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def draw(rank: Rank, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has."""
    return torch.randn(rank.world, *shape, device=rank.device)


def scenario_opcheck(rank: Rank, requires_grad: bool) -> None:
    # On CPUs one process stands for all, since this takes seconds; there the second one is for the first operator.
    count = 1 if rank.world > 1 and rank.device == "cpu" else None
    with open_group(rank) as group:
        x = torch.randn(2 * rank.world, 3, 2 * rank.world, device=rank.device, requires_grad=requires_grad)
        for op, arguments in calls(x, group.name, rank.world)[:count]:
            results = torch.library.opcheck(op, arguments, test_utils=OPCHECK)
            assert results == dict.fromkeys(OPCHECK, "SUCCESS"), op
        group.check()


def layout(tensor: Tensor) -> tuple:
    """What a fake must tell of ``tensor`` [...], with the numbers that stand behind symbols."""
    hints = [[s.node.hint if isinstance(s, torch.SymInt) else s for s in it] for it in (tensor.shape, tensor.stride())]
    return *hints, tensor.dtype, tensor.device, tensor.layout


def views(rank: Rank, dtype: torch.dtype) -> dict[str, Tensor]:
    """[2 * world, 6, 2 * world] each."""
    n = 2 * rank.world
    return {
        "contiguous": torch.ones(n, 6, n, device=rank.device, dtype=dtype),
        "transposed": torch.ones(n, 6, n, device=rank.device, dtype=dtype).transpose(0, 2),
        "every second column": torch.ones(n, 6, 2 * n, device=rank.device, dtype=dtype)[:, :, ::2],
        "expanded": torch.ones(n, 1, n, device=rank.device, dtype=dtype).expand(n, 6, n),
    }


def scenario_fakes(rank: Rank, dtype: torch.dtype) -> None:
    with open_group(rank) as group:
        for what, x in views(rank, dtype).items():
            wanted = [
                lambda x: ops.all_reduce(x, group.name),
                *(lambda x, dim=dim: ops.reduce_scatter(x, dim, rank.world, group.name) for dim in (0, 2, -1)),
                *(lambda x, dim=dim: ops.all_gather(x, dim, rank.world, group.name) for dim in (0, 1, -1)),
            ]
            for number, call in enumerate(wanted):
                real = layout(call(x))
                with FakeTensorMode() as mode:
                    assert layout(call(mode.from_tensor(x))) == real, (what, number)
                context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
                mode = FakeTensorMode(shape_env=ShapeEnv())
                symbolic = mode.from_tensor(x, symbolic_context=context)
                with mode:
                    fake = call(symbolic)
                assert layout(fake) == real, (what, number)
                assert any(isinstance(size, torch.SymInt) for size in fake.shape), "a size became a constant"
        with FakeTensorMode() as mode, pytest.raises(ValueError, match="that 2 ranks can share"):
            ops.reduce_scatter(mode.from_tensor(torch.ones(3, 4)), 0, 2, group.name)


def scenario_fakes_without_a_group(rank: Rank) -> None:
    """A trace may be made before its group is."""
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(6, 4, device=rank.device))
        assert ops.all_reduce(x, "of later").shape == (6, 4)
        assert ops.reduce_scatter(x, 0, 3, "of later").shape == (2, 4)
        assert ops.all_gather(x, -1, 3, "of later").shape == (6, 12)


def scenario_no_aliases(rank: Rank) -> None:
    with open_group(rank) as group:
        for x in views(rank, torch.float32).values():
            for call in (tg.all_reduce, tg.reduce_scatter, tg.all_gather):
                before = x.clone()
                got = call(x, group)
                assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
                got.fill_(-1)
                assert same_bits(x, before), call.__name__


def scenario_versions(rank: Rank) -> None:
    """Autograd, and code that caches values derived from a tensor, sees writes; inference tensors have no versions."""
    with open_group(rank) as group:
        for stride in (1, 2):
            x = torch.randn(2 * rank.world, 6, device=rank.device)[:, ::stride]
            part, whole = x[:2].clone(), torch.cat([x] * rank.world)
            written = [
                (x, lambda x=x: tg.all_reduce_(x, group)),
                (part, lambda x=x, part=part: tg.reduce_scatter_out(part, x, group)),
                (whole, lambda x=x, whole=whole: tg.all_gather_out(whole, x, group)),
                (whole, lambda x=x, whole=whole: tg.all_reduce_out(whole, whole.clone(), group)),
            ]
            for tensor, write in written:
                before = tensor._version
                write()
                assert tensor._version > before
        read = torch.randn(4, device=rank.device)
        tg.all_reduce(read, group)
        assert read._version == 0
        with torch.inference_mode():
            all_ranks = draw(rank, 5)
            assert same_bits(tg.all_reduce_(all_ranks[rank.rank].clone(), group), reference_reduce(all_ranks))


def scenario_saved_tensors(rank: Rank) -> None:
    """A tensor that a backward needs, and a collective wrote, is an error as with any other operator."""
    with open_group(rank) as group:
        weight = torch.randn(4, device=rank.device, requires_grad=True)
        x = torch.randn(4, device=rank.device)
        loss = (weight * x).sum()
        tg.all_reduce_(x, group)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def scenario_written_forms_have_no_gradient(rank: Rank) -> None:
    with open_group(rank) as group:
        leaf = torch.randn(2 * rank.world, 3, device=rank.device, requires_grad=True)
        x = leaf * 1
        same, part = torch.empty_like(leaf, requires_grad=False), torch.empty(2, 3, device=rank.device)
        whole = torch.empty(2 * rank.world**2, 3, device=rank.device)
        for name, call in {
            "all_reduce_": lambda: tg.all_reduce_(x, group),
            "all_reduce_out": lambda: tg.all_reduce_out(same, x, group),
            "reduce_scatter_out": lambda: tg.reduce_scatter_out(part, x, group),
            "all_gather_out": lambda: tg.all_gather_out(whole, x, group),
        }.items():
            with pytest.raises(NotImplementedError, match=f"{name}: has no gradient"):
                call()
            with torch.no_grad():
                call()


def scenario_max_has_no_gradient(rank: Rank) -> None:
    with open_group(rank) as group:
        all_ranks = draw(rank, 4 * rank.world)
        x = all_ranks[rank.rank].clone().requires_grad_()
        for call in (tg.all_reduce, tg.reduce_scatter):
            if rank.rank == 0:
                with pytest.raises(NotImplementedError, match="'max' has no gradient"):
                    call(x, group, reduction="max")
            with torch.no_grad():
                got = call(x, group, reduction="max")
            assert not got.requires_grad
        assert same_bits(tg.all_reduce(x.detach(), group, "max"), all_ranks.amax(0))


def scenario_conjugates(rank: Rank) -> None:
    """What a bit of a tensor's says of its values is not lost on the way."""
    with open_group(rank) as group:
        all_ranks = torch.complex(draw(rank, 6), draw(rank, 6)).conj()
        assert same_bits(tg.all_gather(all_ranks[rank.rank], group), all_ranks.flatten().resolve_conj())
        negative = all_ranks.imag
        assert negative.is_neg()
        assert same_bits(tg.all_gather(negative[rank.rank], group), negative.flatten().resolve_neg())
        total = reference_reduce(negative.resolve_neg())
        assert same_bits(tg.all_reduce(negative[rank.rank], group), total)
        for _ in range(5):
            x = torch.complex(draw(rank, 6), all_ranks.resolve_conj().imag.neg())[rank.rank].conj().imag
            version = x._version
            assert x.is_neg() and tg.all_reduce_(x, group) is x and x.is_neg() and x._version > version
            assert same_bits(x.resolve_neg(), total)
            tg.all_reduce_out(x, negative[rank.rank] * 2, group)
            assert same_bits(x.resolve_neg(), reference_reduce(negative.resolve_neg() * 2))
            whole = torch.zeros(rank.world * 6, dtype=torch.complex64, device=rank.device).conj()
            tg.all_gather_out(whole, all_ranks[rank.rank], group)
            assert whole.is_conj() and same_bits(whole.resolve_conj(), all_ranks.flatten().resolve_conj())


def bad_calls(rank: Rank, group: tg.PeerGroup) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Calls of one rank, what they raise, and with which words."""
    n = 2 * rank.world
    x = torch.randn(n, 3, device=rank.device)
    low, double, scalar = x.bfloat16(), x.double(), x[0, 0]
    sparse, quantized = x.to_sparse(), torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to(rank.device)
    elsewhere = torch.empty(n, 3, device="cpu" if rank.device != "cpu" else "meta")
    out, leaf = torch.zeros_like(x), x.clone().requires_grad_()
    name, world = group.name, rank.world
    number = "expected x of dtype torch.float32, torch.float16 or torch.bfloat16, got"
    bad: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: ops.all_reduce(x, "unknown"), ValueError, "all_reduce: .* te_graph.PeerGroup, got 'unknown'"),
        (lambda: ops.all_gather_out(out, x, 0, world, ""), ValueError, "all_gather_out: .* te_graph.PeerGroup, got ''"),
        (lambda: tg.all_reduce(double, group), TypeError, f"all_reduce: {number} torch.float64"),
        (lambda: tg.reduce_scatter(x.long(), group), TypeError, f"reduce_scatter: {number} torch.int64"),
        (lambda: tg.all_reduce_(x > 0, group), TypeError, f"all_reduce_: {number} torch.bool"),
        (lambda: tg.all_reduce(low, group, "max"), TypeError, "dtype torch.float32 for 'max', got torch.bfloat16"),
        (lambda: tg.all_reduce(x, group, "mean"), ValueError, "expected reduction 'sum' or 'max', got 'mean'"),
        (lambda: tg.all_gather(x, group, 2), IndexError, "all_gather: expected dim from -2 to 1, got 2"),
        (lambda: tg.reduce_scatter(x, group, -3), IndexError, "reduce_scatter: expected dim from -2 to 1, got -3"),
        (lambda: tg.all_gather(scalar, group), ValueError, "all_gather: .* at least one dimension, got a scalar"),
        (lambda: tg.reduce_scatter(scalar, group), ValueError, "reduce_scatter: .* dimension, got a scalar"),
        (lambda: tg.all_reduce(sparse, group), ValueError, "expected x of layout Strided, got Sparse"),
        (lambda: tg.all_gather(sparse, group), ValueError, "expected x of layout Strided, got Sparse"),
        (lambda: tg.all_gather(quantized, group), TypeError, "x that is not quantized, got QInt8"),
        (lambda: ops.all_gather(x, 0, world + 1, name), ValueError, rf"world_size {world} of .*, got {world + 1}"),
        (lambda: ops.reduce_scatter(x, 0, 0, name), ValueError, rf"expected world_size {world} of .*, got 0"),
        (lambda: tg.all_reduce_out(out[1:], x, group), ValueError, rf"expected out of shape \[{n}, 3\], got"),
        (
            lambda: tg.all_reduce_out(out.half(), x, group),
            TypeError,
            "expected out of dtype torch.float32, got torch.float16",
        ),
        (lambda: tg.all_reduce_out(out.to_sparse(), x, group), ValueError, "out of layout Strided, got Sparse"),
        (lambda: tg.reduce_scatter_out(x[:1], x, group), ValueError, r"expected out of shape \[2, 3\], got \[1, 3\]"),
        (lambda: tg.all_gather_out(scalar, x, group), ValueError, r"expected out of shape .*, got \[\]"),
        (lambda: tg.all_reduce_(leaf, group), RuntimeError, "all_reduce_: has no gradient"),
    ]
    if rank.device != "cpu":
        bad.append((lambda: tg.all_reduce(elsewhere, group), ValueError, f"expected x on {rank.device}, .* got cpu"))
    bad.append((lambda: tg.all_reduce_out(elsewhere, x, group), ValueError, f"expected out on {rank.device}, got"))
    if rank.world > 1:
        words = f"a size in dim 1 that {rank.world} ranks can share, got 1"
        bad.append((lambda: tg.reduce_scatter(x[:, :1], group, 1), ValueError, words))
        bad.append((lambda: tg.reduce_scatter_out(out, x[:, :1], group, 1), ValueError, words))
    return bad


def scenario_bad_input(rank: Rank) -> None:
    with open_group(rank) as group:
        for number, (call, error, words) in enumerate(bad_calls(rank, group)):
            if rank.rank == number % rank.world:
                with pytest.raises(error, match=words):
                    call()
            all_ranks = draw(rank, 33)
            assert same_bits(tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks)), words
        group.check()


def scenario_overlapping_output(rank: Rank) -> None:
    """Several elements in one place cannot be written; this, too, is known before anything is sent."""
    with open_group(rank, timeout=2.0) as group:
        x = torch.randn(2 * rank.world, 3, device=rank.device)
        for tensor, write in [
            (x[:1].expand(4, 3), lambda t: tg.all_reduce_(t, group)),
            (torch.zeros(1, 3, device=rank.device).expand(2 * rank.world, 3), lambda t: tg.all_reduce_out(t, x, group)),
            (torch.zeros(1, 3, device=rank.device).expand(2, 3), lambda t: tg.reduce_scatter_out(t, x, group)),
            (x[:1, :1].expand(2 * rank.world**2, 3), lambda t: tg.all_gather_out(t, x, group)),
        ]:
            if rank.rank == 0:
                with pytest.raises((ValueError, RuntimeError), match=r"single memory location|overlap|one place"):
                    write(tensor)
            all_ranks = draw(rank, 33)
            assert same_bits(tg.all_reduce(all_ranks[rank.rank], group), reference_reduce(all_ranks))


def scenario_closed(rank: Rank) -> None:
    with open_group(rank, name="to be closed") as group, open_group(rank) as other:
        group.close()
        x = draw(rank, 4)[rank.rank]
        with pytest.raises(ValueError, match=r"all_reduce: .* te_graph.PeerGroup, got 'to be closed'"):
            tg.all_reduce(x, group)
        for call in (group.check, group.abort, lambda: group.set_timeout(3)):
            with pytest.raises(RuntimeError, match="expected a group that is open, got one that was closed"):
                call()
        all_ranks = draw(rank, 7)
        assert same_bits(tg.all_reduce(all_ranks[rank.rank], other), reference_reduce(all_ranks))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_finds_all_operators_sound(ranks, seed, requires_grad):
    ranks.run(scenario_opcheck, seed, requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fakes_have_the_shape_dtype_and_strides_of_the_real_result(ranks, seed, dtype):
    ranks.run(scenario_fakes, seed, dtype)


def test_bad_input_is_named_before_anything_is_sent(ranks, seed):
    ranks.run(scenario_bad_input, seed)


def test_a_trace_needs_no_group(ranks, seed):
    ranks.run(scenario_fakes_without_a_group, seed)


def test_results_share_no_memory_with_inputs(ranks, seed):
    ranks.run(scenario_no_aliases, seed)


def test_versions_of_tensors_that_are_written_go_up(ranks, seed):
    ranks.run(scenario_versions, seed)


def test_a_backward_sees_that_a_saved_tensor_was_written(ranks, seed):
    ranks.run(scenario_saved_tensors, seed)


def test_forms_that_write_into_a_tensor_refuse_tensors_that_need_gradients(ranks, seed):
    ranks.run(scenario_written_forms_have_no_gradient, seed)


def test_the_largest_has_no_gradient(ranks, seed):
    ranks.run(scenario_max_has_no_gradient, seed)


def test_conjugate_and_negative_views_have_their_values(ranks, seed):
    ranks.run(scenario_conjugates, seed)


def test_a_closed_group_is_gone_and_others_stay(ranks, seed):
    ranks.run(scenario_closed, seed)


def test_outputs_that_overlap_themselves_are_refused_before_anything_is_sent(ranks, seed):
    ranks.run(scenario_overlapping_output, seed)
