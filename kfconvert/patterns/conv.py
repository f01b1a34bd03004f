"""Convolutions with batch norm, an optional residual add and an activation: ``act(bn(conv(x)) + residual)``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Tree, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedConvBN
from .activations import negative_slope, with_activation
from .checks import dtype_refusal, same_shape, traced, weights_refusal
from .skeletons import NORM_ARGUMENTS, NORM_TENSORS, conv_shell, norm_shell

_ARGUMENTS = tuple(map(Var, ("x", "weight", "bias", "stride", "padding", "dilation", "groups")))
CONV = Either(
    *(
        Op(getattr(packet, overload), *_ARGUMENTS, name="conv")
        for packet, overload in product((aten.conv1d, aten.conv2d, aten.conv3d), ("default", "padding"))
    )
)
_NORM = Op(aten.batch_norm.default, CONV, *NORM_ARGUMENTS, name="norm")
_ADD = Op(aten.add.Tensor, _NORM, Var("residual"))


def _refusal(match: Match) -> str | None:
    """The refusal of all patterns with a convolution, with or without the captures "norm" and "residual"."""
    captures = match.captures
    if captures.get("training"):
        return "the batch norm uses the statistics of the batch"
    if traced(captures["x"]).dim() != traced(captures["weight"]).dim():
        return "the input of the convolution has no batch dimension"
    result = captures.get("norm", captures["conv"])
    residual = captures.get("residual")
    if residual is not None:
        if not isinstance(residual, fx.Node):
            return "a constant is added, not a residual"
        if not same_shape(residual, result):
            return "the residual is broadcast"
    names = ("weight", "bias", *NORM_TENSORS)
    refused = weights_refusal(**{name: captures.get(name) for name in names})
    return refused or dtype_refusal(captures["x"], captures["weight"], captures["bias"], result, residual)


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    """The ``build`` of the pattern with ``activation``, with or without "norm" and "residual"."""

    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        captures = match.captures
        conv, bindings = conv_shell(captures, tensor)
        norm = None
        if "norm" in captures:
            norm, of_norm = norm_shell(captures, tensor)
            bindings += of_norm
        module = FusedConvBN(conv, norm, activation, negative_slope(captures)).eval()
        inputs = (captures["x"], captures["residual"]) if "residual" in captures else (captures["x"],)
        return Replacement(module, inputs, tuple(bindings), (match.root,))

    return build


class _Residual(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.bn(self.conv(x)) + x)


class _SharedConv(_Residual):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        return torch.relu(self.bn(hidden)) + hidden


class _Unbatched(nn.Module):
    """A batch norm that treats the rows of an unbatched image as channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 9, 1)
        self.bn = nn.BatchNorm1d(9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class _Uncounted(nn.Module):
    """A user-defined batch norm without the batch counter of nn.BatchNorm2d, which signals training."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("variance", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.batch_norm(self.conv(x), self.mean, self.variance, training=self.training))


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 9, 9),)


def _chain(*after: nn.Module, **options) -> Case:
    def module() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, **options), nn.BatchNorm2d(8, eps=0.1), *after)

    return Case(module, _images, 1)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "none": nn.Identity,
}
_SPECIAL_CASES = {
    "relu": (
        _chain(nn.ReLU(inplace=True), groups=8, dilation=2),
        Case(
            lambda: nn.Sequential(nn.Conv1d(8, 4, 3, bias=False), nn.BatchNorm1d(4, affine=False), nn.ReLU()),
            lambda: (torch.randn(2, 8, 9),),
        ),
        Case(
            lambda: nn.Sequential(nn.Conv3d(8, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
            lambda: (torch.randn(2, 8, 5, 5, 5),),
        ),
        Case(lambda: _SharedConv(torch.relu), _images, 0, "also used by"),
        Case(_Uncounted, _images, 1),
        Case(_Unbatched, lambda: (torch.randn(8, 9, 9),), 0, "no batch dimension"),
        Case(
            lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
            _images,
            0,
            "statistics of the batch",
        ),
    ),
    "none": (_chain(padding="same"),),
}


def conv_pattern(name: str, tree: Tree, activation: str, cases: tuple[Case, ...]) -> Pattern:
    """Returns the pattern of ``tree``, which ends in a convolution, norm or addition, and the activation after it."""
    return Pattern(
        name=name if activation == "none" else f"{name}_{activation}",
        tree=with_activation(activation, tree),
        anchor="conv",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        cases=cases,
    )


def _pattern(activation: str, added: bool) -> Pattern:
    function = _ACTIVATIONS[activation]
    plain = (_chain(function()), *_SPECIAL_CASES.get(activation, ()))
    residual = (Case(lambda: _Residual(function()), _images, 1),)
    if added:
        return conv_pattern("conv_bn_add", _ADD, activation, residual)
    return conv_pattern("conv_bn", _NORM, activation, plain)


PATTERNS = tuple(_pattern(activation, added) for activation in _ACTIVATIONS for added in (False, True))
