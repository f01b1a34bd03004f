"""torch's optimizers in their fastest form for the given parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..declaration import declare

__all__ = ["fused_adam", "fused_adamw", "fused_sgd"]

_FUSED_DEVICES = ("cpu", "cuda")


@declare(group="optimizer", runs="torch's own fused step")
def fused_adam(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.Adam:
    """Creates ``torch.optim.Adam`` (Kingma and Ba, arXiv:1412.6980). See :func:`fused_adamw`."""
    return _made(torch.optim.Adam, torch.optim.Adam, params, lr, options)


@declare(group="optimizer", runs="torch's own fused step")
def fused_adamw(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.AdamW:
    """Creates ``torch.optim.AdamW`` with updates of many parameters in one kernel (Loshchilov and Hutter,
    arXiv:1711.05101).

    ``fused=True`` if all parameters are real floats on the CPU or a CUDA GPU, else ``foreach=True``. A step increments
    the version counters of the parameters that it writes, unlike torch's fused steps, so autograd detects the change.
    Steps of a copied or unpickled optimizer do not.

    Args:
        params: tensors, (name, tensor) pairs or groups (dicts), as for any torch optimizer. Sparse
            gradients are not supported.
        lr: the learning rate.
        options: other options of torch.optim.AdamW, except ``fused``, ``foreach`` and ``differentiable``.
    """
    return _made(torch.optim.AdamW, torch.optim.AdamW, params, lr, options)


@declare(group="optimizer", runs="torch's own fused step")
def fused_sgd(params: Iterable, lr: float | Tensor = 1e-3, **options) -> torch.optim.SGD:
    """Creates ``torch.optim.SGD``. See :func:`fused_adamw`. A nonzero dampening uses ``foreach=True``."""
    return _made(FusedSGD, torch.optim.SGD, params, lr, options)


class FusedSGD(torch.optim.SGD):
    """The optimizer of :func:`fused_sgd`."""

    def _init_group(self, group, *lists):
        """Initializes missing momenta of a group with zeros, so that the first momentum is the gradient. torch's fused
        step needs a momentum for all parameters of a group, or for none.

        A step calls this after its closure, which may compute the gradients.
        """
        members = [member for member in group["params"] if member.grad is not None] if group["momentum"] else []
        late = [member for member in members if self.state[member].get("momentum_buffer") is None]
        if len(late) < len(members):
            for member in late:
                self.state[member]["momentum_buffer"] = torch.zeros_like(member)
        return super()._init_group(group, *lists)


def _made(fused_kind, kind, params, lr, options):
    params = _as_list(params)
    if _takes_fused(params, options):
        optimizer = fused_kind(params, lr, fused=True, **options)
        optimizer.register_step_post_hook(_count_writes)
        return optimizer
    return kind(params, lr, foreach=True, **options)


@torch.compiler.disable  # a trace would have no effect
def _count_writes(optimizer, args, kwargs):
    members = (member for group in optimizer.param_groups for member in group["params"])
    torch.autograd.graph.increment_version([member for member in members if member.grad is not None])


def _as_list(params):
    """Returns ``params`` with iterators, which can be read only once, as lists."""
    if isinstance(params, Tensor):
        return params  # torch raises the error
    return [{**group, "params": _members(group)} if isinstance(group, dict) else group for group in params]


def _members(group):
    """The parameters of an entry of ``params``: a group, or the parameter itself."""
    members = group["params"] if isinstance(group, dict) else group
    return list(members) if isinstance(group, dict) and not isinstance(members, Tensor) else [members]


def _takes_fused(params, options) -> bool:
    # The first momentum is not dampened, but a fused step from zeros would dampen it.
    groups = [group for group in params if isinstance(group, dict)]
    if any(settings.get("dampening") for settings in (options, *groups)):
        return False
    members = [member for group in params for member in _members(group)]
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    # torch rejects other types.
    return all(t.is_floating_point() and t.device.type in _FUSED_DEVICES for t in tensors if isinstance(t, Tensor))
