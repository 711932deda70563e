"""What a dispatch mode asks about one dispatcher call: its tensors, what it writes, whose file it came from."""

from __future__ import annotations

import contextlib
import functools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_dispatch_stack_at, is_traceable_wrapper_subclass

TORCH = os.path.dirname(torch.__file__) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_OF_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # as Python's site says
_OVERWRITING = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
_RUNNING_STATS = ("running_mean", "running_var")


@contextlib.contextmanager
def bypass_modes() -> Iterator[None]:
    """Hide the calls inside from every dispatch and function mode, also from those stacked around this one."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def function_modes() -> Sequence[Any]:
    """The function modes of this thread, outermost first; ``with torch.device(...)`` is one."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(count)] if count else ()


def dispatch_modes() -> Sequence[Any]:
    """The dispatch modes of this thread, outermost first."""
    return [_get_dispatch_stack_at(level) for level in range(torch._C._len_torch_dispatch_stack())]


def is_in_backward() -> bool:
    """True where the autograd engine runs this code, on whichever thread."""
    return torch._C._current_graph_task_id() != -1


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dicts (the containers a dispatcher call can hold), in order."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among the leaves of ``tree``, in order; one that occurs twice is yielded twice."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` with ``function`` applied to each tensor; containers are new, other leaves shared."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, item) for key, item in tree.items()}
    return tree


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of ``tensor`` [...]: equal for views, valid as long as the storage (or a weak reference
    to it) lives. The tensor must be strided."""
    return tensor.untyped_storage()._cdata


def storages_of(tensor: Tensor) -> list[int]:
    """Identities of the storages of ``tensor`` [...], by ``storage_key``; of a DTensor that of what is on this rank."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [key for name in names for key in storages_of(getattr(tensor, name))]
    return [storage_key(tensor)] if is_strided(tensor) else []


def place_of(tensor: Tensor) -> tuple:
    """Which memory ``tensor`` [...], which must be strided, stands for; valid as long as ``storage_key``."""
    return storage_key(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def is_strided(tensor: Tensor) -> bool:
    """True when ``tensor`` [...] is strided, hence has one storage. Nested ones may say that they are, and have no
    sizes."""
    return tensor.layout == torch.strided and not tensor.is_nested


def layout_name(tensor: Tensor) -> str:
    """What messages call the layout of ``tensor`` [...]."""
    is_nested = tensor.is_nested and tensor.layout == torch.strided
    return "nested" if is_nested else str(tensor.layout)


def is_shape_of_zero(tensor: Tensor) -> bool:
    """True for a tensor [...] on meta in a backward: torch makes some where it adds a gradient that is zero by rule, as
    that of ``torch.sgn`` is, to another one. They have no values."""
    return tensor.is_meta and is_in_backward()


def is_operator(func: Any) -> bool:
    """True for an ATen or custom operator with a schema, False for a higher-order operator (``torch.cond``, ...)."""
    return isinstance(func, torch._ops.OpOverload)


def has_subclass(types: Sequence[type]) -> bool:
    """True when a mode's ``types`` name a tensor class with a ``__torch_dispatch__`` of its own, such as DTensor."""
    return any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types)


def acts_like_tensor(kind: type) -> bool:
    """True for ``torch.Tensor``, parameters, and other classes of tensors that operations take no notice of."""
    if kind in (Tensor, torch.nn.Parameter):
        return True
    return kind.__torch_function__ is torch._C._disabled_torch_function_impl and not has_subclass([kind])


def base_name(func: torch._ops.OpOverload) -> str:
    """Name without namespace and overload: ``add_`` for ``aten.add_.Tensor``."""
    return func._schema.name.rpartition("::")[2]


def argument_values(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Iterator[tuple[torch.Argument, Any]]:
    """Yield (schema argument, value given) for the arguments present in the call; defaults are left out."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def written_tensors(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[tuple[Tensor, bool]]:
    """Tensors that a call writes in place, each with True when their former value may matter to the call.

    Follows the schema's alias annotations (in-place, ``out=``, foreach lists, custom operators), and knows two families
    whose schemas keep silent: batch norms that update running statistics, and ``c10d`` collectives (any tensor
    argument counts as written).
    """
    if func.namespace == "c10d":
        return [(tensor, True) for tensor in tensors_in((args, kwargs))]
    updates_stats = _updates_running_stats(func, args, kwargs)
    if not updates_stats and not func._schema.is_mutable:
        return []
    overwrites = func._schema.name in _OVERWRITING
    written = []
    for argument, value in argument_values(func, args, kwargs):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (updates_stats and argument.name in _RUNNING_STATS):
            keeps = not (overwrites or argument.is_out)
            written.extend((tensor, keeps) for tensor in tensors_in(value))
    return written


def tells_of_writes(func: torch._ops.OpOverload) -> bool:
    """True for calls whose writes version counters tell of: not for those of batch norms to running statistics, which
    another one may save for its backward meanwhile. ``c10d`` collectives count, since what they write is read."""
    return func._schema.is_mutable or func.namespace == "c10d"


def call_below(func: Any, args: tuple, kwargs: dict) -> Any:
    """Call ``func`` from the ``__torch_dispatch__`` of a mode, with versions moved on as they are without the mode.

    Most operators that write have a kernel for the key ``ADInplaceOrView``, which moves versions on before modes see
    the call. Of the others, such as those that write lists (``torch._foreach_add_``), the kernel for the device writes
    by in-place operators, which do so, and below modes that key is off for these.
    """
    if not (is_operator(func) and _leaves_versions_to_kernel(func)):
        return func(*args, **kwargs)
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return func(*args, **kwargs)


def _leaves_versions_to_kernel(func: torch._ops.OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return func._schema.is_mutable and not has_kernel(func.name(), "ADInplaceOrView")


def _updates_running_stats(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    name = base_name(func)
    if "batch_norm" not in name and "instance_norm" not in name:
        return False
    if any(part in name for part in ("backward", "functional", "no_training", "no_update")):
        return False
    for argument, value in argument_values(func, args, kwargs):
        if argument.name in ("training", "use_input_stats"):
            return bool(value)
    return any(argument.name in _RUNNING_STATS for argument in func._schema.arguments)


def belongs_to_torch(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> set[int]:
    """Identities of argument tensors that torch makes once per device and keeps: the dropout state of cuDNN's RNNs."""
    given = argument_values(func, args, kwargs) if func.namespace == "aten" else ()
    return {id(tensor) for argument, value in given if argument.name == "dropout_state" for tensor in tensors_in(value)}


@functools.lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """False for the files of torch, this package and the standard library."""
    if filename.startswith((TORCH, PACKAGE, "<frozen")):
        return False
    return not filename.startswith(_STDLIB) or _is_installed(filename)


def is_project_file(filename: str) -> bool:
    """True for files that are neither of Python and torch nor installed as a package."""
    return is_user_file(filename) and not _is_installed(filename)


def _is_installed(filename: str) -> bool:
    return any(folder in filename for folder in _OF_PACKAGES)


def version_of(tensor: Tensor) -> int | None:
    """The version of ``tensor`` [...]; None where it was made in inference mode and counts none."""
    return None if tensor.is_inference() else tensor._version


def has_lost_history(tensor: Tensor) -> bool:
    """Whether ``tensor`` [...] is a view of which autograd refuses to tell more, since its memory was changed through
    another one: code can go on with it without gradients."""
    if not tensor._is_view():
        return False
    try:
        _ = tensor.grad_fn
    except RuntimeError:
        return True
    return False


def is_leaf(tensor: Tensor) -> bool:
    """``tensor.is_leaf`` of [...]; False where autograd refuses to tell."""
    return not has_lost_history(tensor) and tensor.is_leaf
