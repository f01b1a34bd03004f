"""Linear layers with the same input, such as q, k and v of attention, as one product with all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedMergedLinear
from .cases import TOKENS, Make, linear, net, random
from .checks import linear_refusal, traced
from .skeletons import fused_linear

_LINEAR = Op(aten.linear.default, Var("x"), Var("weight"), Var("bias"), name="linear")


def _refusal(match: Match) -> str | None:
    x, weight, bias, linear = (match.captures[name] for name in ("x", "weight", "bias", "linear"))
    refused = refusal_of_views(linear)
    if refused is not None:
        return refused
    siblings = [user for user in x.users if user.target is aten.linear.default]
    if traced(weight).shape[0] % 2 and any(_reaches(each, (aten.view_as_complex.default,)) for each in siblings):
        return "its odd number of features would misalign others that are read as complex numbers"
    return linear_refusal(x, weight, bias)


def refusal_of_views(product: fx.Node) -> str | None:
    """Returns None if a view of a merged product can replace ``product``. It has other strides and keeps the whole
    merged product alive."""
    if _is_returned(product):
        return "its value, or a view of it, is returned by the model"
    if _reaches(product, (aten.view.dtype, aten.as_strided.default)):
        return "its value, or a view of it, is read by an operator that depends on strides"
    return None


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users)


def _reaches(node: fx.Node, targets: tuple[torch._ops.OpOverload, ...]) -> bool:
    """Whether one of ``targets`` is called with the value of ``node``, or with a view of it."""
    return any(user.target in targets or (_is_view(user) and _reaches(user, targets)) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # an item of a tuple
    # A reshape may be a view, which its schema does not state.
    returns = node.target._schema.returns
    return node.target is aten.reshape.default or any(result.alias_info is not None for result in returns)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    made = [fused_linear(member.captures, tensor) for member in match.members]
    module = FusedMergedLinear(*(linear for linear, _ in made))
    bindings = tuple(binding for _, bindings in made for binding in bindings)
    return Replacement(module, (match.captures["x"],), bindings, match.nodes)


def _attention(bias: bool = True, features: int = 16, change: Callable[[Tensor], Tensor] = lambda x: x) -> Make:
    """Three projections; that of keys may lack a bias, be smaller, or read another input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        projected = self.query(x), self.key(change(x)), self.value(x)
        heads = [t.view(*x.shape[:-1], -1, 8).transpose(1, 2) for t in projected]
        mixed = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)  # type: ignore[misc]  # three heads
        return mixed.transpose(1, 2).reshape(x.shape)

    return net(forward, query=linear(), key=linear(16, features, bias), value=linear())


def _branches(function: Callable[[Tensor, Any, Any], Any]) -> Make:
    """``forward`` is a function of x and two layers."""
    return net(lambda self, x: function(x, self.first, self.second), first=linear(), second=linear())


def _scaled(x: Tensor, first: Any, second: Any) -> Tensor:
    return first(x).sin() + nn.functional.linear(x, second.weight * 2)


def _tied(x: Tensor, first: Any, second: Any) -> Tensor:
    return first(x).sin() + nn.functional.linear(x, first.weight, second.bias).cos()


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs()


def _rotated(features: int) -> Make:
    """Two projections that are read as complex numbers, between projections to ``features``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        value = self.value(x).sin().sum(-1, keepdim=True)
        return _complex(self.query(x)) * _complex(self.key(x)) * value

    return net(forward, query=linear(), key=linear(), value=linear(16, features))


PATTERNS = (
    Pattern(
        name="merged_linear",
        tree=_LINEAR,
        anchor="linear",
        refusal=_refusal,
        build=_build,
        siblings="x",
        cases=(
            Case(_attention(), TOKENS),
            Case(_attention(bias=False), TOKENS),
            Case(_attention(features=8), TOKENS),
            Case(_attention(change=torch.sin), TOKENS),
            Case(_branches(lambda x, f, s: f(x).sin() + s(x).cos()), random((16,))),
            Case(_branches(_tied), TOKENS),
            Case(_branches(lambda x, f, s: s(f(x)) + s(x)), TOKENS),
            Case(_rotated(4), TOKENS),
            Case(_rotated(5), TOKENS, 1),
            Case(_branches(lambda x, f, s: f(x) + s(x.sin())), TOKENS, 0),
            Case(_branches(lambda x, f, s: torch.relu(f(x)) + s(x)), TOKENS, 0),
            Case(_branches(_scaled), TOKENS, 0, "computed in the forward"),
            Case(_branches(lambda x, f, s: (f(x).sin(), s(x))), TOKENS, 0, "returned by the model"),
            Case(_branches(lambda x, f, s: (f(x).sin(), s(x).view(2, 5, 2, 8)[0])), TOKENS, 0, "returned by"),
        ),
    ),
)
