"""Attention, whole and in parts: ``softmax(q k^T scale) v``, Vaswani et al., arXiv:1706.03762.

Whole attention is ``F.scaled_dot_product_attention``, which selects PyTorch's fastest kernel for a device. NaN and
infinite scores depend on that kernel: some CPU kernels return 0 where the formula gives NaN. All functions take
float64, float32, float16 or bfloat16 and have a backward pass. Arguments must have one dtype (autocast aligns dtypes)
and one device, else RuntimeError.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...torch_state import being_traced, transformed
from ..arguments import require_share
from ..declaration import declare
from ..fused.rotary import rope
from ..registration import require, require_float, require_same_options, wants_gradient

__all__ = [
    "attention_dropout",
    "attention_score",
    "chunked_attention",
    "flash_attention",
    "fused_multihead_attention",
    "rope_attention",
]


@declare(group="attention", example=lambda t, rows, columns: (t(2, rows, 8), t(2, 7, 8)), runs="torch.baddbmm")
def attention_score(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Computes ``q k^T scale``, the scores before the softmax, of shape (..., N, M); ``torch.baddbmm``.

    The product is scaled during its computation. Half types with gradients are scaled in a separate pass, because
    their gradient would overflow. q: (..., N, D), k: (..., M, D), leading dimensions that broadcast. scale:
    1 / sqrt(D) by default.
    """
    operator = "attention_score"
    _check_keys(operator, q, k)
    message = f"leading dimensions of q {tuple(q.shape)} and k {tuple(k.shape)} do not broadcast"
    sizes = zip(reversed(q.shape[:-2]), reversed(k.shape[:-2]))
    require(all(n == m or n == 1 or m == 1 for n, m in sizes), operator, message)
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    batch = math.prod(leading)
    q, k = (t.expand(*leading, *t.shape[-2:]).reshape(batch, *t.shape[-2:]) for t in (q, k))
    scale = (1.0 if q.shape[-1] == 0 else q.shape[-1] ** -0.5) if scale is None else scale
    # With a factor of 0, baddbmm leaves some results uninitialized.
    if scale == 0 or (q.element_size() == 2 and wants_gradient(q, k)):
        scores = q @ k.mT * scale
    else:
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=scale)
    return scores.reshape(*leading, *scores.shape[-2:])


@declare(
    group="attention", example=lambda t, rows, columns: (t(rows, columns), 0.5), runs="torch.softmax and F.dropout"
)
def attention_dropout(scores: Tensor, p: float, training: bool = True) -> Tensor:
    """Computes ``dropout(softmax(scores))`` over the last dimension, or only the softmax without ``training``.

    p: fraction of dropped weights; the others are divided by 1 - p. Raises ValueError unless 0 <= p <= 1. Both
    operators are PyTorch's, because the backward of softmax needs its result before dropout.
    """
    require_float("attention_dropout", scores)
    require_share("p", p)
    return F.dropout(torch.softmax(scores, -1), p, training)


@declare(
    group="attention",
    example=lambda t, rows, columns: tuple(t(3, 1, 2, rows, 8)),
    runs="F.scaled_dot_product_attention",
)
def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """Computes ``softmax(q k^T scale) v``, of shape (..., N, E), by ``F.scaled_dot_product_attention``.

    On the CPU, and for half types on CUDA, this is flash attention (Dao et al., arXiv:2205.14135) if shapes and GPU
    allow, which does not store scores.

    Args:
        q: (..., N, D), k: (..., M, D), v: (..., M, E), equal leading dimensions, any strides: usually
            (batch, heads, sequence, head_dim).
        scale: factor of the scores, 1 / sqrt(D) by default.
        is_causal: query i attends only to keys 0 to i, also if N and M differ.

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
    """
    check_attention("flash_attention", q, k, v)
    if is_causal and scale is not None and scale <= 0:
        # PyTorch's kernels scale after masking with -inf.
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    queries, keys, values = with_four_dimensions(q, k, v)
    y = F.scaled_dot_product_attention(queries, keys, values, scale=scale, is_causal=is_causal)
    return y.reshape(*q.shape[:-2], *y.shape[-2:])


