"""torch's optimizers in their fastest form for the parameters that they are given."""

from collections.abc import Iterable

import torch
from torch import Tensor

_FUSED_DEVICES = ("cpu", "cuda")


def fused_adam(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.Adam:
    """``torch.optim.Adam`` (Kingma and Ba, arXiv:1412.6980), chosen and called as :func:`fused_adamw`."""
    return _made(torch.optim.Adam, params, lr, options)


def fused_adamw(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.AdamW:
    """``torch.optim.AdamW``, which updates in one kernel for many parameters (Loshchilov and Hutter,
    arXiv:1711.05101).

    ``fused=True`` where all parameters are real floats on the CPU or a CUDA GPU, else ``foreach=True``. A step
    moves the version counters of the parameters that it writes, which torch's fused steps leave as they were: so
    autograd, and caches of what was derived from them, see the change.

    Args:
        params: tensors, (name, tensor) pairs or groups (dicts), as any torch optimizer takes them. Sparse
            gradients are not supported.
        lr: the learning rate.
        options: all others of torch.optim.AdamW but ``fused`` and ``foreach``.
    """
    return _made(torch.optim.AdamW, params, lr, options)


def fused_sgd(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.SGD:
    """``torch.optim.SGD``, chosen and called as :func:`fused_adamw`."""
    return _made(torch.optim.SGD, params, lr, options)


def _made(kind, params, lr, options):
    params = _as_list(params)
    implementation = _implementation(params)
    optimizer = kind(params, lr, **implementation, **options)
    if implementation.get("fused"):
        optimizer.register_step_post_hook(_count_writes)
    return optimizer


@torch.compiler.disable  # which would trace it into nothing
def _count_writes(optimizer, args, kwargs):
    members = (member for group in optimizer.param_groups for member in group["params"])
    torch.autograd.graph.increment_version([member for member in members if member.grad is not None])


def _as_list(params):
    """``params`` with iterators, which can be read only once, as lists."""
    if isinstance(params, Tensor):
        return params  # torch's own error
    return [{**group, "params": _members(group)} if isinstance(group, dict) else group for group in params]


def _members(group):
    """The parameters of ``params``'s entry: those of a group, or the parameter itself."""
    members = group["params"] if isinstance(group, dict) else group
    return list(members) if isinstance(group, dict) and not isinstance(members, Tensor) else [members]


def _implementation(params) -> dict[str, bool]:
    members = [member for group in params for member in _members(group)]
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    # What is no tensor, torch refuses.
    fused = all(
        t.is_floating_point() and t.device.type in _FUSED_DEVICES for t in tensors if isinstance(t, Tensor)
    )
    return {"fused": True} if fused else {"foreach": True}
