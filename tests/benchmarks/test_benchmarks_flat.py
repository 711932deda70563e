"""bench_flat.py with small models over gloo; its counts, targets and table beside numbers written out here by hand."""

import importlib
import json
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench_flat")
processes = importlib.import_module("lib.rank_processes")
stacks = importlib.import_module("cases.flat.stacks")
training = importlib.import_module("cases.flat.training")
table = importlib.import_module("cases.flat.table")
targets = importlib.import_module("cases.flat.targets")
traces = importlib.import_module("cases.flat.traces")
traffic = importlib.import_module("cases.flat.traffic")
variants = importlib.import_module("cases.flat.variants")

PEERS = ["ddp", "ddp-bf16", "fsdp2", "split-cat"]
OURS = [f"{s}-{m}-{o}" for s in ("none", "optimizer") for m in ("eager", "graphed") for o in ("overlap", "end")]
OURS += ["optimizer-eager-overlap-bf16", "optimizer-graphed-overlap-bf16"]
OURS += ["none-eager-overlap-bf16-grads", "none-graphed-overlap-bf16-grads"]
MICROBATCHES = 3


@pytest.fixture(scope="module")
def found():
    """What variants are measured to be, all by the same two processes."""
    names = [
        "none-eager-end",
        "none-graphed-overlap",
        "optimizer-eager-overlap",
        "optimizer-eager-overlap-bf16",
        *PEERS,
    ]
    names += [name for name in ("flatten", "flatten-sum") if variants.VARIANTS[name].missing("cpu") is None]
    stack, repeats = stacks.SMALL["llama"].of(1), training.Repeats(warmup=2, timed=1)
    cases = [training.Case(stack, 4, MICROBATCHES, name, 1, repeats) for name in names]
    rows = {name: {} for name in names}
    processes.run_on_ranks(training.measure, 2, "cpu", (cases,), lambda part: rows[part["variant"]].update(part), 300)
    return rows


def test_all_variants_train_alike(found):
    for name, row in found.items():
        assert row["losses"] == pytest.approx(found["none-eager-end"]["losses"], rel=1e-3), name
        assert row["losses"][1] < row["losses"][0] and row["parameters"] == found["none-eager-end"]["parameters"]
        assert min(row[key] for key in ("step_ms", "reducing_ms", "accumulating_ms", "optimizer_ms")) > 0
    same = ["none-eager-end", "none-graphed-overlap", "optimizer-eager-overlap", "split-cat"]
    assert len({tuple(found[name]["losses"]) for name in same}) == 1


