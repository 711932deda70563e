"""Run many random functions over Python state and tell what came of them."""

from __future__ import annotations

import argparse
import logging
import time

import torch
from program_outcomes import tally

from te_graph.testing import deterministic

from .program import generate
from .run import refusals, report, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.graphs.functions.random_states", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds after which no more are begun")
    parser.add_argument("--show", type=int, help="print the program of this seed and end")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(generate(arguments.show))
        return 0
    logging.getLogger("te_graph").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    outcomes, end = [], time.monotonic() + arguments.time
    with deterministic():
        for seed in range(*map(int, arguments.seeds.split(":"))):
            program = generate(seed)
            outcomes.append(run(program, arguments.device))
            if outcomes[-1].is_wrong:
                print(report(program, outcomes[-1], arguments.device), flush=True)
            if time.monotonic() > end:
                print(f"ended with seed {seed}")
                break
    counts = tally(outcomes, least_replays=2)
    print(dict(counts))
    for reason, count in refusals(outcomes).most_common(20):
        print(f"  {count:5d} x {reason}")
    return 1 if any(outcome.is_wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
