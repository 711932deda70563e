"""Groups of ranks for collectives that capture, replay and tracing cannot break."""

import atexit
import functools
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph import _C
from te_graph.collectives.rendezvous import Agreement, nothing
from te_graph.collectives.tuning import Tuning, is_known, tune

logger = logging.getLogger("te_graph")

MAX_PEERS = 8
MIN_SLAB_BYTES = 1 << 20
PAGE_BYTES = 4096
SLAB_BYTES = 512 << 20
# For set-up and teardown, where a rank that is missing will not come.
PATIENCE = 120.0
PATIENCE_AFTER_FAILURE = 5.0

# Groups live until they are closed: graphs and traces hold their names.
_open_groups: "set[PeerGroup]" = set()


class PeerGroup:
    """Ranks that all_reduce, reduce_scatter and all_gather together, found by these ops through its name.

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
        slab_bytes: memory of each GPU that its peers write into: one half for what they send, through which larger
            operations go in parts, one for `mem_pool`.
        timeout: seconds that an operation waits for a peer.
        on_timeout: "raise": outputs become NaN, `found_inf` 1, and the next op or `check` raises; "trap": the CUDA
            context ends at once.
        watchdog: seconds after which a process that has not looked at a failure is ended, with the message on stderr;
            0 for never.
        device: where tensors are; the current GPU if the process group serves GPUs, else the CPU.
        tune: measure at set-up which algorithm is best for which size, in half a second; None: unless thresholds for
            all ranks' GPUs are shipped (H100, H200).
        name: what ops find the group by; the process group's name if None, with a number for its second group.

    Raises:
        ValueError: an argument is none of the above; on the other ranks, which hear of it, a RuntimeError.
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
        slab_bytes: int = SLAB_BYTES,
        timeout: float = 600.0,
        on_timeout: str = "raise",
        watchdog: float = 30.0,
        device: torch.device | str | int | None = None,
        tune: bool | None = None,
        name: str | None = None,
    ) -> None:
        process_group = process_group if process_group is not None else dist.group.WORLD
        if process_group is None:
            raise ValueError("PeerGroup: expected torch.distributed to be initialized, or a process_group")
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(f"PeerGroup: expected a process_group that this rank is in, got {process_group!r}")
        self.process_group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self._agreement = Agreement(process_group, process_group.group_name, PATIENCE)
        try:
            _check_timeout(timeout)
            _check_options(slab_bytes, on_timeout, watchdog, tune, name)
            self.device = _device_of(process_group, device)
        except Exception as error:
            self._agreement.fail(error)
            raise
        self.timeout, self.on_timeout, self.watchdog = float(timeout), on_timeout, float(watchdog)
        number = self._agreement.number
        self.name = name or process_group.group_name + (f".{number}" if number > 1 else "")
        self.slab_bytes = slab_bytes
        self._inbox_bytes = slab_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        self._pool: torch.cuda.MemPool | None = None
        self._slab: Any = None
        self._handle, needs_tuning = self._set_up(tune)
        _open_groups.add(self)
        if needs_tuning:
            try:
                self.tune()
            except RuntimeError:
                self.close()  # on all ranks, for all have this error
                raise

    @property
    def uses_peers(self) -> bool:
        """Whether kernels write into peers' memory; else data goes through the process group."""
        return self._slab is not None

    @functools.cached_property  # so that a capture finds the tensor among the group's attributes
    def found_inf(self) -> Tensor:
        """[] fp32 on the device: 0, or 1 once the group was given up. For optimizers that are captured.

        It stays 1, so nothing but the group writes it: torch, and ops that would, raise a RuntimeError. A clip gets a
        flag of its own, which is zeroed in each step and tells the optimizer (``optimizer.found_inf = flag``, once) of
        both::

            flag.zero_()
            te_graph.clip_grad_norm_(parameters, 1.0, found_inf=flag)
            torch.maximum(flag, group.found_inf, out=flag)
            optimizer.step()

        Where torch raises, it has written before: such an error is not to be passed over.

        Raises:
            RuntimeError: `uses_peers` is False.
        """
        return self._handle.found_inf()

    def tune(self) -> Tuning:
        """Measure which algorithm is best for which size, and use it from now on. All ranks call it.

        Returns:
            The thresholds, the same on all ranks.

        Raises:
            RuntimeError: `uses_peers` is False, or something failed on a rank.
        """
        if not self.uses_peers:
            raise RuntimeError(f"PeerGroup.tune: expected a group of peers, got {self!r}")
        return tune(self)

    def mem_pool(self) -> torch.cuda.MemPool:
        """A pool for tensors in the slab: what peers gather into such an output is written there and not copied.

        Use it with torch.cuda.use_mem_pool(pool), or as the pool of a graph: torch.cuda.graph(g, pool=pool.id). Tensors
        elsewhere give the same values; ranks need not agree on it. Without peers it is an ordinary pool. Keep the group
        open while tensors of the pool are in use.

        Raises:
            RuntimeError: the group is not on GPUs. Later, torch.OutOfMemoryError: the slab is exhausted.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"PeerGroup.mem_pool: expected a group on GPUs, got one on {self.device}")
        if self._pool is None:
            allocator = None
            if self._slab is not None:
                allocator = _C.make_pool_allocator(self.name, self._slab.memory(), self._inbox_bytes)
            with torch.cuda.device(self.device):
                self._pool = torch.cuda.MemPool(allocator)
        return self._pool

    def check(self) -> None:
        """Raise if the group was given up: which rank, which operation, what was expected and seen. No host sync.

        Raises:
            RuntimeError: the group was given up, or closed.
        """
        self._handle.check("PeerGroup.check")

    def abort(self) -> None:
        """Give the group up: ops raise from now on. Between peers, operations that wait end on all of them; those of a
        process group end when its own time is over.
        """
        self._handle.abort()

    def set_timeout(self, seconds: float) -> None:
        """Change the time that operations wait for a peer: between peers also of those in graphs and those under way;
        those under way of a process group keep theirs.
        """
        _check_timeout(seconds)
        self._handle.set_timeout(seconds)
        self.timeout = float(seconds)

    def close(self) -> None:
        """Wait for all work and all ranks, and give memory back.

        Ranks of a group that was given up are waited for some seconds only, for they may be dead. Ops with the group's
        name raise from now on; graphs that hold operations must not be replayed any more.
        """
        if self not in _open_groups:
            return
        _open_groups.discard(self)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:
            self.check()
        except RuntimeError:
            self._agreement.patience = PATIENCE_AFTER_FAILURE
        self._handle.close()
        self._give_slab_back()
        self._pool = None

    def __enter__(self) -> "PeerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self in _open_groups:
            # The others may be waiting for this rank, which will not come.
            self.abort()
        self.close()

    def __copy__(self) -> "PeerGroup":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PeerGroup":
        return self

    def __repr__(self) -> str:
        way = "peers" if self.uses_peers else "process group" if self.world_size > 1 else "one rank"
        return f"PeerGroup({self.name!r}, rank {self.rank} of {self.world_size}, {self.device}, {way})"

    def _give_slab_back(self) -> None:
        """Once all ranks are done with it. Where one does not come, it may be alive and writing: the slab stays."""
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.unmap()
        try:
            self._agreement.wait("closing the group")
        except RuntimeError:
            if slab is not None:
                slab.abandon()

    def _set_up(self, tune: bool | None) -> tuple[Any, bool]:
        """The group's handle, and whether thresholds have to be measured."""
        agree = self._agreement
        facts = agree.step("looking for peers", lambda: self._facts(tune), _parse_facts)
        _check_alike(facts)
        if self.world_size == 1:
            return _C.GroupHandle.alone(self.name, self.device), False
        handles: list[Any] = []
        try:
            reason = _why_not_peers(facts) or self._map_peers([fact["gpu"] for fact in facts])
            if reason is not None and self.device.type == "cuda":
                logger.warning("PeerGroup %s: no peers (%s); data goes through the process group", self.name, reason)
            opened = self._open_on_peers if reason is None else self._open_on_process_group
            agree.step("opening the group", lambda: handles.append(opened()), nothing)
        except RuntimeError:
            for handle in handles:
                handle.close()
            # On all ranks, for all have this error: also those that have no slab.
            agree.patience = PATIENCE_AFTER_FAILURE
            self._give_slab_back()
            raise
        return handles[0], reason is None and any(fact["needs_tuning"] for fact in facts)

    def _facts(self, tune: bool | None) -> dict[str, Any]:
        facts = {
            "slab_bytes": self.slab_bytes,
            "on_timeout": self.on_timeout,
            "device": self.device.type,
            "name": self.name,
            "host": f"{socket.gethostname()} {_boot_id()}",
            "wants_peers": os.environ.get("TE_GRAPH_PEER", "1") != "0",
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
        return _C.GroupHandle.on_peers(
            self.name,
            self._slab,
            self._inbox_bytes,
            self.rank,
            self.timeout,
            self.on_timeout == "trap",
            self.watchdog,
        )

    def _map_peers(self, gpus: list[str]) -> str | None:
        """Allocate the slab and map those of the peers. Returns why that is not possible, the same on all ranks."""
        agree = self._agreement
        handles = agree.step("allocating the slab", lambda: self._allocate().hex(), bytes.fromhex)
        troubles = agree.step("mapping the slabs of peers", lambda: self._map(handles, gpus), _parse_trouble)
        if not any(troubles):
            agree.step("writing to peers", self._write_to_peers, nothing)
            troubles = agree.step("reading what peers wrote", self._read_from_peers, _parse_trouble)
        if any(troubles):
            self._give_slab_back()
        return next(filter(None, troubles), None)

    def _allocate(self) -> bytes:
        """Returns what peers map the slab by."""
        self._slab = _C.PeerSlab(self.device, self.slab_bytes)
        return self._slab.handle()

    def _map(self, handles: list[bytes], gpus: list[str]) -> str | None:
        seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        for peer, gpu in enumerate(gpus):
            if gpu not in seen:
                return f"rank {self.rank} does not see the GPU of rank {peer}: make all GPUs visible to all ranks"
            if peer != self.rank and not _C.has_peer_link(self.device.index, seen[gpu]):
                return f"no NVLink between the GPUs of ranks {self.rank} and {peer}"
        return self._slab.map(handles, self.rank) or None

    def _write_to_peers(self) -> None:
        for peer in range(self.world_size):
            self._slab.memory_of(peer)[8 * self.rank :][:8].view(torch.int64).fill_(_token(self.rank, peer))
        torch.cuda.synchronize(self.device)

    def _read_from_peers(self) -> str | None:
        found = self._slab.memory()[: 8 * self.world_size].view(torch.int64).tolist()
        for peer, token in enumerate(found):
            if token != _token(peer, self.rank):
                return f"what rank {peer} wrote did not come to rank {self.rank}"
        return None


def _token(source: int, destination: int) -> int:
    return 0x7E69_0000_0000 + source * 256 + destination


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _device_of(process_group: dist.ProcessGroup, device: torch.device | str | int | None) -> torch.device:
    kinds = {kind.type for kind in process_group._device_types}
    if device is None:
        # gloo says that it serves GPUs, too, and is meant for CPUs.
        serves_gpus = "cuda" in kinds and process_group._get_backend(torch.device("cuda")).name() != "gloo"
        device = "cuda" if serves_gpus else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"PeerGroup: expected device to be one of torch's, got {device!r}") from error
    if device.type == "cpu":
        device = torch.device("cpu")  # tensors there have no index
    if device.type not in kinds:
        raise ValueError(
            f"PeerGroup: expected a device that the process group serves ({', '.join(sorted(kinds))}), got {device}"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_timeout(seconds: float) -> None:
    if not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
        raise ValueError(f"PeerGroup: expected timeout in seconds above 0, got {seconds!r}")


def _check_options(slab_bytes: int, on_timeout: str, watchdog: float, tune: bool | None, name: str | None) -> None:
    if not isinstance(slab_bytes, int) or slab_bytes < MIN_SLAB_BYTES:
        raise ValueError(f"PeerGroup: expected slab_bytes of at least {MIN_SLAB_BYTES} as an int, got {slab_bytes!r}")
    if on_timeout not in ("raise", "trap"):
        raise ValueError(f"PeerGroup: expected on_timeout 'raise' or 'trap', got {on_timeout!r}")
    if not isinstance(watchdog, int | float) or not 0 <= watchdog < 1e9:
        raise ValueError(f"PeerGroup: expected watchdog in seconds, 0 for none, got {watchdog!r}")
    if not (tune is None or isinstance(tune, bool)):
        raise ValueError(f"PeerGroup: expected tune to be a bool or None, got {tune!r}")
    if not (name is None or (isinstance(name, str) and name)):
        raise ValueError(f"PeerGroup: expected name to be a string or None, got {name!r}")


_FACTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("on_timeout", "device", "name", "host"), (str,)),
    **dict.fromkeys(("wants_peers", "needs_tuning"), (bool,)),
    "slab_bytes": (int,),
    "gpu": (str, type(None)),
}


