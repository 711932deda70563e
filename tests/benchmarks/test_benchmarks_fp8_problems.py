"""What bench_fp8.py times is compared with plain torch: a result that differs anywhere is told."""

import importlib
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS
from fp8_problems import FUSED_BYTES, small

sys.path.insert(0, str(BENCHMARKS))
plain = importlib.import_module("cases.fp8.plain_torch")
variants = importlib.import_module("cases.fp8.variants")


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("cast", ("out", "scale_inv", "amax")),
        ("cast_transpose", ("out", "out_t", "scale_inv", "amax")),
        ("cast_transpose_dbias", ("out", "out_t", "scale_inv", "amax", "dbias")),
        ("current", ("out", "out_t", "scale_inv")),
    ],
)
def test_a_cast_that_differs_in_one_slot_or_leaves_something_out_is_told(op, names, seed):
    problem = small("activation", "2048x2048", seed)
    call = variants.VARIANTS["te_graph"].build(problem, op)
    results = [call(slot) for slot in range(problem.slots)]
    problem.verify(op, results)
    for name in names:
        wrong = {**results[1], name: results[1][name].clone()}
        values = wrong[name].flatten()
        values.view(torch.uint8)[-1] ^= 0x40  # of FP8 and of the exponents of the others
        with pytest.raises(RuntimeError, match=f"expected {op}: {name} of plain torch, got other values"):
            problem.verify(op, [results[0], wrong])
        del wrong[name]
        with pytest.raises(RuntimeError, match=f"expected {name}, got none"):
            problem.verify(op, [results[0], wrong])


def test_with_current_scaling_a_few_elements_may_be_the_next_number_and_no_other(seed):
    problem = small("activation", "2048x2048", seed)
    results = [plain.torch_cast("current", x, torch.ones(1), torch.zeros(1)) for x in problem.x]
    values = results[0]["out"].view(torch.uint8)
    values[0, :8] ^= 1
    problem.verify("current", results)
    values[0, 8] ^= 2
    with pytest.raises(RuntimeError, match="out of plain torch"):
        problem.verify("current", results)
    values[0, 8] ^= 2
    values[8:16] ^= 1
    with pytest.raises(RuntimeError, match="out of plain torch"):
        problem.verify("current", results)


def test_a_copy_has_to_be_one(seed):
    problem = small("weight", "8192x2048", seed)
    call = variants.VARIANTS["copy"].build(problem, "cast_transpose")
    results = [call(slot) for slot in range(problem.slots)]
    problem.verify("cast_transpose", results)
    results[1][-1, -1] += 1
    with pytest.raises(RuntimeError, match="expected a copy"):
        problem.verify("cast_transpose", results)
    problem.clear()
    assert not results[0].any()


@pytest.mark.parametrize("op", FUSED_BYTES)
def test_a_fused_cast_that_differs_in_one_slot_is_told(op, seed):
    problem = small("fused", "8192x2048", seed)
    call = variants.VARIANTS["te_graph"].build(problem, op)
    results = [call(slot) for slot in range(problem.slots)]
    problem.verify(op, results)
    assert {"out", "out_t", "scale_inv", "amax"} <= results[1].keys()
    beside = results[1].keys() - {"out", "out_t", "scale_inv", "amax"}
    assert bool(beside) == (op not in ("plain", "norm", "gelu", "swiglu"))
    for name, values in results[1].items():
        wrong = values.view(torch.uint8).roll(8, 0).view(values.dtype) if "out" in name else values * 1.1 + 1
        with pytest.raises(RuntimeError, match=f"expected {op}: .*{name}.*, got other values"):
            problem.verify(op, [results[0], {**results[1], name: wrong}])


@pytest.mark.parametrize("op", FUSED_BYTES)
def test_a_copy_moves_as_many_bytes_as_a_fused_cast(op, seed):
    problem = small("fused", "8192x2048", seed)
    results = [variants.VARIANTS["copy"].build(problem, op)(slot) for slot in range(problem.slots)]
    problem.verify(op, results)
    moved = results[1]["source"].nbytes + results[1]["out"].nbytes
    assert moved == FUSED_BYTES[op] * problem.x[0].numel()
    results[1]["out"][-1] ^= 1
    with pytest.raises(RuntimeError, match="expected a copy"):
        problem.verify(op, results)


@pytest.mark.parametrize("variant", ["te_graph", "te_graph_one_by_one"])
def test_all_weights_of_a_model_are_compared(variant, seed):
    problem = small("model", "llama3-8b", seed)
    found = variants.VARIANTS[variant].build(problem, "weights")(0)
    problem.verify("weights", [found])
    assert len(found) == 14
    found[-1]["out_t"].view(torch.uint8)[-1, -1] ^= 1
    with pytest.raises(RuntimeError, match="out_t of plain torch"):
        problem.verify("weights", [found])
    with pytest.raises(ValueError, match="argument"):
        problem.verify("weights", [found[:-1]])


def test_a_skipped_cast_must_leave_all_as_it_was(seed):
    problem = small("model", "gpt3-1.3b", seed)
    cast, skipped = (variants.VARIANTS["te_graph"].build(problem, op) for op in ("weights", "weights_skipped"))
    found = cast(0)
    with pytest.raises(RuntimeError, match="expected weights_skipped: nothing written"):
        problem.verify("weights_skipped", [found])
    problem.clear()
    problem.verify("weights_skipped", [skipped(0)])
    assert variants.VARIANTS["te_graph_one_by_one"].build(problem, "weights_skipped") is None


def test_updates_begin_again_from_the_same_numbers_and_wrong_ones_are_told(seed):
    problem = small("update", "history-16", seed)
    call = variants.VARIANTS["te_graph"].build(problem, "update")
    for _ in range(2):
        problem.prepare()
        for history, scale, scale_inv in zip(problem.history, problem.scale, problem.scale_inv, strict=True):
            assert torch.equal(history, problem.drawn) and bool((torch.cat([scale, scale_inv]) == 1).all())
        problem.verify("update", [call(slot) for slot in range(problem.slots)])
    again = [call(slot) for slot in range(problem.slots)]  # of no module that ran since: nothing changes
    problem.verify("update", again)
    for name in ("history", "scale", "scale_inv"):
        wrong = {**again[1], name: again[1][name] * 1.01}
        with pytest.raises(RuntimeError, match=f"update: {name} of plain torch"):
            problem.verify("update", [again[0], wrong])
