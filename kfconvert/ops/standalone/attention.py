"""Attention, whole and in parts: ``softmax(q k^T scale) v``, Vaswani et al., arXiv:1706.03762.

The whole is ``F.scaled_dot_product_attention``, which picks PyTorch's fastest kernel for a device. Scores
that are NaN or infinite come out as that kernel makes them: some on the CPU give 0 where the formula gives
NaN. All take float64, float32, float16 or bfloat16 and have a backward pass; the arguments must have one
dtype (autocast aligns them) and lie on one device, else RuntimeError.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...torch_state import being_traced, transformed
from ..arguments import require_share, within
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
    """``q k^T scale``, the scores before the softmax, of shape (..., N, M); ``torch.baddbmm``.

    The product is scaled while it is computed, not in a pass of its own; where half types want gradients it is, as
    the gradient that is scaled last would overflow. q: (..., N, D), k: (..., M, D), leading dimensions that broadcast.
    scale: 1 / sqrt(D) by default.
    """
    operator = "attention_score"
    _check_keys(operator, q, k)
    message = f"leading dimensions of q {tuple(q.shape)} and k {tuple(k.shape)} do not broadcast"
    sizes = zip(reversed(q.shape[:-2]), reversed(k.shape[:-2]))
    require(all(n == m or n == 1 or m == 1 for n, m in sizes), operator, message)
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    batch = math.prod(leading)
    q, k = (t.expand(*leading, *t.shape[-2:]).reshape(batch, *t.shape[-2:]) for t in (q, k))
    scale = _default_scale(q) if scale is None else scale
    # A factor of 0 leaves some results of baddbmm as the memory was.
    if scale == 0 or (q.element_size() == 2 and wants_gradient(q, k)):
        scores = q @ k.mT * scale
    else:
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=scale)
    return scores.reshape(*leading, *scores.shape[-2:])


@declare(
    group="attention",
    example=lambda t, rows, columns: (t(rows, columns), 0.5),
    runs="torch.softmax and F.dropout",
)
def attention_dropout(scores: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(softmax(scores))``, the softmax over the last dimension; outside of ``training`` the softmax.

    p: the part of the weights that is dropped; the others are divided by 1 - p. ValueError outside of 0 to 1.
    The two are PyTorch's: the backward of the softmax needs its result without the dropout.
    """
    require_float("attention_dropout", scores)
    require_share("attention_dropout", "p", p)
    return F.dropout(torch.softmax(scores, -1), p, training)


@declare(
    group="attention",
    example=lambda t, rows, columns: tuple(t(3, 1, 2, rows, 8)),
    runs="F.scaled_dot_product_attention",
)
def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """``softmax(q k^T scale) v``, of shape (..., N, E), by ``F.scaled_dot_product_attention``.

    On the CPU, and for the half types on CUDA, that is flash attention (Dao et al., arXiv:2205.14135) as far
    as shapes and GPU allow: no scores are written.

    Args:
        q: (..., N, D), k: (..., M, D), v: (..., M, E), leading dimensions alike, any strides: usually
            (batch, heads, sequence, head_dim).
        scale: factor of the scores, 1 / sqrt(D) by default.
        is_causal: query i sees the keys 0 to i only, also where N and M differ.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit.
    """
    check_attention("flash_attention", q, k, v)
    if is_causal and scale is not None and scale <= 0:
        # PyTorch's kernels scale after they have put -inf in the place of what is hidden.
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
    """:func:`flash_attention`, with the scores of at most ``chunk_size`` queries in memory at a time.

    One call where ``F.scaled_dot_product_attention`` has a kernel that writes no scores at all, which is faster;
    else, such as for float64 on CUDA or values of another width than the keys, one call for each ``chunk_size``
    queries. The backward pass of those keeps the scores of all chunks.

    q, k, v, scale: see :func:`flash_attention`. RuntimeError: arguments that do not fit.
    """
    operator = "chunked_attention"
    check_attention(operator, q, k, v)
    fits = within(operator, "chunk_size", 1, chunk_size, math.inf)
    require(fits, operator, f"chunk_size is {chunk_size}, expected 1 or more")
    if q.shape[-2] <= chunk_size or _writes_no_scores(with_four_dimensions(q, k, v), scale):
        return flash_attention(q, k, v, scale)
    return torch.cat([flash_attention(part, k, v, scale) for part in q.split(chunk_size, -2)], -2)


def _writes_no_scores(tensors, scale):
    if being_traced() or transformed():  # which do not take a function that returns a number
        return False
    return torch._fused_sdp_choice(*tensors, scale=scale) != SDPBackend.MATH.value


@declare(
    group="attention",
    example=lambda t, rows, columns: (*t(3, 2, rows, 8), 2),
    runs="flash_attention of another layout",
)
def fused_multihead_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """:func:`flash_attention` of ``num_heads`` parts of the columns, put side by side again: (..., N, E).

    q: (..., N, D), k: (..., M, D), v: (..., M, E), usually (batch, sequence, embed), after their projections;
    num_heads divides D and E.
    """
    operator = "fused_multihead_attention"
    check_attention(operator, q, k, v)
    require(
        within(operator, "num_heads", 1, num_heads, math.inf)
        and q.shape[-1] % num_heads == 0
        and v.shape[-1] % num_heads == 0,
        operator,
        lambda: f"{q.shape[-1]} columns of q and k and {v.shape[-1]} of v do not make {num_heads} heads",
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
    """:func:`flash_attention` of ``rope(q)``, ``rope(k)`` and v; cos, sin, interleaved: see :func:`rope`.

    q and k are as long as each other where cos and sin have more than one row.
    """
    q, k = (rope(t, cos, sin, interleaved) for t in (q, k))
    return flash_attention(q, k, v, scale, is_causal)


def with_four_dimensions(*tensors: Tensor) -> list[Tensor]:
    """(..., N, D) as (batch, heads, N, D), which the kernels take."""
    return [
        t if t.dim() == 4 else t.reshape(math.prod(t.shape[:-3]), *(t.shape[-3:-2] or (1,)), *t.shape[-2:])
        for t in tensors
    ]


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """RuntimeError where shapes, dtypes or devices do not fit."""
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


def _default_scale(q):
    return 1.0 if q.shape[-1] == 0 else q.shape[-1] ** -0.5
