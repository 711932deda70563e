"""Run many random programs on flat parameters, up to the first that fails, which is made small."""

from __future__ import annotations

import argparse
import logging
import pathlib
import tempfile

import torch
from ranks import Ranks

from te_graph.testing import deterministic

from .generate import generate
from .run import first_failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flat.flat_programs", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="leave the program that fails as it is")
    parser.add_argument("--show", type=int, help="print the program of this seed and end")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(generate(arguments.show))
        return 0
    torch.set_num_threads(1)
    logging.getLogger("te_graph").setLevel(logging.ERROR)
    first, end = map(int, arguments.seeds.split(":"))
    with tempfile.TemporaryDirectory() as folder, deterministic():
        ranks = Ranks("cpu", arguments.ranks, pathlib.Path(folder))
        try:
            failure = first_failure(ranks, range(first, end), shrinks=not arguments.whole)
        finally:
            ranks.close()
    print(failure or f"{end - first} programs ran")
    return 1 if failure else 0


if __name__ == "__main__":
    raise SystemExit(main())
