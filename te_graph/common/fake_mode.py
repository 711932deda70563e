"""Whether code runs for its shapes alone: on the meta device, and under FakeTensorMode, as torch.export runs it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_in_fake_mode() -> bool:
    """Whether this thread is in a FakeTensorMode, where what is made has no values, nor what is computed of others."""
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_FAKE) is not None


def has_no_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` [...], or what is computed of it here, has a shape alone."""
    return tensor.is_meta or isinstance(tensor, FakeTensor) or is_in_fake_mode()


def is_traced() -> bool:
    """Whether torch.export or make_fx makes a program of what this thread computes."""
    return get_proxy_mode() is not None