def test_bytes_are_those_of_what_is_launched(found):
    assert found["none-eager-end"]["device_bytes"] == found["optimizer-eager-overlap"]["device_bytes"] == 6 + 10 * 2
    assert found["split-cat"]["device_bytes"] == 4 + (4 + 10) * 3
    assert found["ddp"]["wire_bytes"] == found["ddp-bf16"]["wire_bytes"] == 2.0  # an all-reduce in bf16
    assert found["split-cat"]["wire_bytes"] == 4.0
    sent = {"none-eager-end": 4.0, "optimizer-eager-overlap": 3.0, "optimizer-eager-overlap-bf16": 2.0}
    for name, of_element in sent.items():
        padded = -(-found[name]["parameters"] // 2**14) * 2**14
        assert found[name]["wire_bytes"] == pytest.approx(of_element * padded / found[name]["parameters"], rel=0.05)
    assert "wire_bytes" not in found["none-graphed-overlap"]


def test_traces_know_concats_and_reductions(found):
    for name in ("none-eager-end", "none-graphed-overlap", "optimizer-eager-overlap"):
        assert found[name]["kernels"]["cat and split"] == 0 < found[name]["kernels"]["reductions"]
        assert found[name]["first_reduction_us"]["after_begin"] > 0
    assert found["split-cat"]["kernels"]["cat and split"] == MICROBATCHES  # of one layer


def test_the_script_keeps_rows_and_compares_graphs(tmp_path):
    names = ["optimizer-eager-end", "optimizer-graphed-end"]
    options = ("--models", "gpt", "--layers", 1, "--tokens", 4, "--variants", *names, "--commit", "abc")
    process = run_script("bench_flat.py", "--device", "cpu", "--seed", 3, *options, "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    record = json.loads((tmp_path / "flat.json").read_text())
    assert [(row["model"], row["tokens"], row["variant"]) for row in record["rows"]] == [("gpt", 4, n) for n in names]
    assert [row["equal_to_eager"] for row in record["rows"]] == [None, True]
    assert record["rows"][1]["wire_bytes"] is None and record["rows"][1]["peak_mib"] is None
    assert (record["world"], record["microbatches"], record["failures"], record["targets"]) == (2, 2, [], [])


@pytest.mark.full
def test_variants_are_added_to_earlier_ones(tmp_path):
    file, records = tmp_path / "flat.json", []
    for variant, tokens in (("optimizer-graphed-end", 4), ("optimizer-eager-end", 4), ("ddp", 5)):
        append = ("--append", file) if file.exists() else ()
        options = ("--models", "gpt", "--layers", 1, "--tokens", tokens, "--variants", variant, "--commit", "abc")
        process = run_script("bench_flat.py", "--device", "cpu", *options, "--out", tmp_path, *append)
        if tokens == 5:
            assert process.returncode == 2 and "same measurement, got tokens [4] instead of [5]" in process.stderr
            break
        assert process.returncode == 0, process.stderr
        records.append(json.loads(file.read_text()))
    first, second = records
    names = ["optimizer-eager-end", "optimizer-graphed-end"]
    assert [row["variant"] for row in second["rows"]] == list(second["variants"]) == names
    assert second["rows"][1] == {**first["rows"][0], "equal_to_eager": True}
    assert second["command"] == (
        "python benchmarks/bench_flat.py --device cpu --layers 1 --tokens 4 --models gpt --variants " + " ".join(names)
    )


def test_variants_are_te_graphs_and_peers():
    assert [name for name, variant in variants.VARIANTS.items() if variant.is_ours] == OURS == targets.OURS
    options = bench.BENCHMARK.parse_args(["--device", "cpu"])
    assert set(options.variants) >= {*OURS, *PEERS} and options.stacks == stacks.SMALL
    assert "Megatron-core, distributed optimizer" in options.not_measured
    assert bench.BENCHMARK.parse_args(["--device", "cpu", "--quick"]).models == ["llama"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "1"], "--gpus: expected at least 2 ranks"),
        (["--layers", "0"], "--layers: expected at least 1"),
        (["--tokens", "0"], "--tokens: expected at least 1"),
    ],
)
def test_what_cannot_be_measured_is_told(options, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.BENCHMARK.parse_args(["--device", "cpu", *options])
    assert words in capsys.readouterr().err


def test_a_variant_that_fails_stops_no_other(monkeypatch):
    def run(function, world, device, arguments, receive, time_limit):
        (case,) = arguments[0]
        receive({"variant": case.variant, "tokens": case.tokens, "losses": [1.0]})
        if case.variant == "ddp":
            raise RuntimeError("rank 1 died")

    monkeypatch.setattr(bench, "run_on_ranks", run)
    arguments = ["--device", "cpu", "--models", "llama", "--tokens", "4", "--variants", "ddp", "fsdp2"]
    record = bench.run_benchmark(bench.BENCHMARK.parse_args(arguments))
    assert record["failures"] == [{"model": "llama", "variant": "ddp", "error": "RuntimeError: rank 1 died"}]
    assert [row["variant"] for row in record["rows"]] == ["ddp", "fsdp2"]
    assert record["rows"][0]["kernels"] is None


def test_models_have_the_sizes_of_their_names():
    llama, gpt = (stack.of(1) for stack in stacks.STACKS.values())
    counts = [sum(p.numel() for p in stacks.Model(stack, "meta").parameters()) for stack in (llama, gpt)]
    assert counts[0] == 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    assert counts[1] == 2048 * (4 * 2048 + 2 * 8192) + 4 * 2048 + 8192 + 2048 + 4 * 2048


def test_traffic_counts_what_touches_gradients():
    sums, grad = torch.zeros(10), torch.ones(10, dtype=torch.bfloat16)
    with traffic.Traffic([sums], world=2) as counted:
        sums.copy_(grad)
        sums[:5].add_(grad[:5])
        sums.zero_()
        grad.add_(1)
        torch.cat([grad, grad])
    assert counted.device == (20 + 40) + (10 + 2 * 20) + 40 + 2 * 40


def test_kinds_of_kernels():
    names = {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reductions",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "reductions",
        "void te_graph::two_shot_all_reduce_simple_kernel<float>(te_graph::LaunchArgs)": "reductions",
        "void te_graph::reduce_rows_kernel<float>": "reductions",
        "ncclDevKernel_AllGather_RING_LL": "gathers",
        "te_graph::all_gather_simple_kernel(te_graph::LaunchArgs, te_graph::Peers)": "gathers",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<...>": "cat and split",
        "at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "cat and split",
        "void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel": "cat and split",
        "Memset (Device)": "memsets",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "memsets",
        "Memcpy DtoD (Device -> Device)": "copies",
        "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": "copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>": "copies",
        "aten::split_with_sizes": "others",  # a view
        "void cublasLt::splitKreduce_kernel<32, 16, int>": "others",
        "pytorch_flash::flash_fwd_splitkv_kernel": "others",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "others",
    }
    assert {name: traces.kind_of(name) for name in names} == names


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict[str, object]:
    return {"name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def step_trace(reduces_at: float, stream: int, in_node: bool) -> list[dict[str, object]]:
    """A backward of two nodes on a thread of its own, the later one a graph; kernels run from 200 to 300 and on to
    400. A reduction is launched in the first one, or behind both."""
    reduce, scale = "ncclDevKernel_AllReduce_Sum_f32", "vectorized_elementwise_kernel"
    at = 105 if in_node else 160
    return [
        event("last backward", "user_annotation", 100, 80),
        event("last backward", "gpu_user_annotation", 150, 10),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 101, 10, tid=2),
        event("autograd::engine::evaluate_function: GraphBackward", "cpu_op", 120, 10, tid=2),
        event("cudaLaunchKernel", "cuda_runtime", 50, 1, tid=1, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 102, 1, tid=2, correlation=2),
        event("cudaLaunchKernelExC", "cuda_runtime", at, 1, tid=2, correlation=3),
        event("cudaLaunchKernel", "cuda_runtime", at + 1, 1, tid=2, correlation=4),
        event("cudaGraphLaunch", "cuda_runtime", 121, 1, tid=2, correlation=5),
        event("forward", "kernel", 150, 50, correlation=1, stream=7),
        event("gemm", "kernel", 200, 100, correlation=2, stream=7),
        event("gemm", "kernel", 300, 60, correlation=5, stream=7),
        event("norm", "kernel", 360, 40, correlation=5, stream=7),
        event(reduce, "kernel", reduces_at, 100, correlation=3, stream=stream),
        event(scale, "kernel", reduces_at + 100, 50, correlation=4, stream=stream),
    ]


@pytest.mark.parametrize(
    ("reduces_at", "stream", "in_node", "expected"),
    [
        (310, 20, True, {"after_begin": 110, "before_end": 90}),
        (410, 7, False, {"after_begin": 210, "before_end": -10}),
        (190, 20, False, {"after_begin": -10, "before_end": 210}),
    ],
)
def test_the_first_reduction_is_found_in_a_trace(reduces_at, stream, in_node, expected):
    assert traces.reduction_times(step_trace(reduces_at, stream, in_node), "cuda") == expected


def test_traces_without_what_is_looked_for():
    events = step_trace(310, 20, True)
    assert traces.reduction_times([one for one in events if "AllReduce" not in one["name"]], "cuda") is None
    with pytest.raises(RuntimeError, match="last backward"):
        traces.reduction_times(events[1:], "cuda")
    with pytest.raises(RuntimeError, match="kernels of the last backward"):
        traces.reduction_times([one for one in events if one["cat"] != "kernel"], "cuda")


def row(variant: str, tokens: int, **changes: object) -> dict[str, object]:
    """Eight micro-batches of 1e9 elements on two ranks, with all targets met; 40 bytes of each saved at 4 TB/s."""
    is_split, is_ours = variant == "split-cat", variant in OURS
    counts = dict.fromkeys([*traces.KINDS, "others"], 2) | {"cat and split": 32 if is_split else 0}
    before_end = -5.0 if variant.endswith("end") else 900.0
    return {
        **{"model": "gpt", "tokens": tokens, "variant": variant, "parameters": 10**9, "losses": [1.0]},
        **{"step_ms": 112.0 if is_split else 100.0 if is_ours else 101.0, "wall_ms": 100.0, "optimizer_ms": 10.0},
        **{"reducing_ms": 81.0, "accumulating_ms": 80.0, "last_bucket_ms": 0.5, "all_buckets_ms": 20.0},
        **{"peak_mib": 20600.0, "reserved_mib": 21504.0, "terms_mib": {"all": 20480.0} if is_ours else None},
        "wire_bytes": 2.0 if variant.endswith("bf16") else 3.0,
        "device_bytes": 116.0 if is_split else 76.0,
        "kernels": counts,
        "first_reduction_us": {"after_begin": 50.0, "before_end": before_end},
        "equal_to_eager": None,
        **changes,
    }


def rows_of(**changes: object) -> list[dict[str, object]]:
    """Of te_graph's variants with changes."""
    return [row(name, 512, **(changes if name in OURS else {})) for name in (*OURS, *PEERS)]


def verdicts(rows: list[dict[str, object]], bandwidth: float | None = 4e12) -> list[object]:
    return [target["is_met"] for target in targets.targets_of(rows, 8, 2, bandwidth)]


def test_targets_that_are_met():
    found = targets.targets_of(rows_of(), 8, 2, 4e12)
    assert [target["is_met"] for target in found] == [True] * 18
    assert found[-3]["got"] == 1.2 and found[-2]["got"] == 0.107 and found[3]["limit"] == 3.003


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"kernels": {"cat and split": 1}}, [0]),
        ({"first_reduction_us": {"after_begin": -1.0, "before_end": 5.0}}, [1]),
        ({"first_reduction_us": {"after_begin": 1.0, "before_end": -5.0}}, [2]),
        ({"wire_bytes": 4.0}, [3, 4]),
        ({"wire_bytes": 3.0}, [4]),
        ({"device_bytes": 77.0}, [5]),
        ({"reducing_ms": 82.0}, [6]),
        ({"step_ms": 104.0}, [*range(7, 17)]),
        ({"peak_mib": 21000.0}, [17]),
    ],
)
def test_targets_that_are_missed(changes, missed):
    found = verdicts(rows_of(**changes))
    assert [number for number, verdict in enumerate(found) if verdict is False] == missed