@declare(
    group="attention",
    example=lambda t, rows, columns: (*t(3, 1, 2, rows, 8), 2),
    runs="flash_attention where that writes no scores",
)
def chunked_attention(q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 1024, scale: float | None = None) -> Tensor:
    """Computes :func:`flash_attention` with the scores of at most ``chunk_size`` queries in memory at a time.

    If ``F.scaled_dot_product_attention`` has a faster kernel that stores no scores, this is one call. Otherwise, such
    as for float64 on CUDA or values of another width than the keys, it is one call for each ``chunk_size`` queries,
    whose backward stores the scores of all chunks.

    q, k, v, scale: see :func:`flash_attention`. RuntimeError: incompatible arguments.
    """
    operator = "chunked_attention"
    check_attention(operator, q, k, v)
    require(chunk_size >= 1, operator, f"chunk_size is {chunk_size}, expected 1 or more")
    if q.shape[-2] <= chunk_size or _writes_no_scores(with_four_dimensions(q, k, v), scale):
        return flash_attention(q, k, v, scale)
    return torch.cat([flash_attention(part, k, v, scale) for part in q.split(chunk_size, -2)], -2)


def _writes_no_scores(tensors, scale):
    if being_traced() or transformed():  # these do not support a function that returns a number
        return False
    return torch._fused_sdp_choice(*tensors, scale=scale) != SDPBackend.MATH.value


@declare(
    group="attention", example=lambda t, rows, columns: (*t(3, 2, rows, 8), 2), runs="flash_attention of another layout"
)
def fused_multihead_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """Computes :func:`flash_attention` of ``num_heads`` column blocks and concatenates the results: (..., N, E).

    q: (..., N, D), k: (..., M, D), v: (..., M, E), usually (batch, sequence, embed), after their projections;
    num_heads divides D and E.
    """
    operator = "fused_multihead_attention"
    check_attention(operator, q, k, v)
    require(
        num_heads >= 1 and q.shape[-1] % num_heads == 0 and v.shape[-1] % num_heads == 0,
        operator,
        lambda: f"{q.shape[-1]} columns of q and k and {v.shape[-1]} of v cannot be divided into {num_heads} heads",
    )
    q, k, v = (t.unflatten(-1, (num_heads, t.shape[-1] // num_heads)).transpose(-2, -3) for t in (q, k, v))
    return flash_attention(q, k, v).transpose(-2, -3).flatten(-2)


@declare(
    group="attention",
    example=lambda t, rows, columns: (*t(3, 1, 2, rows, 8), t(rows, 8), t(rows, 8)),
    runs="rope and flash_attention",
)
def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float | None = None,
    is_causal: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """Computes :func:`flash_attention` of ``rope(q)``, ``rope(k)`` and v; cos, sin, interleaved: see :func:`rope`.

    q and k must have equal lengths if cos and sin have more than one row.
    """
    q, k = (rope(t, cos, sin, interleaved) for t in (q, k))
    return flash_attention(q, k, v, scale, is_causal)


def with_four_dimensions(*tensors: Tensor) -> list[Tensor]:
    """Reshapes (..., N, D) to (batch, heads, N, D) for the kernels."""
    return [
        t if t.dim() == 4 else t.reshape(math.prod(t.shape[:-3]), *(t.shape[-3:-2] or (1,)), *t.shape[-2:])
        for t in tensors
    ]


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises RuntimeError if shapes, dtypes or devices are incompatible."""
    _check_keys(operator, q, k)
    require_same_options(operator, "v", q, v, "q")
    require(
        k.shape[:-2] == q.shape[:-2],
        operator,
        f"k has shape {tuple(k.shape)}, but q of shape {tuple(q.shape)} has other leading dimensions",
    )
    require(
        v.dim() == k.dim() and v.shape[:-1] == k.shape[:-1],
        operator,
        f"v has shape {tuple(v.shape)}, but k of shape {tuple(k.shape)}",
    )


def _check_keys(operator, q, k):
    require_float(operator, q)
    require_same_options(operator, "k", q, k, "q")
    require(
        q.dim() >= 2 and k.dim() >= 2 and q.shape[-1] == k.shape[-1],
        operator,
        f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}, expected (..., N, D) and (..., M, D)",
    )
