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
    """Computes ``torch.einsum(equation, *tensors)``, and returns the result as a view of ``shape``.

    PyTorch's libraries compute the matrix products of einsum. The dense result is viewed in another shape without a
    copy, unless its axes have another order in memory. For example,
    ``contract("bnhd,hde->bne", x, w, shape=(b * n, -1))`` needs no separate reshape.

    Args:
        equation: see ``torch.einsum``; tensors: one or more, float64, float32, float16 or bfloat16, of one
            dtype (autocast aligns dtypes) and device.
        shape: a shape with the number of elements of the result; one size may be -1. None: einsum's shape.

    Raises:
        RuntimeError: incompatible equation, tensors or shape. TypeError: an argument of another type.
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
    require(
        fits,
        operator,
        lambda: f"shape {tuple(sizes)} does not have as many elements as the result of shape {tuple(y.shape)}",
    )
    return sizes
