"""Layer norm with the residual add before it and the activation after it: ``act(layer_norm(x + residual))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Replacement
from ..modules import FusedAddLayerNorm, FusedLayerNorm
from .activations import family
from .cases import TOKENS, Make, chain, net, random
from .checks import dtype_refusal, residual_refusal, weights_refusal
from .skeletons import norm_replacement

_REST = tuple(map(Var, ("normalized_shape", "weight", "bias", "eps", "cudnn_enabled")))
_NORM = Op(aten.layer_norm.default, Var("x"), *_REST, name="norm")
_SUM = Op(aten.add.Tensor, Var("x"), Var("residual"), name="sum")
_ADD_NORM = Op(aten.layer_norm.default, _SUM, *_REST, name="norm")


def _refusal(match: Match) -> str | None:
    captures = match.captures
    x, residual = captures["x"], captures.get("residual")
    reason = None
    if "residual" in captures:
        reason = residual_refusal(x, residual, captures["sum"], len(captures["normalized_shape"]))
    weight, bias = captures["weight"], captures["bias"]
    return reason or weights_refusal(weight=weight, bias=bias) or dtype_refusal(x, residual, weight, bias)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    captures = match.captures
    return norm_replacement(
        match,
        tensor,
        (FusedLayerNorm, FusedAddLayerNorm),
        {name: captures[name] for name in ("weight", "bias")},
        normalized_shape=captures["normalized_shape"],
        eps=captures["eps"],
        activation=activation,
    )


def _pre_norm(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    """A pre-norm block, whose sum is also the residual stream."""
    stream = x + residual
    return stream + self.act(self.norm(stream))


def _added(forward: Callable[..., Tensor], act: Make, shapes: tuple[tuple[int, ...], ...], *expected: Any) -> Case:
    return Case(net(forward, norm=lambda: nn.LayerNorm(16, eps=0.1), act=act), random(*shapes), *expected)


def _post_norm(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return self.act(self.norm(x + residual))


_EQUAL = (2, 5, 16), (2, 5, 16)
_RESIDUALS = (
    _added(_post_norm, nn.ReLU, ((2, 5, 16), (1, 5, 16))),
    _added(_post_norm, nn.ReLU, ((5, 16), (2, 5, 16))),
    _added(_post_norm, nn.ReLU, ((2, 5, 16), (2, 5, 1)), 0, "broadcast"),
    _added(_post_norm, nn.ReLU, ((2, 5, 1), (2, 1, 16)), 0, "broadcast"),
)
_COMMON: dict[str, Any] = {"build": _build, "refusal": _refusal, "anchor": "norm"}
PATTERNS = (
    *family(
        "layernorm",
        lambda act: act(_NORM),
        "none relu gelu silu",
        cases=lambda act: (Case(chain(lambda: nn.LayerNorm(16, eps=0.1), act), TOKENS),),
        special={
            "relu": (
                Case(chain(lambda: nn.LayerNorm((5, 16), bias=False), nn.ReLU), TOKENS),
                Case(chain(lambda: nn.LayerNorm(16, elementwise_affine=False), nn.ReLU), TOKENS),
            )
        },
        **_COMMON,
    ),
    *family(
        "add_layernorm",
        lambda act: act(_ADD_NORM),
        "none relu gelu silu",
        cases=lambda act: tuple(_added(forward, act, _EQUAL) for forward in (_post_norm, _pre_norm)),
        special={"relu": _RESIDUALS},
        kept=frozenset({"sum"}),
        **_COMMON,
    ),
)