def test_what_was_not_measured_is_not_judged():
    assert verdicts(rows_of(), bandwidth=None)[15] is None
    assert verdicts([]) == [None] * 18
    without_peers = verdicts([one for one in rows_of() if one["variant"] in OURS])
    assert without_peers[:7] == [True] * 7 and without_peers[7:17] == [None] * 10


def test_the_table_has_a_row_for_each_variant():
    rows = [row("optimizer-graphed-overlap", 512, wire_bytes=None, device_bytes=None), row("ddp", 512, peak_mib=None)]
    names = ["optimizer-graphed-overlap", "ddp", "fsdp2"]
    record = {
        **{"benchmark": "flat", "gpu": "NVIDIA H100", "cpu": "", "torch": "2.11.0", "cuda": "13.0", "driver": "580"},
        **{"python": "3.12", "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02T00"},
        **{"command": "python benchmarks/bench_flat.py", "world": 2, "microbatches": 8, "tokens": [512]},
        "models": {"gpt": "24 GPT layers, 2048 x 8192"},
        "variants": {name: variants.VARIANTS[name].label for name in names},
        "rows": rows,
        "targets": targets.targets_of(rows, 8, 2, None),
        "not_measured": {"Megatron-core, distributed optimizer": "megatron.core is not installed"},
        "failures": [{"model": "gpt", "variant": "fsdp2", "error": "out of memory"}],
    }
    lines = table.flat_table(record)
    assert lines[2] == "| | 24 GPT layers, 2048 x 8192, 512 tokens |"
    assert lines[4:7] == [
        "| te_graph, shard optimizer, graphed, overlap | 100, 1.0 / 10.0; 21.0 GiB |",
        "| torch DDP, bf16 gradients, fp32 copies | 101, 1.0 / 10.0 |",
        "| torch FSDP2, fp32 parameters and reduction | failed |",
    ]
    assert "fp32 copies 3.00 sent, 76 to sum gradients, 2 reductions, 2 gathers, 0 cat and split" in lines[-1]
    assert "overlap 2 reductions" in lines[-1]
    assert "Not measured: Megatron-core" in lines[-1] and "NVIDIA H100" in lines[-1]
