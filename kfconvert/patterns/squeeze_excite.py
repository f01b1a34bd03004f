"""Squeeze-and-excitation: ``x * gate(conv2(act(conv1(mean(x)))))`` with 1x1 convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedSqueezeExcite
from .cases import IMAGES, Make, chain, conv, net
from .checks import dtype_refusal, same_shape, traced, weights_refusal
from .skeletons import conv_shell

_ACTIVATIONS = {aten.relu.default: "relu", aten.silu.default: "silu", aten.hardswish.default: "hardswish"}
_GATES = {aten.sigmoid.default: "sigmoid", aten.hardsigmoid.default: "hardsigmoid"}
_ARGUMENTS = ("weight", "bias", "stride", "padding", "dilation", "groups")


def _conv(x: Op | Either, number: int) -> Op:
    return Op(aten.conv2d.default, x, *(Var(f"{name}{number}") for name in _ARGUMENTS), name=f"conv{number}")


def _one_of(targets: dict, x: Op, name: str) -> Either:
    return Either(*(Op(target, x, name=name) for target in targets))


_MEAN = Either(
    Op(aten.adaptive_avg_pool2d.default, Var("x"), Var("size"), name="mean"),
    Op(aten.mean.dim, Var("x"), Var("dims"), True, name="mean"),
)
_HIDDEN = _one_of(_ACTIVATIONS, _conv(_MEAN, 1), "hidden")
_TREE = Op(aten.mul.Tensor, _one_of(_GATES, _conv(_HIDDEN, 2), "gate"), Var("x"))


def _refusal(match: Match) -> str | None:
    captures = match.captures
    x = captures["x"]
    dims = sorted(dim % 4 for dim in captures.get("dims", (2, 3)) or ())
    if traced(x).dim() != 4 or dims != [2, 3] or tuple(captures.get("size", (1, 1))) != (1, 1):
        return "the mean is not over an image's pixels"
    tensors = {f"{name} of conv{i}": captures[f"{name}{i}"] for i in (1, 2) for name in ("weight", "bias")}
    refused = weights_refusal(**tensors)
    if refused is not None:
        return refused
    for i in (1, 2):
        if tuple(traced(captures[f"weight{i}"]).shape[2:]) != (1, 1) or captures[f"groups{i}"] != 1:
            return "a convolution between mean and product is not a plain 1x1 convolution"
        if any(captures[f"padding{i}"]):
            return "a convolution between mean and product is padded"
    if not same_shape(match.root, x) or traced(captures["gate"]).shape[1] != traced(x).shape[1]:
        return "the gates are not one for each channel"
    return dtype_refusal(x, *tensors.values())


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures = match.captures
    convs, bindings = [], []
    for i in (1, 2):
        conv, held = conv_shell({name: captures[f"{name}{i}"] for name in _ARGUMENTS}, tensor)
        convs.append(conv)
        bindings += held
    activation, gate = _ACTIVATIONS[captures["hidden"].target], _GATES[captures["gate"].target]
    module = FusedSqueezeExcite(convs[0], convs[1], activation, gate).eval()
    return Replacement(module, (captures["x"],), tuple(bindings), (match.root,))


def _case(
    forward: Callable[..., Any], *expected: Any, act: Make = nn.ReLU, gate: Make = nn.Sigmoid, **other: Any
) -> Case:
    options = {"kernel_size": 1, **other}
    scales = chain(conv(out_channels=4, **options), act, conv(in_channels=4, **options), gate)
    return Case(net(forward, scales=scales), IMAGES, *expected)


def _mean(self: Any, x: Tensor) -> Tensor:
    return x * self.scales(x.mean((2, 3), keepdim=True))


def _pooled(self: Any, x: Tensor) -> Tensor:
    return self.scales(nn.functional.adaptive_avg_pool2d(x, 1)) * x


def _tiles(self: Any, x: Tensor) -> Tensor:
    return x * self.scales(nn.functional.adaptive_avg_pool2d(x, (9, 1)))


def _gates_returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gates = self.scales(x.mean((2, 3), keepdim=True))
    return x * gates, gates


PATTERNS = (
    Pattern(
        name="squeeze_excite",
        tree=_TREE,
        anchor="conv1",
        refusal=_refusal,
        build=_build,
        cases=(
            _case(_mean),
            _case(_pooled, gate=nn.Hardsigmoid),
            _case(_mean, act=nn.SiLU, bias=False),
            _case(_pooled, act=lambda: nn.SiLU(inplace=True)),
            _case(_tiles, 0, "over an image's pixels"),
            _case(lambda self, x: x * self.scales(x.mean(3, keepdim=True)), 0, "an image's pixels"),
            _case(_mean, 0, "padded", padding=1, stride=3),
            _case(lambda self, x: (x + 1) * self.scales(x.mean((2, 3), keepdim=True)), 0),
            _case(_gates_returned, 0, "also used by"),
        ),
    ),
)