def _parse_facts(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != _FACTS.keys():
        raise ValueError(f"expected {', '.join(sorted(_FACTS))}, got {str(value)[:100]}")
    for name, kinds in _FACTS.items():
        if type(value[name]) not in kinds:
            raise ValueError(f"expected {name} of type {kinds[0].__name__}, got {str(value[name])[:100]}")
    return value


def _parse_trouble(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise ValueError(f"expected a reason or nothing, got {str(value)[:100]}")
    return value


def _check_alike(facts: list[dict[str, Any]]) -> None:
    for what in ("slab_bytes", "on_timeout", "device", "name"):
        for rank, fact in enumerate(facts):
            if fact[what] != facts[0][what]:
                raise RuntimeError(
                    f"PeerGroup: expected the same {what} on all ranks, got {facts[0][what]} on rank 0 and "
                    f"{fact[what]} on rank {rank}"
                )


def _why_not_peers(facts: list[dict[str, Any]]) -> str | None:
    """Why kernels cannot write to all ranks; what is known before anything is tried."""
    if any(fact["gpu"] is None for fact in facts):
        return "tensors are on the CPU"
    for rank, fact in enumerate(facts):
        if not fact["wants_peers"]:
            return f"TE_GRAPH_PEER=0 on rank {rank}"
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host than rank 0"
    if len(facts) > MAX_PEERS:
        return f"{len(facts)} ranks, and kernels know {MAX_PEERS}"
    if len({fact["gpu"] for fact in facts}) < len(facts):
        return "two ranks share a GPU"
    return None


@atexit.register
def _forget_groups() -> None:
    """At exit nobody waits for anybody: peers may have gone."""
    for group in list(_open_groups):
        _open_groups.discard(group)
        group._handle.close()
        if group._slab is not None:
            group._slab.abandon()
