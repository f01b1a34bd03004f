"""What the Triton kernels take, and tensors laid out for them."""

import torch
import triton
from torch import Tensor

from ...ops.registration import require
from .launch import WIDEST, tile

_INTERPRETED = not isinstance(tile, triton.JITFunction)


def require_forward(operator: str, *tensors: Tensor | None) -> None:
    """RuntimeError of one line for what kfconvert.ops takes and the Triton kernels do not."""
    given = [tensor for tensor in tensors if tensor is not None]
    require(_INTERPRETED or all(t.is_cuda for t in given), operator, "Triton needs CUDA tensors")
    wide = any(tensor.dtype == torch.float64 for tensor in given)
    require(not wide, operator, "the Triton kernels compute in float32 and take no float64")
    cast = torch.is_autocast_enabled(given[0].device.type)
    require(not cast, operator, "the Triton kernels know no autocast; kfconvert.ops does")
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    require(not learned, operator, "the Triton kernels are forward only; kfconvert.ops has the backward")


def require_width(operator: str, cols: int) -> None:
    """RuntimeError for rows that are too long for a tile."""
    require(cols <= WIDEST, operator, f"Triton takes rows of at most {WIDEST} elements, not {cols}")


def laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """x with the shape of the dense tensor y, to which it broadcasts, and with its order in memory."""
    x = x.expand(y.shape)
    return x if x.stride() == y.stride() else torch.empty_like(y, dtype=x.dtype).copy_(x)


def repeated_rows(values: Tensor, x: Tensor, dims: int) -> tuple[Tensor, int, int]:
    """(values, inner, count): values as contiguous rows, of which row r of x gets row r // inner % count.

    values: a shape that broadcasts to x's; a row is its last ``dims`` dimensions. It is expanded unless it
    repeats in the first and the last of the other dimensions only.
    """
    values = values[(None,) * (x.dim() - values.dim())]
    leading = x.dim() - dims
    kept = [d for d in range(leading) if values.shape[d] != 1]
    first, last = (kept[0], kept[-1] + 1) if kept else (leading, leading)
    if values.shape[first:last] != x.shape[first:last] or values.shape[leading:] != x.shape[leading:]:
        values, first, last = values.expand(x.shape), 0, leading
    return values.contiguous(), x.shape[last:leading].numel(), x.shape[first:last].numel()
