"""Distributed parameters (``DTensor``), of which each process of a run holds a part, its shard."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def shard_of(tensor: Any) -> Tensor | None:
    """What this rank holds of a distributed tensor, None for anything else."""
    library = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return tensor._local_tensor if library is not None and isinstance(tensor, library.DTensor) else None


def is_one_of_several() -> bool:
    """Whether this process is one of several in a distributed run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathers_parameters(model: nn.Module) -> bool:
    """Whether a module gathers parameters from all ranks for its calls, as those of ``fully_shard`` do; it may keep
    them."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())
