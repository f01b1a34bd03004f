"""A product for a few rows of x, as in a step of generation, by one kernel that reads the weights once."""

from typing import Any, NamedTuple

import torch

from ..ops.fused.norm_linear import RowNorm, norm_linear, takes_norm_linear
from ..ops.fused.quantized_linear import quantized_linear
from ..ops.fused.skinny_linear import skinny_linear


class FewRows(NamedTuple):
    """``act(x W^T + b)``, or ``act(g) * u`` of its halves if ``gated``.

    Attributes:
        weights: one tensor (out_features, in_features); or with ``scales``, one for each row, up to three quantized
            tensors, stacked.
        code: number of the activation, see ``kfconvert.ops.activations``.
        gate_first: whether the first half is activated.
        sizes: return views of the result, of these numbers of features.
        owner: kept alive, as it has the tensors for further plans.
    """

    weights: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...] = ()
    bias: torch.Tensor | None = None
    code: int = 0
    negative_slope: float = 0.0
    gated: bool = False
    gate_first: bool = True
    sizes: tuple[int, ...] | None = None
    owner: Any = None

    def run(self, x: torch.Tensor) -> Any:
        """Returns the result for x (..., in_features)."""
        if self.scales:
            y = quantized_linear(x, self.weights, self.scales, self.code, self.negative_slope, self.gated)
        else:
            gate = self.gated, self.gate_first
            y = skinny_linear(x, self.weights[0], self.bias, self.code, self.negative_slope, *gate)
        return self._parts(y)

    def takes_norm(self, x: torch.Tensor, norm: RowNorm) -> bool:
        """Whether :meth:`after_norm` accepts x."""
        return takes_norm_linear(x, norm, self.weights, self.scales)

    def after_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: RowNorm) -> tuple[Any, torch.Tensor]:
        """Returns the result for the norm of x + residual, by the same kernel, and the sum."""
        product = self.weights, self.scales, self.bias, self.code, self.negative_slope, self.gated, self.gate_first
        y, total = norm_linear(x, residual, *norm, *product)
        return self._parts(y), total

    def _parts(self, y: torch.Tensor) -> Any:
        return y if self.sizes is None else torch.split_with_sizes(y, self.sizes, -1)
