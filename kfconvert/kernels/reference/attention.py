"""Attention and rotary embedding in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.rotary import reference as rope


def attention_score(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def attention_dropout(scores: Tensor, p: float, training: bool = True) -> Tensor:
    return F.dropout(torch.softmax(scores, -1), p, training)


def flash_attention(q, k, v, scale=None, is_causal=False) -> Tensor:
    scores = attention_score(q, k, scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 1024, scale: float | None = None) -> Tensor:
    return torch.cat([flash_attention(part, k, v, scale) for part in q.split(chunk_size, -2)], -2)


def fused_multihead_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    parts = zip(*(t.chunk(num_heads, -1) for t in (q, k, v)))
    return torch.cat([flash_attention(*part) for part in parts], -1)


def block_sparse_attention(q, k, v, layout, block_size, scale=None) -> Tensor:
    blocks = torch.ones(block_size, block_size, dtype=torch.uint8, device=q.device)
    seen = torch.kron(layout.to(torch.uint8), blocks)[..., : q.shape[-2], : k.shape[-2]].bool()
    scores = attention_score(q, k, scale)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return (torch.softmax(scores, -1) * seen) @ v  # the lowest value, because a row of -inf gives NaN


def rope_attention(q, k, v, cos, sin, scale=None, is_causal=False, interleaved=False) -> Tensor:
    q, k = (rope(t, cos, sin, interleaved) for t in (q, k))
    return flash_attention(q, k, v, scale, is_causal)
