"""Scaled dot-product attention: ``softmax(q k^T scale + masks) v``."""

from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.fused.attention import attention_triton, keeps_keys
from .base import FusedModule, Plan
from .linear import has_triton

# With fewer keys than a vector has elements, and no mask, the CPU kernel of torch 2.11 to 2.14 returns zeros
# for a row of NaN scores; with a mask it does not.
_FEWEST_KEYS = 16
_FEWEST_ROWS = 16  # of queries, in a tile of Triton's kernel


class MaskTerm(NamedTuple):
    """A term that is added to the attention scores.

    fill: None if the tensor itself is added; otherwise the tensor is boolean, and the term is ``fill`` at elements
    equal to ``hidden`` and 0 elsewhere. split: whether its first dimension is split, see ``FusedAttention``.
    """

    fill: float | None = None
    hidden: bool = True
    split: bool = False


class FusedAttention(FusedModule):
    """``softmax(q k^T scale + sum of terms) v``, Vaswani et al., arXiv:1706.03762, without dropout.

    q: (..., N, D), k: (..., M, D), or (..., D, M) with ``key_transposed``; v: (..., M, E); one or more
    leading dimensions; those of k and v may be 1. Each term broadcasts to (..., N, M). The result is (..., N, E) in q's
    dtype: float64, float32, float16 or bfloat16, equal for all tensors except boolean terms.

    By this formula, a row with terms of -inf only is NaN, but it is 0 in ``F.scaled_dot_product_attention``. Set
    ``empty_rows`` if there may be such rows. A filled score is the sum of score and fill, so it does not hide NaN or
    +inf.

    Args:
        scale: factor of the scores.
        key_transposed: the layout of k.
        terms: a MaskTerm for each additional input.
        split: the first dimension of q and k is a product (B * split) and the terms broadcast to
            (B, split, ..., N, M). q, k: (B * heads, N, D), as in BLOOM, v of that form or (B, heads, M, E);
            or q, k, v: (B * windows, heads, N, D), as in Swin. The result has as many dimensions as v.
        saturated: the terms may contain the lowest value of their dtype. CUDA kernels scale scores by log2(e), which
            overflows that value to -inf and zeroes rows that have uniform weights in the original. The module uses
            half of the value, which stays finite.
        empty_rows: the terms may be -inf in whole rows, which gives NaN.
    Strategies: "sdpa" (``F.scaled_dot_product_attention``; not for half types on the CPU), "triton" (CUDA, half types,
    up to 256 keys, from 16 queries on, if Triton is installed: one kernel that reads terms without expanding or summing
    them), "composition". If a gradient is needed, "sdpa" runs instead of "triton".
    """

    live_strategies = ("sdpa", "triton", "composition")
    lays_out_anew = True

    def __init__(
        self, scale: float, key_transposed: bool = False, terms: tuple[MaskTerm, ...] = (), split: int | None = None,
        saturated: bool = False, empty_rows: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.scale, self.key_transposed, self.terms, self.split = scale, key_transposed, tuple(terms), split
        self.saturated, self.empty_rows = saturated, empty_rows

    @classmethod
    def examples(cls):
        q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
        yield cls(0.3), (q, k, v)
        terms, masks = (MaskTerm(), MaskTerm(-1e4)), (torch.randn(5, 7), torch.randn(2, 1, 5, 7) > 0)
        yield cls(0.3, True, terms), (q, k.mT.contiguous(), v, *masks)

    def strategies(self, *inputs) -> list[str]:
        q, v = inputs[0], inputs[2]
        if _is_inexact(q):
            return ["composition"]
        fits = q.is_cuda and q.element_size() == 2 and q.shape[-2] >= _FEWEST_ROWS and keeps_keys(q, v)
        return ["sdpa", *(["triton"] if fits and has_triton(q.device) else []), "composition"]

    def differentiable(self, *inputs: Tensor) -> Tensor:
        # Independent of sizes, which are free in a trace.
        plain = self.strategy == "composition" or _is_inexact(inputs[0])
        return self.reference(*inputs) if plain else self._kernel(*inputs)

    def plan(self, *inputs: Tensor) -> Plan:
        return self._triton if self.choose(*inputs) == "triton" else super().plan(*inputs)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        given = q, v
        q, k, v, mask = self._arranged(q, k, v, masks)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        return _as(torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v), *given)

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        if not keeps_keys(q, v):  # a plan for few keys meets any number
            return self._kernel(q, k, v, *masks)
        rank, terms = v.dim(), map(self._added, repeat(q), self.terms, masks)
        k = k.transpose(-1, -2) if self.key_transposed else k
        if self.split is not None:
            q, k, v = (x.unflatten(0, (-1, self.split)) if x.dim() == q.dim() else x for x in (q, k, v))
        five = {3: (None, None), 4: (slice(None), None), 5: ()}[q.dim()]  # an index that makes five dimensions
        q, k, v, *added = (x[(None,) * (q.dim() - x.dim())][five] for x in (q, k, v, *terms))
        y: Tensor = attention_triton(q, k, v, added, self.scale)
        return y.flatten(0, 5 - rank)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        given = q, v
        q, k, v, mask = self._arranged(q, k, v, masks)
        highest = None
        if mask is not None:
            if mask.dim() < 4:
                mask = mask[(None,) * (4 - mask.dim())]
            if self.empty_rows:
                highest = mask.amax(-1, keepdim=True)
            if self.saturated and mask.is_cuda:
                mask = torch.where(mask.isneginf(), mask, mask.clamp(min=torch.finfo(mask.dtype).min / 2))
            if mask.is_cuda and (mask.shape[-1] == 1 or mask.stride(-1) != 1):
                mask = mask.expand(*mask.shape[:-1], k.shape[-2]).contiguous()  # no stride of 0
        elif q.is_cpu and k.shape[-2] < _FEWEST_KEYS:
            mask = q.new_zeros(1, 1, 1, k.shape[-2])
        if q.dim() == 3:  # the kernels need four dimensions
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        batch = q.shape[:-2]
        if k.shape[:-2] != batch:
            k = k.expand(*batch, -1, -1)
        if v.shape[:-2] != batch:
            v = v.expand(*batch, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        if highest is not None:
            y = y + (highest - highest)  # adds 0, or NaN for infinity and NaN: cheaper than compare and fill
        return _as(y, *given)

    def _added(self, q: Tensor, term: MaskTerm, mask: Tensor) -> Tensor:
        """Returns the tensor that a term adds to the scores."""
        if term.fill is not None:
            hidden, shown = (term.fill, 0.0) if term.hidden else (0.0, term.fill)
            mask = torch.where(mask, torch.full((), hidden, dtype=q.dtype, device=q.device), shown)
        return mask.unflatten(0, (-1, self.split)) if term.split else mask

    def _arranged(self, q, k, v, masks):
        """Returns q, k (..., M, D), v and the sum of terms, with up to four dimensions and matching leading ones."""
        total = None
        for term, mask in zip(self.terms, masks):
            mask = self._added(q, term, mask)
            total = mask if total is None else total + mask
        if self.key_transposed:
            k = k.transpose(-1, -2)
        rank, split = q.dim(), self.split
        if rank == 3 and split is not None:
            v = v.unflatten(0, (-1, split)) if v.dim() == 3 else v
            return q.unflatten(0, (-1, split)), k.unflatten(0, (-1, split)), v, total
        if rank == 5:
            split, batch = q.shape[1], q.shape[:-2]
            total = total[None] if total is not None and total.dim() == 4 and total.shape[0] != 1 else total
            q, k, v = (x.expand(*batch, -1, -1).flatten(0, 1) for x in (q, k, v))
        if total is not None and total.dim() == 5:  # windows: reshaping the mask copies less than splitting q, k, v
            total = total.expand(q.shape[0] // split, split, -1, -1, -1).flatten(0, 1)
        return q, k, v, total

    def extra_repr(self) -> str:
        names = ("scale", "key_transposed", "terms", "split", "saturated", "empty_rows")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _is_inexact(x: Tensor) -> bool:
    """Whether SDPA returns 0 where an infinite q or k makes NaN: on the CPU for half types, in torch 2.11 to 2.14."""
    return x.is_cpu and x.element_size() == 2


def _as(y: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Returns y with as many dimensions as v, which may be those of q."""
    if y.dim() < v.dim():
        return y.unflatten(0, q.shape[:2])
    return y.flatten(0, 1) if y.dim() > v.dim() else y
