"""Gradients of gradients: a backward that is differentiated itself is that of the composition.

The compiled backward kernels have no derivative of their own, and need none: they serve the usual backward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_differentiated() -> bool:
    """Whether the backward at work is to have a derivative: by create_graph=True, or in forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def differentiable_gradients(
    in_aten: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of ``in_aten(*tensors)``, themselves differentiable; None where none is required.

    tensors: those that the operator has saved; grad: the gradient of the result, in its shape and dtype.
    """
    with torch.enable_grad():
        # Views: where one tensor is another, or was computed from it, each has its own part of the gradient.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        wanted = [view for view in views if view is not None and view.requires_grad]
        found = iter(torch.autograd.grad(in_aten(*views), wanted, grad, create_graph=True))
    return [next(found) if view is not None and view.requires_grad else None for view in views]
