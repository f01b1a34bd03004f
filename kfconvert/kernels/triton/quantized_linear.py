"""Linear layers with a weight of int8 or float8 numbers, for a few rows: each number is read once, and never stored in
another dtype."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.fused.quantized_linear import check
from ...ops.registration import LIBRARY
from .arguments import INTERPRETED

# For one row: numbers of a tile, and columns of a tile, so that all multiprocessors have several tiles to load.
TILE, COLUMNS = 8192, (8, 4, 2)
# For more rows: columns and depth of a tile on tensor cores, which take 16 rows.
ROWS, DOT_COLUMNS, DOT_DEPTH = 16, 16, 256


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, weight, scale, y, rows, cols, depth, w_row,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    col, at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C), tl.arange(0, D)
    if R == 1:
        v = tl.zeros((C, D), tl.float32)
        for start in range(0, depth, D):
            inside = at < depth - start
            a = tl.load(x + start + at, inside, 0.0).to(tl.float32)
            b = tl.load(
                weight + col[:, None] * w_row + start + at[None, :], (col < cols)[:, None] & inside[None, :], 0.0
            )
            v += b.to(tl.float32) * a[None, :]
        factor = tl.load(scale + col, col < cols, 0.0).to(tl.float32)
        tl.store(y + col, tl.sum(v, 1) * factor, col < cols)
    else:
        row = tl.arange(0, R)
        v = tl.zeros((R, C), tl.float32)
        for start in range(0, depth, D):
            inside = at < depth - start
            a = tl.load(x + row[:, None] * depth + start + at[None, :], (row < rows)[:, None] & inside[None, :], 0.0)
            b = tl.load(
                weight + col[None, :] * w_row + start + at[:, None], (col < cols)[None, :] & inside[:, None], 0.0
            )
            v = tl.dot(a.to(FACTOR), b.to(FACTOR), v)
        factor = tl.load(scale + col, col < cols, 0.0).to(tl.float32)
        place = row[:, None] * cols + col[None, :]
        tl.store(y + place, v * factor[None, :], (row < rows)[:, None] & (col < cols)[None, :])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def few_rows(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns ``(x W^T) * scale`` for at most ``ROWS`` rows of x."""
    check(x, weight, scale)
    cols, depth = weight.shape
    y = x.new_empty((*x.shape[:-1], cols))
    rows, wide = x.numel() // depth, 2 * _multiprocessors(x.device)
    if rows == 1:
        r, c = 1, next((each for each in COLUMNS if triton.cdiv(cols, each) >= wide), COLUMNS[-1])
        d = min(triton.next_power_of_2(depth), TILE // c)
    else:
        r, c, d = ROWS, DOT_COLUMNS, min(triton.next_power_of_2(depth), DOT_DEPTH)
    factor = tl.float32 if INTERPRETED else getattr(tl, str(x.dtype).removeprefix("torch."))
    tensors = x.reshape(rows, depth).contiguous(), weight, scale.flatten().contiguous(), y
    try:
        with torch.cuda.device_of(y):
            _kernel[(triton.cdiv(cols, c),)](
                *tensors, rows, cols, depth, weight.stride(0), R=r, C=c, D=d, FACTOR=factor, num_warps=4, num_stages=4
            )
    except Exception as error:  # the compiler raises its own, and other libraries raise this
        raise RuntimeError(f"Triton: {type(error).__name__}: {error}") from error
    return y


LIBRARY.impl("quantized_linear", few_rows, "CUDA")

__all__: list[str] = []
