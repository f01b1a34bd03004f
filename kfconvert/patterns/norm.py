"""Layer norm with the residual add before it and the activation after it: ``act(layer_norm(x + residual))``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedAddLayerNorm, FusedLayerNorm
from .activations import with_activation
from .checks import dtype_refusal, residual_refusal, weights_refusal

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


def _builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        captures = match.captures
        held = {name: captures[name] for name in ("weight", "bias") if captures[name] is not None}
        live = {name: tensor(node) for name, node in held.items()}
        fixed = (captures["normalized_shape"], live.get("weight"), live.get("bias"), captures["eps"], activation)
        inputs: tuple[fx.Node, ...] = (captures["x"],)
        outputs: tuple[fx.Node, ...] = (match.root,)
        if "residual" in captures:
            keeps_sum = match.is_kept("sum")
            module = FusedAddLayerNorm.from_tensors(*fixed, return_sum=keeps_sum)
            inputs = (captures["x"], captures["residual"])
            outputs = (match.root, captures["sum"]) if keeps_sum else outputs
        else:
            module = FusedLayerNorm.from_tensors(*fixed)
        bindings = tuple((module, name, node) for name, node in held.items())
        return Replacement(module, inputs, bindings, outputs)

    return build


class _AddNorm(nn.Module):
    def __init__(self, activation: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(16, eps=0.1)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.activation(self.norm(x + residual))


class _PreNorm(_AddNorm):
    """A pre-norm block, whose sum is also the residual stream."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        stream = x + residual
        return stream + self.activation(self.norm(stream))


def _rows(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


_TWO = _rows((2, 5, 16), (2, 5, 16))
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
_SPECIAL_CASES = {
    "relu": (
        Case(lambda: nn.Sequential(nn.LayerNorm((5, 16), bias=False), nn.ReLU()), _rows((2, 5, 16))),
        Case(lambda: nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.ReLU()), _rows((2, 5, 16))),
    ),
}


def _pattern(activation: str, added: bool) -> Pattern:
    suffix = "" if activation == "none" else f"_{activation}"
    function = _ACTIVATIONS[activation]
    added_cases = (
        Case(lambda: _AddNorm(function()), _TWO),
        Case(lambda: _PreNorm(function()), _TWO),
        Case(lambda: _AddNorm(function()), _rows((2, 5, 16), (1, 5, 16))),
        Case(lambda: _AddNorm(function()), _rows((5, 16), (2, 5, 16))),
        Case(lambda: _AddNorm(function()), _rows((2, 5, 16), (2, 5, 1)), 0, "broadcast"),
        Case(lambda: _AddNorm(function()), _rows((2, 5, 1), (2, 1, 16)), 0, "broadcast"),
    )
    plain_cases = (
        Case(lambda: nn.Sequential(nn.LayerNorm(16, eps=0.1), function()), _rows((2, 5, 16))),
        *_SPECIAL_CASES.get(activation, ()),
    )
    return Pattern(
        name=f"add_layernorm{suffix}" if added else f"layernorm{suffix}",
        tree=with_activation(activation, _ADD_NORM if added else _NORM),
        anchor="norm",
        numerics="reassociated",
        refusal=_refusal,
        build=_builder(activation),
        kept=frozenset({"sum"}) if added else frozenset(),
        cases=added_cases if added else plain_cases,
    )


PATTERNS = tuple(_pattern(activation, added) for activation in _ACTIVATIONS for added in (False, True))
