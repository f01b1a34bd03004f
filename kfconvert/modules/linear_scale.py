"""A linear layer and the layer scale after it: ``y = (x W^T + b) * gamma``."""

import torch
import torch.nn.functional as F

from .base import FusedModule, Plan, held_of, is_too_narrow, require_float_tensor
from .linear import FusedLinear


class FusedLinearScale(FusedLinear):
    """``y = (x W^T + b) * gamma`` per output feature: the last layer of a branch with layer scale (Touvron et
    al., arXiv:2103.17239).

    x: (..., in_features); weight, bias: as in :class:`FusedLinear`; gamma: out_features elements, with all other sizes
    1; y: (..., out_features), permuted by ``permutation`` if given, as a view.

    In inference, gamma is folded into the layer, W' = gamma W and b' = gamma b in float64, then cast once to the dtype
    of W. The live tensors are folded again after each change. In float16, W' and b' must be in range. Otherwise, if a
    gradient is needed, under autocast and under ``torch.compile``, gamma is applied after the layer.
    Strategies: as in :class:`FusedLinear`, on the folded weights ("folded" in place of "kernel").
    """

    live_strategies = FusedModule.live_strategies  # all others use folded weights
    few_rows = FusedModule.few_rows  # which would read the live weights
    gamma: torch.Tensor
    permutation: tuple[int, ...] | None

    def __init__(self, *_, **__):
        raise TypeError("create a FusedLinearScale from tensors: FusedLinearScale.from_tensors(weight, bias, gamma)")

    @classmethod
    def from_tensors(  # type: ignore[override]  # other tensors, no activation
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gamma: torch.Tensor,
        transposed: bool = False,
        permutation: tuple[int, ...] | None = None,
    ) -> "FusedLinearScale":
        """Creates a module that shares ``weight`` (out, in), or (in, out) if ``transposed``, ``bias`` (out,) or
        None, and ``gamma`` (out,), optionally with additional sizes of 1.

        Parameters stay parameters, and plain tensors become buffers. Raises TypeError for tensors that are not plain
        floats, ValueError for shapes that do not match.
        """
        module = super().from_tensors(weight, bias, "none", transposed=transposed)
        require_float_tensor(gamma, "gamma")
        shape, size = tuple(gamma.shape), module.out_features
        if max(shape, default=1) != gamma.numel() or gamma.numel() != size:
            raise ValueError(f"gamma must have {size} elements in one dimension, got shape {shape}")
        module._set_tensors(gamma=gamma)
        module.permutation = permutation
        return module

    @classmethod
    def examples(cls):
        linear, gamma = torch.nn.Linear(8, 6), torch.nn.Parameter(torch.rand(6, 1, 1) + 0.5)
        yield cls.from_tensors(linear.weight, linear.bias, gamma, permutation=(1, 0)), (torch.randn(20, 8),)

    def strategies(self, x: torch.Tensor) -> list[str]:
        names = ["folded" if name == "kernel" else name for name in super().strategies(x)]
        return names if "folded" in names else [*names[:-1], "folded", names[-1]]

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        return self.reference(x)

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        if strategy == "composition":
            return self.reference
        plans = self._prepared(self.sources())
        if strategy not in plans:
            plans[strategy] = self._folded_plan(strategy)
        return plans[strategy]

    def places(self) -> list[tuple[dict, str]]:
        """Bias and gamma are folded too."""
        return FusedModule.places(self)

    def sources(self) -> list[torch.Tensor]:
        return held_of(self, "weight", "bias", "gamma")

    def _folded_plan(self, strategy: str) -> Plan:
        with torch.inference_mode(False), torch.no_grad():
            gamma = self.gamma.double().flatten()
            factors = gamma if self.transposed else gamma[:, None]
            tensors = held_of(self, "weight", "bias")
            scaled = [tensor.double() * factor for tensor, factor in zip(tensors, (factors, gamma))]
            narrow = [wide.to(tensor.dtype) for wide, tensor in zip(scaled, tensors)]
            if any(map(is_too_narrow, narrow, scaled)):
                return self.reference
            weight, bias = narrow if len(narrow) == 2 else (*narrow, None)
            folded = FusedLinear.from_tensors(weight, bias, transposed=self.transposed)
            plan = folded._kernel if strategy == "folded" else folded._plan(strategy, weight)
        permutation = self.permutation  # a plan must not keep this module and its folded weight alive
        return plan if permutation is None else lambda x: plan(x).permute(permutation)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.oriented(self.weight), self.bias) * self.gamma.flatten()
        return y if self.permutation is None else y.permute(self.permutation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, permutation={self.permutation}"
