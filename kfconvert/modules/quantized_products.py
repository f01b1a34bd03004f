"""Linear layers with quantized weights and the same input, as one product: q, k and v of attention, and gated MLPs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..ops.activations import ACTIVATIONS, apply_activation
from ..ops.fused.act_mul import act_mul
from ..ops.fused.quantized_linear import MOST_WEIGHTS, takes_few_rows
from .base import FusedModule, Plan, held
from .few_rows import FewRows
from .quantized_linear import FusedQuantizedLinear, product_of


class _Several(FusedModule):
    """The base: two or more :class:`FusedQuantizedLinear`, used unchanged."""

    live_strategies = FusedQuantizedLinear.live_strategies
    is_chosen_for_steps = True

    def __init__(
        self, linears: tuple[FusedQuantizedLinear, ...], activation: str = "none", negative_slope: float = 0.01
    ):
        super().__init__(activation, negative_slope)
        if len(linears) < 2:
            raise ValueError(f"expected two linear layers or more, got {len(linears)}")
        # An nn.ModuleList does not state the class of its modules.
        self.linears: Any = nn.ModuleList(linears)
        if len({held(linear, "weight").shape[1] for linear in linears}) > 1:
            raise ValueError("the linear layers differ in input size")

    def strategies(self, x: torch.Tensor) -> list[str]:
        offered = [linear.strategies(x) for linear in self.linears]
        dtypes = {(held(each, "weight").dtype, held(each, "scale").dtype) for each in self.linears}
        common = [name for name in offered[0] if all(name in each for each in offered)]
        return [name for name in common if name != "skinny" or len(dtypes) == 1]

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        if strategy == "composition":
            return self.reference
        if strategy == "skinny":
            return self._few_rows
        for linear in self.linears:
            linear.strategy = strategy
        plans = [linear.plan(x) for linear in self.linears]
        return lambda x: self._combined([plan(x) for plan in plans])

    def _few_rows(self, x: torch.Tensor) -> Any:
        # A plan meets any number of rows.
        is_few = all([takes_few_rows(x, held(linear, "weight")) for linear in self.linears])
        return self._skinny(x) if is_few else self.reference(x)


class FusedMergedQuantizedLinear(_Several):
    """``(x (q1 * s1)^T, x (q2 * s2)^T, ...)``.

    x: (..., in_features); the results: (..., out_features) of each linear, a tuple in order. Raises ValueError for
    fewer than two ``linears``, and if their input sizes differ.
    Strategies: those that all linears have, see :class:`FusedQuantizedLinear`. "skinny" computes up to three of them in
    one launch; the results are views of its output.
    """

    def __init__(self, *linears: FusedQuantizedLinear):
        super().__init__(linears)

    @classmethod
    def examples(cls):
        yield cls(*_made(6, 4)), (torch.rand(5, 16),)

    def _skinny(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        for start in range(0, len(self.linears), MOST_WEIGHTS):
            found += _side_by_side(self.linears[start : start + MOST_WEIGHTS]).run(x)
        return tuple(found)

    def few_rows(self) -> FewRows | None:
        """Returns the product for few rows of x, by one kernel; None for more linears than it takes."""
        return _side_by_side(self.linears) if len(self.linears) <= MOST_WEIGHTS else None

    def _combined(self, products: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(products)

    def reference(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([linear.reference(x) for linear in self.linears])


def _side_by_side(linears: Sequence[FusedQuantizedLinear]) -> FewRows:
    return product_of(linears, sizes=tuple([held(linear, "weight").shape[0] for linear in linears]))


class FusedGatedQuantizedLinear(_Several):
    """``act(x (qg * sg)^T) * (x (qu * su)^T)``, the first half of a gated MLP with quantized weights.

    x: (..., in_features); y: (..., hidden_features), contiguous. ``activation``: one of ``kfconvert.ops.ACTIVATIONS``.
    Raises ValueError if the sizes of the linears differ, or for an unknown activation.
    Strategies: those that both linears have, see :class:`FusedQuantizedLinear`. "skinny" computes products and gate in
    one launch; the others are followed by ``kfconvert.ops.act_mul``.
    """

    def __init__(
        self,
        gate: FusedQuantizedLinear,
        up: FusedQuantizedLinear,
        activation: str = "silu",
        negative_slope: float = 0.01,
    ):
        super().__init__((gate, up), activation, negative_slope)
        sizes = [held(linear, "weight").shape[0] for linear in self.linears]
        if sizes[0] != sizes[1]:
            raise ValueError(f"gate and up have {sizes[0]} and {sizes[1]} features, expected the same")

    @classmethod
    def examples(cls):
        yield cls(*_made(6, 6)), (torch.rand(5, 16),)

    def _skinny(self, x: torch.Tensor) -> torch.Tensor:
        return self.few_rows().run(x)

    def few_rows(self) -> FewRows:
        """Returns products and gate for few rows of x, by one kernel."""
        code = ACTIVATIONS[self.activation].code
        return product_of(self.linears, code=code, negative_slope=self.negative_slope, gated=True)

    def _combined(self, products: list[torch.Tensor]) -> torch.Tensor:
        return act_mul(*products, self.activation, self.negative_slope)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (linear.reference(x) for linear in self.linears)
        return apply_activation(gate, self.activation, self.negative_slope) * up


def _made(*features: int) -> list[FusedQuantizedLinear]:
    """Linear layers for examples, whose numbers make both ways to scale round alike."""
    return [
        FusedQuantizedLinear.from_tensors(
            torch.randint(1, 128, (each, 16), dtype=torch.int8), nn.Parameter(torch.rand(each, 1) / 64)
        )
        for each in features
    ]
