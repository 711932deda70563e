"""Run many random programs and tell what came of them."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib

import torch

from .campaign import campaign
from .generate import generate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--poison", action="store_true", help="the recorder fills memory that is dead with NaN")
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds after which no more are begun")
    parser.add_argument("--shrinks", type=int, default=3, help="failures of one kind that are made small")
    parser.add_argument("--avoid", default="", help="pattern of pieces and kinds of steps that are left out")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the programs that failed, made small")
    parser.add_argument("--show", type=int, help="print the program of this seed and end")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(generate(arguments.show, arguments.device).source(f"Seed {arguments.show}"))
        return 0
    logging.getLogger("te_graph").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if arguments.poison:
        os.environ["TE_GRAPH_POISON"] = "1"
    first, end = map(int, arguments.seeds.split(":"))
    tally = campaign(range(first, end), arguments.device, arguments.time, arguments.shrinks, avoid=arguments.avoid)
    print(tally)
    for number, failure in enumerate(tally.failures.values()):
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{failure.program.seed}_{number}.py").write_text(failure.source())
        else:
            print(f"\n{failure.source()}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
