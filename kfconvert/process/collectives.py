"""Local collectives of ``torch.distributed`` during the conversion of a rank's model.

A conversion runs a model some hundred times, and the number depends on measurements of each rank. If ranks communicated
in these runs, they would wait for each other, or receive data of other runs.
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

#: A recorded collective: the operator, the process group, and the shapes and dtypes of the tensors.
Collective = tuple[Any, ...]

# Collectives with a result on each rank. Others have one on a single rank, or involve two ranks.
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
    """Raised for a collective that a rank cannot compute locally."""


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Context manager in which collectives of this thread return locally, so that converting one rank does not wait for
    others. The result is as if all ranks had equal data, and reductions were sums. Other threads communicate.

    All collectives end in an operator of c10d, whose kernels are replaced. The local results are valid to compare two
    implementations, but must not be stored. If ``model`` gathers its parameters, this context has no effect.
    """
    if not is_one_of_several() or gathers_parameters(model):
        yield
        return
    here, groups = ThisThread(), dict[str, Any]()
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
    """Context manager that yields a list of the collectives of this thread, within ``alone``."""
    noted: list[Collective] = []
    _logs.append(noted)
    try:
        yield noted
    finally:
        _logs.remove(noted)


def _stand_in(name: str, kernel: Any, here: ThisThread, groups: dict[str, Any]) -> Callable[..., Any]:
    def stand_in(keys: Any, *args: Any) -> Any:
        group = next((arg for arg in args if _is_group(arg)), None)
        if not here or group is None:
            return kernel.call_boxed(keys, *args)
        if name not in _OF_ALL:
            raise CannotBeAlone(f"{name} involves only some of the ranks, so a rank cannot be converted alone")
        real = dist.ProcessGroup.unbox(group)
        for noted in _logs:
            noted.append((name, real.group_name, *map(_kind, _tensors(args))))
        if real.group_name not in groups:
            groups[real.group_name] = _fake(real.rank(), real.size()).boxed()
        results = kernel.call_boxed(keys, *[groups[real.group_name] if _is_group(arg) else arg for arg in args])
        if "reduce" in name:  # Python cannot read the kind of reduction from the argument
            for tensor in _tensors(args[:1]):
                if tensor.dtype is not torch.bool:
                    tensor.mul_(real.size())
        return results

    return stand_in


def _fake(rank: int, size: int) -> Any:
    """A process group of this size and rank that does not communicate."""
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
