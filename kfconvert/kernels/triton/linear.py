"""Linear layers: product, bias and activation in one kernel, on tensor cores with float32 sums."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.activations import BY_CODE, CODES
from ...ops.fused.linear_act import TILED_MIN_ROWS, check
from ...ops.registration import LIBRARY
from .activations import activate
from .arguments import INTERPRETED, require_forward

# By the bytes of an element: rows, columns and depth of a tile, warps, stages, registers, relative time of an element.
TILES = {
    2: ((128, 256, 64, 8, 3, 255, 1.0), (128, 128, 64, 8, 3, 128, 1.0), (64, 64, 64, 4, 4, 255, 1.4)),
    4: ((64, 128, 32, 4, 3, 255, 1.0), (64, 64, 32, 4, 3, 255, 1.3)),
}


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", negative_slope: float = 0.01
) -> Tensor:
    code = CODES[activation]
    check("linear_act", x, weight, bias)
    require_forward("linear_act", x, weight, bias)
    return _linear(x, weight, bias, code, negative_slope)


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, weight, bias, y, negative_slope, rows, cols, depth, x_row, x_col, w_row, w_col,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # Bands of 8 tiles, whose programs share columns of the weight in the cache.
    program, band = tl.program_id(0), tl.cdiv(cols, C) * 8
    height = tl.minimum(tl.cdiv(rows, R) - program // band * 8, 8)
    row = (program // band * 8 + program % band % height).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = (program % band // height).to(tl.int64) * C + tl.arange(0, C)[None, :]
    x += row * x_row
    weight += col * w_row
    at = tl.arange(0, D)
    left, right = x + at[None, :] * x_col, weight + at[:, None] * w_col
    v = tl.zeros((R, C), tl.float32)
    for start in range(0, depth, D):
        inside = at < depth - start
        a = tl.load(left, (row < rows) & inside[None, :], 0.0)
        b = tl.load(right, inside[:, None] & (col < cols), 0.0)
        if SPLIT:
            # Each factor is a TF32 number and a remainder, and the product of remainders is below 2^-22. Tensor cores
            # truncate sums, so they sum only one tile. With three forms of the same number, all stay in registers.
            a, b = a.to(tl.float32), b.to(tl.float32)
            bits = a.to(tl.int32, bitcast=True) + 4096
            high = ((b.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
            p = tl.dot(a - (bits & -8192).to(tl.float32, bitcast=True), high, input_precision="tf32")
            p = tl.dot((bits >> 13 << 13).to(tl.float32, bitcast=True), b - high, p, input_precision="tf32")
            v += tl.dot((bits - (bits & 8191)).to(tl.float32, bitcast=True), high, p, input_precision="tf32")
        else:
            v = tl.dot(a, b, v)
        left += D * x_col
        right += D * w_col
    if SPLIT and tl.sum(tl.sum((v != v).to(tl.int32), 1), 0) > 0:
        # Infinities, and numbers that round to infinities, have remainders that make every sum NaN.
        v = tl.zeros((R, C), tl.float32)
        for k in range(0, depth):
            a = tl.load(x + k * x_col, row < rows, 0.0).to(tl.float32)
            v += a * tl.load(weight + k * w_col, col < cols, 0.0)
    if bias is not None:
        v += tl.load(bias + col, col < cols).to(tl.float32)
    tl.store(y + row * cols + col, activate(v, ACTIVATION, negative_slope), (row < rows) & (col < cols))


@functools.lru_cache
def _tile(rows: int, cols: int, size: int, device: torch.device) -> tuple:
    """Returns the tile with the shortest time on all multiprocessors, among those that fit into shared memory."""
    if device.type != "cuda":
        return TILES[size][-1]
    properties, cdiv = torch.cuda.get_device_properties(device), triton.cdiv
    width, memory = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    tiles = [t for t in TILES[size] if (t[0] + t[1]) * t[2] * t[4] * size <= memory]
    return min(tiles, key=lambda t: cdiv(cdiv(rows, t[0]) * cdiv(cols, t[1]), width) * t[0] * t[1] * t[-1])


def _linear(x, weight, bias, code, negative_slope):
    cols, depth = weight.shape
    y = x.new_empty((*x.shape[:-1], cols))
    if y.numel() == 0:
        return y
    rows = y.numel() // cols
    x = x.reshape(rows, depth)
    r, c, d, warps, stages, registers, _ = _tile(rows, cols, x.element_size(), x.device)
    arguments = x, weight, None if bias is None else bias.contiguous(), y, negative_slope, rows, cols, depth
    name = BY_CODE[code].name
    name += "_of_half" if name == "gelu" and x.element_size() == 2 else ""
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    switches = {"SPLIT": x.dtype == torch.float32 or INTERPRETED, "ACTIVATION": name}
    try:
        with torch.cuda.device_of(y):
            _kernel[(triton.cdiv(rows, r) * triton.cdiv(cols, c),)](
                *arguments, *x.stride(), *weight.stride(), r, c, d, **switches, **options
            )
    except Exception as error:  # the compiler raises its own, and other libraries raise this
        raise RuntimeError(f"Triton: {type(error).__name__}: {error}") from error
    return y


def _linear_or_library(x, weight, bias, code, negative_slope):
    few = x.numel() < TILED_MIN_ROWS * weight.shape[1]  # a plan for more rows meets any number
    run = torch.ops.kfconvert.linear_act_inference.default if few else _linear
    return run(x, weight, bias, code, negative_slope)


LIBRARY.impl("linear_triton", _linear_or_library, "CUDA")

__all__ = ["linear_act"]
