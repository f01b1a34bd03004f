"""Linear layers with an activation: ``act(x W^T + b)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedLinear
from .activations import negative_slope, with_activation
from .checks import linear_refusal

_WEIGHT = Either(Op(aten.t.default, Var("transposed_weight")), Var("weight"))
LINEAR = Op(aten.linear.default, Var("x"), _WEIGHT, Var("bias"), name="linear")


def linear_weight(match: Match) -> fx.Node:
    """Returns the weight parameter of a matched ``LINEAR``."""
    return match.captures.get("transposed_weight") or match.captures["weight"]


def _refusal(match: Match) -> str | None:
    weight, bias = linear_weight(match), match.captures["bias"]
    return linear_refusal(match.captures["x"], weight, bias, "transposed_weight" in match.captures)


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        weight, bias = linear_weight(match), match.captures["bias"]
        module = FusedLinear.from_tensors(
            tensor(weight),
            None if bias is None else tensor(bias),
            activation,
            negative_slope(match.captures),
            transposed="transposed_weight" in match.captures,
        )
        bindings = [(module, "weight", weight)] + ([] if bias is None else [(module, "bias", bias)])
        return Replacement(module, (match.captures["x"],), tuple(bindings), (match.root,))

    return build


class _UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return torch.relu(hidden) + hidden


class _ComputedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(x, self.weight * 2))


class _QuickGELU(nn.Module):
    def __init__(self, slope: float, swapped: bool = False):
        super().__init__()
        self.slope, self.swapped = slope, swapped

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.slope * x)
        return gate * x if self.swapped else x * gate


class _GateOfAnother(nn.Module):
    """Two layers in place of the single layer of quick GELU."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * torch.sigmoid(1.702 * self.second(x))


def _clipped() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(0, 5))


class _ParametersOfShape(nn.Module):
    def __init__(self, weight: tuple[int, ...], bias: tuple[int, ...] | None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(weight))
        self.bias = None if bias is None else nn.Parameter(torch.randn(bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


def _batch() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8),)


def _pair(activation: Callable[[], nn.Module]) -> Case:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 8, bias=False), activation())

    return Case(module, _batch, 2)


_CASES: dict[str, tuple[Case, ...]] = {
    "relu": (
        _pair(nn.ReLU),
        _pair(lambda: nn.ReLU(inplace=True)),
        Case(_UsedTwice, _batch, 0, "also used by"),
        Case(_ComputedWeight, _batch, 0, "computed in the forward"),
        Case(lambda: _ParametersOfShape((16, 8), (1, 16)), _batch, 0, "is broadcast"),
        Case(lambda: _ParametersOfShape((16, 8), (1,)), _batch, 0, "is broadcast"),
        Case(lambda: _ParametersOfShape((8,), None), _batch, 0, "1 dimensions"),
    ),
    "gelu": (_pair(nn.GELU),),
    "gelu_tanh": (_pair(lambda: nn.GELU(approximate="tanh")),),
    "silu": (_pair(nn.SiLU),),
    "tanh": (_pair(nn.Tanh),),
    "sigmoid": (_pair(nn.Sigmoid),),
    "relu6": (_pair(nn.ReLU6), _pair(lambda: nn.Hardtanh(0, 6)), Case(_clipped, _batch, 0)),
    "hardswish": (_pair(nn.Hardswish),),
    "leaky_relu": (_pair(lambda: nn.LeakyReLU(0.2)),),
    "quick_gelu": (
        _pair(lambda: _QuickGELU(1.702)),
        _pair(lambda: _QuickGELU(1.702, swapped=True)),
        Case(lambda: nn.Sequential(nn.Linear(8, 16), _QuickGELU(1.5)), _batch, 0),
        Case(_GateOfAnother, _batch, 0),
    ),
    "none": (Case(lambda: nn.Linear(8, 16), _batch, 1),),
}

PATTERNS = tuple(
    Pattern(
        name="linear" if activation == "none" else f"linear_{activation}",
        tree=with_activation(activation, LINEAR),
        anchor="linear",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        cases=cases,
    )
    for activation, cases in _CASES.items()
)
