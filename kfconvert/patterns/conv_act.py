"""Convolutions without a batch norm, with an optional residual add and an activation: ``act(conv(x) + residual)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..graph import Op, Var, aten
from ..matching import Case, Pattern
from .conv import CONV, conv_pattern

_ADD = Op(aten.add.Tensor, CONV, Var("residual"))

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "none": nn.Identity,
}


class _Residual(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.conv(x))


class _Broadcast(_Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.conv(x) + x.mean((2, 3), keepdim=True))


class _UsedTwice(_Residual):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        return self.activation(hidden) * hidden


class _ComputedWeight(_Residual):
    """A weight-standardised convolution, as in BiT and NFNet."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight - self.conv.weight.mean((1, 2, 3), keepdim=True)
        return self.activation(nn.functional.conv2d(x, weight, self.conv.bias))


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 9, 9),)


def _chain(activation: nn.Module, **options) -> Case:
    return Case(lambda: nn.Sequential(nn.Conv2d(8, 8, 3, **options), activation), _images)


_SPECIAL_CASES = {
    "relu": (
        _chain(nn.ReLU(inplace=True), groups=8, dilation=2, bias=False),
        _chain(nn.ReLU(), stride=2, padding_mode="reflect", padding=1),
        Case(lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.ReLU()), lambda: (torch.randn(2, 8, 9),)),
        Case(lambda: nn.Sequential(nn.Conv3d(8, 4, 3), nn.ReLU()), lambda: (torch.randn(2, 8, 5, 5, 5),)),
        Case(lambda: _UsedTwice(torch.relu), _images, 0, "also used by"),
        Case(lambda: _ComputedWeight(torch.relu), _images, 0, "computed in the forward"),
    ),
    "none": (
        _chain(nn.Identity(), padding="same"),
        Case(lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), _images, 0),
    ),
}


def _pattern(activation: str, added: bool) -> Pattern:
    function = _ACTIVATIONS[activation]
    plain = (_chain(function()), *_SPECIAL_CASES.get(activation, ()))
    residual = (
        Case(lambda: _Residual(function()), _images),
        Case(lambda: _Broadcast(function()), _images, 0, "the residual is broadcast"),
    )
    if added:
        return conv_pattern("conv_add", _ADD, activation, residual)
    return conv_pattern("conv", CONV, activation, plain)


PATTERNS = tuple(_pattern(activation, added) for activation in _ACTIVATIONS for added in (False, True))
