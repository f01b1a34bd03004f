"""Distributed parameters (``DTensor``), sharded over processes."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

# The attributes that lead from a distributed tensor to this rank's shard (see ``wrapped_tensors.inner_tensor``).
OF_SHARD = ("_local_tensor",)


def shard_of(tensor: Any) -> Tensor | None:
    """Returns this rank's shard of a distributed tensor; None for other values."""
    library = sys.modules.get("torch.distributed.tensor")  # imported if any exist
    return tensor._local_tensor if library is not None and isinstance(tensor, library.DTensor) else None


def is_one_of_several() -> bool:
    """Whether this process is one of several in a distributed run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathers_parameters(model: nn.Module) -> bool:
    """Whether a module gathers parameters from all ranks in its calls, as with ``fully_shard``, and may keep them."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())
