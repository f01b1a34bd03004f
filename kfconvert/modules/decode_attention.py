"""Attention of one new token over a static cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.fused.decode_attention import attended, decode_attention_, written
from ..ops.registration import has_kernels
from .base import FusedModule, Plan

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
    Strategies: "kernel" (CUDA, heads of up to 512 bytes: one launch, which reads the visible part of the cache once),
    "sdpa" (CPU, not for half types: heads of keys are not repeated), "composition".
    """

    caches = (3, 4)

    def __init__(self, scale: float, masked: bool = True, rotated: bool = False, in_place: bool = False):
        super().__init__()
        self.scale, self.masked, self.rotated, self.in_place = scale, masked, rotated, in_place

    @classmethod
    def examples(cls):
        q, k, v, cos, sin = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2, 1, 1))
        keys, values, position = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16), torch.tensor([6])
        mask = torch.arange(20).expand(2, 1, 1, 20) <= 6
        yield cls(0.3, rotated=True), (q, k, v, keys, values, position, mask, cos, sin)
        yield cls(0.3, masked=False), (q, k, v, keys, values, position)

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
        q, keys, values = written(q, k, v, keys, values, position, cos, sin, self.in_place)
        return q, keys, values, mask

    def _kernel(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, keys, values, position, *rest = inputs
        if not (keys.is_contiguous() and values.is_contiguous()):
            return self.reference(*inputs)
        if not self.in_place:
            keys, values = keys.clone(), values.clone()
        y: Tensor = decode_attention_(q, k, v, keys, values, position, *self._others(rest), self.scale)
        return y, keys, values

    def _others(self, rest: list[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns mask, cos and sin."""
        mask = rest[0] if self.masked else None
        cos, sin = rest[-2:] if self.rotated else (None, None)
        return mask, cos, sin

    def extra_repr(self) -> str:
        return f"scale={self.scale}, masked={self.masked}, rotated={self.rotated}, in_place={self.in_place}"
