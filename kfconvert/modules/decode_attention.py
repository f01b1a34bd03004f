"""Attention of one new token over a static cache of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.fused.decode_attention import attended, decode_attention_, written
from ..ops.registration import has_kernels
from .base import FusedModule, Plan, held
from .rms_norm import FusedRMSNorm

# The largest head in bytes for the kernel, and the multiple of bytes that a head must be.
_MOST_BYTES, _PACK = 512, 16


class FusedDecodeAttention(FusedModule):
    """``softmax(q K^T scale + mask) V``, where K and V are caches with the new k and v at ``position``.

    q: (batch, heads, 1, size); k, v: (batch, key heads, 1, size), key heads a divisor of heads, each shared by
    neighboring heads; keys, values: (batch, key heads, capacity, size); position: int64 of shape (1,), the index of k
    and v; mask: broadcast to (batch, heads, 1, capacity), boolean (True is visible) or added to the scores; cos, sin:
    (batch or 1, 1, 1, size). All have one dtype, float64, float32, float16 or bfloat16, except position and a boolean
    mask. Returns y (batch, heads, 1, size), and keys and values updated with k and v.

    Args:
        scale: factor of the scores.
        masked: whether there is a mask, the seventh input.
        rotated: whether to rotate q and k as in ``FusedRotary``, by cos and sin, the last two inputs.
        in_place: write to ``keys`` and ``values`` and return them; else copies.
        norms: RMS norms of q and k, which are applied before the rotation; or empty. Used unchanged. Raises ValueError
            unless they differ only in their weights, of size ``size``.
    Strategies: "kernel" (CUDA, heads of up to 512 bytes: one launch, which reads the visible part of the cache once),
    "sdpa" (CPU, not for half types: heads of keys are not repeated), "composition".
    """

    caches = (3, 4)
    live_strategies = ("kernel", "sdpa", "composition")

    def __init__(
        self,
        scale: float,
        masked: bool = True,
        rotated: bool = False,
        in_place: bool = False,
        norms: Sequence[FusedRMSNorm] = (),
    ):
        super().__init__()
        if norms and not are_norms_of_heads(*norms):
            raise ValueError("the norms of q and k cannot run in one launch")
        self.scale, self.masked, self.rotated, self.in_place = scale, masked, rotated, in_place
        # An nn.Module does not state the class of its modules.
        self.norms: Any = nn.ModuleList(norms)

    @classmethod
    def examples(cls):
        q, k, v, cos, sin = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2, 1, 1))
        keys, values, position = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16), torch.tensor([6])
        mask = torch.arange(20).expand(2, 1, 1, 20) <= 6
        yield cls(0.3, rotated=True), (q, k, v, keys, values, position, mask, cos, sin)
        yield cls(0.3, masked=False), (q, k, v, keys, values, position)
        norms = FusedRMSNorm(16, offset=1.0), FusedRMSNorm(16, offset=1.0)
        yield cls(0.3, rotated=True, norms=norms), (q, k, v, keys, values, position, mask, cos, sin)

    def strategies(self, *inputs: Tensor) -> list[str]:
        q = inputs[0]
        width = q.shape[-1] * q.element_size()
        if q.is_cuda and has_kernels(q) and width <= _MOST_BYTES and width % _PACK == 0:
            return ["kernel", "composition"]
        # The CPU kernels of the half types (torch 2.11 to 2.14) return 0 where an infinite q or k makes NaN.
        return ["sdpa", "composition"] if q.is_cpu and q.element_size() > 2 else ["composition"]

    def plan(self, *inputs: Tensor) -> Plan:
        return {"kernel": self._kernel, "sdpa": self._sdpa}.get(self.choose(*inputs), self.reference)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes attention. inputs: q, k, v, keys, values, position, then mask, cos and sin if present."""
        result: tuple[Tensor, Tensor, Tensor] = (self.reference if torch.is_grad_enabled() else self.plan(*inputs))(
            *inputs
        )
        return result

    def reference(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values, mask = self._written(inputs)
        return attended(q, keys, values, mask, self.scale), keys, values

    def _sdpa(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values, mask = self._written(inputs)
        y = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale, enable_gqa=True)
        return y, keys, values

    def _written(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns the rotated q, the caches updated with k and v, and the mask."""
        q, k, v, keys, values, position, *rest = inputs
        mask, cos, sin = self._others(rest)
        q, k = self._normalized(q, k, [norm.reference for norm in self.norms])
        q, keys, values = written(q, k, v, keys, values, position, cos, sin, self.in_place)
        return q, keys, values, mask

    def _kernel(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, keys, values, position, *rest = inputs
        if not all(each.is_contiguous() and each.data_ptr() % _PACK == 0 for each in (keys, values)):
            return self.reference(*inputs)
        if not self.in_place:
            keys, values = keys.clone(), values.clone()
        weights = [held(norm, "weight") for norm in self.norms]
        if weights and not any(w is None or w.dtype is not q.dtype or not w.is_contiguous() for w in weights):
            norms = *weights, self.norms[0].eps, self.norms[0].offset
        else:
            q, k = self._normalized(q, k, [norm.plan(q) for norm in self.norms])
            norms = None, None, 0.0, 0.0
        y: Tensor = decode_attention_(q, k, v, keys, values, position, *self._others(rest), *norms, self.scale)
        return y, keys, values

    @staticmethod
    def _normalized(q: Tensor, k: Tensor, norms: list[Plan]) -> tuple[Tensor, Tensor]:
        return (norms[0](q), norms[1](k)) if norms else (q, k)

    def _others(self, rest: list[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns mask, cos and sin."""
        mask = rest[0] if self.masked else None
        cos, sin = rest[-2:] if self.rotated else (None, None)
        return mask, cos, sin

    def extra_repr(self) -> str:
        flags = f"masked={self.masked}, rotated={self.rotated}, in_place={self.in_place}"
        return f"scale={self.scale}, {flags}, normed={bool(len(self.norms))}"


def are_norms_of_heads(*norms: Any) -> bool:
    """Whether ``norms`` are two RMS norms of heads with weights, which differ only in these."""
    if len(norms) != 2 or not all(type(each) is FusedRMSNorm and held(each, "weight") is not None for each in norms):
        return False
    one, other = ((each.normalized_shape, each.eps, each.offset, each.activation) for each in norms)
    return one == other and len(one[0]) == 1 and one[-1] == "none"
