"""Rotary position embedding in its two-halves form."""

import torch

from kfconvert.ops.rotary import by_parts, reference

from .base import FusedModule, Plan, takes_plain_path


class FusedRotary(FusedModule):
    """``y = x * cos + [-x[..., D/2:], x[..., :D/2]] * sin`` (Su et al., arXiv:2104.09864).

    x: (..., D), D even, any strides; cos, sin: the same dtype, broadcast to x, sin with D columns; y as x.
    float64, float32, float16, bfloat16.
    Strategies: "halves" (the rotated x is never written), "composition".
    """

    live_strategies = ("halves", "composition")

    def strategies(self, *inputs) -> list[str]:
        """See :meth:`FusedModule.strategies`."""
        return ["halves", "composition"]

    def plan(self, *inputs: torch.Tensor) -> Plan:
        """See :meth:`FusedModule.plan`."""
        return self.reference if self.choose(*inputs) == "composition" else self._halves

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Shapes as in the class's description."""
        plain = takes_plain_path(x, (cos, sin)) or self.choose(x) == "composition"
        return self.reference(x, cos, sin) if plain else self._halves(x, cos, sin)

    def reference(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The definition in plain ATen calls."""
        return reference(x, cos, sin)

    def _halves(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return by_parts(x, cos, sin)

    def extra_repr(self) -> str:
        return f"strategy={self.strategy!r}" if self.strategy is not None else ""
