"""Linear layers with an activation: ``act(x W^T + b)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Replacement
from ..modules import FusedLinear
from .activations import family, negative_slope
from .cases import Make, chain, linear, net, parameter, random
from .checks import linear_refusal
from .skeletons import bound, live

_WEIGHT = Either(Op(aten.t.default, Var("transposed_weight")), Var("weight"))
LINEAR = Op(aten.linear.default, Var("x"), _WEIGHT, Var("bias"), name="linear")


def linear_tensors(match: Match) -> dict[str, Any]:
    """Returns the parameters of a matched ``LINEAR``."""
    weight = match.captures.get("transposed_weight") or match.captures["weight"]
    return {"weight": weight, "bias": match.captures["bias"]}


def refusal(match: Match) -> str | None:
    """Returns the reason why a matched ``LINEAR`` must not be fused, or None."""
    return linear_refusal(
        match.captures["x"], **linear_tensors(match), transposed="transposed_weight" in match.captures
    )


def _build(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    nodes, slope = linear_tensors(match), negative_slope(match.captures)
    transposed = "transposed_weight" in match.captures
    module = FusedLinear.from_tensors(
        **live(tensor, nodes), activation=activation, negative_slope=slope, transposed=transposed
    )
    return Replacement(module, (match.captures["x"],), tuple(bound(module, nodes)), (match.root,))


_BATCH = random((4, 8))


def _pair(act: Make) -> Case:
    return Case(chain(linear(8, 16), act, linear(16, 8, bias=False), act), _BATCH, 2)


def _of_shape(weight: tuple[int, ...], *bias: int) -> Make:
    tensors = {"weight": parameter(*weight), "bias": parameter(*bias) if bias else lambda: None}
    return net(lambda self, x: torch.relu(nn.functional.linear(x, self.weight, self.bias)), **tensors)


def _scaled_weight(self: Any, x: Tensor) -> Tensor:
    return torch.relu(nn.functional.linear(x, self.linear.weight * 2))


_ONE, _TWO = {"linear": linear(8, 16)}, {"first": linear(8, 16), "second": linear(8, 16)}
_SPECIAL: dict[str, tuple[Case, ...]] = {
    "relu": (
        _pair(lambda: nn.ReLU(inplace=True)),
        Case(net(lambda self, x: torch.relu(y := self.linear(x)) + y, **_ONE), _BATCH, 0, "also used by"),
        Case(net(_scaled_weight, **_ONE), _BATCH, 0, "computed in the forward"),
        Case(_of_shape((16, 8), 1, 16), _BATCH, 0, "is broadcast"),
        Case(_of_shape((16, 8), 1), _BATCH, 0, "is broadcast"),
        Case(_of_shape((8,)), _BATCH, 0, "1 dimensions"),
    ),
    "relu6": (_pair(lambda: nn.Hardtanh(0, 6)), Case(chain(linear(8, 16), lambda: nn.Hardtanh(0, 5)), _BATCH, 0)),
    "quick_gelu": (
        _pair(net(lambda self, x: (1.702 * x).sigmoid() * x)),
        Case(chain(linear(8, 16), net(lambda self, x: x * (1.5 * x).sigmoid())), _BATCH, 0),
        # Two layers in place of the single layer of quick GELU.
        Case(net(lambda self, x: self.first(x) * (1.702 * self.second(x)).sigmoid(), **_TWO), _BATCH, 0),
    ),
}

PATTERNS = family(
    "linear",
    lambda act: act(LINEAR),
    "relu gelu gelu_tanh silu tanh sigmoid relu6 hardswish leaky_relu quick_gelu none",
    _build,
    lambda act: (_pair(act) if act is not nn.Identity else Case(linear(8, 16), _BATCH),),
    special=_SPECIAL,
    anchor="linear",
    refusal=refusal,
)
