"""The first half of gated MLPs: ``act(x Wg^T + bg) * (x Wu^T + bu)``; Shazeer, arXiv:2002.05202."""

import torch
from torch import nn

from ..ops.activations import ACTIVATIONS, apply_activation
from ..ops.fused.act_mul import act_mul
from ..ops.registration import has_kernels
from .base import FusedModule, Plan
from .few_rows import FewRows
from .linear import FusedLinear
from .merged import FusedMergedLinear, plain_linear


class FusedGatedLinear(FusedModule):
    """``act(gate(x)) * up(x)`` of two linear layers, or of the halves of one packed layer.

    x: (..., in_features); y: (..., hidden_features), contiguous. All of one dtype and device.

    ``gate``, ``up``: ``nn.Linear`` or Hugging Face ``Conv1D``, whose parameters are shared, or
    ``FusedLinear`` without an activation, used unchanged. ``activation``: one of ``kfconvert.ops.ACTIVATIONS``. Raises
    ValueError if their sizes, dtypes or devices differ, or for an unknown activation.
    Strategies: "mkl" and "onednn" (CPU, float32, packed weights), "merged" (two layers: one product with stacked
    weights, see :class:`FusedMergedLinear`), "kernel" (the live weights), each of them followed by
    ``kfconvert.ops.act_mul``, "skinny" (CUDA, half types, up to 16 rows: product and gate in one launch), and
    "composition". If a gradient is needed, under autocast and under ``torch.compile``, the differentiable operators
    run.
    """

    def __init__(self, gate: nn.Module, up: nn.Module, activation: str = "silu", negative_slope: float = 0.01):
        super().__init__(activation, negative_slope)
        self.projection: FusedMergedLinear | FusedLinear = FusedMergedLinear(gate, up)
        sizes = [linear.out_features for linear in self.projection.linears]
        if sizes[0] != sizes[1]:
            raise ValueError(f"gate and up have {sizes[0]} and {sizes[1]} features, expected the same")
        self.gate_first = True

    @classmethod
    def from_packed(
        cls, linear: nn.Module, activation: str = "silu", gate_first: bool = True, negative_slope: float = 0.01
    ) -> "FusedGatedLinear":
        """Creates ``act(a) * b`` with ``a, b = linear(x).chunk(2, -1)``, or ``a * act(b)`` unless ``gate_first``.

        Raises ValueError if the layer has an odd number of features.
        """
        module = cls.__new__(cls)
        FusedModule.__init__(module, activation, negative_slope)
        module.projection = plain_linear(linear)
        if module.projection.out_features % 2:
            raise ValueError(f"a packed layer must have an even number of features, got {linear.out_features}")
        module.gate_first = gate_first
        return module

    @classmethod
    def examples(cls):
        yield cls(nn.Linear(8, 6), nn.Linear(8, 6)), (torch.randn(20, 8),)
        yield cls.from_packed(nn.Linear(8, 12), "relu", gate_first=False), (torch.randn(20, 8),)

    @property
    def packed(self) -> bool:
        return not isinstance(self.projection, FusedMergedLinear)

    def strategies(self, x: torch.Tensor) -> list[str]:
        live = ["kernel"] if not self.packed and has_kernels(x) else []
        return [*self.projection.strategies(x)[:-1], *live, "composition"]

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(self.projection.differentiable(x))

    def merged_weights(self) -> list[torch.Tensor]:
        if not isinstance(self.projection, FusedMergedLinear) or self.strategy in self.live_strategies:
            return []
        # The projection has the strategy of the last plan, which may have been a trial.
        return self.projection.weights()

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        if strategy == "composition":
            return self.reference
        if strategy == "skinny":
            return self._skinny if self.packed else self.few_rows().run
        live = strategy == "kernel" and not self.packed
        self.projection.strategy = "composition" if live else strategy
        project = self.projection.plan(x)
        return lambda x: self._gated(project(x))

    def few_rows(self) -> FewRows:
        """Returns product and gate for few rows of x, by one kernel."""
        product = self.projection.few_rows()
        code, slope = ACTIVATIONS[self.activation].code, self.negative_slope
        return product._replace(code=code, negative_slope=slope, gated=True, gate_first=self.gate_first, sizes=None)

    def _skinny(self, x: torch.Tensor) -> torch.Tensor:
        return self.few_rows().run(x)

    def _halves(self, projected) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = projected.chunk(2, -1) if self.packed else projected
        return (first, second) if self.gate_first else (second, first)

    def _gated(self, projected) -> torch.Tensor:
        return act_mul(*self._halves(projected), self.activation, self.negative_slope)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._halves(self.projection.reference(x))
        return apply_activation(gate, self.activation, self.negative_slope) * up

    def extra_repr(self) -> str:
        order = "" if self.gate_first else ", gate_first=False"
        return super().extra_repr() + order
