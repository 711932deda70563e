"""Data-parallel training steps of eight micro-batches with te_graph's flat parameters, beside DDP, FSDP2, and views by
`split`: time, what reducing costs, memory, kernels, bytes.

    python benchmarks/bench_flat.py                           # all models and variants; needs two GPUs, some minutes
    python benchmarks/bench_flat.py --quick                   # the Llama layers alone, fewer steps
    python benchmarks/bench_flat.py --gpus 4 --out part       # on four; kept where --out says
    python benchmarks/bench_flat.py --models gpt --layers 12 --variants optimizer-graphed-overlap fsdp2
    python benchmarks/bench_flat.py --models gpt --append part/flat.json --out part    # added to what was measured
    python benchmarks/bench_flat.py --device cpu              # tries the script on small models over gloo

This script starts a process for each rank, and new ones for each model and variant, all with deterministic kernels, or
eager execution would not equal itself. Times are medians of those of the
slowest rank, of steps that follow each other: of a step; of its micro-batches with a reduction and without one, the
optimizer left out; of the optimizer; of the reduction of the last bucket, and of all, by themselves. Of eager variants,
bytes between ranks are counted from the collectives that are called, times what a ring moves of them, and bytes on the
device from the operators that touch sums of gradients. Kernels and the begin of the first reduction are read from a
trace of the first rank. What should be in memory at the peak is listed as it is found: tensors, and activations by a
micro-batch that keeps no gradient; te_graph's buffers between ranks are outside of what torch allocates. From graphs,
losses of the first steps are compared with eager ones, bit for bit. A complete run is kept as results/flat.json, a part
of it only where --out says. Exit status: 0 measured, 1 something failed or graphs differ from eager execution, 2 bad
input.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch
from cases.flat.stacks import SMALL, STACKS
from cases.flat.targets import exposed_ms, targets_of
from cases.flat.training import NOT_COUNTED, Case, Repeats, measure
from cases.flat.variants import VARIANTS
from lib.earlier import add_append_option, earlier_record
from lib.harness import Benchmark, choose_variants, describe, in_fresh_process
from lib.rank_processes import ENVIRONMENT, run_on_ranks
from lib.timing import BANDWIDTH_BYTES, Sampling, measure_bandwidth
from tqdm import tqdm

TOKENS, CPU_TOKENS = (512, 2048), (8, 16)
WORLD = 2
MICROBATCHES, CPU_MICROBATCHES = 8, 2
QUICK_MODELS = ("llama",)
FULL, QUICK, TRIAL = Repeats(warmup=3, timed=5), Repeats(warmup=2, timed=2), Repeats(warmup=2, timed=1)
BANDWIDTH = Sampling(repeats=5, seconds=0.02)
TIME_LIMIT = 150  # seconds for a variant of a model, several times what it takes


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all that was asked for; what fails is listed, with what was found until then, and stops no other."""
    is_gpu, microbatches, repeats = options.device == "cuda", microbatches_of(options), repeats_of(options)
    bandwidth = (
        in_fresh_process(measure_bandwidth, options.device, BANDWIDTH, BANDWIDTH_BYTES)["copy"] if is_gpu else None
    )
    asked = [(model, variant) for model in options.models for variant in options.variants]
    earlier = options.earlier or {"rows": [], "failures": []}
    failures = [one for one in earlier["failures"] if (one["model"], one["variant"]) not in asked]
    found = {
        (row["model"], row["variant"], row["tokens"]): row
        for row in earlier["rows"]
        if (row["model"], row["variant"]) not in asked
    }
    with tqdm(total=len(options.models) * len(options.variants), desc="benchmark", disable=None) as bar:
        for model in options.models:

            def receive(part: dict[str, Any], model: str = model) -> None:
                key = (model, part["variant"], part["tokens"])
                found[key] = {"model": model, **NOT_COUNTED, **found.get(key, {}), **part}

            for variant in options.variants:
                names = {"model": model, "variant": variant}
                bar.set_postfix_str(" ".join(names.values()))
                what = (microbatches, variant, options.seed, repeats)
                cases = [Case(options.stacks[model], tokens, *what) for tokens in options.tokens]
                try:
                    run_on_ranks(measure, options.gpus, options.device, (cases,), receive, TIME_LIMIT)
                except (RuntimeError, TimeoutError) as error:
                    failures.append({**names, "error": describe(error)})
                bar.update()
    records = [*found.values(), *failures]
    models = [name for name in STACKS if name in {*options.models, *(one["model"] for one in records)}]
    variants = [name for name in VARIANTS if name in {*options.variants, *(one["variant"] for one in records)}]
    places = [(model, variant, tokens) for model in models for variant in variants for tokens in options.tokens]
    rows = compared([found[place] for place in places if place in found])
    return {
        **what_is_measured(options),
        "command": options.command if options.earlier is None else command_of(options, models, variants),
        "environment": ENVIRONMENT,
        "models": {name: options.stacks[name].label for name in models},
        "variants": {name: VARIANTS[name].label for name in variants},
        "copy_tb_per_s": None if bandwidth is None else round(bandwidth / 1e12, 3),
        "not_measured": options.not_measured,
        "rows": rows,
        "targets": targets_of(rows, microbatches, options.gpus, bandwidth) if is_gpu else [],
        "failures": failures,
    }


