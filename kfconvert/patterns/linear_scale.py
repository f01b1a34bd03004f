"""Layer scale after a linear layer, ``linear(x) * gamma``: the branches of ConvNeXt, CaiT, BEiT and DINOv2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedLinearScale
from .cases import Make, linear, net, parameter, random
from .checks import dtype_refusal, traced, weights_refusal
from .linear import LINEAR, linear_tensors, refusal
from .skeletons import bound, live

_GAMMA = Either(Op(aten.reshape.default, Var("gamma"), Var("gamma_shape"), name="reshaped"), Var("gamma"))
# ConvNeXt computes its linear layers on (N, H, W, C) and permutes to (N, C, H, W) before the product.
_BRANCH = Either(Op(aten.permute.default, LINEAR, Var("permutation")), LINEAR)


def _refusal(match: Match) -> str | None:
    captures = match.captures
    gamma = captures["gamma"]
    if not isinstance(gamma, fx.Node):
        return "the result is multiplied by a constant, not by a layer scale"
    refused = weights_refusal(**{"layer scale": gamma}) or refusal(match)
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
    nodes = {**linear_tensors(match), "gamma": captures["gamma"]}
    module = FusedLinearScale.from_tensors(
        **live(tensor, nodes),
        transposed="transposed_weight" in captures,
        permutation=_positive(captures.get("permutation"), traced(captures["linear"]).dim()),
    )
    return Replacement(module, (captures["x"],), tuple(bound(module, nodes)), (match.root,))


def _scaled(forward: Callable[..., Tensor], *shape: int, bias: bool = True) -> Make:
    return net(forward, linear=linear(8, 8, bias), gamma=parameter(*shape))


def _branch(self: Any, x: Tensor) -> Tensor:
    return x + self.gamma * self.linear(x)


def _image(self: Any, x: Tensor) -> Tensor:
    """A branch of ConvNeXt: the linear layer on (N, H, W, C), the factor on (N, C, H, W)."""
    return self.gamma * self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x


def _reshaped_image(self: Any, x: Tensor) -> Tensor:
    return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.gamma.reshape(1, -1, 1, 1) + x


_ROWS, _PIXELS = random((2, 8, 8)), random((2, 8, 8, 8))
PATTERNS = (
    Pattern(
        name="linear_scale",
        tree=Op(aten.mul.Tensor, _BRANCH, _GAMMA),
        anchor="linear",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_scaled(_branch, 8), _ROWS),
            Case(_scaled(_branch, 1, 1, 8, bias=False), _ROWS),
            Case(_scaled(_image, 8, 1, 1), _PIXELS),
            Case(_scaled(_reshaped_image, 8), _PIXELS),
            Case(_scaled(_branch, 8, 1), _ROWS, 0, "does not vary along"),
            Case(_scaled(_branch, 8, 8), _ROWS, 0, "does not vary along"),
            Case(_scaled(_branch, 1), _ROWS, 0, "is broadcast"),
            Case(_scaled(_image, 8), _PIXELS, 0, "does not vary along"),
            Case(_scaled(lambda self, x: self.linear(x) * x), _ROWS, 0, "the layer scale is computed in the forward"),
            Case(_scaled(lambda self, x: self.linear(x) * 2.0), _ROWS, 0, "by a constant"),
            Case(_scaled(lambda self, x: (y := self.linear(x)) + self.gamma * y, 8), _ROWS, 0, "also used by"),
        ),
    ),
)
