"""A graphed model and its eager twin that are driven through the same operations and compared after each.

The reference is the twin: three layers that run eagerly, with the same values, hooks, generator state and history.
"""

from __future__ import annotations

import collections
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from stress_model import (
    ARGUMENTS,
    BATCH,
    EAGER,
    GRAPHED,
    IN_FLIGHT,
    MODIFIED,
    MOVED,
    SINCE_CAPTURE,
    WIDTH,
    Call,
    Operation,
    Pending,
    Side,
    Stack,
    Stopped,
    assert_same,
    circumstances,
    generator_state,
    inner_modules,
    refusal_of,
    set_generator_state,
    stop,
)
from torch import Tensor
from twins import eager_copy

import te_graph as tg

_PATHS = ((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1), (1, 2), (2, 0), (0,), (1,), (2,))
# Calls outside of the chain run eagerly.
_CHAINS = (*[(0, 1, 2)] * 8, (0, 1), (0,), (2, 0), (1, 2))


def _busy_slots(handle: Any, expected: int) -> int:
    """Slots in use; more than ``expected`` only if they stay so.

    The engine's thread for a GPU lets go of the nodes of a backward that raised a little after it has told so.
    """
    deadline = time.monotonic() + 2
    while (busy := handle.info()["in_flight"]) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return busy