def microbatches_of(options: argparse.Namespace) -> int:
    return MICROBATCHES if options.device == "cuda" else CPU_MICROBATCHES


def repeats_of(options: argparse.Namespace) -> Repeats:
    return TRIAL if options.device != "cuda" else QUICK if options.quick else FULL


def what_is_measured(options: argparse.Namespace) -> dict[str, Any]:
    """What a record says of the steps, whichever models and variants have run."""
    return {
        "seed": options.seed,
        "world": options.gpus,
        "microbatches": microbatches_of(options),
        "steps": repeats_of(options).timed,
        "layers": options.layers,
        "tokens": options.tokens,
    }


def command_of(options: argparse.Namespace, models: Sequence[str], variants: Sequence[str]) -> str:
    """What runs at once all that is in a record that was added to."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--append")
    for name in ("--models", "--variants"):
        parser.add_argument(name, nargs="+")
    words = parser.parse_known_args(shlex.split(options.command))[1]
    return shlex.join([*words, "--models", *models, "--variants", *variants])


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what became of the comparison of those from graphs with eager ones."""
    losses = {(row["model"], row["tokens"], row["variant"]): row["losses"] for row in rows}

    def is_equal(row: dict[str, Any]) -> bool | None:
        eager = losses.get((row["model"], row["tokens"], VARIANTS[row["variant"]].eager))
        return None if eager is None else row["losses"] == eager

    return [{**row, "equal_to_eager": is_equal(row)} for row in rows]


def print_table(record: dict[str, Any]) -> None:
    columns = ("step ms", "reducing", "optimizer", "last", "all", "peak MiB", "sent", "cat")
    print(f"\n{'model':<7}{'tokens':>6}  {'variant':<30}{''.join(f'{name:>10}' for name in columns)}")
    for row in record["rows"]:
        cats = row["kernels"] and row["kernels"]["cat and split"]
        numbers = (
            *(row["step_ms"], exposed_ms(row), row["optimizer_ms"], row["last_bucket_ms"], row["all_buckets_ms"]),
            *(row["peak_mib"], row["wire_bytes"], cats),
        )
        shown = "".join(f"{'-' if number is None else format(number, '.2f'):>10}" for number in numbers)
        print(f"{row['model']:<7}{row['tokens']:>6}  {row['variant']:<30}{shown}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(seed=1)
    add("--gpus", type=int, default=WORLD, help="ranks, each with a GPU; default 2")
    add("--models", nargs="+", choices=STACKS, metavar="MODEL", help=f"of {', '.join(STACKS)}; default all")
    add("--layers", type=int, help="of each model; default 4 of llama, 24 of gpt")
    add("--tokens", nargs="+", type=int, help="of a micro-batch; default 512 and 2048")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")
    add_append_option(parser)


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    available = torch.cuda.device_count() if options.device == "cuda" else None
    if options.gpus < 2 or (available is not None and options.gpus > available):
        parser.error(f"--gpus: expected at least 2 ranks, each with a GPU, got {options.gpus}, with {available} GPUs")
    for name in ("layers", "tokens"):
        given = getattr(options, name)
        if given is not None and min(given if name == "tokens" else [given]) < 1:
            parser.error(f"--{name}: expected at least 1, got {given}")
    stacks = SMALL if options.device == "cpu" else STACKS
    options.stacks = {name: stack.of(options.layers) for name, stack in stacks.items()}
    options.models = list(dict.fromkeys(options.models or (QUICK_MODELS if options.quick else STACKS)))
    options.tokens = list(dict.fromkeys(options.tokens or (CPU_TOKENS if options.device == "cpu" else TOKENS)))
    choose_variants(parser, options, VARIANTS)
    options.earlier = earlier_record(parser, options, what_is_measured(options))


BENCHMARK = Benchmark(
    "flat",
    "Time data-parallel training steps with flat parameters.",
    add_options,
    part_options=("gpus", "models", "layers", "tokens", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
