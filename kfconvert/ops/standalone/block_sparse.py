"""block_sparse_attention: attention with only some square blocks of scores.

Functions import flex_attention when they need it, because the import takes a second.
"""

import functools
import math

import torch
import torch.nn.functional as F

from ...torch_state import being_traced, transformed
from ..declaration import declare
from ..registration import cast_to_lower, require, require_same_device
from .attention import check_attention, with_four_dimensions

__all__ = ["block_sparse_attention"]

# The size of blocks that flex_attention's kernels skip, and the smallest head size of these kernels.
_TILE = 128
_NARROWEST = 16


@declare(
    group="attention",
    example=lambda t, rows, columns: (*t(3, 1, 2, 64, 8), torch.ones(4, 4, dtype=torch.bool), 16),
    runs="flex_attention; its time depends on the layout of the blocks",
)
def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: torch.Tensor, block_size: int, scale: float | None = None
) -> torch.Tensor:
    """Computes ``softmax(q k^T scale) v`` over the blocks of scores that ``layout`` keeps, of shape (..., N, E).

    On CUDA, this is ``torch.nn.attention.flex_attention``, compiled in the first call (by torch.compile, which
    needs a C compiler). Excluded blocks have no cost, and no scores are stored. It supports block sizes that divide
    or are divisible by 128, sequences from 128 and heads from 16, and all dtypes except float64. In all other cases,
    and on the CPU, this is ``F.scaled_dot_product_attention`` with the layout expanded to a boolean mask (N, M),
    which is not faster than full attention.

    Args:
        q: (..., N, D), k: (..., M, D), v: (..., M, E), any strides; leading dimensions, dtype (float64,
            float32, float16 or bfloat16) and device are equal.
        layout: boolean, (..., ceil(N / block_size), ceil(M / block_size)), with leading dimensions that broadcast
            to q's. Entry (i, j): whether the queries of block i attend to the keys of block j. Queries without
            keys return 0.
        block_size: number of queries and keys in a block.
        scale: factor of the scores, 1 / sqrt(D) by default.

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
    """
    check_attention("block_sparse_attention", q, k, v)
    _check_layout(q, k, layout, block_size)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = cast_to_lower((q, k, v), q.device.type)
    leading = q.shape[:-2]
    if q.dim() > 4:
        layout = layout.expand(*leading, *layout.shape[-2:])
        layout = layout.reshape(math.prod(leading[:-1]), leading[-1], *layout.shape[-2:])
    layout = layout[(None,) * (4 - layout.dim())]
    queries, keys, values = with_four_dimensions(q, k, v)
    if _has_kernel(q, k, v, block_size):
        mask = block_mask(layout, block_size, q.shape[-2], k.shape[-2])
        y = _flex_attention()(queries, keys, values, block_mask=mask, scale=scale)
    else:
        mask = _expanded(layout, block_size, q.shape[-2], k.shape[-2])
        y = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
        # For queries without keys, some of its kernels for half types return an average of v.
        y = y.masked_fill(~mask.any(-1, keepdim=True), 0)
    return y.reshape(*leading, *y.shape[-2:])


def block_mask(layout: torch.Tensor, block_size: int, queries: int, keys: int):
    """Returns the ``BlockMask`` of a boolean layout (batch or 1, heads or 1, rows, columns).

    Small blocks are merged into tiles. Only partial tiles, and tiles beyond the end of a sequence, look up the layout
    for every score.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tile, joined = max(_TILE, block_size), max(1, _TILE // block_size)
    rows, columns = math.ceil(queries / tile), math.ceil(keys / tile)
    missing = (0, columns * joined - layout.shape[-1], 0, rows * joined - layout.shape[-2])
    tiles = F.pad(layout, missing).unflatten(-1, (columns, joined)).unflatten(-3, (rows, joined))
    some, whole = tiles.any(-1).any(-2), tiles.all(-1).all(-2)
    # A tile of one block is complete even if the sequence ends within it.
    if queries % tile:
        whole[..., -1, :] = False
    if keys % tile:
        whole[..., -1] = False
    partial = some & ~whole
    batch, heads = layout.shape[:2]

    def keeps(b, h, i, j):
        return layout[b % batch, h % heads, i // block_size, j // block_size]

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=tile, mask_mod=keeps, seq_lengths=(queries, keys)
    )


def _listed(tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of tiles per row, and their columns in order, followed by the other columns."""
    order = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _expanded(layout, block_size, queries, keys):
    rows = layout.repeat_interleave(block_size, -2)[..., :queries, :]
    return rows.repeat_interleave(block_size, -1)[..., :keys]


def _has_kernel(q, k, v, block_size):
    return (
        q.is_cuda
        and not transformed()
        and (torch.compiler.is_compiling() or not being_traced())  # compiled code takes no fake tensors
        and q.dtype != torch.float64
        and (_TILE % block_size == 0 or block_size % _TILE == 0)
        and min(q.shape[-2], k.shape[-2]) >= _TILE
        and min(q.shape[-1], v.shape[-1]) >= _NARROWEST
        and math.prod(q.shape[:-2]) > 0
    )


def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)


@functools.cache
def _compiled(function):
    return torch.compile(function)


def _check_layout(q, k, layout, block_size):
    operator = "block_sparse_attention"
    require(block_size >= 1, operator, f"block_size is {block_size}, expected 1 or more")
    require_same_device(operator, "layout", q, layout, "q")
    require(layout.dtype == torch.bool, operator, "layout is not boolean")
    blocks = tuple(math.ceil(n / block_size) for n in (q.shape[-2], k.shape[-2]))
    leading = tuple(q.shape[:-2])
    sizes = zip(reversed(layout.shape[:-2]), reversed(leading))
    require(
        2 <= layout.dim() <= q.dim()
        and tuple(layout.shape[-2:]) == blocks
        and all(n in (1, size) for n, size in sizes),
        operator,
        f"layout has shape {tuple(layout.shape)}, expected {(*leading, *blocks)} or what broadcasts to it",
    )
