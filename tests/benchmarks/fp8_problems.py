"""What tests of bench_fp8.py share: small problems, and the bytes of fused casts."""

import importlib
import sys

from benchmark_scripts import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
cases = importlib.import_module("cases.fp8.parts")
problems = importlib.import_module("cases.fp8.problems")

# Bytes of an element that are read and written, two for each in bf16.
FUSED_BYTES = {
    "plain": 2 + 2,
    "norm": 2 + 2,
    "add_norm": 4 + 4,
    "gelu": 2 + 2,
    "swiglu": 4 + 2,
    "plain_sums": 2 + 2,
    "gelu_backward": 4 + 2,
    "norm_backward": 6 + 4,
}


def small(part: str, case: str, seed: int) -> object:
    return problems.make_problem(cases.PARTS[part], cases.PARTS[part].small[case], "cpu", seed)
