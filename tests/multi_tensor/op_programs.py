"""Random programs of ops over views of few storages, beside plain PyTorch on copies of these.

    PYTHONPATH=tests/helpers python tests/multi_tensor/op_programs.py --seeds 0:2000

A program is drawn once and run several times: as it is, in inference mode, under autocast, compiled, by a recorder's
replays and by ``graphed``. Views have any strides, offsets and dtypes, and lie among each other in one storage; values
are NaN, infinite, subnormal and of all magnitudes. After each run every storage and result has the bits of the
reference, but for those of NaNs. A statement that is refused has written nothing.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from op_statements import DRAWS, DTYPES, LENGTHS, Memory, Results, Statement
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

WAYS = ("eager", "no grad", "inference", "autocast", "recorded", "graphed", "compiled")


@dataclass
class Program:
    seed: int
    statements: list[Statement] = field(default_factory=list)

    def memory(self, turn: int) -> Memory:
        """Storages of fresh values; scales and norms are mostly positive numbers, flags mostly 0."""
        generator = torch.Generator().manual_seed(self.seed * 10 + turn)
        memory = {}
        for name, length in LENGTHS.items():
            values = torch.randn(length, generator=generator, dtype=torch.float64)
            values *= 10 ** (8 * torch.rand(length, generator=generator, dtype=torch.float64) - 4)
            for share, special in ((0.05, 0.0), (0.02, -0.0), (0.01, 1e-310), (0.02, 1e-40), (0.01, 6e-8)):
                values[torch.rand(length, generator=generator) < share] = special
            if self.seed % 3 == 0:  # else norms would hardly ever be finite
                for special in (math.nan, math.inf, -math.inf):
                    values[torch.rand(length, generator=generator) < 0.01] = special
            memory[name] = values.to(DTYPES.get(name, torch.float32))
        memory["flags"][:8] = (torch.rand(8, generator=generator) < 0.15).float()
        memory["flags"][8:] = memory["flags"][8:].abs()
        return memory


def draw_program(seed: int, length: int = 8) -> Program:
    rng = random.Random(seed)
    return Program(seed, [rng.choice(DRAWS)(rng) for _ in range(length)])


def alike(actual: Tensor, expected: Tensor) -> bool:
    """The same bits, but for those of NaNs."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    actual, expected = actual.detach(), expected.detach()
    if actual.dtype.itemsize == 1 and actual.is_floating_point():
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
        return torch.equal(actual, expected)
    both = actual.isnan() & expected.isnan()
    return same_bits(actual.masked_fill(both, 0), expected.masked_fill(both, 0))


def compare(program: Program, what: str, actual: tuple[Memory, Results], expected: tuple[Memory, Results]) -> None:
    place = f"program {program.seed}, {what}:\n" + "\n".join(statement.text for statement in program.statements)
    for name, tensor in expected[0].items():
        assert alike(actual[0][name], tensor), f"{name} in {place}"
    assert len(actual[1]) == len(expected[1]), place
    for number, (got, wanted) in enumerate(zip(actual[1], expected[1], strict=True)):
        assert alike(got, wanted), f"result {number}: {got}, expected {wanted} in {place}"


def check_eagerly(program: Program) -> list[Statement]:
    """Run each statement by itself; the statements that are well defined. Others may be refused, without a write."""
    memory, expected, fine = program.memory(0), program.memory(0), []
    for statement in program.statements:
        alone = Program(program.seed, [statement])
        if not statement.is_well_defined():
            try:
                statement.run(memory)
            except (ValueError, TypeError, RuntimeError):
                before = [view for view in statement.written if statement.text.startswith("update(")]
                if not before:  # there abs_() was before
                    compare(alone, "refused", (memory, []), (expected, []))
            memory = {name: tensor.clone() for name, tensor in expected.items()}
            continue
        results = statement.run(memory)
        compare(alone, "eager", (memory, results), (expected, statement.reference(expected)))
        fine.append(statement)
    return fine


def run_program(seed: int, ways: Sequence[str] = WAYS[:-1]) -> None:
    """Draw and run one program in several ways."""
    program = draw_program(seed)
    program.statements = check_eagerly(program)

    def run(memory: Memory) -> Results:
        return [result for statement in program.statements for result in statement.run(memory)]

    def expected(turn: int) -> tuple[Memory, Results]:
        memory = program.memory(turn)
        return memory, [result for statement in program.statements for result in statement.reference(memory)]

    contexts = {
        "no grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    for way in ways:
        if way in contexts:
            with contexts[way]():
                memory = program.memory(1)
                results = run(memory)
            compare(program, way, (memory, results), expected(1))
        elif way == "recorded":
            memory, recorder = program.memory(1), tg.Recorder(poison=True)
            with recorder.capture():
                results = run(memory)
            for turn in (2, 3):
                for name, values in program.memory(turn).items():
                    memory[name].copy_(values)
                recorder.replay()
                compare(program, way, (memory, results), expected(turn))
        elif way == "graphed":
            memory, step = program.memory(1), tg.graphed(run)
            for turn in range(1, 5):
                for name, values in program.memory(turn).items():
                    memory[name].copy_(values)
                compare(program, way, (memory, step(memory)), expected(turn))
        elif way == "compiled":
            torch._dynamo.reset()
            memory = program.memory(1)
            results = torch.compile(run, backend="aot_eager")(memory)
            compare(program, way, (memory, results), expected(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--ways", default=",".join(WAYS[:-1]), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--keep-going", action="store_true")
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    failed = 0
    for seed in range(first, end):
        try:
            run_program(seed, arguments.ways.split(","))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:3000]}", flush=True)
            if not arguments.keep_going:
                raise
    print(f"{end - first} programs of seeds {arguments.seeds}: {failed} differ")


if __name__ == "__main__":
    main()
