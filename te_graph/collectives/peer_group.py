"""Groups of ranks for collectives that capture, replay and tracing cannot break."""

import atexit
import functools
import logging
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph import _C
from te_graph.collectives.options import check_options, check_timeout, device_of
from te_graph.collectives.peer_facts import check_alike, parse_facts
from te_graph.collectives.rendezvous import Rendezvous, expect_none
from te_graph.collectives.tuning import Tuning, apply, blocks_within, is_known, tune
from te_graph.common.environment import switch

logger = logging.getLogger("te_graph")

MAX_PEERS = 8
PAGE_BYTES = 4096
BUFFER_BYTES = 512 << 20
# Seconds, for set-up and teardown; shorter where ranks may have died.
RENDEZVOUS_TIMEOUT = 120.0
ABORTED_TIMEOUT = 5.0

_RENAMED = "PeerGroup: slab_bytes is now called buffer_bytes; the old name will be removed in the next release"

# Groups live until they are closed: graphs and traces hold their names.
_open_groups: "set[PeerGroup]" = set()


class PeerGroup:
    """Ranks that all_reduce, reduce_scatter and all_gather together; ops find the group by its name.

    On GPUs of one host kernels write straight into the memory of the others; elsewhere, on CPUs, or where
    TE_GRAPH_PEER=0, data goes through the process group. The numbers are the same: sums are taken in fp32, in the order
    of the ranks, and rounded once, whatever the size, the algorithm or the transport, so all ranks and runs find the
    same bits.

    An op decides when it runs, in C++, on what is true at replay too. There is nothing to register, nothing to enter
    before a capture, and traces hold the group's name alone, so it has to be there, under the same name, when they run.
    A copy of a module that holds a group holds the same one.

    Args:
        process_group: of torch.distributed; the default one if None. All of its ranks construct the group, in the same
            order among its groups, and call operations in the same order among all of them where they go through it.
        buffer_bytes: size of each GPU's symmetric buffer, which peers write into: one half is the receive buffer,
            through which larger operations go in parts, one is for ``mem_pool``.
        timeout: seconds that an operation waits for a peer; through a process group in whole milliseconds, rounded up.
        on_timeout: "raise": outputs become NaN, ``found_inf`` 1, and the next op or ``check`` raises; "trap": the CUDA
            context ends at once.
        watchdog: seconds after which a process with an unobserved failure is terminated, with the message on stderr; 0
            for never.
        device: where tensors are; the current GPU if the process group serves GPUs, else the CPU.
        tune: measure at set-up which algorithm is best for which size, in half a second; None: unless thresholds for
            all ranks' GPUs are shipped (H100, H200).
        max_sms: multiprocessors that an operation between peers takes at most, rounded down to a power of two, for one
            that runs beside others; all that help it if None. Changes no bit.
        name: by which ops find the group; the process group's name if None, with a number for its second group.
        slab_bytes: deprecated name of buffer_bytes.

    Raises:
        ValueError: an argument is none of the above; on the other ranks, which are notified, a RuntimeError.
        RuntimeError: set-up failed on a rank, as where the name is taken; the same error on all ranks, within two
            minutes. After either all ranks may try again.

    Stream and capture: construction synchronizes and must not be captured. Ops allocate their result and nothing else,
    and do not synchronize. All operations of a group run one after the other: across streams they are ordered where one
    capture, or no capture, has them both. Replays are for the caller to order, alike on all ranks; two that overlap
    on one GPU are an error that ops report, unless their launches' numbers are equal modulo 141.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        timeout: float = 600.0,
        on_timeout: str = "raise",
        watchdog: float = 30.0,
        device: torch.device | str | int | None = None,
        tune: bool | None = None,
        max_sms: int | None = None,
        name: str | None = None,
        slab_bytes: int | None = None,
    ) -> None:
        if slab_bytes is not None:
            warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
            buffer_bytes = slab_bytes
        process_group = process_group if process_group is not None else dist.group.WORLD
        if process_group is None:
            raise ValueError("PeerGroup: expected torch.distributed to be initialized, or a process_group")
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(f"PeerGroup: expected a process_group that this rank is in, got {process_group!r}")
        self.process_group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self._rendezvous = Rendezvous(process_group, process_group.group_name, RENDEZVOUS_TIMEOUT)
        try:
            check_timeout(timeout)
            check_options(buffer_bytes, on_timeout, watchdog, tune, max_sms, name)
            self.device = device_of(process_group, device)
        except Exception as error:
            self._rendezvous.fail(error)
            raise
        self.timeout, self.on_timeout, self.watchdog = float(timeout), on_timeout, float(watchdog)
        self.max_sms = max_sms
        number = self._rendezvous.number
        self.name = name or process_group.group_name + (f".{number}" if number > 1 else "")
        self.buffer_bytes = buffer_bytes
        self._receive_buffer_bytes = buffer_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        self._pool: torch.cuda.MemPool | None = None
        self._buffer: Any = None
        self._handle, needs_tuning = self._set_up(tune)
        _open_groups.add(self)
        if needs_tuning:
            try:
                self.tune()
            except RuntimeError:
                self.close()  # on all ranks, for all have this error
                raise

    @property
    def slab_bytes(self) -> int:
        """Deprecated name of ``buffer_bytes``."""
        warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
        return self.buffer_bytes

    @property
    def uses_peers(self) -> bool:
        """Whether kernels write into peers' memory; else data goes through the process group."""
        return self._buffer is not None

    @functools.cached_property  # so that a capture finds the tensor among the group's attributes
    def found_inf(self) -> Tensor:
        """[] fp32 on the device: 0, or 1 once the group was aborted. For captured optimizers.

        It stays 1, so nothing but the group writes it: torch, and ops that would, raise a RuntimeError. A clip gets a
        flag of its own, which is zeroed in each step and tells the optimizer (``optimizer.found_inf = flag``, once) of
        both::

            flag.zero_()
            te_graph.clip_grad_norm_(parameters, 1.0, found_inf=flag)
            torch.maximum(flag, group.found_inf, out=flag)
            optimizer.step()

        Where torch raises, it has written before: such an error is not to be passed over.

        Raises:
            RuntimeError: ``uses_peers`` is False.
        """
        return self._handle.found_inf()

    def tune(self) -> Tuning:
        """Measure which algorithm is best for which size, and use it from now on. All ranks call it.

        Returns:
            The thresholds, the same on all ranks.

        Raises:
            RuntimeError: ``uses_peers`` is False, or something failed on a rank.
        """
        if not self.uses_peers:
            raise RuntimeError(f"PeerGroup.tune: expected a group of peers, got {self!r}")
        return tune(self)

    def mem_pool(self) -> torch.cuda.MemPool:
        """A pool for tensors in the symmetric buffer: peers write gathered data directly into such an output.

        Use it with torch.cuda.use_mem_pool(pool), or as the pool of a graph: torch.cuda.graph(g, pool=pool.id). Tensors
        elsewhere give the same values; ranks need not agree on it. Without peers it is an ordinary pool. Keep the group
        open while tensors of the pool are in use.

        Raises:
            RuntimeError: the group is not on GPUs. Later, torch.OutOfMemoryError: the symmetric buffer is
                exhausted.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"PeerGroup.mem_pool: expected a group on GPUs, got one on {self.device}")
        if self._pool is None:
            allocator = None
            if self._buffer is not None:
                allocator = _C.make_pool_allocator(self.name, self._buffer.memory(), self._receive_buffer_bytes)
            with torch.cuda.device(self.device):
                self._pool = torch.cuda.MemPool(allocator)
        return self._pool

    def check(self) -> None:
        """Raise if the group was aborted: rank, operation, what was expected and seen. No host sync.

        Raises:
            RuntimeError: the group was aborted, or closed.
        """
        self._handle.check("PeerGroup.check")

    def abort(self) -> None:
        """Abort the group: ops raise from now on.

        Between peers, waiting operations end on all ranks; those of a process group end when its own timeout has
        passed.

        Stream and capture: waits for nothing.
        """
        self._handle.abort()

    def set_timeout(self, seconds: float) -> None:
        """Change the time that operations wait for a peer.

        Args:
            seconds: positive. Between peers they hold also for operations in graphs and for those under way;
                those under way of a process group keep theirs.

        Raises:
            ValueError, TypeError: ``seconds`` is no positive number.

        Stream and capture: waits for nothing.
        """
        check_timeout(seconds)
        self._handle.set_timeout(seconds)
        self.timeout = float(seconds)

    def close(self) -> None:
        """Wait for all work and all ranks, and give memory back.

        All ranks close their groups in the same order. Those that do not come are waited for two minutes, and a warning
        in the log names the group then; those of a group that was aborted for some seconds only, for they may be dead.
        Ops with the group's name raise from now on; graphs that hold operations must not be replayed any more.

        Stream and capture: synchronizes the device. Not inside a capture.
        """
        if self not in _open_groups:
            return
        _open_groups.discard(self)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:
            self.check()
        except RuntimeError:
            self._rendezvous.timeout = ABORTED_TIMEOUT
        self._handle.close()
        self._free_buffer()
        self._pool = None

    def __enter__(self) -> "PeerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self in _open_groups:
            # The other ranks may be waiting for this one, which will not arrive.
            self.abort()
        self.close()

    def __copy__(self) -> "PeerGroup":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PeerGroup":
        return self

    def __repr__(self) -> str:
        transport = "peers" if self.uses_peers else "process group" if self.world_size > 1 else "one rank"
        return f"PeerGroup({self.name!r}, rank {self.rank} of {self.world_size}, {self.device}, {transport})"

    def _free_buffer(self) -> None:
        """Free it once all ranks have unmapped it; never if a rank does not arrive, which may still write to it."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.unmap()
        try:
            self._rendezvous.wait("closing the group")
        except RuntimeError as error:
            logger.warning(
                "PeerGroup %s: closed without the other ranks, which close groups in the same order as this one unless "
                "they have ended: %s",
                self.name,
                error,
            )
            if buffer is not None:
                buffer.abandon()

    def _set_up(self, tune: bool | None) -> tuple[Any, bool]:
        """The group's handle, and whether thresholds have to be measured."""
        rendezvous = self._rendezvous
        facts = rendezvous.step("looking for peers", lambda: self._facts(tune), parse_facts)
        check_alike(facts)
        if self.world_size == 1:
            return _C.GroupHandle.local(self.name, self.device), False
        handles: list[Any] = []
        try:
            reason = _why_not_peers(facts) or self._map_peers([fact["gpu"] for fact in facts])
            if reason is not None and self.device.type == "cuda":
                logger.warning("PeerGroup %s: no peers (%s); data goes through the process group", self.name, reason)
            opened = self._open_on_peers if reason is None else self._open_on_process_group
            rendezvous.step("opening the group", lambda: handles.append(opened()), expect_none)
        except RuntimeError:
            for handle in handles:
                handle.close()
            # On all ranks, for all have this error: also those without a buffer.
            rendezvous.timeout = ABORTED_TIMEOUT
            self._free_buffer()
            raise
        return handles[0], reason is None and any(fact["needs_tuning"] for fact in facts)

    def _facts(self, tune: bool | None) -> dict[str, Any]:
        facts = {
            "buffer_bytes": self.buffer_bytes,
            "on_timeout": self.on_timeout,
            "max_sms": self.max_sms,
            "device": self.device.type,
            "name": self.name,
            "host": f"{socket.gethostname()} {_boot_id()}",
            "wants_peers": switch("TE_GRAPH_PEER", default=True),
            "gpu": None,
            "needs_tuning": bool(tune),
        }
        if self.device.type == "cuda":
            if tune is None:
                facts["needs_tuning"] = not is_known(self.device)
            facts["gpu"] = str(torch.cuda.get_device_properties(self.device).uuid)
        return facts

    def _open_on_process_group(self) -> Any:
        return _C.GroupHandle.on_process_group(
            self.name, self.process_group.group_name, self.rank, self.world_size, self.device, self.timeout
        )

    def _open_on_peers(self) -> Any:
        handle = _C.GroupHandle.on_peers(
            self.name,
            self._buffer,
            self._receive_buffer_bytes,
            self.rank,
            self.timeout,
            self.on_timeout == "trap",
            self.watchdog,
        )
        shipped = Tuning(*handle.tuning())
        apply(handle, replace(shipped, blocks=blocks_within(self.max_sms)))
        return handle

    def _map_peers(self, gpus: list[str]) -> str | None:
        """Allocate the buffer and map those of the peers. Returns why that is not possible, the same on all ranks."""
        rendezvous = self._rendezvous
        handles = rendezvous.step("allocating the symmetric buffer", lambda: self._allocate().hex(), bytes.fromhex)
        reasons = rendezvous.step("mapping the buffers of peers", lambda: self._map(handles, gpus), _parse_reason)
        if not any(reasons):
            rendezvous.step("writing to peers", self._write_to_peers, expect_none)
            reasons = rendezvous.step("reading what peers wrote", self._read_from_peers, _parse_reason)
        if any(reasons):
            self._free_buffer()
        return next(filter(None, reasons), None)

    def _allocate(self) -> bytes:
        """Returns the handle by which peers map the buffer."""
        self._buffer = _C.SymmetricBuffer(self.device, self.buffer_bytes)
        return self._buffer.handle()

    def _map(self, handles: list[bytes], gpus: list[str]) -> str | None:
        seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        for peer, gpu in enumerate(gpus):
            if gpu not in seen:
                return f"rank {self.rank} does not see the GPU of rank {peer}: make all GPUs visible to all ranks"
            if peer != self.rank and not _C.has_peer_link(self.device.index, seen[gpu]):
                return f"no NVLink between the GPUs of ranks {self.rank} and {peer}"
        return self._buffer.map(handles, self.rank) or None

    def _write_to_peers(self) -> None:
        for peer in range(self.world_size):
            self._buffer.memory_of(peer)[8 * self.rank :][:8].view(torch.int64).fill_(_token(self.rank, peer))
        torch.cuda.synchronize(self.device)

    def _read_from_peers(self) -> str | None:
        found = self._buffer.memory()[: 8 * self.world_size].view(torch.int64).tolist()
        for peer, token in enumerate(found):
            if token != _token(peer, self.rank):
                return f"a write of rank {peer} did not arrive at rank {self.rank}"
        return None


def _token(source: int, destination: int) -> int:
    return 0x7E69_0000_0000 + source * 256 + destination


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _parse_reason(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise ValueError(f"expected a reason or nothing, got {str(value)[:100]}")
    return value


def _why_not_peers(facts: list[dict[str, Any]]) -> str | None:
    """Why kernels cannot write to all ranks, as far as it is known before trying."""
    if any(fact["gpu"] is None for fact in facts):
        return "tensors are on the CPU"
    for rank, fact in enumerate(facts):
        if not fact["wants_peers"]:
            return f"TE_GRAPH_PEER=0 on rank {rank}"
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host than rank 0"
    if len(facts) > MAX_PEERS:
        return f"{len(facts)} ranks, and kernels support {MAX_PEERS}"
    if len({fact["gpu"] for fact in facts}) < len(facts):
        return "two ranks share a GPU"
    return None


@atexit.register
def _forget_groups() -> None:
    """At exit no rank waits for another: peers may have exited."""
    for group in list(_open_groups):
        _open_groups.discard(group)
        group._handle.close()
        if group._buffer is not None:
            group._buffer.abandon()
