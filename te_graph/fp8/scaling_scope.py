"""The scales, and the FP8 copies of weights, of all modules that compute by one recipe."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_graph import _C
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.optimizer_step_watch import optimizer_step_watch
from te_graph.fp8.recipes import DelayedScaling, Recipe

_ops = torch.ops.te_graph
_FIRST_CAPACITY = 32
INPUT, WEIGHT, GRAD = range(3)  # tensors of a module that are cast
_VERSION, _HEADER, _USUAL_LENGTH = 1, 8, 1024  # of saved state
_CAST_SCALE, _IS_CAST = 3, 4  # places in its header


class HasWeight(Protocol):
    """A module that computes in FP8: ``weight`` [out, in]."""

    weight: nn.Parameter
    fuse_wgrad_accumulation: bool


class _Block:
    """Columns for a number of modules. They never move, so kernels of graphs find them.

    Attributes:
        forward, backward: scales of (input and weight) and of gradients; None under current scaling.
        history, scale, scale_inv: of both directions, [H, n], [n] and [n] each; empty under current scaling. Casts
            have inverses of their own.
        weight_scale: [capacity] fp32, with which the weights were cast.
        weight_scale_inv: [capacity, 4] fp32, of which the first ones count: cuBLASLt wants multiples of 16 bytes.
        free: numbers that no module has, the next one last.
    """

    def __init__(self, capacity: int, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.weight_scale = torch.ones(capacity, device=device)
        self.weight_scale_inv = torch.ones(capacity, 4, device=device)
        self.free = list(reversed(range(capacity)))
        self.tables: list[_C.ScaleTable | None] = [None, None]
        self.history: list[Tensor] = []
        self.scale: list[Tensor] = []
        self.scale_inv: list[Tensor] = []
        if not isinstance(recipe, DelayedScaling):
            return
        formats = recipe.fp8_format.forward_dtype, recipe.fp8_format.backward_dtype
        for direction, (columns, dtype) in enumerate(zip((2 * capacity, capacity), formats, strict=True)):
            self.history.append(torch.zeros(recipe.amax_history_len, columns, device=device))
            self.scale.append(torch.ones(columns, device=device))
            self.scale_inv.append(torch.ones(columns, device=device))
            table = _C.ScaleTable(
                self.history[direction],
                self.scale[direction],
                self.scale_inv[direction],
                torch.finfo(dtype).max,
                recipe.margin,
                recipe.amax_compute_algo,
            )
            if group is not None and recipe.reduce_amax:
                table.set_reduce(lambda row: dist.all_reduce(row, dist.ReduceOp.MAX, group))
            self.tables[direction] = table

    def place(self, number: int, tensor: int) -> tuple[int, int]:
        """Direction and column of ``tensor`` (INPUT, WEIGHT or GRAD) of module ``number``."""
        return (1, number) if tensor == GRAD else (0, 2 * number + tensor)


def new_state(device: torch.device, length: int = 0) -> Tensor:
    """What ``Member.state`` returns of a module that has no magnitudes yet, [3, n] fp32.

    Args:
        device: where it is.
        length: of the histories; 0: none.
    """
    state = torch.zeros(3, _HEADER + max(length, _USUAL_LENGTH), device=device)
    state[:, 0], state[:, 1], state[:, 2] = _VERSION, length, 1
    return state


class _Place:
    """The columns of one module in ``block``; free again when its member is gone, and all backwards and graphs that use
    them."""

    def __init__(self, block: _Block) -> None:
        self.block, self.number = block, block.free.pop()
        weakref.finalize(self, block.free.append, self.number).atexit = False


class Member:
    """What one module has in a scope.

    Args:
        module: not kept alive.
        scope: has the block of the place.
        place: its columns.

    Attributes:
        linear: the products.
        loaded_version: of the weight, when a state was loaded that says how it was cast; None: that is not known.
        trains: whether a forward of the module has recorded magnitudes.
        data, transposed: FP8 copies of the weight, [out, in] and [in, out].
    """

    def __init__(self, module: HasWeight, scope: ScalingScope, place: _Place) -> None:
        weight, formats = module.weight, scope.recipe.fp8_format
        block, number = place.block, place.number
        self.scope, self.block, self.number = scope, block, number
        self._module = weakref.ref(module)
        self.loaded_version: int | None = None
        self.trains = False
        options = {"dtype": formats.forward_dtype, "device": weight.device}
        self.data = torch.zeros(weight.shape, **options)
        self.transposed = torch.zeros(weight.shape[::-1], **options)
        forward, backward = block.tables
        self.linear = _C.Linear(
            self.data,
            self.transposed,
            block.weight_scale_inv[number, :1],
            forward,
            block.place(number, INPUT)[1],
            backward,
            block.place(number, GRAD)[1],
            formats.backward_dtype,
            place,
        )
        if module.fuse_wgrad_accumulation:
            self.linear.set_main_grad_of(_main_grad_of)
        # By a weak reference, since what C++ holds is not seen by the garbage collector.
        self.linear.set_cast_weights(functools.partial(_cast_weights_of, weakref.ref(self)))

    @property
    def weight(self) -> Tensor | None:
        """[out, in]: that of the module, if it is still there."""
        module = self._module()
        return None if module is None else module.weight

    def fits(self, weight: Tensor) -> bool:
        """Whether the copies are of the shape and device of ``weight`` [out, in], which is not sharded since."""
        is_like = self.data.shape == weight.shape and self.data.device == weight.device
        return is_like and not is_traceable_wrapper_subclass(weight)

    def history(self, tensor: int) -> tuple[Tensor, Tensor]:
        """Views of the history [H] and the scale [1] of INPUT, WEIGHT or GRAD; of delayed scaling only."""
        direction, column = self.block.place(self.number, tensor)
        return self.block.history[direction][:, column], self.block.scale[direction][column : column + 1]

    def state(self) -> Tensor:
        """A copy of the histories and scales, which ``load_`` takes: [3, n] fp32, n at least 1032, row by row of INPUT,
        WEIGHT and GRAD the version of the format, the length of the history, the scale, of the WEIGHT the scale of its
        cast and whether it is as it was then, three zeros, and the history.
        """
        length = self.scope.recipe.amax_history_len if self.scope.is_delayed else 0
        state = new_state(self.data.device, length)
        for tensor in (INPUT, WEIGHT, GRAD) if length else ():
            history, scale = self.history(tensor)
            state[tensor, 2:3] = scale
            state[tensor, _HEADER : _HEADER + length] = history
        weight = self.weight
        if length and weight is not None and (self.linear.is_cast(weight, True) or self.is_resumed(weight)):
            state[WEIGHT, _CAST_SCALE : _CAST_SCALE + 1] = self.block.weight_scale[self.number : self.number + 1]
            state[WEIGHT, _IS_CAST] = 1
        return state

    def is_resumed(self, weight: Tensor) -> bool:
        """Whether ``weight`` [out, in] is as it was when it was cast, elsewhere, as a loaded state says."""
        return self.loaded_version is not None and self.loaded_version == weight._version

    def load_(self, state: Tensor, loaded_version: int) -> None:
        """Take histories and scales from ``state`` [3, n], which ``state()`` returned here or elsewhere.

        Of a longer history the newest magnitudes are taken. If the weight stays as it is, it is cast with the scale of
        its cast there, and its magnitude, which is in the history, not recorded again.

        Args:
            state: as above.
            loaded_version: of the weight that goes with it.

        Raises:
            ValueError: it is of another form.
        """
        if state.dim() != 2 or len(state) != 3 or state.shape[1] <= _HEADER or state[0, 0] != _VERSION:
            raise ValueError(
                f"te_graph.Linear: expected FP8 state of version {_VERSION}, got shape {list(state.shape)}"
            )
        saved = int(state[0, 1])
        if not self.scope.is_delayed or not saved:
            return
        for tensor in (INPUT, WEIGHT, GRAD):
            history, scale = self.history(tensor)
            rows = state[tensor, _HEADER : _HEADER + saved].to(history)
            kept = min(len(history), saved) - 1  # beside row 0, what was recorded since the last update
            history.zero_()
            history[:1] = rows[:1]
            history[len(history) - kept :] = rows[saved - kept :]
            scale.copy_(state[tensor, 2:3])
            self.use(tensor)
        if state[WEIGHT, _IS_CAST]:
            self.block.weight_scale[self.number] = state[WEIGHT, _CAST_SCALE]
            self.loaded_version = loaded_version

    def settle(self, tensors: Sequence[int] = (INPUT, WEIGHT, GRAD)) -> None:
        """Update the scales of what has been recorded of ``tensors``, as their next casts would."""
        for tensor in tensors if self.scope.is_delayed else ():
            direction, column = self.block.place(self.number, tensor)
            self.block.tables[direction].settle(column)

    def use(self, tensor: int) -> None:
        """Say that ``tensor`` is about to be cast, and its magnitude recorded."""
        direction, column = self.block.place(self.number, tensor)
        self.block.tables[direction].settle(column)
        self.block.tables[direction].note(column)


def _main_grad_of(weight: Tensor) -> tuple[Tensor, _C.StoreFlag]:
    """The ``main_grad`` of ``weight`` [out, in], and what says that it is to be overwritten."""
    main_grad = main_grad_of(weight)
    if main_grad is None:
        raise RuntimeError(
            "te_graph.Linear: expected weight.main_grad, to which fuse_wgrad_accumulation adds the gradient, got none"
        )
    return main_grad, gradient_state(weight).flag


def _cast_weights_of(reference: weakref.ref[Member], records: bool) -> None:
    """Cast the weights of a member that is about to be replayed, if it is still there."""
    member = reference()
    if member is not None:
        member.scope.cast_weights(member, records)


class ScalingScope(OwnObject):
    """All modules that compute by one recipe on one device, in one amax reduction group.

    One launch updates all their scales of a direction. Columns of modules that have not run stay as they are, so it
    does not matter which modules share a scope, but for weights that change twice between two forwards of their module.

    Args:
        recipe: how scales are found.
        device: where the modules' weights are.
        group: whose ranks share the scales, or None.
    """

    def __init__(self, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.recipe, self.device, self.group = recipe, device, group
        self._blocks: list[_Block] = []
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        optimizer_step_watch().watch(self)

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from histories."""
        return isinstance(self.recipe, DelayedScaling)

    @property
    def weights(self) -> list[Tensor]:
        """[out, in] each, those that the modules have now."""
        return [weight for member in list(self._members) if (weight := member.weight) is not None]

    def add(self, module: HasWeight) -> Member:
        """A place for ``module``, whose scales are 1 and histories empty."""
        block = next((block for block in self._blocks if block.free), None)
        if block is None:
            with torch.inference_mode(False), torch.no_grad():
                capacity = _FIRST_CAPACITY << len(self._blocks)
                block = _Block(capacity, self.recipe, self.device, self.group)
            self._blocks.append(block)
        with torch.inference_mode(False), torch.no_grad():
            member = Member(module, self, _Place(block))
            for tensor in (INPUT, WEIGHT, GRAD) if self.is_delayed else ():
                history, scale = member.history(tensor)  # another module may have had the place
                history.zero_()
                scale.fill_(1)
        self._members.add(member)
        return member

    def update(self) -> None:
        """Update the scales of what forwards have cast since the last time."""
        for block in self._blocks:
            if block.tables[0] is not None:
                block.tables[0].update()

    def cast_weights(self, member: Member, records: bool, is_noted: bool = True) -> None:
        """Cast the weight of ``member``, and all others that have changed since they were cast, [out, in] each.

        Args:
            member: about to be called.
            records: whether magnitudes are recorded for delayed scaling. A weight that was cast without is cast again.
                Of modules that only evaluate none is recorded.
            is_noted: False for a cast that is captured, or undone by a capture.
        """
        records = records and self.is_delayed
        member.trains |= records and is_noted
        stale = [
            (other, weight)
            for other in list(self._members)
            if (other.trains or other is member or not records)
            and (weight := other.weight) is not None
            and not other.linear.is_cast(weight, records)
        ]
        stale = [(other, weight) for other, weight in stale if other.fits(weight)]
        # Before the casts: what another thread writes meanwhile is to be cast again.
        writes = [_C.write_count(weight) for _, weight in stale]
        resumed = [(other, weight) for other, weight in stale if other.is_resumed(weight)]
        changed = [(other, weight) for other, weight in stale if not other.is_resumed(weight)]
        with torch.inference_mode(False), torch.no_grad():
            if records and is_noted:
                # All updates first: one between would forget what was noted of casts that are still to come.
                for other, _ in changed:
                    other.settle((WEIGHT,))
                for other, _ in changed:
                    other.use(WEIGHT)
            for block, run in _runs(changed):
                self._cast(block, run, records, is_resumed=False)
            for block, run in _runs(resumed):
                self._cast(block, run, False, is_resumed=True)
        done = _C.CastDone(self.device)
        for (other, weight), count in zip(stale, writes, strict=True) if is_noted else ():
            is_recorded = records or not self.is_delayed or other.is_resumed(weight)
            other.linear.note_cast(weight, is_recorded, count, done)
        for other, _ in changed if is_noted else ():
            other.loaded_version = None

    def _cast(self, block: _Block, run: Sequence[tuple[Member, Tensor]], records: bool, is_resumed: bool) -> None:
        """Cast the weights of members whose numbers follow each other in ``block``."""
        weights = [weight.detach().contiguous() for _, weight in run]
        first, end = run[0][0].number, run[-1][0].number + 1
        amax, cast_scale = torch.zeros(len(run), device=self.device), block.weight_scale[first:end]
        if not self.is_delayed:
            largest = _ops.multi_tensor_norms(weights, float("inf"))
            cast_scale.copy_(_ops.fp8_scale(largest, self.recipe.fp8_format.forward_dtype))
        elif not is_resumed:
            columns = slice(2 * first + WEIGHT, 2 * end, 2)
            cast_scale.copy_(block.scale[0][columns])
            amax = block.history[0][0, columns] if records else amax
        _ops.fp8_cast_weights_(
            [member.data for member, _ in run],
            [member.transposed for member, _ in run],
            weights,
            cast_scale,
            block.weight_scale_inv[first:end, 0],
            amax,
        )


