"""Rotary position embedding in its two-halves form."""

import torch

from ..ops.fused.rotary import reference, rope, rope_inference
from .base import FusedModule


class FusedRotary(FusedModule):
    """``y = x * cos + [-x[..., D/2:], x[..., :D/2]] * sin`` (Su et al., arXiv:2104.09864).

    x: (..., D), D even, any strides; cos, sin: the same dtype, broadcast to x, sin with D columns; y as x.
    float64, float32, float16, bfloat16.
    Strategies: "kernel" (one pass over memory; cos with D columns too), "composition".
    """

    keeps_order = True

    @classmethod
    def examples(cls):
        yield cls(), (torch.randn(5, 8), torch.randn(5, 8), torch.randn(5, 8))

    def strategies(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[str]:
        return super().strategies(x) if cos.dim() and cos.shape[-1] == x.shape[-1] else ["composition"]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates x. See the class for shapes."""
        return self.reference(x, cos, sin) if self.choose(x, cos, sin) == "composition" else rope(x, cos, sin)

    def reference(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return reference(x, cos, sin)

    def _kernel(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope_inference(x, cos, sin, False, False)
