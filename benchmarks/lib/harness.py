"""The command line of a benchmark: options, a fresh process for each measurement, what is printed and kept."""

import argparse
import multiprocessing
import multiprocessing.context
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from lib.environment import environment
from lib.results import RESULTS, write_json

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function of a module in a process of its own, so that no other measurement's memory is counted.

    The process is forked from a server that has not touched the GPU.

    Raises:
        Exception: what the function raised.
        BrokenProcessPool: the process died.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=fresh_processes()) as pool:
        return pool.submit(function, *args).result()


def fresh_processes() -> multiprocessing.context.ForkServerContext:
    """What makes processes that start at once: forked from a server that has imported torch and te_graph."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "te_graph"])
    return context


class Measurements:
    """Calls in processes of their own, behind a progress bar.

    Args:
        total: How many there will be.

    Attributes:
        failures: What failed, which stops nothing else: the names given to `run`, and the error.
    """

    def __init__(self, total: int) -> None:
        self.failures: list[dict[str, Any]] = []
        self._bar = tqdm(total=total, desc="benchmark", disable=None)

    def __enter__(self) -> "Measurements":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def run(self, names: dict[str, Any], function: Callable[..., T], *args: Any) -> T | None:
        """What `function` returns, or None where it raised."""
        self._bar.set_postfix_str(" ".join(map(str, names.values())))
        try:
            return in_fresh_process(function, *args)
        except Exception as error:
            self.fail(names, describe(error))
            return None
        finally:
            self._bar.update()

    def rows(self, names: dict[str, Any], function: Callable[..., dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
        """The "rows" of what `function` returns, none where it raised; its "failures" are counted among these here."""
        found = self.run(names, function, *args) or {"rows": [], "failures": []}
        for failure in found["failures"]:
            self.fail({key: value for key, value in failure.items() if key != "error"}, failure["error"])
        return found["rows"]

    def fail(self, names: dict[str, Any], error: str) -> None:
        self.failures.append({**names, "error": error})


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a command: what its script hands to `main`.

    Attributes:
        name: of the script and its results: bench_NAME.py and results/NAME.json.
        description: for --help.
        add_options: adds to a parser what this benchmark has beside the options of all.
        part_options: those of them that, given, ask for a part of the benchmark, which does not replace what is kept.
        prepare: checks the options and fills in defaults; `options.results` is the name of the results, which it may
            change. `options.not_measured` tells what is left out, and why.
        measure: what the record of results holds beside where and how it was measured, with "rows" and "failures".
        print_table: prints the rows of a record.
    """

    name: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    part_options: tuple[str, ...]
    prepare: Callable[[argparse.ArgumentParser, argparse.Namespace], None]
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    print_table: Callable[[dict[str, Any]], None]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; returns the exit status."""
        return self.run(self.parse_args(argv))

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `options.command` is what repeats the run. Ends the program where options are wrong."""
        argv = sys.argv[1:] if argv is None else argv
        parser = argparse.ArgumentParser(prog=f"bench_{self.name}.py", description=self.description)
        add = parser.add_argument
        add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script with te_graph's recorder")
        add("--quick", action="store_true", help="measure for a shorter time")
        add("--seed", type=int, help="of weights and inputs; by default drawn anew, or the benchmark's own")
        add("--out", type=Path, help="folder for the JSON; by default benchmarks/results if the run is complete")
        add("--commit", help="commit to record where git is missing; with -dirty behind it if files differ from it")
        self.add_options(parser)
        options = parser.parse_args(argv)
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device: expected a CUDA GPU, and torch finds none; --device cpu --quick tries the script")
        options.is_part = any(getattr(options, name) != parser.get_default(name) for name in self.part_options)
        is_complete = not (options.is_part or options.quick or options.device == "cpu")
        options.out = options.out or (RESULTS if is_complete else None)
        options.seed = random.randrange(2**31) if options.seed is None else options.seed
        options.command = _reproducing_command(parser.prog, argv)
        options.results = self.name
        self.prepare(parser, options)
        return options

    def run(self, options: argparse.Namespace) -> int:
        """Measure, print and keep what `options` ask for; returns the exit status, 1 if anything failed."""
        # The GPU is asked in another process, since this one must not touch it.
        where = in_fresh_process(environment, options.device, options.commit)
        how = {"command": options.command, "device": options.device, "seed": options.seed}
        record = {"benchmark": options.results, **where, **how, **self.measure(options)}
        self.print_table(record)
        _print_verdicts(record)
        return _finish(record, options.out)


def choose_variants(
    parser: argparse.ArgumentParser, options: argparse.Namespace, variants: Mapping[str, Any], *where: Any
) -> None:
    """Fill in `options.variants`, by default all that can be measured here, and `not_measured`: why others cannot.

    Args:
        parser: Ends the program if one was asked for that cannot be measured.
        options: What it parsed, with `variants` and `device`; changed in place.
        variants: By name; with `missing` and `label`, as `workloads.Variant` has them.
        where: What their `missing` asks for behind the device.
    """
    missing = {
        name: reason for name, variant in variants.items() if (reason := variant.missing(options.device, *where))
    }
    for name in options.variants or ():
        if name in missing:
            parser.error(f"--variants: expected what can be measured here, got {name}: {missing[name]}")
    options.not_measured = {} if options.variants else {variants[n].label: reason for n, reason in missing.items()}
    options.variants = list(dict.fromkeys(options.variants or [name for name in variants if name not in missing]))


def _reproducing_command(script: str, argv: Sequence[str]) -> str:
    """The command without what concerns one machine only: where files go, and the commit, which has its own field."""
    parser = argparse.ArgumentParser(add_help=False)
    for option in ("--out", "--commit"):
        parser.add_argument(option)
    return shlex.join(["python", f"benchmarks/{script}", *parser.parse_known_args(argv)[1]])


def _print_verdicts(record: dict[str, Any]) -> None:
    """Print what became of the targets, where there are any, and what was not measured."""
    for target in record.get("targets", ()):
        verdict = {True: "met", False: "MISSED", None: "not measured"}[target["is_met"]]
        print(f"target: {target['what']}: {target['bound']} {target['limit']}, got {target['got']}: {verdict}")
    for label, reason in record["not_measured"].items():
        print(f"not measured: {label}: {reason}")


def _finish(record: dict[str, Any], out: Path | None) -> int:
    """Write the record if asked to and tell what failed; returns the exit status, 1 if anything did."""
    for failure in record["failures"]:
        *names, error = map(str, failure.values())
        print(f"error: {' '.join(names)}: {error}", file=sys.stderr)
    if out:
        path = out / f"{record['benchmark']}.json"
        write_json(path, record)
        print(f"written: {path}")
    else:
        print("not written: a part of the benchmark, kept only with --out")
    return 1 if record["failures"] or any(row["equal_to_eager"] is False for row in record["rows"]) else 0