class World:
    """Both models, and everything that is compared between them.

    Args:
        device: where both are.
        kind: one of ``KINDS``.
        options: of ``make_graphed_callables``.
        seed: of the values and of the sequence of operations.

    Attributes:
        rng: what operations draw their choices from.
        leaves: pairs of inputs used of late, [n, WIDTH] each.
        kept: pairs of tensors [...] that the user holds on to.
        pending: forwards whose backward has not run, oldest first.
        slots: ``max_in_flight`` of the last capture.
        captures: how many.
        reads_in_place: whether layers read results of each other where they lie.
        paths: numbers of the layers that forwards call in turn.
        is_chain: whether the layers feed each other: they are captured by one call, and called in order.
        repairs: number of the step at which it is due, and what it does.
        counts, calls: outcomes ("replayed" | "eager" | "raised" | "done") of each operation, and of calls of layers.
    """

    def __init__(self, device: str, kind: str, options: dict[str, Any], seed: int) -> None:
        self.device, self.kind, self.options = device, kind, options
        self._captures_on_mismatch = options.get("on_mismatch") == "capture"
        self.is_chain = options.get("chain", False)
        self.reads_in_place = self.is_chain and not self._captures_on_mismatch
        self.paths = _CHAINS if self.is_chain else _PATHS
        self.rng = random.Random(seed)
        self._values = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = Stack(kind).to(device)
        self.sides = (Side(model), Side(eager_copy(model)))
        self.leaves: list[list[Tensor]] = []
        self.kept: list[list[Tensor]] = []
        self.pending: list[Pending] = []
        self.repairs: list[tuple[int, Callable[[], None]]] = []
        self.captured: dict[int, tuple[Any, dict[str, Any], bool]] = {}
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self.journal: list[str] = []
        self.step = 0
        self.slots = 2
        self.captures = 0
        self._operation = ""

    def run(self, operations: Sequence[Operation], steps: int) -> None:
        """Do ``steps`` operations, each at least once per round of all, and compare after each.

        Raises:
            AssertionError: the sides differ, or te_graph failed in another way than documented; tells the last steps.
        """
        cards: list[Operation] = []
        self.repairs.append((0, lambda: self.capture(self.slots, together=True)))
        for self.step in range(steps):
            if len(cards) < 8 or not any(card.is_possible(self) for card in cards):
                new = [operation for operation in operations for _ in range(operation.weight)]
                self.rng.shuffle(new)
                cards = new + cards
            try:
                self._do(cards)
                self.check()
                self._heal()
            except Exception as error:
                last = "\n  ".join(self.journal[-20:])
                raise AssertionError(f"{type(error).__name__}: {error}; after\n  {last}") from error

    def _do(self, cards: list[Operation]) -> None:
        """Do a repair that is due, or the operation of the last of ``cards`` that is possible, and take that card."""
        due = next((repair for repair in self.repairs if repair[0] <= self.step), None)
        if due is not None:
            self.repairs.remove(due)
            self._begin("repair")
            due[1]()
            self.count("done")
            return
        possible = next(i for i in reversed(range(len(cards))) if cards[i].is_possible(self))
        operation = cards.pop(possible)
        self._begin(operation.name)
        operation.run(self)

    def _heal(self) -> None:
        """Capture anew, soon, where something has changed since the capture that no repair will undo."""
        layers = range(len(self.sides[GRAPHED].model.layers))
        if not self.repairs and any(number not in self.captured or self.changed(number) for number in layers):
            self.repair_later(lambda: self.capture(self.slots, together=True))

    def _begin(self, name: str) -> None:
        self._operation = name
        self.journal.append(f"{self.step}: {name}")

    # What operations are made of.

    def note(self, words: str) -> None:
        """Add to the journal's line of this step."""
        self.journal[-1] += f" {words}"

    def fresh(self, *shape: int, requires_grad: bool = False) -> list[Tensor]:
        """A pair of equal random tensors of ``shape``."""
        values = torch.randn(shape, generator=self._values)
        return [values.to(self.device, copy=True).requires_grad_(requires_grad) for _ in self.sides]

    def keep(self, pair: Sequence[Tensor | None]) -> None:
        """Hold on to a pair of tensors [...]; the oldest of ten is let go of."""
        if pair[GRAPHED] is not None:
            self.kept.append(list(pair))
        del self.kept[:-10]

    def both(self, action: Callable[[Side], Any], may_raise: tuple[type[Exception], ...] = ()) -> list[Any]:
        """Do ``action`` on both sides, from the same state of the generator.

        Where it may raise, it must raise the same on both; then the list is empty.
        """
        state, ends, results, errors = generator_state(self.device), [], [], []
        for side in self.sides:
            set_generator_state(self.device, state)
            try:
                results.append(action(side))
            except may_raise as error:
                errors.append(f"{type(error).__name__}: {error}")
            ends.append(generator_state(self.device))
        assert torch.equal(*ends), "the generators are not in the same state"
        assert not errors or (not results and errors[0] == errors[1]), f"raised on one side only: {errors}"
        return results

    def do(self, action: Callable[[Side], Any], may_raise: tuple[type[Exception], ...] = ()) -> None:
        """``both``, for an operation that calls no layer."""
        self.both(action, may_raise)
        self.count("done")

    def some_parameter(self) -> int:
        """Number of one parameter."""
        return self.rng.randrange(len(self.sides[EAGER].parameters))

    def count(self, outcome: str) -> None:
        self.counts[self._operation, outcome] += 1

    def repair_later(self, action: Callable[[], None]) -> None:
        """Do ``action`` some steps from now."""
        self.repairs.append((self.step + self.rng.randint(3, 8), action))

    # Captures.

    def capture(self, max_in_flight: int, together: bool) -> None:
        """Reset what is graphed and capture anew, or be refused where a capture has to be."""
        layers = list(self.sides[GRAPHED].model.layers)
        self._reset()
        self.captures += 1
        groups = [layers] if together else [[layer] for layer in layers]
        state = generator_state(self.device)
        for group in groups:
            samples = tuple((torch.randn(BATCH, WIDTH, device=self.device, requires_grad=True),) for _ in group)
            set_generator_state(self.device, state)
            _, refusal = refusal_of(
                lambda group=group, samples=samples: tg.make_graphed_callables(
                    tuple(group), samples, max_in_flight=max_in_flight, **self.options
                )
            )
            hooked = any(module._forward_hooks for layer in group for module in inner_modules(layer))
            if hooked and self.options.get("hooks", "refuse") == "refuse":
                assert re.match(r"RuntimeError: .*has forward hooks, which a replay would not run", refusal), refusal
                self.count("raised")
                continue
            assert not refusal, refusal
            self.count("done")
            for layer in group:
                self.captured[layers.index(layer)] = (layer.te_graph, circumstances(layer), layer.training)
        if self.kind == "tied" and len(self.captured) < len(layers):
            # A weight that eager code uses as well is added to twice, where eager execution adds the sum once.
            self._reset()
        assert torch.equal(generator_state(self.device), state), "the capture moved the generator"
        self.slots = max_in_flight

    def _reset(self) -> None:
        for handle, _, _ in self.captured.values():
            handle.reset()
        self.captured.clear()

    def changed(self, number: int) -> list[str]:
        """Patterns of what has changed for layer ``number`` since its capture."""
        now = circumstances(self.sides[GRAPHED].model.layers[number])
        return [words + SINCE_CAPTURE for words, was in self.captured[number][1].items() if now[words] != was]

    def in_flight(self, handle: Any) -> int:
        """How many slots of ``handle`` wait for a backward."""
        return len({call.slot for pending in self.pending for call in pending.calls if call.handle is handle})

    # Forwards.

    def call(self, number: int, inputs: list[Tensor]) -> tuple[list[Tensor], Call] | None:
        """Call layer ``number`` on both sides with inputs [n, WIDTH]; None where te_graph had to refuse and did."""
        layer, twin = (side.model.layers[number] for side in self.sides)
        refusals, required = self._expected_refusals(number, inputs[GRAPHED])
        handle = layer.te_graph if number in self.captured else None
        replays = handle.info()["forward_replays"] if handle else 0
        state = generator_state(self.device)
        output, refusal = refusal_of(lambda: layer(inputs[GRAPHED]))
        end = generator_state(self.device)
        replayed = handle is not None and handle.info()["forward_replays"] > replays
        outcome = "raised" if refusal else "replayed" if replayed else "eager"
        self.count(outcome)
        self.calls[outcome] += 1
        if refusal:
            assert any(re.search(words, refusal) for words in refusals), f"not expected of layer {number}: {refusal}"
            assert torch.equal(end, state), "a refused call moved the generator"
            self.note(f"layer {number} refused")
            return None
        assert not required, f"layer {number} was called in spite of {refusals}"
        set_generator_state(self.device, state)
        own_results: list[Tensor] = []
        hook = twin.register_forward_hook(lambda module, args, result: own_results.append(result), prepend=True)
        expected = twin(inputs[EAGER])
        hook.remove()
        assert torch.equal(end, generator_state(self.device)), "the generators are not in the same state"
        addresses = circumstances(layer)[MOVED]
        call = Call(number, handle if replayed else None, addresses, own_results[0].grad_fn)
        return [output, expected], call

    def forward(
        self, path: Sequence[int], inputs: list[Tensor], between: Sequence[Callable], holds_inner: bool = False
    ) -> Pending | None:
        """Call the layers of ``path``, each on what ``between`` makes of the result before. None: one was refused.

        Args:
            path: numbers of layers.
            inputs: of the first, [n, WIDTH] each.
            between: functions of a result, [n, WIDTH] to the same; one fewer than there are layers.
            holds_inner: keep what the last but one returned.
        """
        pending = Pending(inputs, inputs, [])
        for position, number in enumerate(path):
            done = self.call(number, pending.outputs)
            if done is None:
                return None
            outputs, call = done
            pending.calls.append(call)
            pending.outputs = outputs
            if position + 1 < len(path):
                pending.inner = outputs if holds_inner else None
                # Results of backward hooks are views, which may not be edited in place.
                pending.outputs = self.both(
                    lambda side, y=outputs, change=between[position]: change(y[self.sides.index(side)]), (RuntimeError,)
                )
                if not pending.outputs:
                    return None
        return pending

    def _expected_refusals(self, number: int, x: Tensor) -> tuple[list[str], bool]:
        """Patterns of the refusals that a call may meet, and whether it must meet one. ``x``: [n, WIDTH]."""
        if number not in self.captured or not torch.is_grad_enabled():
            return [], False
        handle, _, training = self.captured[number]
        if self.sides[GRAPHED].model.layers[number].training is not training:
            return [], False
        patterns = []
        if self.options.get("on_mismatch", "raise") == "raise":
            patterns = self.changed(number)
            if tuple(x.shape) != (BATCH, WIDTH):
                patterns.append(ARGUMENTS + "of shape")
            if not x.requires_grad:
                patterns.append(ARGUMENTS + "with requires_grad=True, got requires_grad=False")
        required = bool(patterns)
        # What does not come from its predecessor in a chain runs eagerly, and what does has a slot of its own.
        needs_slot = number == 0 or not self.is_chain
        is_refused = needs_slot and self.options.get("on_exhausted", "raise") == "raise"
        if is_refused and self.in_flight(handle) >= self.slots:
            patterns.append(IN_FLIGHT)
            # Another signature has slots of its own.
            required = required or self.options.get("on_mismatch", "raise") == "raise"
        return patterns, required

    # Backwards.

    def backward(self, pending: Pending, start: Callable[[int, Tensor], Any], last: bool) -> list[Any] | None:
        """Let ``start(side, loss)`` run the backward of ``pending`` on both sides.

        Where te_graph refuses, which it must have reason to, the twin's backward stops at the layer that refused.

        Args:
            pending: the forward.
            start: runs a backward from a loss, a scalar.
            last: the slots are free afterwards.

        Returns:
            What ``start`` returned on both sides, or None when it was refused.
        """
        if pending.losses is None and not self._make_losses(pending):
            return None
        handles = [call.handle for call in pending.calls if call.is_due and call.handle is not None]
        replays = sum(handle.info()["backward_replays"] for handle in handles)
        result, refusal = refusal_of(lambda: start(GRAPHED, pending.losses[GRAPHED]))
        if refusal:
            self.count("raised")
            self.note(f"backward refused: {refusal[:90]}")
            self._stop_twin(pending, start, refusal)
            self.pending.remove(pending)
            return None
        replayed = sum(handle.info()["backward_replays"] for handle in handles) > replays
        self.count("replayed" if replayed else "eager")
        moved = [call.number for call in pending.calls if self._has_moved(call)]
        assert not moved, f"the backward of layers {moved} was replayed although parameters have moved"
        results = [result, start(EAGER, pending.losses[EAGER])]
        if last:
            self.pending.remove(pending)
        return results

    def _make_losses(self, pending: Pending) -> bool:
        """False where both sides raise: a result that is a view, of a backward hook, may not be used once edited."""
        pending.losses = self.both(lambda side: pending.loss(self.sides.index(side)), (RuntimeError,))
        if not pending.losses:
            self.count("raised")
            self.pending.remove(pending)
        return bool(pending.losses)

    def _has_moved(self, call: Call) -> bool:
        layer = self.sides[GRAPHED].model.layers[call.number]
        return call.is_due and call.handle is not None and circumstances(layer)[MOVED] != call.addresses

    def _stop_twin(self, pending: Pending, start: Callable[[int, Tensor], Any], refusal: str) -> None:
        """Run the twin's backward as far as the graphed one came, and see that the refusal had a reason."""
        name = re.search(r"\b(First|Second|Third)\b", refusal)
        if name is None:  # from an operation that runs eagerly on both sides
            _, expected = refusal_of(lambda: start(EAGER, pending.losses[EAGER]))
            # The versions that messages tell began at different numbers.
            words = [re.sub(r"\d+", "", message) for message in (refusal, expected)]
            assert words[GRAPHED] == words[EAGER], f"the backward raised {refusal}, its twin {expected}"
            return
        layers = self.sides[EAGER].model.layers
        call = next(call for call in pending.calls if call.is_due and type(layers[call.number]).__name__ == name[0])
        if re.search(MOVED + SINCE_CAPTURE, refusal):
            assert self._has_moved(call), refusal
        else:
            assert re.search(f"{MODIFIED}|a second time: its slot has been released", refusal), refusal
            self._check_that_twin_refuses(pending, call)
        hook = call.node.register_prehook(stop)
        try:
            start(EAGER, pending.losses[EAGER])
        except Stopped:
            return
        finally:
            hook.remove()
        raise AssertionError(f"the backward of the twin does not come to {name[0]}")

    def _check_that_twin_refuses(self, pending: Pending, call: Call) -> None:
        side = self.sides[EAGER]
        seen = [len(hook.log) for hook in side.hooks]
        targets = [p for p in side.model.layers[call.number].parameters() if p.requires_grad]
        loss = pending.losses[EAGER]
        _, refusal = refusal_of(lambda: torch.autograd.grad(loss, targets, retain_graph=True, allow_unused=True))
        for hook, count in zip(side.hooks, seen, strict=True):
            del hook.log[count:]
        assert re.search("modified by an inplace operation|a second time", refusal), "the twin does not refuse"

    # Comparison.

    def check(self) -> None:
        """Compare everything visible, and the slots in use with what should be in use."""
        for hooks in zip(*(side.hooks for side in self.sides), strict=True):
            runs = [len(hook.log) for hook in hooks]
            assert runs[GRAPHED] == runs[EAGER], f"a hook ran {runs[GRAPHED]} times instead of {runs[EAGER]}"
        for name, actual, expected in self._visible():
            assert_same(name, actual, expected)
        for hook in (hook for side in self.sides for hook in side.hooks):
            hook.log.clear()
        for number, (handle, _, _) in self.captured.items():
            expected = self.in_flight(handle)
            busy = _busy_slots(handle, expected)
            # A capture that another has replaced is not told of any more.
            right = busy <= expected if self._captures_on_mismatch else busy == expected
            assert right, f"{busy} slots of layer {number} are busy instead of {expected}"

    def _visible(self) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        graphed, eager = (side.model for side in self.sides)
        for (name, p), q in zip(graphed.named_parameters(), eager.parameters(), strict=True):
            yield name, p, q
            yield f"{name}.grad", p.grad, q.grad
        for (name, p), q in zip(graphed.named_buffers(), eager.buffers(), strict=True):
            yield name, p, q
        for number, (x, y) in enumerate(self.leaves):
            yield f"input {number}", x, y
            yield f"input {number}.grad", x.grad, y.grad
        for number, pair in enumerate(self.kept):
            yield f"kept tensor {number}", *pair
        for number, pending in enumerate(self.pending):
            yield f"result {number}", *pending.outputs
        for number, hooks in enumerate(zip(*(side.hooks for side in self.sides), strict=True)):
            for pair in zip(*(hook.log for hook in hooks), strict=True):
                yield f"what hook {number} saw", *pair
