"""Scaled dot-product attention: ``softmax(q k^T scale + masks) v``."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import FusedModule

# With fewer keys than a vector has elements, and no mask, the CPU kernel of torch 2.11 to 2.14 returns zeros
# for a row of NaN scores; with a mask it does not.
_FEWEST_KEYS = 16


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
    Strategies: "sdpa" (``F.scaled_dot_product_attention``; not for half types on the CPU), "composition".
    """

    live_strategies = ("sdpa", "composition")
    lays_out_anew = True

    def __init__(
        self,
        scale: float,
        key_transposed: bool = False,
        terms: tuple[MaskTerm, ...] = (),
        split: int | None = None,
        saturated: bool = False,
        empty_rows: bool = False,
    ):
        super().__init__()
        self.scale = scale
        self.key_transposed = key_transposed
        self.terms = tuple(terms)
        self.split = split
        self.saturated = saturated
        self.empty_rows = empty_rows

    @classmethod
    def examples(cls):
        q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
        yield cls(0.3), (q, k, v)
        terms, masks = (MaskTerm(), MaskTerm(-1e4)), (torch.randn(5, 7), torch.randn(2, 1, 5, 7) > 0)
        yield cls(0.3, True, terms), (q, k.mT.contiguous(), v, *masks)

    def strategies(self, *inputs) -> list[str]:
        # The CPU kernels of the half types (torch 2.11 to 2.14) return 0 where an infinite q or k makes NaN.
        inexact = inputs[0].is_cpu and inputs[0].element_size() == 2
        return ["composition"] if inexact else ["sdpa", "composition"]

    def differentiable(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.plan(*inputs)(*inputs)
        return y

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        rank = v.dim()
        q, k, v, mask = self._arranged(q, k, v, self._mask(q, masks))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        y = torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)
        return y.flatten(0, 1) if y.dim() > rank else y

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        rank = v.dim()
        q, k, v, mask = self._arranged(q, k, v, self._mask(q, masks))
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
        return y.flatten(0, 1) if y.dim() > rank else y

    def _mask(self, q: Tensor, masks: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the sum of all terms."""
        total = None
        for term, mask in zip(self.terms, masks):
            if term.fill is not None:
                hidden, shown = (term.fill, 0.0) if term.hidden else (0.0, term.fill)
                mask = torch.where(mask, torch.full((), hidden, dtype=q.dtype, device=q.device), shown)
            if term.split:
                mask = mask.unflatten(0, (-1, self.split))
            total = mask if total is None else total + mask
        return total

    def _arranged(self, q, k, v, mask):
        """Returns q, k, v and mask with matching leading dimensions, and k as (..., M, D)."""
        if self.key_transposed:
            k = k.transpose(-1, -2)
        if self.split is None:
            return q, k, v, mask
        if q.dim() == 3:
            sizes = (-1, self.split)
            v = v.unflatten(0, sizes) if v.dim() == 3 else v
            return q.unflatten(0, sizes), k.unflatten(0, sizes), v, mask
        if mask is not None and mask.dim() == 5:  # windows: reshaping the mask copies less than splitting q, k, v
            mask = mask.expand(q.shape[0] // self.split, self.split, -1, -1, -1).flatten(0, 1)
        return q, k, v, mask

    def extra_repr(self) -> str:
        return (
            f"scale={self.scale}, key_transposed={self.key_transposed}, terms={self.terms}, "
            f"split={self.split}, saturated={self.saturated}, empty_rows={self.empty_rows}"
        )
