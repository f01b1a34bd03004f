"""Group norm and activation, as in the U-Nets of diffusion models: ``act(group_norm(x))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Replacement
from ..modules import FusedGroupNorm
from .activations import family, negative_slope
from .cases import IMAGES, chain, net, random
from .checks import dtype_refusal, traced, weights_refusal
from .skeletons import hold

_NORM = Op(
    aten.group_norm.default, *map(Var, ("x", "num_groups", "weight", "bias", "eps", "cudnn_enabled")), name="norm"
)


def _refusal(match: Match) -> str | None:
    x, weight, bias = (match.captures[name] for name in ("x", "weight", "bias"))
    return weights_refusal(weight=weight, bias=bias) or dtype_refusal(x, weight, bias)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    captures = match.captures
    channels = traced(captures["x"]).shape[1]
    norm = nn.GroupNorm(captures["num_groups"], int(channels), captures["eps"], device="meta").eval()
    bindings = hold(norm, {"weight": captures["weight"], "bias": captures["bias"]}, tensor)
    module = FusedGroupNorm(norm, activation, negative_slope(captures))
    # The kernel keeps the layout of channels-last images; ATen's on CUDA does not.
    module.lays_out_anew = traced(captures["x"]).is_cuda
    return Replacement(module, (captures["x"],), tuple(bindings), (match.root,))


def _norm() -> nn.Module:
    return nn.GroupNorm(2, 8)


def _computed_weight(self: Any, x: Tensor) -> Tensor:
    return torch.relu(nn.functional.group_norm(x, 2, self.norm.weight + 1, self.norm.bias))


PATTERNS = family(
    "groupnorm",
    lambda act: act(_NORM),
    "silu relu gelu none",
    _build,
    lambda act: (Case(chain(lambda: nn.GroupNorm(4, 8, eps=0.1), act), IMAGES),),
    special={
        "relu": (
            Case(chain(lambda: nn.GroupNorm(8, 8, affine=False), nn.ReLU), random((2, 8, 9))),
            Case(net(lambda self, x: torch.relu(y := self.norm(x)) + y, norm=_norm), IMAGES, 0, "also used by"),
            Case(net(_computed_weight, norm=_norm), IMAGES, 0, "computed in the forward"),
        ),
    },
    anchor="norm",
    refusal=_refusal,
)
