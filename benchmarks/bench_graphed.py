"""GPT blocks replayed from graphs: wall time, host time and memory of forward + backward, beside eager execution.

    python benchmarks/bench_graphed.py                                  # all shapes and variants; needs a GPU
    python benchmarks/bench_graphed.py --quick --shapes h512-t256 --variants eager te_graph
    python benchmarks/bench_graphed.py --device cpu --quick             # the recorder: tries the script, times nothing
    python benchmarks/bench_graphed.py --profile --shapes h512-t256     # where te_graph's host time goes

Eight blocks run after one another in bf16; gradients exist before and every iteration adds to them. Each pair of shape
and variant is measured in a process of its own. A complete run is kept as results/graphed.json, a part of it only where
--out says. Exit status: 0 measured, 1 something failed or gradients differ from eager ones, 2 bad input.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    RESULTS,
    WARMUP_CALLS,
    Effort,
    bits_equal,
    environment,
    in_fresh_process,
    make_deterministic,
    measure_step,
    print_profile,
    reproducing_command,
    summarize,
    write_json,
)
from torch import Tensor, nn
from tqdm import tqdm

LAYERS = 8
FULL, QUICK = Effort(repeats=9, seconds=0.15, bursts=20), Effort(repeats=3, seconds=0.02, bursts=3)


@dataclass(frozen=True)
class Shape:
    """A block of width `hidden` over one sequence of `tokens`; with `shards`, what one tensor-parallel rank holds."""

    hidden: int
    heads: int
    tokens: int
    shards: int = 1

    @property
    def label(self) -> str:
        sharded = f" sharded {self.shards}-way" if self.shards > 1 else ""
        return f"h {self.hidden}{sharded}, {self.tokens} tokens"


CPU_SHAPE = "tiny"  # for machines without a GPU; the others take minutes there
SHAPES = {
    "h2048-t2048": Shape(hidden=2048, heads=16, tokens=2048),
    "h2048-tp4-t2048": Shape(hidden=2048, heads=16, tokens=2048, shards=4),
    "h2048-tp4-t512": Shape(hidden=2048, heads=16, tokens=512, shards=4),
    "h512-t256": Shape(hidden=512, heads=8, tokens=256),
    CPU_SHAPE: Shape(hidden=32, heads=2, tokens=8),
}


class Block(nn.Module):
    """Pre-norm transformer layer of 12 parameters: x + attention(norm(x)), then x + mlp(norm(x)).

    A sharded one keeps its rank's heads and its part of the MLP, without the all-reduces.
    """

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.hidden // shape.shards
        self.heads = shape.heads // shape.shards
        self.norm1 = nn.LayerNorm(hidden, **factory)
        self.qkv = nn.Linear(hidden, 3 * inner, **factory)
        self.proj = nn.Linear(inner, hidden, **factory)
        self.norm2 = nn.LayerNorm(hidden, **factory)
        self.fc1 = nn.Linear(hidden, 4 * inner, **factory)
        self.fc2 = nn.Linear(4 * inner, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, hidden] -> [batch, tokens, hidden]
        # query, key, value: [batch, heads, tokens, hidden / heads]
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Workload:
    """Blocks, their input and the gradient of their output, drawn from `seed`; every leaf has a gradient of zeros."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        factory = {"device": device, "dtype": torch.bfloat16}
        self.layers = tuple(Block(shape, **factory) for _ in range(LAYERS))
        self.x = torch.randn(1, shape.tokens, shape.hidden, **factory, requires_grad=True)
        self.grad_output = torch.randn_like(self.x)
        self.leaves = [self.x, *(parameter for layer in self.layers for parameter in layer.parameters())]
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)

    def step(self) -> None:
        """One forward and backward, layer by layer as Python calls them."""
        y = self.x
        for layer in self.layers:
            y = layer(y)
        y.backward(self.grad_output)


def build_torch_graphed(workload: Workload) -> Callable[[], None]:
    # A sample is the static input of its layer, which must keep its value until that layer's backward.
    samples = tuple((torch.randn_like(workload.x).requires_grad_(),) for _ in workload.layers)
    torch.cuda.make_graphed_callables(workload.layers, samples)
    return workload.step


def build_te_graph(workload: Workload) -> Callable[[], None]:
    import te_graph

    te_graph.make_graphed_callables(workload.layers, ((workload.x,),) * len(workload.layers), show_progress=False)
    if any(layer.te_graph.info()["backend"] is None for layer in workload.layers):
        raise RuntimeError("te_graph: expected graphs, got eager layers; TE_GRAPH_DISABLE=1 asks for that")
    return workload.step


def build_whole_graph(workload: Workload) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            workload.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        workload.step()
    return graph.replay


@dataclass(frozen=True)
class Variant:
    """A way to run a workload: `build` returns what runs one step. Building may leave anything in gradients, but must
    leave the tensors in place."""

    label: str
    build: Callable[[Workload], Callable[[], None]]
    needs_cuda: bool = False


VARIANTS = {
    "eager": Variant("eager", lambda workload: workload.step),
    "torch_graphed": Variant("torch.cuda.make_graphed_callables", build_torch_graphed, needs_cuda=True),
    "te_graph": Variant("te_graph", build_te_graph),
    "whole_graph": Variant("one captured graph", build_whole_graph, needs_cuda=True),
}


def measure(shape: str, variant: str, device: str, seed: int, effort: Effort) -> dict[str, Any]:
    """Times and memory of one variant, as `measure_step` gives them; for a process of its own."""
    workload = Workload(SHAPES[shape], device, seed)
    return measure_step(VARIANTS[variant].build(workload), device, effort)


