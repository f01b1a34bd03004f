"""quantize_int8 and dequantize_int8, with results bit-for-bit equal to kfconvert.ops."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.registration import require, require_float
from ...ops.standalone.quantize import parameters
from .arguments import laid_out_as, require_forward
from .launch import by_channel, channel_of, launch, tile


def quantize_int8(x: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, dim: int = -1) -> Tensor:
    require_float("quantize_int8", x)
    return _launched("quantize_int8", _quantize, x, scale, zero_point, dim, torch.int8)


def dequantize_int8(
    q: Tensor,
    scale: float | Tensor,
    zero_point: int | Tensor = 0,
    dim: int = -1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    require(q.dtype == torch.int8, "dequantize_int8", "expected int8")
    require_float("dequantize_int8", q.new_empty(0, dtype=dtype))
    return _launched("dequantize_int8", _dequantize, q, scale, zero_point, dim, dtype)


@triton.jit
def _quantize(
    x, scale, zero_point, y, channels, rows, cols,
    R: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    channel = channel_of(row, col, channels, BY_ROW)
    exists = channel < channels
    # Triton's / is not correctly rounded.
    v = tl.div_rn(tl.load(x + at, inside, 0.0).to(tl.float32), tl.load(scale + channel, exists, 1.0))
    v = v + tl.load(zero_point + channel, exists, 0.0)
    v = tl.where(v < -128.0, -128.0, tl.where(v > 127.0, 127.0, v))
    # From 2^23 to 2^24 floats are integers, so the sum is rounded, with half-way cases to even.
    v = (v + 12582912.0) - 12582912.0
    tl.store(y + at, tl.where(v == v, v, 0.0).to(tl.int8), inside)


@triton.jit
def _dequantize(
    q, scale, zero_point, y, channels, rows, cols,
    R: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    channel = channel_of(row, col, channels, BY_ROW)
    exists = channel < channels
    v = tl.load(q + at, inside, 0).to(tl.float32) - tl.load(zero_point + channel, exists, 0.0)
    tl.store(y + at, v * tl.load(scale + channel, exists, 0.0), inside)


def _launched(operator, kernel, x, scale, zero_point, dim, dtype):
    given = [value for value in (scale, zero_point) if isinstance(value, Tensor)]
    require_forward(operator, x, x.new_empty(0, dtype=dtype), *given)
    values = parameters(operator, x, scale, zero_point, torch.float32, dim)
    channels = max((value.numel() for value in values if isinstance(value, Tensor)), default=1)
    scale, zero_point = (
        (value if isinstance(value, Tensor) else x.new_full((1,), value, dtype=torch.float32))
        .expand(channels)
        .contiguous()
        for value in values
    )
    y = torch.empty_like(x, dtype=dtype)
    matrix = by_channel(y, dim, channels)
    launch(kernel, y, laid_out_as(y, x), scale, zero_point, y, channels, **matrix)
    return y
