"""Sums of products over indices, by torch.einsum."""

import math

import torch
from torch import Tensor

from ..arguments import as_integer
from ..declaration import declare
from ..registration import require, require_float, require_same_options

__all__ = ["contract"]


@declare(group="block", example=lambda t, rows, columns: ("bij,jk->bik", t(2, 3, 4), t(4, 5)), runs="torch.einsum")
def contract(equation: str, *tensors: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """``torch.einsum(equation, *tensors)``, then as a view of ``shape``.

    einsum makes matrix products of it, PyTorch's libraries compute them, and the result, which is dense, is seen
    in another shape without a copy (its axes in another order in memory are copied): so the scores of
    heads, ``contract("bnhd,hde->bne", x, w, shape=(b * n, -1))``, need no reshape of their own.

    Args:
        equation: as of ``torch.einsum``; tensors: one or more, float64, float32, float16 or bfloat16, of one
            dtype (autocast aligns them) and device.
        shape: as many elements as the result has; one size may be -1. None: as einsum leaves it.

    Raises:
        RuntimeError: an equation, tensors or a shape that do not fit. TypeError: an argument of another kind.
    """
    operator = "contract"
    if not isinstance(equation, str):
        raise TypeError(f"kfconvert::{operator}: equation must be text, got {type(equation).__name__}")
    require(len(tensors) > 0, operator, "there is no tensor")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"kfconvert::{operator}: tensors must be tensors, got {type(tensor).__name__}")
        require_float(operator, tensor)
        require_same_options(operator, f"tensor {i}", tensors[0], tensor, "tensor 0")
    y = torch.einsum(equation, *tensors)
    return y if shape is None else y.reshape(_fitting(operator, shape, y))


def _fitting(operator, shape, y):
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"kfconvert::{operator}: shape must be a tuple of integers, got {type(shape).__name__}")
    sizes = [as_integer(operator, "shape", size) for size in shape]
    known = math.prod([size for size in sizes if size != -1])
    fits = min(sizes, default=0) >= -1 and sizes.count(-1) <= 1
    fits = fits and (known == y.numel() if -1 not in sizes else known > 0 and y.numel() % known == 0)
    require(fits, operator, lambda: f"shape {tuple(sizes)} does not hold the result of shape {tuple(y.shape)}")
    return sizes
