"""Scaled dot-product attention: ``softmax(q k^T scale + masks) v``."""

from functools import reduce
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
        rank = v.dim()
        q, k, v, terms = self._arranged(q, k, v, masks)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        y = torch.matmul(torch.softmax(scores + reduce(torch.add, terms) if terms else scores, -1), v)
        return y.flatten(0, 1) if y.dim() > rank else y

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        if not keeps_keys(q, v):  # a plan for few keys meets any number
            return self._kernel(q, k, v, *masks)
        rank = v.dim()
        q, k, v, terms = self._arranged(q, k, v, masks)
        five = {3: (None, None), 4: (slice(None), None), 5: ()}[q.dim()]  # an index that makes five dimensions
        q, k, v, *terms = (x[(None,) * (q.dim() - x.dim())][five] for x in (q, k, v, *terms))
        y: Tensor = attention_triton(q, k, v, terms, self.scale)
        return y.flatten(0, 5 - rank)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        rank = v.dim()
        q, k, v, terms = self._arranged(q, k, v, masks)
        highest = mask = None
        if q.dim() == 3:  # the kernels need four dimensions
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        batch = q.shape[:-2]
        k, v = (x if x.shape[:-2] == batch else x.expand(*batch, -1, -1) for x in (k, v))
        if terms:
            mask = reduce(torch.add, terms)
            mask = mask[(None,) * (4 - mask.dim())]
            if q.dim() == 5 and any(size != 1 for size in mask.shape[:-3]):
                mask = mask.expand(*batch[:2], -1, -1, -1)
            mask = mask.flatten(0, mask.dim() - 4)
            if self.empty_rows:
                highest = mask.amax(-1, keepdim=True)
            if self.saturated and mask.is_cuda:
                mask = torch.where(mask.isneginf(), mask, mask.clamp(min=torch.finfo(mask.dtype).min / 2))
            if mask.is_cuda and (mask.shape[-1] == 1 or mask.stride(-1) != 1):
                mask = mask.expand(*mask.shape[:-1], k.shape[-2]).contiguous()  # no stride of 0
        elif q.is_cpu and k.shape[-2] < _FEWEST_KEYS:
            mask = q.new_zeros(1, 1, 1, k.shape[-2])
        if q.dim() == 5:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        if highest is not None:
            y = y + (highest - highest)  # adds 0, or NaN for infinity and NaN: cheaper than compare and fill
        if y.dim() < rank:
            return y.unflatten(0, batch[:2])
        return y.flatten(0, 1) if y.dim() > rank else y

    def _arranged(self, q, k, v, masks):
        """Returns q, k, v with matching leading dimensions, k as (..., M, D), and the list of terms to add."""
        terms = []
        for term, mask in zip(self.terms, masks):
            if term.fill is not None:
                hidden, shown = (term.fill, 0.0) if term.hidden else (0.0, term.fill)
                mask = torch.where(mask, torch.full((), hidden, dtype=q.dtype, device=q.device), shown)
            terms.append(mask.unflatten(0, (-1, self.split)) if term.split else mask)
        if self.key_transposed:
            k = k.transpose(-1, -2)
        if self.split is not None:
            rank = q.dim()
            q, k, v = (x.unflatten(0, (-1, self.split)) if x.dim() == rank else x for x in (q, k, v))
        return q, k, v, terms

    def extra_repr(self) -> str:
        names = ("scale", "key_transposed", "terms", "split", "saturated", "empty_rows")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _is_inexact(x: Tensor) -> bool:
    """Whether SDPA returns 0 where an infinite q or k makes NaN: on the CPU for half types, in torch 2.11 to 2.14."""
    return x.is_cpu and x.element_size() == 2
