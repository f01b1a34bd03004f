"""Collectives of ``torch.distributed`` that one rank computes for itself, while its model is converted.

A conversion runs a model some hundred times, how often depends on what is measured, and on each rank something else is.
Were the ranks to communicate in these runs, they would wait for one another, or get what was meant for another run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .shards import gathers_parameters, is_one_of_several
from .turns import ThisThread

#: One in a log: the operator, the group of processes, and the shapes and dtypes of the tensors.
Collective = tuple[Any, ...]

# Those of which each rank has a result. Of the others one does, or they are for two ranks.
_OF_ALL = frozenset(
    f"c10d::{name}"
    for name in (
        "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "barrier",
    )
)  # fmt: skip
_DEVICES = ("CPU", "CUDA")
_logs: list[list[Collective]] = []


class CannotBeAlone(RuntimeError):
    """A collective that a rank cannot compute for itself."""


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Within the block, a collective that this thread begins waits for no other rank: its result is that of ranks which
    all hold what this one does, where reductions are taken for sums. Those of other threads communicate.

    All ways to a collective end in an operator of c10d, whose kernels are others meanwhile. What a rank makes up is
    good for a comparison of two ways to compute with it, and for nothing that is kept: where ``model`` gathers its
    parameters, nothing is done here.
    """
    if not is_one_of_several() or gathers_parameters(model):
        yield
        return
    here, groups = ThisThread(), _Groups()
    library = torch.library.Library("c10d", "IMPL")
    try:
        for name in torch._C._dispatch_get_all_op_names():
            for key in _DEVICES:
                if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                    stand_in = _stand_in(name, torch.library.get_kernel(name, key), here, groups)
                    short = name.removeprefix("c10d::")
                    library.impl(short, stand_in, key, with_keyset=True, allow_override=True)
        yield
    finally:
        here.over = True
        library._destroy()


@contextmanager
def noted_collectives() -> Iterator[list[Collective]]:
    """Yields a list of the collectives that this thread begins within the block, where it is alone."""
    noted: list[Collective] = []
    _logs.append(noted)
    try:
        yield noted
    finally:
        _logs.remove(noted)


def _stand_in(name: str, kernel: Any, here: ThisThread, groups: _Groups) -> Callable[..., Any]:
    def stand_in(keys: Any, *args: Any) -> Any:
        group = next((arg for arg in args if _is_group(arg)), None)
        if not here or group is None:
            return kernel.call_boxed(keys, *args)
        if name not in _OF_ALL:
            raise CannotBeAlone(f"{name} is for some of the ranks, which cannot be converted apart from the others")
        for noted in _logs:
            noted.append((name, dist.ProcessGroup.unbox(group).group_name, *map(_kind, _tensors(args))))
        results = kernel.call_boxed(keys, *[groups.apart(arg) if _is_group(arg) else arg for arg in args])
        if "reduce" in name:  # of which kind, the operator's argument does not tell in Python
            for tensor in _tensors(args[:1]):
                if tensor.dtype is not torch.bool:
                    tensor.mul_(dist.ProcessGroup.unbox(group).size())
        return results

    return stand_in


class _Groups:
    """For each group of processes one of its size and rank that does not communicate."""

    def __init__(self) -> None:
        self._apart: dict[str, Any] = {}

    def apart(self, group: Any) -> Any:
        real = dist.ProcessGroup.unbox(group)
        if real.group_name not in self._apart:
            self._apart[real.group_name] = _fake(real.rank(), real.size()).boxed()
        return self._apart[real.group_name]


def _fake(rank: int, size: int) -> Any:
    from torch._C._distributed_c10d import FakeProcessGroup

    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    for device in _DEVICES:
        group._register_backend(torch.device(device.lower()), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def _is_group(value: Any) -> bool:
    if not isinstance(value, torch.ScriptObject):
        return False
    kind: Any = value._type()  # the stubs lack its name
    return kind.name() == "ProcessGroup"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype
