"""The ranks that flat parameters are reduced over, and those that have other parts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from te_graph.collectives.peer_group import PeerGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Groups(NamedTuple):
    """Those of a ``FlatParameters``.

    Attributes:
        process_group: among whose ranks buckets are divided; None: this one is alone.
        replica_group: of the ranks that have this one's place in other process groups; None: there are none.
        peer_group: over ``process_group``; None: one is to be made.
    """

    process_group: ProcessGroup | None
    replica_group: ProcessGroup | None = None
    peer_group: PeerGroup | None = None

    @classmethod
    def of(cls, process_group: Any, peer_group: Any, mesh: Any) -> Groups:
        """Those that the arguments of ``FlatParameters`` name.

        Raises:
            TypeError, ValueError: they are none, or do not go together.
        """
        if not dist.is_available():
            return cls(None)
        given, which, replica_group = process_group, "process_group", None
        if mesh is not None:
            if process_group is not None:
                raise ValueError("FlatParameters: expected mesh or process_group, got both")
            given, replica_group = _groups_of(mesh)
            which = "the last dimension of mesh"
        if peer_group is not None:
            if not isinstance(peer_group, PeerGroup):
                raise TypeError(
                    f"FlatParameters: expected peer_group to be a PeerGroup, got {type(peer_group).__name__}"
                )
            if given is not None and given is not peer_group.process_group:
                raise ValueError(f"FlatParameters: expected {which} to be that of peer_group, got another one")
            given = peer_group.process_group
        if given is None and dist.is_initialized():
            given = dist.group.WORLD
        _check_group("process_group", given)
        return cls(given, replica_group, peer_group)

    @property
    def reduced_over(self) -> list[ProcessGroup]:
        """Each that has ranks with other gradients of the same parameters."""
        return [group for group in (self.process_group, self.replica_group) if group is not None and group.size() > 1]


def tensor_parallel_group(tp_group: Any) -> ProcessGroup | None:
    """The process group that ``tp_group`` is, or is over.

    Raises:
        TypeError: it is none.
    """
    group = tp_group.process_group if isinstance(tp_group, PeerGroup) else tp_group
    _check_group("tp_group", group)
    return group


def _check_group(which: str, group: Any) -> None:
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"FlatParameters: expected {which} to be a process group that this rank is in, got {group!r:.100}"
        )


def _groups_of(mesh: Any) -> tuple[ProcessGroup, ProcessGroup | None]:
    """The process group and the replica group of ``mesh``."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"FlatParameters: expected mesh to be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"FlatParameters: expected mesh to have one dimension, or two, replicas and shards, got {mesh.ndim}: take "
            "those of a larger one by their names, as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"FlatParameters: expected mesh to have this rank in it, got {mesh}")
    groups = mesh.get_all_groups()
    return groups[-1], groups[0] if mesh.ndim == 2 else None
