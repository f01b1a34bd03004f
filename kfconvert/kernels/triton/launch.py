"""Division of the work: each program computes a tile of rows and columns of a matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements; full rows may be longer
WIDEST = 2**17


@triton.jit
def tile(rows, cols, R: tl.constexpr, C: tl.constexpr):
    """Returns row numbers (R, 1), column numbers (1, C) and their mask (R, C) for this program's tile."""
    program = tl.program_id(0)
    across = tl.cdiv(cols, C)
    row = (program // across).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = (program % across).to(tl.int64) * C + tl.arange(0, C)[None, :]
    return row, col, (row < rows) & (col < cols)


def launch(kernel, y: Tensor, *arguments, rows: int, cols: int, widest: int = TILE, **switches) -> None:
    """Launches ``kernel(*arguments, rows, cols, R=, C=, **switches)``, which fills y, for every tile.

    widest: maximum number of columns of a tile; WIDEST for kernels that need full rows.
    """
    if y.numel() == 0:
        return
    c = min(triton.next_power_of_2(cols), widest)
    r = max(1, TILE // c)
    # Layer norm of float16 on an H100, GB/s with 2, 4, 8 warps at 768 columns: 2834, 2601, 1678; with 8, 16,
    # 32 at 8192: 2799, 2817, 2284; at 32768: 2132, 2565, 2646.
    warps = min(32, max(2, c // 512))
    programs = triton.cdiv(rows, r) * triton.cdiv(cols, c)
    with torch.cuda.device_of(y):  # Triton launches on the current device
        kernel[(programs,)](*arguments, rows, cols, R=r, C=c, num_warps=warps, **switches)