def _runs(stale: Sequence[tuple[Member, Tensor]]) -> Iterator[tuple[_Block, list[tuple[Member, Tensor]]]]:
    """Members with their weights [out, in], by blocks, in runs of numbers that follow each other."""
    ordered = sorted(stale, key=lambda pair: (id(pair[0].block), pair[0].number))
    for _, run in groupby(enumerate(ordered), key=lambda item: (id(item[1][0].block), item[1][0].number - item[0])):
        pairs = [pair for _, pair in run]
        yield pairs[0][0].block, pairs


class ScalingScopes(OwnObject):
    """The scopes of a process; one is there for as long as a module is in it."""

    def __init__(self) -> None:
        self._scopes: weakref.WeakValueDictionary[tuple[Any, ...], ScalingScope] = weakref.WeakValueDictionary()
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number_of(self, enabled: bool, calibrating: bool, recipe: Recipe, group: dist.ProcessGroup | None) -> int:
        """A number, not 0, that regions have in common in which modules compute alike."""
        key = (enabled, calibrating, recipe, None if group is None else group.group_name)
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def find(self, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None) -> ScalingScope:
        """The scope of these, made if there is none."""
        key = (recipe, device, group)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = ScalingScope(recipe, device, group)
        return scope

    def update(self) -> None:
        """Update the scales of all scopes in which forwards have recorded magnitudes."""
        for scope in list(self._scopes.values()):
            scope.update()


scaling_scopes = ScalingScopes()  # one for the process: modules of several models share a launch
