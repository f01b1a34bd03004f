"""Attention as one short Triton kernel whose scores stay on the chip.

The algorithm is from Dao et al., "FlashAttention" (2022), with the running maximum and sum of Milakov and Gimelshein,
"Online normalizer calculation for softmax" (2018). A program has a tile of queries, iterates over all keys, and
rescales its sums when it finds a larger score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_QUERIES, TILE_KEYS = 64, 32


@triton.jit
def _at(start, batch_stride, head_stride, heads):
    """Returns the offset of this program's head."""
    program = tl.program_id(1).to(tl.int64)
    return start + program // heads * batch_stride + program % heads * head_stride


@triton.jit
def _kernel(
    q, k, v, y, scale, heads, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, y_batch, y_head, y_row,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, WIDTH)
    inside = row[:, None] < queries
    query = tl.load(_at(q, q_batch, q_head, heads) + row[:, None] * q_row + column[None, :], inside, 0.0)
    k, v = _at(k, k_batch, k_head, heads), _at(v, v_batch, v_head, heads)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        at = start + tl.arange(0, KEYS)
        key = tl.load(k + at[None, :] * k_row + column[:, None], at[None, :] < keys, 0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(at[None, :] < keys, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shares, shrunk = tl.exp(scores - larger[:, None]), tl.exp(largest - larger)
        value = tl.load(v + at[:, None] * v_row + column[None, :], at[:, None] < keys, 0.0)
        total = total * shrunk + tl.sum(shares, 1)
        mixed = tl.dot(shares.to(value.dtype), value, mixed * shrunk[:, None], input_precision="ieee")
        largest = larger
    tl.store(_at(y, y_batch, y_head, heads) + row[:, None] * y_row + column[None, :], mixed / total[:, None], inside)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes ``softmax(Q K^T / sqrt(d)) V``. Arguments and result: (batch, heads, length, d), d 16, 32, 64 or 128;
    float32, float16 or bfloat16, on CUDA.

    Raises:
        ValueError: d has another value.
    """
    batch, heads, queries, width = query.shape
    if width not in (16, 32, 64, 128):
        raise ValueError(f"attention: the head width must be 16, 32, 64 or 128, not {width}")
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # The heads of a position are adjacent in memory, as the next product reads them.
    y = torch.empty((batch, queries, heads, width), dtype=query.dtype, device=query.device).transpose(1, 2)
    strides = [stride for x in (query, key, value, y) for stride in x.stride()[:3]]
    sizes = {"QUERIES": TILE_QUERIES, "KEYS": TILE_KEYS, "WIDTH": width}
    grid = triton.cdiv(queries, TILE_QUERIES), batch * heads
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _kernel[grid](query, key, value, y, width**-0.5, heads, queries, key.shape[2], *strides, **sizes)
    return y
