"""Checks of the arguments of a PeerGroup."""

import torch
import torch.distributed as dist

from te_graph._build import check_is_built_for

MIN_BUFFER_BYTES = 1 << 20


def device_of(process_group: dist.ProcessGroup, device: torch.device | str | int | None) -> torch.device:
    kinds = {kind.type for kind in process_group._device_types}
    if device is None:
        # gloo reports GPUs as well, but is meant for CPUs.
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
    check_is_built_for(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_timeout(seconds: float) -> None:
    if not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
        raise ValueError(f"PeerGroup: expected timeout in seconds above 0, got {seconds!r}")


def check_options(
    buffer_bytes: int, on_timeout: str, watchdog: float, tune: bool | None, max_sms: int | None, name: str | None
) -> None:
    if not isinstance(buffer_bytes, int) or buffer_bytes < MIN_BUFFER_BYTES:
        raise ValueError(
            f"PeerGroup: expected buffer_bytes of at least {MIN_BUFFER_BYTES} as an int, got {buffer_bytes!r}"
        )
    if on_timeout not in ("raise", "trap"):
        raise ValueError(f"PeerGroup: expected on_timeout 'raise' or 'trap', got {on_timeout!r}")
    if not isinstance(watchdog, int | float) or not 0 <= watchdog < 1e9:
        raise ValueError(f"PeerGroup: expected watchdog in seconds, 0 for none, got {watchdog!r}")
    if not (tune is None or isinstance(tune, bool)):
        raise ValueError(f"PeerGroup: expected tune to be a bool or None, got {tune!r}")
    if not (max_sms is None or (type(max_sms) is int and max_sms >= 1)):
        raise ValueError(f"PeerGroup: expected max_sms to be a positive int or None, got {max_sms!r}")
    if not (name is None or (isinstance(name, str) and name)):
        raise ValueError(f"PeerGroup: expected name to be a string or None, got {name!r}")
