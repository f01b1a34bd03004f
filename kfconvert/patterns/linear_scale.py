"""Layer scale after a linear layer, ``linear(x) * gamma``: the branches of ConvNeXt, CaiT, BEiT and DINOv2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedLinearScale
from .checks import dtype_refusal, linear_refusal, traced, weights_refusal
from .linear import LINEAR, linear_weight

_GAMMA = Either(Op(aten.reshape.default, Var("gamma"), Var("gamma_shape"), name="reshaped"), Var("gamma"))
# ConvNeXt computes its linear layers on (N, H, W, C) and permutes to (N, C, H, W) before the product.
_BRANCH = Either(Op(aten.permute.default, LINEAR, Var("permutation")), LINEAR)


def _refusal(match: Match) -> str | None:
    captures = match.captures
    weight, bias, gamma = linear_weight(match), captures["bias"], captures["gamma"]
    if not isinstance(gamma, fx.Node):
        return "the result is multiplied by a constant, not by a layer scale"
    refused = weights_refusal(**{"layer scale": gamma}) or linear_refusal(
        captures["x"], weight, bias, "transposed_weight" in captures
    )
    if refused is not None:
        return refused
    result = traced(captures["linear"])
    order = _positive(captures.get("permutation"), result.dim()) or tuple(range(result.dim()))
    # The dimension of the output features, counted from the last dimension of the product.
    along = result.dim() - 1 - order.index(result.dim() - 1)
    sizes = tuple(traced(captures.get("reshaped", gamma)).shape)
    if len(sizes) <= along or any(n != 1 for i, n in enumerate(reversed(sizes)) if i != along):
        return "the factor is not a layer scale: it does not vary along the output features"
    if len(sizes) > result.dim() or sizes[-1 - along] != result.shape[-1]:
        return "the factor is not a layer scale: it is broadcast"
    return dtype_refusal(captures["x"], gamma)


def _positive(permutation: list[int] | None, dimensions: int) -> tuple[int, ...] | None:
    return None if permutation is None else tuple(dim % dimensions for dim in permutation)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures = match.captures
    held = {"weight": linear_weight(match), "bias": captures["bias"], "gamma": captures["gamma"]}
    held = {name: node for name, node in held.items() if node is not None}
    live = {name: tensor(node) for name, node in held.items()}
    module = FusedLinearScale.from_tensors(
        live["weight"],
        live.get("bias"),
        live["gamma"],
        transposed="transposed_weight" in captures,
        permutation=_positive(captures.get("permutation"), traced(captures["linear"]).dim()),
    )
    bindings = tuple((module, name, node) for name, node in held.items())
    return Replacement(module, (captures["x"],), bindings, (match.root,))


class _Branch(nn.Module):
    """x + gamma * linear(x)"""

    def __init__(self, *shape: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias)
        self.gamma = nn.Parameter(torch.rand(shape or (8,)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.linear(x)


class _Image(_Branch):
    """A branch of ConvNeXt: the linear layer on (N, H, W, C), the factor on (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x


class _ReshapedImage(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.gamma.reshape(1, -1, 1, 1) + x


class _Gate(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x


class _Doubled(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2.0


class _UsedTwice(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.gamma * y


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 8),)


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 8, 8),)


PATTERNS = (
    Pattern(
        name="linear_scale",
        tree=Op(aten.mul.Tensor, _BRANCH, _GAMMA),
        anchor="linear",
        numerics="reassociated",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_Branch, _tokens),
            Case(lambda: _Branch(1, 1, 8, bias=False), _tokens),
            Case(lambda: _Image(8, 1, 1), _images),
            Case(lambda: _ReshapedImage(8), _images),
            Case(lambda: _Branch(8, 1), _tokens, 0, "does not vary along"),
            Case(lambda: _Branch(8, 8), _tokens, 0, "does not vary along"),
            Case(lambda: _Branch(1), _tokens, 0, "is broadcast"),
            Case(lambda: _Image(8), _images, 0, "does not vary along"),
            Case(_Gate, _tokens, 0, "the layer scale is computed in the forward"),
            Case(_Doubled, _tokens, 0, "by a constant"),
            Case(_UsedTwice, _tokens, 0, "also used by"),
        ),
    ),
)
