"""How tensors are laid out in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
    """True where they equal a new tensor's. Strides of sizes of 1 count only for images, whose memory format they may
    determine."""
    if tensor.dim() < 4 and tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if stride != expected:
            return tensor.stride()
        expected *= max(size, 1)
    return True
