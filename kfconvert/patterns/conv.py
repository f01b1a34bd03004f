"""Convolutions with an optional batch norm, residual add and activation: ``act(bn(conv(x)) + residual)``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Replacement
from ..modules import FusedConvBN
from .activations import family, negative_slope
from .cases import IMAGES, Make, batch_norm, chain, conv, net, random
from .checks import dtype_refusal, same_shape, traced, weights_refusal
from .skeletons import NORM_ARGUMENTS, NORM_TENSORS, conv_shell, norm_shell

_ARGUMENTS = tuple(map(Var, ("x", "weight", "bias", "stride", "padding", "dilation", "groups")))
_CONV = Either(
    *(
        Op(getattr(packet, overload), *_ARGUMENTS, name="conv")
        for packet, overload in product((aten.conv1d, aten.conv2d, aten.conv3d), ("default", "padding"))
    )
)
_NORM = Op(aten.batch_norm.default, _CONV, *NORM_ARGUMENTS, name="norm")


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


def _build(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    captures = match.captures
    shell, bindings = conv_shell(captures, tensor)
    norm = None
    if "norm" in captures:
        norm, of_norm = norm_shell(captures, tensor)
        bindings += of_norm
    module = FusedConvBN(shell, norm, activation, negative_slope(captures)).eval()
    inputs = (captures["x"], captures["residual"]) if "residual" in captures else (captures["x"],)
    return Replacement(module, inputs, tuple(bindings), (match.root,))


def _standardized(self: Any, x: Tensor) -> Tensor:
    """A weight-standardised convolution, as in BiT and NFNet."""
    weight = self.conv.weight - self.conv.weight.mean((1, 2, 3), keepdim=True)
    return torch.relu(nn.functional.conv2d(x, weight, self.conv.bias))


# The tensors of a batch norm without the batch counter of nn.BatchNorm2d, which signals training.
_UNCOUNTED = net(
    lambda self, x: nn.functional.batch_norm(self.conv(x), self.mean, self.variance).relu(),
    conv=conv(),
    mean=lambda: nn.Buffer(torch.randn(8)),
    variance=lambda: nn.Buffer(torch.rand(8) + 0.5),
)
_SAME = {"conv": conv(padding=1, bias=False), "bn": batch_norm()}
_ROWS, _VOLUMES = random((2, 8, 9)), random((2, 8, 5, 5, 5))
_FLAT, _DEEP = lambda: nn.Conv1d(8, 4, 3, bias=False), lambda: nn.Conv3d(8, 4, 3)
_NORMED: dict[str, tuple[Case, ...]] = {
    "relu": (
        Case(chain(conv(groups=8, dilation=2), batch_norm(eps=0.1), lambda: nn.ReLU(inplace=True)), IMAGES),
        Case(chain(_FLAT, lambda: nn.BatchNorm1d(4, affine=False), nn.ReLU), _ROWS),
        Case(chain(_DEEP, lambda: nn.BatchNorm3d(4), nn.ReLU), _VOLUMES),
        Case(net(lambda self, x: torch.relu(self.bn(y := self.conv(x))) + y, **_SAME), IMAGES, 0, "also used by"),
        Case(_UNCOUNTED, IMAGES),
        # A batch norm that treats the rows of an unbatched image as channels.
        Case(
            chain(conv(out_channels=9, kernel_size=1), lambda: nn.BatchNorm1d(9), nn.ReLU),
            random((8, 9, 9)),
            0,
            "no batch dimension",
        ),
        Case(chain(conv(), batch_norm(track_running_stats=False), nn.ReLU), IMAGES, 0, "statistics of the batch"),
    ),
    "none": (Case(chain(conv(padding="same"), batch_norm(eps=0.1)), IMAGES),),
}
_PLAIN: dict[str, tuple[Case, ...]] = {
    "relu": (
        Case(chain(conv(groups=8, dilation=2, bias=False), lambda: nn.ReLU(inplace=True)), IMAGES),
        Case(chain(conv(stride=2, padding_mode="reflect", padding=1), nn.ReLU), IMAGES),
        Case(chain(_FLAT, nn.ReLU), _ROWS),
        Case(chain(_DEEP, nn.ReLU), _VOLUMES),
        Case(net(lambda self, x: torch.relu(y := self.conv(x)) * y, **_SAME), IMAGES, 0, "also used by"),
        Case(net(_standardized, **_SAME), IMAGES, 0, "computed in the forward"),
    ),
    "none": (Case(conv(padding="same"), IMAGES), Case(chain(conv(), batch_norm(), nn.ReLU), IMAGES, 0)),
}


def _added(act: Make) -> tuple[Case, ...]:
    return (Case(net(lambda self, x: self.act(self.bn(self.conv(x)) + x), act=act, **_SAME), IMAGES),)


def _plain_added(act: Make) -> tuple[Case, ...]:
    return (Case(net(lambda self, x: self.act(x + self.conv(x)), conv=conv(padding=1), act=act), IMAGES),)


def _broadcast(self: Any, x: Tensor) -> Tensor:
    return self.conv(x) + x.mean((2, 3), keepdim=True)


_COMMON: dict[str, Any] = {"build": _build, "refusal": _refusal, "anchor": "conv"}
_AFTER_NORM = "relu relu6 silu hardswish sigmoid gelu leaky_relu none"
_AFTER_CONV = "relu relu6 silu hardswish hardsigmoid sigmoid gelu gelu_tanh tanh leaky_relu none"
PATTERNS = (
    *family(
        "conv_bn",
        lambda act: act(_NORM),
        _AFTER_NORM,
        cases=lambda act: (Case(chain(conv(), batch_norm(eps=0.1), act), IMAGES),),
        special=_NORMED,
        **_COMMON,
    ),
    *family(
        "conv_bn_add",
        lambda act: act(Op(aten.add.Tensor, _NORM, Var("residual"))),
        _AFTER_NORM,
        cases=_added,
        **_COMMON,
    ),
    *family(
        "conv",
        lambda act: act(_CONV),
        _AFTER_CONV,
        cases=lambda act: (Case(chain(conv(), act), IMAGES),),
        special=_PLAIN,
        **_COMMON,
    ),
    *family(
        "conv_add",
        lambda act: act(Op(aten.add.Tensor, _CONV, Var("residual"))),
        _AFTER_CONV,
        cases=_plain_added,
        special={"none": (Case(net(_broadcast, conv=conv(padding=1)), IMAGES, 0, "the residual is broadcast"),)},
        **_COMMON,
    ),
)
