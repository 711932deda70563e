"""Does FP8 train as well as bf16? The loss of a GPT of te_graph's transformer layers, on text that it has not seen.

    python benchmarks/bench_fp8_training.py                             # all runs; needs a GPU, some minutes
    python benchmarks/bench_fp8_training.py --runs delayed-1-graphed --out part    # one; later ones are added to it:
    python benchmarks/bench_fp8_training.py --runs current-1-graphed --append part/fp8_training.json --out part
    python benchmarks/bench_fp8_training.py --device cpu                # tries the script with a small model

100 million parameters, 1024 steps of two micro-batches, AdamW. A token is a byte of the sources of Python's standard
library, of which none is trained on twice; other files are held out. Seeds are of the weights and of the order of the
data: that of --seed, by default 1, and the two after it. All run from graphs, the first one eagerly, too: then all
losses are compared bit for bit. What counts is the mean loss of the validations behind the last 64 steps: it is to
differ from bf16's by at most 0.5 %, or by as much as seeds make a difference in bf16. A complete run is kept as
results/fp8_training.json, a part of it only where --out says. Exit status: 0 measured, 1 something failed or graphs
differ from eager execution, 2 bad input.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from cases.fp8.training import FULL, RECIPES, SMALL, train
from cases.fp8.training_targets import targets_of
from lib.earlier import add_append_option, earlier_record
from lib.harness import Benchmark, Measurements

FIRST_SEED, SEEDS = 1, 3
# What a record has in common with one that it is added to.
ALIKE = ("settings", "seeds")


def runs_of(seed: int) -> dict[str, tuple[str, int, str]]:
    """Recipe, seed and mode of each run, by its name: from graphs all, eagerly those of the first seed."""
    runs = [(recipe, seed + i, "graphed") for recipe in RECIPES for i in range(SEEDS)]
    runs += [(recipe, seed, "eager") for recipe in RECIPES]
    return {"-".join(map(str, run)): run for run in runs}


def what_is_measured(options: argparse.Namespace) -> dict[str, Any]:
    """What a record says of the trainings, whichever of them have run."""
    return {
        "settings": options.settings.label,
        "validated": options.settings.validated,
        "recipes": list(RECIPES),
        "seeds": [options.seed + i for i in range(SEEDS)],
    }


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Train what was asked for; what fails is listed and does not stop the others."""
    runs, rows = runs_of(options.seed), {row["run"]: row for row in options.earlier["rows"]}
    corpus = options.earlier["corpus"]
    with Measurements(len(options.runs)) as measurements:
        for name in options.runs:
            recipe, seed, mode = runs[name]
            row = measurements.run({"run": name}, train, options.settings, recipe, seed, mode, options.device)
            if row is None:
                continue
            corpus = corpus or row["corpus"]
            if row.pop("corpus") != corpus:
                measurements.fail({"run": name}, f"expected the files of the other runs, {corpus}, got others")
                continue
            rows[name] = {"run": name, "recipe": recipe, "seed": seed, "mode": mode, **row}
    found = compared([rows[name] for name in runs if name in rows])
    return {
        **what_is_measured(options),
        "command": options.command if options.append is None else command_of(options, rows),
        "parameters": found[0]["parameters"] if found else None,
        "corpus": corpus,
        "rows": found,
        "not_measured": {},
        "targets": [] if options.settings is SMALL else targets_of(found, list(RECIPES), SEEDS),
        "failures": measurements.failures,
    }


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what became of the comparison of those from graphs with eager ones."""
    eager = {(row["recipe"], row["seed"]): row["losses_sha256"] for row in rows if row["mode"] == "eager"}

    def is_equal(row: dict[str, Any]) -> bool | None:
        expected = eager.get((row["recipe"], row["seed"]))
        return None if row["mode"] == "eager" or expected is None else row["losses_sha256"] == expected

    return [{**row, "equal_to_eager": is_equal(row)} for row in rows]


def command_of(options: argparse.Namespace, names: Sequence[str]) -> str:
    """What runs at once all that is in a record that was added to."""
    words = ["python", "benchmarks/bench_fp8_training.py"]
    words += ["--device", options.device] if options.device != "cuda" else []
    words += ["--quick"] if options.quick else []
    words += ["--seed", str(options.seed)] if options.seed != FIRST_SEED else []
    every = list(runs_of(options.seed))
    return shlex.join(words + ([] if set(names) == set(every) else ["--runs", *filter(set(names).__contains__, every)]))


def print_table(record: dict[str, Any]) -> None:
    print(f"\n{'recipe':<10}{'seed':>5}{'mode':>9}{'validation':>12}{'training':>10}{'seconds':>9}  losses")
    for row in record["rows"]:
        verdict = {True: "= eager", False: "DIFFER", None: ""}[row["equal_to_eager"]]
        print(
            f"{row['recipe']:<10}{row['seed']:>5}{row['mode']:>9}{row['validation_loss']:>12.4f}"
            f"{row['training_loss'][-1]:>10.4f}{row['seconds']:>9.1f}  {verdict}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(seed=FIRST_SEED)
    add("--runs", nargs="+", metavar="RUN", help=f"of {', '.join(runs_of(FIRST_SEED))}; default all")
    add_append_option(parser)


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.settings = SMALL if options.quick or options.device == "cpu" else FULL
    known = runs_of(options.seed)
    options.runs = list(dict.fromkeys(options.runs or known))
    for name in options.runs:
        if name not in known:
            parser.error(f"--runs: expected {', '.join(known)}, got {name}")
    alike = {name: value for name, value in what_is_measured(options).items() if name in ALIKE}
    options.earlier = earlier_record(parser, options, alike) or {"rows": [], "corpus": None}


BENCHMARK = Benchmark(
    "fp8_training",
    "Train a GPT in bf16 and in FP8.",
    add_options,
    part_options=("runs",),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
