"""Ranks that share one GPU, for tests of several GPUs where there is one: ``TE_GRAPH_TEST_SHARE_GPU=1``.

Kernels of two processes take turns on a GPU, so ranks that wait for each other go on after a time slice of some
milliseconds. Peers map each other's memory as between GPUs; what is not tested so is the link. NCCL refuses such ranks,
so they have gloo beside, which copies through the host and cannot be captured.
"""

import os
from typing import Any

import torch

from te_graph import _C
from te_graph.collectives import options, peer_group

IS_SHARED = os.environ.get("TE_GRAPH_TEST_SHARE_GPU") == "1"
BACKEND = "cpu:gloo,cuda:gloo"

_why_not_peers = peer_group._why_not_peers


def share() -> None:
    """For the rest of this process groups are opened on the current GPU, and have peers on it."""
    peer_group._why_not_peers = _why_not_peers_apart_from_sharing
    peer_group.device_of = _device_of
    _C.has_peer_link = lambda device, peer: True


def _why_not_peers_apart_from_sharing(facts: list[dict[str, Any]]) -> str | None:
    apart = [{**fact, "gpu": fact["gpu"] and f"{fact['gpu']} {rank}"} for rank, fact in enumerate(facts)]
    return _why_not_peers(apart)


def _device_of(process_group: Any, device: Any) -> torch.device:
    return options.device_of(process_group, "cuda" if device is None else device)
