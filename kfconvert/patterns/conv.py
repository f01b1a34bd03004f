"""Convolutions with batch norm, an optional residual add and an activation: ``act(bn(conv(x)) + residual)``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, fx, nn

from ..dataflow import Either, Op, Var, aten
from ..matcher import Case, Match, Pattern, Replacement
from ..modules import FusedConvBN
from .activations import negative_slope, with_activation
from .checks import dtype_refusal, same_shape, weights_refusal

_CONV_MODULES = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_NORM_MODULES = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_ARGUMENTS = tuple(map(Var, ("x", "weight", "bias", "stride", "padding", "dilation", "groups")))
_CONV = Either(
    *(
        Op(getattr(packet, overload), *_ARGUMENTS, name="conv")
        for packet, overload in product((aten.conv1d, aten.conv2d, aten.conv3d), ("default", "padding"))
    )
)
_NORM = Op(
    aten.batch_norm.default,
    _CONV,
    *map(Var, ("scale", "shift", "mean", "variance", "training", "momentum", "eps", "cudnn_enabled")),
    name="norm",
)
_ADD = Op(aten.add.Tensor, _NORM, Var("residual"))


def _refusal(match: Match) -> str | None:
    captures = match.captures
    if captures["training"]:
        return "the batch norm uses the statistics of the batch"
    residual = captures.get("residual")
    if residual is not None:
        if not isinstance(residual, fx.Node):
            return "a constant is added, not a residual"
        if not same_shape(residual, captures["norm"]):
            return "the residual is broadcast"
    names = ("weight", "bias", "scale", "shift", "mean", "variance")
    return weights_refusal(**{name: captures[name] for name in names}) or dtype_refusal(
        captures["x"], captures["weight"], captures["norm"], residual
    )


def _shell(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """``module`` (made on the meta device) holding the live tensors themselves, not copies."""
    for name, tensor in tensors.items():
        store = module._buffers if name in module._buffers else module._parameters
        store[name] = tensor
    return module


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        captures = match.captures

        def live(name: str) -> Tensor | None:
            return None if captures[name] is None else tensor(captures[name])

        weight = live("weight")
        channels, rank = weight.shape[0], weight.dim()
        padding = captures["padding"]
        conv = _CONV_MODULES[rank](
            weight.shape[1] * captures["groups"],
            channels,
            tuple(weight.shape[2:]),
            tuple(captures["stride"]),
            padding if isinstance(padding, str) else tuple(padding),
            tuple(captures["dilation"]),
            captures["groups"],
            bias=captures["bias"] is not None,
            device="meta",
        )
        norm = _NORM_MODULES[rank](
            channels, captures["eps"], captures["momentum"], affine=captures["scale"] is not None, device="meta"
        )
        _shell(conv, weight=weight, bias=live("bias"))
        _shell(
            norm,
            weight=live("scale"),
            bias=live("shift"),
            running_mean=live("mean"),
            running_var=live("variance"),
            num_batches_tracked=None,
        )
        module = FusedConvBN(conv, norm, activation, negative_slope(captures)).eval()
        held = (
            (conv, "weight", "weight"),
            (conv, "bias", "bias"),
            (norm, "weight", "scale"),
            (norm, "bias", "shift"),
            (norm, "running_mean", "mean"),
            (norm, "running_var", "variance"),
        )
        bindings = tuple((owner, name, captures[key]) for owner, name, key in held if captures[key] is not None)
        inputs = (captures["x"], captures["residual"]) if "residual" in captures else (captures["x"],)
        return Replacement(module, inputs, bindings, (match.root,))

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


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 9, 9),)


def _chain(*after: nn.Module, **options) -> Case:
    def module() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, **options), nn.BatchNorm2d(8), *after)

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
        Case(lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), lambda: (torch.randn(2, 8, 9),)),
        Case(
            lambda: nn.Sequential(nn.Conv3d(8, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
            lambda: (torch.randn(2, 8, 5, 5, 5),),
        ),
        Case(lambda: _SharedConv(torch.relu), _images, 0, "also used by"),
        Case(
            lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
            _images,
            0,
            "statistics of the batch",
        ),
    ),
    "none": (_chain(padding="same"),),
}


def _pattern(activation: str, added: bool) -> Pattern:
    suffix = "" if activation == "none" else f"_{activation}"
    function = _ACTIVATIONS[activation]
    plain = (_chain(function()), *_SPECIAL_CASES.get(activation, ()))
    residual = (Case(lambda: _Residual(function()), _images, 1),)
    return Pattern(
        name=f"conv_bn_add{suffix}" if added else f"conv_bn{suffix}",
        tree=with_activation(activation, _ADD if added else _NORM),
        anchor="conv",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        cases=residual if added else plain,
    )


PATTERNS = tuple(_pattern(activation, added) for activation in _ACTIVATIONS for added in (False, True))
