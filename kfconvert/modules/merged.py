"""Linear layers with the same input, such as q, k and v of attention, as one matrix product."""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.activations import ACTIVATIONS
from ..ops.fused.linear_act import linear_triton
from ..ops.fused.skinny_linear import takes_skinny
from ..runtime import whole
from .base import FusedModule, Plan
from .few_rows import FewRows
from .linear import FusedLinear, takes_triton


class FusedMergedLinear(FusedModule):
    """``(x W1^T + b1, x W2^T + b2, ...)``.

    x: (..., in_features); the results: (..., out_features) of each linear, a tuple in order. With "merged" they are
    views of one tensor, each a block of its columns. All have one dtype and device.

    ``linears``: two or more ``nn.Linear`` or Hugging Face ``Conv1D``, whose parameters are shared, or
    ``FusedLinear`` without an activation, used unchanged. Raises ValueError for fewer, for an activation, and if
    input sizes, dtypes or devices differ.
    Strategies: "mkl" (CPU, float32: each weight packed separately), "merged" (one product with stacked weights: without
    a copy if they are contiguous in memory, see ``runtime.merge``, else with a concatenated copy that is updated with
    the parameters), "skinny" (CUDA, half types, up to 16 rows: one product by a kernel of this package), "triton"
    (CUDA, float32: one product on tensor cores, see :class:`FusedLinear`), "composition" (one product each). If a
    gradient is needed, under autocast and under ``torch.compile``, there is one product each.
    """

    live_strategies = ("composition",)

    def __init__(self, *linears: nn.Module):
        super().__init__()
        if len(linears) < 2:
            raise ValueError(f"expected two linear layers or more, got {len(linears)}")
        # An nn.ModuleList does not state the class of its modules.
        self.linears: Any = nn.ModuleList(map(plain_linear, linears))
        kinds = {(m.in_features, m.weight.dtype, m.weight.device) for m in self.linears}
        if len(kinds) > 1:
            raise ValueError("the linear layers differ in input size, dtype or device")

    @classmethod
    def examples(cls):
        yield cls(nn.Linear(8, 6), nn.Linear(8, 4, bias=False)), (torch.randn(20, 8),)

    def strategies(self, x: torch.Tensor) -> list[str]:
        packed = all("mkl" in linear.strategies(x) for linear in self.linears)
        weight = self.linears[0].oriented(self.linears[0].weight)
        fits = weight.dtype == x.dtype
        offered = {"mkl": packed, "skinny": fits and takes_skinny(x, weight.shape[1]), "merged": True}
        offered |= {"triton": fits and takes_triton(x, weight, "none"), "composition": True}
        return [name for name, is_offered in offered.items() if is_offered]

    def differentiable(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes one product each, with differentiable operators."""
        return tuple([linear.differentiable(x) for linear in self.linears])

    def merged_weights(self) -> list[torch.Tensor]:
        return [] if self.strategy in self.live_strategies else self.weights()

    def weights(self) -> list[torch.Tensor]:
        """Returns the weights of all linears; empty if one is stored as (in, out)."""
        return [] if any(linear.transposed for linear in self.linears) else [each.weight for each in self.linears]

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        if strategy in ("merged", "triton"):
            product = self.product()
            return product if strategy == "merged" else product.triton
        if strategy == "skinny":
            return self.few_rows().run
        if strategy == "composition":
            return self.reference
        for linear in self.linears:
            linear.strategy = strategy
        plans = [linear.plan(x) for linear in self.linears]
        return lambda x: tuple([plan(x) for plan in plans])

    def product(self) -> "MergedProduct":
        """Returns one product for all plans. A concatenated weight lives as long as a plan that reads it."""
        values = self._prepared(self.sources())
        known = values.get("merged")
        product = known and known()
        if product is None:
            product = MergedProduct(self.linears)
            values["merged"] = weakref.ref(product)
        return product

    def few_rows(self) -> FewRows:
        """Returns the product for few rows of x, by one kernel."""
        product = self.product()
        return FewRows((product.weight,), bias=product.bias, sizes=tuple(product.sizes), owner=product)

    def reference(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([linear.reference(x) for linear in self.linears])


class MergedProduct:
    """A product with all weights, stacked. A linear without a bias gets zeros if others have one."""

    @torch.no_grad()
    def __init__(self, linears):
        weights = [linear.oriented(linear.weight) for linear in linears]
        biases = [linear.bias for linear in linears]
        self.sizes = [weight.shape[0] for weight in weights]
        below_each_other = whole(weights)
        self.weight, self.bias = torch.cat(weights) if below_each_other is None else below_each_other, None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in zip(weights, biases)]
            )

    def __call__(self, x):
        return self._parts(F.linear(x, self.weight, self.bias))

    def triton(self, x):
        """Computes the product by Triton's kernel."""
        return self._parts(linear_triton(x, self.weight, self.bias, ACTIVATIONS["none"].code, 0.0))

    def _parts(self, y):
        return torch.split_with_sizes(y, self.sizes, -1)


def plain_linear(linear: nn.Module) -> FusedLinear:
    """Returns ``linear`` as a FusedLinear that shares its parameters. Raises ValueError if it has an activation."""
    if not isinstance(linear, FusedLinear):
        return FusedLinear.from_linear(linear)
    if linear.activation != "none":
        raise ValueError(f"the linear layer ends in {linear.activation!r}: expected none")
    return linear
