"""rope: x * cos + rotated(x) * sin, each element with its partner in the pair."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.fused.rotary import check_rope
from ...ops.norms import row_count
from .arguments import laid_out_as, repeated_rows, require_forward
from .launch import launch, tile


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    check_rope(x, cos, sin)
    require_forward("rope", x, cos, sin)
    y = torch.empty_like(x)
    if y.stride(-1) != 1:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Rows in the order of memory: (batch, heads, sequence) is often a view of (batch, sequence, heads).
    order = (*sorted(range(x.dim() - 1), key=y.stride, reverse=True), -1)
    x = laid_out_as(y, x).permute(order)
    cos, sin = (values[(None,) * (x.dim() - values.dim())].permute(order) for values in (cos, sin))
    cos, *of_cos = repeated_rows(cos, x, 1)
    sin, *of_sin = repeated_rows(sin, x, 1)
    cols = x.shape[-1]
    arguments = (x, cos, sin, y, *of_cos, *of_sin)
    launch(_kernel, y, *arguments, rows=row_count(x, (cols,)), cols=cols, INTERLEAVED=interleaved)
    return y


@triton.jit
def _kernel(
    x, cos, sin, y, cos_inner, cos_count, sin_inner, sin_count, rows, cols,
    R: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    if INTERLEAVED:
        first = col % 2 == 0
        partner = tl.where(first, col + 1, col - 1)
    else:
        first = col < cols // 2
        partner = tl.where(first, col + cols // 2, col - cols // 2)
    v = tl.load(x + row * cols + col, inside).to(tl.float32)
    other = tl.load(x + row * cols + partner, inside).to(tl.float32)
    c = tl.load(cos + row // cos_inner % cos_count * cols + col, inside).to(tl.float32)
    s = tl.load(sin + row // sin_inner % sin_count * cols + col, inside).to(tl.float32)
    tl.store(y + row * cols + col, v * c + tl.where(first, -other, other) * s, inside)
