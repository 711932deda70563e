"""Times and memory of training steps of several micro-batches on all ranks."""

import contextlib
import copy
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lib.launches import trace_step
from lib.rank_processes import Rank
from lib.timing import CYCLES_PER_SECOND
from lib.units import MIB
from torch import Tensor, nn
from torch.profiler import record_function

from cases.flat.stacks import Model, Stack, loss_of
from cases.flat.traces import LAST_BACKWARD, count_kinds, reduction_times
from cases.flat.traffic import Traffic
from cases.flat.variants import VARIANTS, Trained
from te_graph.testing import deterministic

HEAD_START = 1e-3  # seconds for which the device sleeps, so that what is timed has been launched when it begins


@dataclass(frozen=True)
class Repeats:
    """How often: `warmup` steps, whose losses are kept, and `timed` ones of each kind."""

    warmup: int
    timed: int


@dataclass(frozen=True)
class Case:
    """What a rank measures."""

    stack: Stack
    tokens: int
    microbatches: int
    variant: str
    seed: int
    repeats: Repeats


class Training:
    """A model and its micro-batches on one rank, with what a variant makes of them.

    Attributes:
        trained: the variant.
        numel: elements of the parameters.
        terms: bytes of what is on the device beside what the variant holds, by what it is.
    """

    def __init__(self, rank: Rank, case: Case) -> None:
        self.rank, self._repeats = rank, case.repeats
        before = self._allocated()
        torch.manual_seed(case.seed)
        model = Model(case.stack, rank.device)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        torch.manual_seed(case.seed + 1 + rank.rank)
        shape = (1, case.tokens, case.stack.hidden)
        self._data = [torch.randn(shape, device=rank.device, dtype=torch.bfloat16) for _ in range(case.microbatches)]
        activations, workspaces = self._activations(model)
        inputs = sum(x.nbytes for x in self._data)
        self.terms = {"inputs": inputs, "activations": activations, "workspaces": workspaces, "before": before}
        self.trained: Trained = VARIANTS[case.variant].build(rank, model, self._data[0])

    def step(self, reduces: bool = True, optimizes: bool = True) -> Tensor:
        """All micro-batches.

        Args:
            reduces: over the ranks, in the last one.
            optimizes: steps the optimizer afterwards.

        Returns:
            [], the loss of this rank.
        """
        total = torch.zeros((), device=self.rank.device)
        for number, x in enumerate(self._data):
            is_last = number + 1 == len(self._data)
            with self.trained.microbatch(is_last and reduces):
                loss = loss_of(self.trained.model(x), len(self._data))
                with record_function(LAST_BACKWARD) if is_last else contextlib.nullcontext():
                    loss.backward()
            total += loss.detach()
        if reduces:
            self.trained.after_last()
        self.before_optimizer = self._mark()
        if optimizes:
            self.trained.step()
        self.trained.zero_grad()
        return total

    def times(self) -> dict[str, Any]:
        """What a row holds before anything is counted; all ranks come here together."""
        trained, times = self.trained, self._repeats.timed
        losses = [self.step() for _ in range(self._repeats.warmup)]
        self._reset_peak()
        whole = self._timed_steps(times)
        memory = self._memory()
        row = {
            "parameters": self.numel,
            "step_ms": whole["device"],
            "wall_ms": whole["wall"],
            "optimizer_ms": whole["optimizer"],
            "reducing_ms": self._timed_steps(times, optimizes=False)["device"],
            "last_bucket_ms": self._timed_alone(trained.last_bucket, 3 * times),
            "all_buckets_ms": self._timed_alone(trained.all_buckets, times),
        }
        trained.zero_grad()
        row["accumulating_ms"] = self._timed_steps(times, reduces=False, optimizes=False)["device"]
        self.step()  # FSDP2 has kept what was not reduced
        trained.check()
        return {**row, **memory, "losses": [float(loss) for loss in losses]}

    def traffic(self) -> dict[str, Any]:
        """Bytes for each element of the parameters: between ranks in a step, and on the device to sum gradients,
        as far as they can be counted."""
        gradients = self.trained.gradients
        if not self.trained.is_countable:
            return {}
        with Traffic((), self.rank.world) as whole:
            self.step()
        device = None
        if gradients is not None:
            with Traffic(gradients, self.rank.world) as sums:
                self.step(reduces=False, optimizes=False)
            device = round(sums.device / self.numel, 3)
        return {"wire_bytes": round(whole.wire / self.numel, 4), "device_bytes": device}

    def trace(self) -> dict[str, Any]:
        """What the first rank's device runs in a step, and when it reduces; the others step along."""
        device = "cuda" if self.rank.is_gpu else "cpu"
        if self.rank.rank > 0:
            for _ in range(2):
                self.step()
            return {}
        events = trace_step(self.step, device)
        return {"kernels": count_kinds(events, device), "first_reduction_us": reduction_times(events, device)}

    def _timed_steps(self, times: int, **what: bool) -> dict[str, float]:
        """Milliseconds of a step on the slowest rank, the median of so many that follow each other."""
        self.step(**what)
        self._meet()
        start = perf_counter()
        self.step(**what)  # the device is busy when the first one that is timed begins
        ends, optimizers = [self._mark()], []
        for _ in range(times):
            self.step(**what)
            optimizers.append(self.before_optimizer)
            ends.append(self._mark())
        self.rank.synchronize()
        wall = (perf_counter() - start) / (times + 1)
        found = [
            (_seconds(begin, end), wall, _seconds(optimizer, end))
            for begin, optimizer, end in zip(ends, optimizers, ends[1:], strict=False)
        ]
        device, wall, optimizer = self._slowest(found)
        return {"device": device, "wall": wall, "optimizer": optimizer}

    def _timed_alone(self, run: Callable[[], Any] | None, times: int) -> float | None:
        """Milliseconds of `run` by itself, on the slowest rank, the median of so many."""
        if run is None:
            return None
        found = []
        for _ in range(times + 1):  # the first one is left out
            self._meet()
            if self.rank.is_gpu:
                torch.cuda._sleep(int(HEAD_START * CYCLES_PER_SECOND))
            begin = self._mark()
            run()
            end = self._mark()
            self.rank.synchronize()
            found.append((_seconds(begin, end),))
        return self._slowest(found[1:])[0]

    def _memory(self) -> dict[str, Any]:
        """MiB at the peak since `_reset_peak`, and what should be there by then, as far as it is known."""
        if not self.rank.is_gpu:
            return {"peak_mib": None, "reserved_mib": None, "terms_mib": None}
        terms = None
        if self.trained.held is not None:
            held = {name: sum(one.nbytes for one in tensors) for name, tensors in self.trained.held().items()}
            terms = {name: _mib(nbytes) for name, nbytes in (held | self.terms).items()}
        return {
            "peak_mib": _mib(torch.cuda.max_memory_allocated()),
            "reserved_mib": _mib(torch.cuda.max_memory_reserved()),
            "terms_mib": terms,
        }

    def _reset_peak(self) -> None:
        if self.rank.is_gpu:
            self.rank.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _activations(self, model: nn.Module) -> tuple[int, int]:
        """Bytes that forward and backward of a micro-batch need beside parameters and sums of gradients, and those that
        libraries keep afterwards."""
        if not self.rank.is_gpu:
            return 0, 0
        begin, model = self._allocated(), copy.deepcopy(model)
        copied = self._allocated() - begin
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        for _ in range(2):
            self._reset_peak()
            before = self._allocated()
            loss_of(model(self._data[0]), len(self._data)).backward()
            peak = torch.cuda.max_memory_allocated()
        return peak - before, before - begin - copied

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.rank.is_gpu else 0

    def _mark(self) -> "torch.cuda.Event | float":
        if not self.rank.is_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _meet(self) -> None:
        self.rank.synchronize()
        dist.barrier(group=self.rank.control)

    def _slowest(self, seconds: Sequence[Sequence[float]]) -> list[float]:
        """Medians in milliseconds of each column of what the slowest rank took."""
        times = torch.tensor(seconds, dtype=torch.float64)  # [repeats, columns]
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.rank.control)
        return [round(1e3 * statistics.median(column), 4) for column in times.T.tolist()]


# What a row holds until operators and a trace have been looked at.
NOT_COUNTED = {"wire_bytes": None, "device_bytes": None, "kernels": None, "first_reduction_us": None}


def measure(rank: Rank, cases: Sequence[Case]) -> None:
    """What each rank does, one case after the other; the first one emits rows, and then what is counted for them."""
    with deterministic():  # or steps of 2048 tokens would differ from themselves, by the backward of attention
        for case in cases:
            training = Training(rank, case)
            for part in (Training.times, Training.traffic, Training.trace):
                found = part(training)
                if rank.rank == 0:
                    rank.emit({"variant": case.variant, "tokens": case.tokens, **found})
            training.trained.close()
            del training
            gc.collect()
            if rank.is_gpu:
                torch.cuda.empty_cache()


def _seconds(begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def _mib(nbytes: int) -> float:
    return round(nbytes / MIB, 2)
