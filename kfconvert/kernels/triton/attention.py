"""Attention with few keys: scores, terms, softmax and the product with the values in one kernel."""

import torch
import triton
import triton.language as tl

from ...ops.fused.attention import padded
from ...ops.registration import LIBRARY
from .arguments import INTERPRETED


@triton.jit
def _load(x, strides, batch, part, head, row, col, inside, DTYPE: tl.constexpr):
    x += batch.to(tl.int64) * strides[0] + part.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    return tl.load(x + row * strides[3] + col * strides[4], inside, 0.0).to(DTYPE)


@triton.jit(do_not_specialize=["parts", "heads", "rows"])
def _kernel(
    q, k, v, y, terms, strides, scale, parts, heads, rows, keys, width, v_width,
    R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Computes R rows of one head with all keys, in float32 except for the factors of products."""
    blocks = tl.cdiv(rows, R)
    place = tl.program_id(0) // blocks
    head, batch, part = place % heads, place // heads // parts, place // heads % parts
    row = ((tl.program_id(0) % blocks).to(tl.int64) * R + tl.arange(0, R))[:, None]
    key, deep, col = tl.arange(0, M).to(tl.int64), tl.arange(0, D).to(tl.int64), tl.arange(0, E).to(tl.int64)[None, :]
    inside = (row < rows) & (deep < width)[None, :]
    a = _load(q, strides[0], batch, part, head, row, deep[None, :], inside, FACTOR)
    inside = (deep < width)[:, None] & (key < keys)[None, :]
    b = _load(k, strides[1], batch, part, head, key[None, :], deep[:, None], inside, FACTOR)
    s = tl.dot(a, b, input_precision="ieee") * scale
    inside = (row < rows) & (key < keys)[None, :]
    for i in tl.static_range(len(terms)):
        s += _load(terms[i], strides[i + 4], batch, part, head, row, key[None, :], inside, tl.float32)
    s = tl.where((key < keys)[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])  # NaN in a row of -inf
    inside = (key < keys)[:, None] & (col < v_width)
    b = _load(v, strides[2], batch, part, head, key[:, None], col, inside, FACTOR)
    s = tl.dot(p.to(FACTOR), b, input_precision="ieee") / tl.sum(p, 1)[:, None]
    y += batch.to(tl.int64) * strides[3][0] + part.to(tl.int64) * strides[3][1] + head.to(tl.int64) * v_width
    tl.store(y + row * strides[3][3] + col, s, (row < rows) & (col < v_width))


def attention(q, k, v, terms, scale):
    """Computes ``attention_triton`` for any strides, see ``kfconvert.ops.fused.attention``."""
    batch, parts, heads, rows, width = q.shape
    keys, v_width = v.shape[-2:]
    y = q.new_empty((batch, parts, rows, heads, v_width)).transpose(2, 3)
    r, m, factor = min(64, padded(rows)), padded(keys), str(q.dtype).removeprefix("torch.")
    # A dimension of size 1 is broadcast.
    strides = [tuple([s if n > 1 else 0 for s, n in zip(x.stride(), x.shape)]) for x in (q, k, v, y, *terms)]
    sizes = parts, heads, rows, keys, width, v_width, r, m, padded(width), padded(v_width)
    options = {"FACTOR": getattr(tl, "float32" if INTERPRETED else factor), "num_warps": 8 if r * m > 8192 else 4}
    try:
        with torch.cuda.device_of(y):
            if programs := batch * parts * heads * triton.cdiv(rows, r):
                _kernel[(programs,)](q, k, v, y, tuple(terms), tuple(strides), scale, *sizes, **options)
    except Exception as error:  # the compiler raises its own, and other libraries raise this
        raise RuntimeError(f"Triton: {type(error).__name__}: {error}") from error
    return y


LIBRARY.impl("attention_triton", attention, "CPU" if INTERPRETED else "CUDA")
