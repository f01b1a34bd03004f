"""Group norm and activation, as in the U-Nets of diffusion models: ``act(group_norm(x))``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedGroupNorm
from .activations import negative_slope, with_activation
from .checks import dtype_refusal, traced, weights_refusal
from .skeletons import hold

_NORM = Op(
    aten.group_norm.default,
    *map(Var, ("x", "num_groups", "weight", "bias", "eps", "cudnn_enabled")),
    name="norm",
)


def _refusal(match: Match) -> str | None:
    x, weight, bias = (match.captures[name] for name in ("x", "weight", "bias"))
    return weights_refusal(weight=weight, bias=bias) or dtype_refusal(x, weight, bias)


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        captures = match.captures
        channels = traced(captures["x"]).shape[1]
        norm = nn.GroupNorm(captures["num_groups"], int(channels), captures["eps"], device="meta").eval()
        bindings = hold(norm, {"weight": captures["weight"], "bias": captures["bias"]}, tensor)
        module = FusedGroupNorm(norm, activation, negative_slope(captures))
        return Replacement(module, (captures["x"],), tuple(bindings), (match.root,))

    return build


class _UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return torch.relu(hidden) + hidden


class _ComputedWeight(_UsedTwice):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.group_norm(x, 2, self.norm.weight + 1, self.norm.bias))


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 9, 9),)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "none": nn.Identity,
}
_SPECIAL_CASES = {
    "relu": (
        Case(lambda: nn.Sequential(nn.GroupNorm(8, 8, affine=False), nn.ReLU()), lambda: (torch.randn(2, 8, 9),)),
        Case(_UsedTwice, _images, 0, "also used by"),
        Case(_ComputedWeight, _images, 0, "computed in the forward"),
    ),
}


def _pattern(activation: str) -> Pattern:
    function = _ACTIVATIONS[activation]
    plain = Case(lambda: nn.Sequential(nn.GroupNorm(4, 8, eps=0.1), function()), _images)
    return Pattern(
        name="groupnorm" if activation == "none" else f"groupnorm_{activation}",
        tree=with_activation(activation, _NORM),
        anchor="norm",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        cases=(plain, *_SPECIAL_CASES.get(activation, ())),
    )


PATTERNS = tuple(map(_pattern, _ACTIVATIONS))
