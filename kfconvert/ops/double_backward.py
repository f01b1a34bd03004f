"""Double backward: a backward that is itself differentiated uses the composition.

The compiled backward kernels have no derivative. They compute the ordinary backward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_differentiated() -> bool:
    """Whether the running backward must be differentiable: with create_graph=True, or in forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def differentiable_gradients(
    in_aten: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Returns differentiable gradients of ``in_aten(*tensors)``; None for tensors without a required gradient.

    tensors: saved tensors of the operator; grad: the gradient of the result, in its shape and dtype.
    """
    with torch.enable_grad():
        # Views, so that each tensor gets a separate gradient, even if tensors are equal or depend on each other.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        wanted = [view for view in views if view is not None and view.requires_grad]
        found = iter(torch.autograd.grad(in_aten(*views), wanted, grad, create_graph=True))
    return [next(found) if view is not None and view.requires_grad else None for view in views]
