"""``gelu(x W^T + b)`` as one short Triton kernel, with a tile of the result per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS, TILE_INNER = 64, 64, 32


@triton.jit
def _kernel(
    x, weight, bias, y, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        across = start + tl.arange(0, INNER)
        left = tl.load(x + row * inner + across[None, :], (row < rows) & (across[None, :] < inner), 0.0)
        right = tl.load(weight + column * inner + across[:, None], (column < columns) & (across[:, None] < inner), 0.0)
        # "ieee": full float32 products instead of the default of tensor cores with 10 bits.
        total = tl.dot(left, right, total, input_precision="ieee")
    total += tl.load(bias + column, column < columns).to(tl.float32)
    total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    tl.store(y + row * columns + column, total, (row < rows) & (column < columns))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes (..., out) of x (..., in), weight (out, in) and bias (out,): float32, float16 or bfloat16, on CUDA."""
    columns, inner = weight.shape
    matrix = x.reshape(-1, inner).contiguous()
    rows = matrix.shape[0]
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    grid = triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS)
    sizes = {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS, "INNER": TILE_INNER}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _kernel[grid](matrix, weight.contiguous(), bias.contiguous(), y, rows, columns, inner, **sizes)
    return y.view(*x.shape[:-1], columns)