def check(shape: str, variants: Sequence[str], device: str, seed: int) -> dict[str, bool]:
    """Whether the gradients that two steps leave equal eager ones bit for bit; for a process of its own."""
    make_deterministic()

    def gradients_of(variant: str) -> list[Tensor]:
        workload = Workload(SHAPES[shape], device, seed)
        step = VARIANTS[variant].build(workload)
        for leaf in workload.leaves:
            leaf.grad.zero_()
        for _ in range(2):
            step()
        return [leaf.grad.cpu() for leaf in workload.leaves]

    expected = gradients_of("eager")
    if not all(grad.isfinite().all() and grad.any() for grad in expected):
        raise RuntimeError(f"{shape}: expected finite eager gradients with values other than zero")
    return {name: all(map(bits_equal, expected, gradients_of(name))) for name in variants}


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and check all that was asked for; what fails is listed and does not stop the others."""
    pairs = [(shape, variant) for shape in options.shapes for variant in options.variants]
    rounds = [pair for number in range(options.rounds) for pair in (reversed(pairs) if number % 2 else pairs)]
    checked = [name for name in options.variants if name != "eager"]
    checks = options.shapes if options.check and checked else []
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    equal: dict[str, dict[str, bool]] = {}
    failures: list[dict[str, str]] = []
    record = in_fresh_process(environment, options.device, options.commit)

    with tqdm(total=len(rounds) + len(checks), desc="benchmark", disable=None) as bar:

        def attempt(shape: str, variant: str, function: Callable[..., Any], *args: Any) -> Any:
            bar.set_postfix_str(f"{shape} {variant}")
            try:
                return in_fresh_process(function, *args)
            except Exception as error:
                failures.append({"shape": shape, "variant": variant, "error": f"{type(error).__name__}: {error}"})
                return None
            finally:
                bar.update()

        for shape, variant in rounds:
            sample = attempt(shape, variant, measure, shape, variant, options.device, options.seed, options.effort)
            samples[shape, variant] += [sample] if sample else []
        for shape in checks:
            equal[shape] = attempt(shape, "check", check, shape, checked, options.device, options.seed) or {}

    return {
        "benchmark": "graphed",
        **record,
        "command": options.command,
        "device": options.device,
        "layers": LAYERS,
        "seed": options.seed,
        "shapes": {name: SHAPES[name].label for name in options.shapes},
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "rows": [
            {"shape": s, "variant": v, **summarize(found, LAYERS), "equal_to_eager": equal.get(s, {}).get(v)}
            for (s, v), found in samples.items()
            if found
        ],
        "failures": failures,
    }


def print_table(record: dict[str, Any]) -> None:
    print(f"\n{'shape':<18}{'variant':<15}{'wall us':>9}{'host us':>9}{'peak MiB':>10}{'spread':>8}  gradients")
    words = {True: "= eager", False: "DIFFER", None: "-"}
    for row in record["rows"]:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        times = f"{row['wall_us_per_layer']:>9.1f}{row['host_us_per_layer']:>9.1f}"
        numbers = f"{times}{peak:>10}{row['spread']:>8.1%}"
        print(f"{row['shape']:<18}{row['variant']:<15}{numbers}  {words[row['equal_to_eager']]}")
    for failure in record["failures"]:
        print(f"error: {failure['shape']} {failure['variant']}: {failure['error']}", file=sys.stderr)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time GPT blocks, eager and replayed from graphs.")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script with te_graph's recorder")
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")
    add("--quick", action="store_true", help="measure for a shorter time")
    add("--rounds", type=int, default=1, help="processes in which each pair is measured, in alternating order")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare gradients with eager ones")
    add("--seed", type=int, help="of weights and inputs; drawn anew by default")
    add("--out", type=Path, help="folder for graphed.json; by default benchmarks/results if the run is complete")
    add("--commit", help="commit to record where git is missing; with -dirty behind it if files differ from it")
    add("--profile", action="store_true", help="profile te_graph on the first of --shapes instead of measuring")
    options = parser.parse_args(argv)
    is_cuda = options.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("--device: expected a CUDA GPU, and torch finds none; --device cpu --quick tries the script")
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    every_shape = [name for name in SHAPES if (name == CPU_SHAPE) != is_cuda]
    every_variant = [name for name, variant in VARIANTS.items() if is_cuda or not variant.needs_cuda]
    for name in options.variants or ():
        if name not in every_variant:
            parser.error(f"--variants: expected {' or '.join(every_variant)} with --device cpu, got {name}")
    is_part = options.quick or not is_cuda or bool(options.shapes or options.variants) or not options.check
    options.out = options.out or (None if is_part else RESULTS)
    options.shapes = list(dict.fromkeys(options.shapes or every_shape))
    options.variants = list(dict.fromkeys(options.variants or every_variant))
    options.effort = QUICK if options.quick else FULL
    options.seed = random.randrange(2**31) if options.seed is None else options.seed
    options.command = reproducing_command("bench_graphed.py", sys.argv[1:] if argv is None else argv)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parse_args(argv)
    if options.profile:
        workload = Workload(SHAPES[options.shapes[0]], options.device, options.seed)
        print_profile(VARIANTS["te_graph"].build(workload))
        return 0
    record = run_benchmark(options)
    print_table(record)
    if options.out:
        write_json(options.out / "graphed.json", record)
        print(f"written: {options.out / 'graphed.json'}")
    else:
        print("not written: a part of the benchmark, kept only with --out")
    return 1 if record["failures"] or any(row["equal_to_eager"] is False for row in record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
