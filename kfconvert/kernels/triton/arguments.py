"""Checks of the Triton kernels' arguments, and memory layouts for them."""

import torch
import triton
from torch import Tensor

from ...ops.registration import require
from .launch import WIDEST, tile

_INTERPRETED = not isinstance(tile, triton.JITFunction)


def require_forward(operator: str, *tensors: Tensor | None) -> None:
    """Raises a one-line RuntimeError for arguments that kfconvert.ops supports but the Triton kernels do not."""
    given = [tensor for tensor in tensors if tensor is not None]
    require(_INTERPRETED or all(t.is_cuda for t in given), operator, "Triton needs CUDA tensors")
    wide = any(tensor.dtype == torch.float64 for tensor in given)
    require(not wide, operator, "the Triton kernels compute in float32 and support no float64")
    cast = torch.is_autocast_enabled(given[0].device.type)
    require(not cast, operator, "the Triton kernels support no autocast; kfconvert.ops does")
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    require(not learned, operator, "the Triton kernels are forward only; kfconvert.ops has the backward")


def require_width(operator: str, cols: int) -> None:
    """Raises RuntimeError for rows that are too long for a tile."""
    require(cols <= WIDEST, operator, f"Triton takes rows of at most {WIDEST} elements, not {cols}")


def laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """Returns x, broadcast to the shape of the dense tensor y, with y's memory layout."""
    x = x.expand(y.shape)
    return x if x.stride() == y.stride() else torch.empty_like(y, dtype=x.dtype).copy_(x)


def repeated_rows(values: Tensor, x: Tensor, dims: int) -> tuple[Tensor, int, int]:
    """Returns (values, inner, count): values as contiguous rows, where row r of x uses row r // inner % count.

    values: a shape that broadcasts to x's; a row has its last ``dims`` dimensions. Values are expanded unless they
    only repeat in the first and the last of the other dimensions.
    """
    values = values[(None,) * (x.dim() - values.dim())]
    leading = x.dim() - dims
    kept = [d for d in range(leading) if values.shape[d] != 1]
    first, last = (kept[0], kept[-1] + 1) if kept else (leading, leading)
    if values.shape[first:last] != x.shape[first:last] or values.shape[leading:] != x.shape[leading:]:
        values, first, last = values.expand(x.shape), 0, leading
    return values.contiguous(), x.shape[last:leading].numel(), x.shape[first:last].numel()
