"""Linear layers: product, bias and activation in one kernel, on tensor cores with float32 sums."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...ops.activations import BY_CODE, CODES
from ...ops.fused.linear_act import check
from ...ops.registration import LIBRARY
from .activations import activate
from .arguments import INTERPRETED, require_forward

# By the bytes of an element: rows, columns and depth of a tile, warps, stages, registers, relative time of an element.
TILES = {2: ((128, 128, 64, 4, 3, 255, 1.0),), 4: ((128, 128, 32, 8, 3, 255, 1.0), (64, 64, 32, 4, 3, 168, 1.15))}
# Of half types, for as many tiles as multiprocessors. Only GPUs with a Tensor Memory Accelerator have so much memory.
TMA_TILE, TMA_TILES, TMA_MEMORY = (128, 256, 64, 8, 3, 255), 120, 224 * 1024


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", negative_slope: float = 0.01
) -> Tensor:
    code = CODES[activation]
    check("linear_act", x, weight, bias)
    require_forward("linear_act", x, weight, bias)
    return _linear(x, weight, bias, code, negative_slope, takes(x, weight))


@triton.jit
def _place(tile, rows, cols, R: tl.constexpr, C: tl.constexpr):
    # Bands of 8 tiles, whose programs share columns of the weight in the cache.
    band = tl.cdiv(cols, C) * 8
    height = tl.minimum(tl.cdiv(rows, R) - tile // band * 8, 8)
    return (tile // band * 8 + tile % band % height) * R, tile % band // height * C


@triton.jit(do_not_specialize=["rows", "cols", "depth"])
def _tma_kernel(
    x, weight, y, bias, negative_slope, rows, cols, depth,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, FACTOR: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Each program computes several tiles: it loads factors of the next tile during the activation of the last."""
    tiles = tl.cdiv(rows, R) * tl.cdiv(cols, C)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = _place(tile, rows, cols, R, C)
        v = tl.zeros((R, C), tl.float32)
        for start in range(0, depth, D):
            v = tl.dot(x.load([row, start]).to(FACTOR), weight.load([col, start]).to(FACTOR).T, v)
        if bias is not None:
            at = col + tl.arange(0, C)
            v += tl.load(bias + at, at < cols)[None, :].to(tl.float32)
        y.store([row, col], activate(v, ACTIVATION, negative_slope).to(y.dtype))


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, weight, y, bias, negative_slope, rows, cols, depth, x_row, x_col, w_row, w_col,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, FACTOR: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col = _place(tl.program_id(0), rows, cols, R, C)
    row, col = row.to(tl.int64) + tl.arange(0, R)[:, None], col.to(tl.int64) + tl.arange(0, C)[None, :]
    x += row * x_row
    weight += col * w_row
    at = tl.arange(0, D)
    left, right = x + at[None, :] * x_col, weight + at[:, None] * w_col
    v = tl.zeros((R, C), tl.float32)
    for start in range(0, depth, D):
        inside = at < depth - start
        a = tl.load(left, (row < rows) & inside[None, :], 0.0).to(FACTOR)
        b = tl.load(right, inside[:, None] & (col < cols), 0.0).to(FACTOR)
        if FACTOR == tl.float32:
            # Each factor is a TF32 number and a remainder, and the product of remainders is below 2^-22. Tensor cores
            # truncate sums, so they sum only one tile. With three forms of the same number, all stay in registers.
            bits = a.to(tl.int32, bitcast=True) + 4096
            high = ((b.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
            p = tl.dot(a - (bits & -8192).to(tl.float32, bitcast=True), high, input_precision="tf32")
            p = tl.dot((bits >> 13 << 13).to(tl.float32, bitcast=True), b - high, p, input_precision="tf32")
            v += tl.dot((bits - (bits & 8191)).to(tl.float32, bitcast=True), high, p, input_precision="tf32")
        else:
            v = tl.dot(a, b, v)
        left += D * x_col
        right += D * w_col
    if FACTOR == tl.float32 and tl.sum(tl.sum((v != v).to(tl.int32), 1), 0) > 0:
        # Infinities, and numbers that round to infinities, have remainders that make every sum NaN.
        v = tl.zeros((R, C), tl.float32)
        for k in range(0, depth):
            a = tl.load(x + k * x_col, row < rows, 0.0).to(tl.float32)
            v += a * tl.load(weight + k * w_col, col < cols, 0.0)
    if bias is not None:
        v += tl.load(bias + col, col < cols).to(tl.float32)
    tl.store(y + row * cols + col, activate(v, ACTIVATION, negative_slope), (row < rows) & (col < cols))


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Returns the number of multiprocessors, and the shared memory of each."""
    if device.type != "cuda":
        return 1, TMA_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor


@functools.lru_cache
def _tile(rows: int, cols: int, size: int, device: torch.device) -> tuple:
    """Returns the tile with the shortest time on all multiprocessors."""
    (width, memory), cdiv = _limits(device), triton.cdiv
    tiles = TILES[size] if memory >= TMA_MEMORY else TILES[size][-1:]  # older GPUs have no registers for the large one
    return min(tiles, key=lambda t: cdiv(cdiv(rows, t[0]) * cdiv(cols, t[1]), width) * t[0] * t[1] * t[-1])


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel may be faster than the library's. For half types, rows must be at multiples of 16 bytes."""
    cols, depth = weight.shape
    if x.element_size() != 2:
        return x.numel() >= 64 * depth > 0
    few = x.numel() * cols <= TMA_TILES * TMA_TILE[0] * TMA_TILE[1] * depth
    if few or cols % 8 or _limits(x.device)[1] < TMA_MEMORY:
        return False
    both = x.reshape(-1, depth), weight
    return all(t.stride(1) == 1 and t.stride(0) % 8 == t.data_ptr() % 16 == 0 and t.stride(0) >= depth for t in both)


def _linear(x, weight, bias, code, negative_slope, taken=True):
    cols, depth = weight.shape
    y = x.new_empty((*x.shape[:-1], cols))
    if y.numel() == 0:
        return y
    rows, half = y.numel() // cols, x.element_size() == 2
    tensors, sizes = [x.reshape(rows, depth), weight, y.view(rows, cols)], [rows, cols, depth]
    r, c, d, *options = TMA_TILE if half and taken else _tile(rows, cols, x.element_size(), x.device)
    kernel, programs = _kernel, triton.cdiv(rows, r) * triton.cdiv(cols, c)
    if half and taken:
        kernel, programs = _tma_kernel, min(programs, _limits(x.device)[0])
        tensors = [TensorDescriptor.from_tensor(*each) for each in zip(tensors, ([r, d], [c, d], [r, c]))]
    else:
        sizes += [*tensors[0].stride(), *weight.stride()]
    arguments = *tensors, None if bias is None else bias.contiguous(), negative_slope, *sizes, r, c, d
    name, factor = BY_CODE[code].name, "float32" if INTERPRETED else str(x.dtype).removeprefix("torch.")
    switches = {"FACTOR": getattr(tl, factor), "ACTIVATION": "gelu_of_half" if half and name == "gelu" else name}
    options = dict(zip(("num_warps", "num_stages", "maxnreg"), options))
    try:
        with torch.cuda.device_of(y):
            kernel[(programs,)](*arguments, **switches, **options)
    except Exception as error:  # the compiler raises its own, and other libraries raise this
        raise RuntimeError(f"Triton: {type(error).__name__}: {error}") from error
    return y


def _linear_or_library(x, weight, bias, code, negative_slope):
    # A plan for many rows meets any number, and views at any address.
    run = _linear if takes(x, weight) else torch.ops.kfconvert.linear_act_inference.default
    return run(x, weight, bias, code, negative_slope)


LIBRARY.impl("linear_triton", _linear_or_library, "CUDA")

__all__ = ["linear_act"]
