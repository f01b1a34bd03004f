"""Batch norm and activation without a convolution before them, as in DenseNet: ``act(bn(x))``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..graph import Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedBatchNormAct
from .activations import negative_slope, with_activation
from .checks import dtype_refusal, traced, weights_refusal
from .skeletons import NORM_ARGUMENTS, NORM_MODULES, NORM_TENSORS, norm_shell

_NORM = Op(aten.batch_norm.default, Var("x"), *NORM_ARGUMENTS, name="norm")


def _refusal(match: Match) -> str | None:
    captures = match.captures
    if captures["training"]:
        return "the batch norm uses the statistics of the batch"
    if traced(captures["norm"]).dim() not in NORM_MODULES:
        return f"its input has {traced(captures['norm']).dim()} dimensions, which no batch norm module accepts"
    tensors = {name: captures[name] for name in NORM_TENSORS}
    return weights_refusal(**tensors) or dtype_refusal(captures["x"], *tensors.values())


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        norm, bindings = norm_shell(match.captures, tensor)
        module = FusedBatchNormAct(norm.eval(), activation, negative_slope(match.captures))
        return Replacement(module, (match.captures["x"],), tuple(bindings), (match.root,))

    return build


class _DenseLayer(nn.Module):
    """A pre-activation layer whose result is concatenated with its input."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.activation = activation
        self.conv = nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(self.activation(self.norm(x)))), 1)


class _UsedTwice(_DenseLayer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return self.activation(hidden) + hidden


class _OfSixDimensions(nn.BatchNorm3d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps).relu()

    def __init__(self) -> None:
        super().__init__(8)


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 9, 9),)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "gelu": nn.GELU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "none": nn.Identity,
}
_SPECIAL_CASES = {
    "relu": (
        Case(lambda: nn.Sequential(nn.BatchNorm1d(8, eps=0.1), nn.ReLU()), lambda: (torch.randn(5, 8),)),
        Case(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(inplace=True)), lambda: (torch.randn(2, 8, 9),)),
        Case(lambda: nn.Sequential(nn.BatchNorm3d(8, affine=False), nn.ReLU()), lambda: (torch.randn(2, 8, 3, 3, 3),)),
        Case(lambda: _UsedTwice(nn.ReLU()), _images, 0, "also used by"),
        Case(
            lambda: nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
            _images,
            0,
            "statistics of the batch",
        ),
        Case(lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), _images, 0),
        Case(_OfSixDimensions, lambda: (torch.randn(2, 8, 1, 2, 1, 3),), 0, "6 dimensions"),
    ),
}


def _pattern(activation: str) -> Pattern:
    function = _ACTIVATIONS[activation]
    return Pattern(
        name="batchnorm" if activation == "none" else f"batchnorm_{activation}",
        tree=with_activation(activation, _NORM),
        anchor="norm",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        cases=(Case(lambda: _DenseLayer(function()), _images), *_SPECIAL_CASES.get(activation, ())),
    )


PATTERNS = tuple(map(_pattern, _ACTIVATIONS))
