"""softmax(x * scale + mask), with a full row per tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.norms import row_count
from ...ops.standalone.softmax import check_mask
from .arguments import repeated_rows, require_forward, require_width
from .launch import WIDEST, launch, tile


def softmax(x: Tensor, dim: int = -1, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    check_mask(x, mask)
    require_forward("softmax", x, mask)
    if x.dim() == 0:
        return softmax(x[None], dim, scale, mask)[0]
    if mask is not None and dim not in (-1, x.dim() - 1):
        mask = mask.expand(x.shape).movedim(dim, -1)
    rows = x.movedim(dim, -1)  # raises IndexError if dim is out of range
    return _of_rows(rows, scale, mask).movedim(-1, dim)


@triton.jit
def _kernel(x, mask, y, scale, inner, count, rows, cols, R: tl.constexpr, C: tl.constexpr):
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    v = tl.where(inside, tl.load(x + at, inside, 0.0).to(tl.float32) * scale, float("-inf"))
    if mask is not None:
        given = tl.load(mask + row // inner % count * cols + col, inside, 0)
        if mask.dtype.element_ty == tl.uint8:
            v = tl.where(given != 0, v, float("-inf"))
        else:
            v = v + given.to(tl.float32)
    v = tl.exp(v - tl.max(v, 1)[:, None])
    tl.store(y + at, v / tl.sum(v, 1)[:, None], inside)


def _of_rows(x, scale, mask):
    cols = x.shape[-1]
    require_width("softmax", cols)
    x, inner, count = x.contiguous(), 1, 1
    y = torch.empty_like(x)
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask, inner, count = repeated_rows(mask, x, 1)
    arguments = (x, mask, y, scale, inner, count)
    launch(_kernel, y, *arguments, rows=row_count(x, (cols,)), cols=cols, widest=WIDEST)
    return y
