"""An RMS or layer norm, and the linear layers that read its result, in one launch for a few rows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.fused.norm_linear import RowNorm
from .base import FusedModule, Plan, held
from .linear import FusedLinear
from .merged import FusedMergedLinear
from .norm import FusedAddLayerNorm, FusedLayerNorm
from .norm_base import FusedNorm
from .rms_norm import FusedAddRMSNorm, FusedRMSNorm


class FusedNormLinear(FusedModule):
    """``product(norm(x))``; or, if the norm returns its sum, ``(product(norm(x + residual)), x + residual)``.

    ``norm``: a fused RMS or layer norm of rows, with a weight and without an activation; this module takes its inputs.
    ``product``: a fused module of linear layers. Both are used unchanged. Raises ValueError for others.
    Strategies: "kernel" (CUDA, half types, up to 16 rows, of up to 32 KiB together with the norm's tensors: one launch;
    for other inputs, one launch for each module), "composition".
    """

    live_strategies = ("composition",)

    def __init__(self, norm: FusedNorm, product: FusedModule):
        super().__init__()
        if not fits(norm, product):
            raise ValueError(f"{type(norm).__name__} and {type(product).__name__} cannot run in one launch")
        # An nn.Module does not state the class of its modules.
        self.norm: Any = norm
        self.product: Any = product

    @classmethod
    def examples(cls) -> Iterator[tuple[FusedModule, tuple[Tensor, ...]]]:
        x, residual = torch.randn(5, 16), torch.randn(5, 16)
        merged = FusedMergedLinear(nn.Linear(16, 8), nn.Linear(16, 4, bias=False))
        yield cls(FusedRMSNorm(16, offset=1.0), merged), (x,)
        yield cls(FusedAddRMSNorm(16, return_sum=True), FusedLinear(16, 8)), (x, residual)
        yield cls(FusedAddLayerNorm(16, return_sum=True), FusedLinear(16, 8)), (x, residual)

    def plan(self, *inputs: Tensor) -> Plan:
        if self.choose(*inputs) == "composition":
            return self.reference
        norm, return_sum = self.norm, self.norm.return_sum
        product = self.product.few_rows() if fits(norm, self.product) else None
        normalize, multiply = norm.plan(*inputs), self.product.plan(inputs[0])

        def run(x: Tensor, *residual: Tensor) -> Any:
            is_sum = all(each.shape == x.shape for each in residual)
            if product is not None and is_sum and product.takes_norm(x, of_rows := _of_rows(norm)):
                y, total = product.after_norm(x, residual[0] if residual else None, of_rows)
            else:
                found = normalize(x, *residual)
                normalized, total = found if return_sum else (found, None)
                y = multiply(normalized)
            return (y, total) if return_sum else y

        return run

    def reference(self, *inputs: Tensor) -> Any:
        found = self.norm.reference(*inputs)
        if not self.norm.return_sum:
            return self.product.reference(found)
        return self.product.reference(found[0]), found[1]

    def merged_weights(self) -> list[Tensor]:
        weights: list[Tensor] = self.product.merged_weights()
        return weights


def fits(norm: FusedModule, product: FusedModule) -> bool:
    """Whether ``FusedNormLinear`` accepts the modules."""
    if (
        not isinstance(norm, (FusedLayerNorm, FusedRMSNorm))
        or norm.activation != "none"
        or held(norm, "weight") is None
    ):
        return False
    return len(norm.normalized_shape) == 1 and type(product).few_rows is not FusedModule.few_rows


def _of_rows(norm: Any) -> RowNorm:
    centers = isinstance(norm, FusedLayerNorm)
    bias, offset = (held(norm, "bias"), 0.0) if centers else (None, norm.offset)
    return RowNorm(held(norm, "weight"), bias, norm.eps, offset, centers)
