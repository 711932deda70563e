"""The table of external tensors: what a region reads or writes and did not make itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from te_graph.common.as_written import AsWrittenMode
from te_graph.common.dispatch import (
    base_name,
    belongs_to_torch,
    bypass_modes,
    call_below,
    has_lost_history,
    has_subclass,
    is_leaf,
    is_operator,
    is_strided,
    place_of,
    storage_key,
    tensors_in,
    written_tensors,
)
from te_graph.graphs.tracing.host_access import MemoryWatch
from te_graph.graphs.tracing.refusals import IS_NESTED, Refusal, uses_nested
from te_graph.graphs.tracing.source_lines import user_site

_NO_HOOKS = "support saved tensor hooks"  # says torch of some transforms


@dataclass(eq=False)
class External:
    """One storage that a region uses and does not own.

    Attributes:
        tensor: [...] detached alias of the tensor as first seen; keeps the storage alive.
        op: first operator that touched it, such as ``aten.mul.Tensor``.
        site: the user's line of that call, or ``backward (...)``.
        originals: the very objects seen on this storage: the first, if it was a leaf, and every ``nn.Parameter``
            (several when parameters are views of one flat buffer).
        read: an operator used its value.
        written: an operator wrote it in place.
        saved: autograd saved it for backward while ``TensorWatch.saved_tensors()`` was active.
    """

    tensor: Tensor
    op: str
    site: str
    originals: list[Tensor] = field(default_factory=list)
    read: bool = False
    written: bool = False
    saved: bool = False


class TensorWatch(AsWrittenMode):
    """Dispatch mode that finds the external tensors of a region and can undo the region's writes to them.

    A tensor is external when an operator takes it as an argument and its storage was neither made by an operator of
    the region nor given in ``owned``. Forward and backward are both seen: the autograd engine hands the mode to its
    threads. The mode may be entered several times, one after the other; tables and snapshots go on.

    Before the first write to an external tensor its value is cloned, so ``restore()`` can undo every write, also after
    the region raised. Tensors in ``owned`` are not restored, but writes to them are reported in ``mutated_owned``.

    Not seen: what a higher-order operator does inside (its tensor arguments count as read), and memory that kernels
    reach without the dispatcher. Subclasses with ``__torch_dispatch__`` (DTensor) are left to themselves: the
    calls they make on plain tensors are what is watched.

    Args:
        owned: tensors [...] that belong to the region, such as its static inputs. Not mutated.
        restorable: False saves the clones, where nothing is to be undone: ``restore()`` then does nothing.
        runs_compiled: as of ``AsWrittenMode``.

    Attributes:
        externals: storage identity -> External, in order of first use. The storages are kept alive.
        mutated_owned: storage identity -> (op, site) of the first write to a tensor in ``owned``.
        nested: the first use of nested tensors, if any, which no graph can hold.
        writes: storage identity -> how often an external tensor there was written.
    """

    supports_higher_order_operators = True

    def __init__(self, owned: Sequence[Tensor] = (), restorable: bool = True, runs_compiled: bool = False) -> None:
        super().__init__(runs_compiled)
        self._restorable = restorable
        self.externals: dict[int, External] = {}
        self.mutated_owned: dict[int, tuple[str, str]] = {}
        self.nested: Refusal | None = None
        self.writes: Counter[int] = Counter()
        # Weak references pin the identity of a storage (no later storage gets the same one) but not its memory.
        self._owned = {storage_key(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in owned}
        self._produced: dict[int, StorageWeakRef] = {}
        self._saved: dict[int, StorageWeakRef] = {}
        self._snapshots: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._memory: MemoryWatch | None = None  # while it is entered, for it refers to this object

    def __enter__(self) -> TensorWatch:
        if self._restorable:
            self._memory = MemoryWatch(self._note_export, self.note_exchange)
            self._memory.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.__exit__(*failure)

    @property
    def produced_storages(self) -> KeysView[int]:
        """Identities of the storages made inside the region, alive or not."""
        return self._produced.keys()

    @property
    def saved_storages(self) -> KeysView[int]:
        """Identities of all storages that autograd saved under ``saved_tensors()``: external, owned or produced."""
        return self._saved.keys()

    @contextlib.contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """Note what autograd saves for backward inside this context; what is saved stays the same.

        Hooks that the region itself installs (activation checkpointing, ``save_on_cpu``) come before this one: what
        they take is not noted.

        Raises:
            RuntimeError: the region uses a transform of ``torch.func`` for which torch allows no such hooks.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
            try:
                yield
            except RuntimeError as error:
                if _NO_HOOKS not in str(error):
                    raise
                raise RuntimeError(
                    "torch.func.grad, and vjp, jacrev and hessian, cannot be captured inside of a callable: what they "
                    "save for backward is not to be seen; call them outside, or in a function for te_graph.graphed"
                ) from error

    def restore(self) -> None:
        """Copy back the value that each external tensor had before the region's first write to it.

        Writes the external storages without touching version counters; modes see nothing. May be called again. Where
        one cannot be written, the others are, before the error is raised.
        """
        with contextlib.ExitStack() as stack:
            # Beneath what refuses to write tensors of inference mode outside of it.
            for context in (bypass_modes(), torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView()):
                stack.enter_context(context)
            # Backwards: where overlapping views were written one after the other, the oldest value wins.
            for alias, value in self._snapshots.values():
                stack.callback(alias.copy_, value)

    def restore_grads(self) -> None:
        """Give the leaves that the region has used, or that ``keep_grads`` was given, the ``.grad`` that they had:
        a ``backward()`` inside the region may have given them another one."""
        with bypass_modes(), torch.no_grad():
            for leaf, grad in self._grads.values():
                if is_leaf(leaf) and leaf.grad is not grad:
                    leaf.grad = grad

    def keep_grads(self, tensor: Tensor) -> None:
        """Remember the ``.grad`` of ``tensor`` [...] if it is a leaf, else of the leaves that it was computed from."""
        if not tensor.requires_grad or id(tensor) in self._grads or has_lost_history(tensor):
            return
        with bypass_modes():
            self._grads[id(tensor)] = (tensor, tensor.grad if tensor.is_leaf else None)
            for leaf in leaves_below(tensor):
                self._grads.setdefault(id(leaf), (leaf, leaf.grad))

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if has_subclass(types):
            return NotImplemented
        if self.nested is None and uses_nested(func, args, kwargs):
            self.nested = Refusal(str(func), IS_NESTED, user_site())
        written, not_ours = dict[int, bool](), set[int]()
        if is_operator(func):
            not_ours = belongs_to_torch(func, args, kwargs)
            written = {id(tensor): keeps for tensor, keeps in written_tensors(func, args, kwargs)}
            if base_name(func) == "lift_fresh":
                # The first sight of a tensor just built from Python data.
                self._add_produced(args)
        for tensor in tensors_in((args, kwargs)):
            if is_strided(tensor) and id(tensor) not in not_ours:
                self._see(tensor, str(func), written.get(id(tensor)))
        result = call_below(func, args, kwargs)
        if is_operator(func) and base_name(func) == "set_":
            # The tensor got a storage that was there before; cuDNN's LSTM takes hold of its flat weights in this way.
            self._see(result, str(func), None)
        else:
            self._add_produced(result)
        return result

    def note_use(self, tensor: Tensor) -> None:
        """Count ``tensor`` [...] as read, which no operator needs to have touched."""
        self._see(tensor, "the result", None)

    def _see(self, tensor: Tensor, op: str, keeps: bool | None) -> None:
        """Enter an argument [...] in the tables; ``keeps`` is None unless the call writes it."""
        key = storage_key(tensor)
        if key in self._produced:
            return
        is_written = keeps is not None
        if key in self._owned:
            if is_written:
                self.mutated_owned.setdefault(key, (op, user_site()))
            return
        if tensor.requires_grad:
            self.keep_grads(tensor)
        external = self.externals.get(key)
        if external is None:
            with bypass_modes():
                external = External(tensor.detach(), op, user_site(), saved=key in self._saved)
            self.externals[key] = external
            if is_leaf(tensor):
                external.originals.append(tensor)
        elif isinstance(tensor, torch.nn.Parameter) and all(seen is not tensor for seen in external.originals):
            external.originals.append(tensor)
        external.read |= not is_written or keeps
        external.written |= is_written
        if is_written:
            self.writes[key] += 1
            self.keep(tensor)

    def _note_export(self, tensor: Tensor) -> None:
        """That NumPy or another library, which may write it, gets the memory of ``tensor`` [...]."""
        if has_subclass([type(tensor)]) or not is_strided(tensor):
            return
        if (key := storage_key(tensor)) not in self._produced and key not in self._owned:
            self.keep_value(tensor)

    def note_exchange(self, tensor: Tensor) -> None:
        """That ``tensor`` [...] gets other memory."""

    def note_plan(self, writes: Sequence[Tensor]) -> None:
        for tensor in writes:
            self._note_export(tensor)

    def keep(self, tensor: Tensor) -> None:
        """What is done before a write to ``tensor`` [...]."""
        self.keep_value(tensor)

    def keep_value(self, tensor: Tensor) -> None:
        """Clone the value of ``tensor`` [...], unless that was done before, for ``restore()``."""
        place = place_of(tensor)
        if self._restorable and place not in self._snapshots:
            with bypass_modes(), torch.no_grad():
                alias = _without_repeats(tensor.detach())
                self._snapshots[place] = (alias, alias.clone())

    def _add_produced(self, tree: Any) -> None:
        for tensor in tensors_in(tree):
            if is_strided(tensor):
                key = storage_key(tensor)
                if key not in self._produced and key not in self.externals and key not in self._owned:
                    self._produced[key] = StorageWeakRef(tensor.untyped_storage())

    def _note_saved(self, tensor: Tensor) -> Tensor:
        if is_strided(tensor):
            key = storage_key(tensor)
            self._saved[key] = StorageWeakRef(tensor.untyped_storage())
            if key in self.externals:
                self.externals[key].saved = True
        # Not the tensor itself: autograd would then hold an output together with its own node, a reference cycle.
        with bypass_modes():
            return tensor.detach()


def _without_repeats(alias: Tensor) -> Tensor:
    """``alias`` [...] without the elements that ``expand`` repeats: torch copies to no tensor that has them."""
    for dim, (size, stride) in enumerate(zip(alias.shape, alias.stride(), strict=True)):
        if size > 1 and stride == 0:
            alias = alias.narrow(dim, 0, 1)
    return alias


def leaves_below(output: Tensor) -> list[Tensor]:
    """The leaves that autograd would accumulate into if ``output`` [...] got a gradient, each once."""
    if output.grad_fn is None:
        return [output] if output.requires_grad else []
    leaves, seen, stack = {}, {output.grad_fn}, [output.grad_fn]
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(leaves.values())
