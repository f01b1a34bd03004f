"""Properties of tensors besides shape, dtype and device: no graph records code that depends on them.

Trial runs find whether a model depends on them, see ``capture.argument_trials``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: The outputs depend on how arguments are laid out in memory.
LAYOUT = "the memory layout"
#: The outputs depend on the class of arguments, on what autograd records for them, or on whether it records.
AUTOGRAD = "gradients or the class"


def memory_format_of(image: Tensor) -> bool | str:
    """True where it is contiguous; "channels last" where operators treat it and their results as such, as c10's
    ``suggest_memory_format`` decides: a tensor with gaps may be one; else False."""
    if image.is_contiguous():
        return True
    if image.dim() not in (4, 5):
        return False
    least = 0
    for dimension in (1, *range(image.dim() - 1, 1, -1), 0):
        size, stride = image.shape[dimension], image.stride(dimension)
        is_ambiguous = least == image.stride(1) if dimension == 0 else stride == 0 == least
        if size == 0 or stride < least or is_ambiguous:
            return False
        least = stride * size
    return "channels last"


def strides_of(tensor: Tensor) -> Any:
    """True where they equal a new tensor's. A tensor is contiguous regardless of its strides in sizes of 1."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if stride != expected:
            return tensor.stride()
        expected *= max(size, 1)
    return True


def facts(names: Collection[str], values: Iterable[Any]) -> list[Any]:
    """The properties of these kinds, for each tensor among ``values``."""
    tensors = [value for value in values if isinstance(value, Tensor)] if names else []
    found: list[Any] = []
    if LAYOUT in names:
        found += [(strides_of(tensor), tensor.storage_offset()) for tensor in tensors]
    if AUTOGRAD in names:
        found.append(torch.is_grad_enabled())
        found += [(isinstance(t, nn.Parameter), t.requires_grad, t.is_leaf and t.grad is None) for t in tensors]
    return found
