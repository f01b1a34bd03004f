"""Linear layers with the same input, such as q, k and v of attention, as one product with all weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedLinear, FusedMergedLinear
from .checks import linear_refusal, traced

_LINEAR = Op(aten.linear.default, Var("x"), Var("weight"), Var("bias"), name="linear")


def _refusal(match: Match) -> str | None:
    x, weight, bias, linear = (match.captures[name] for name in ("x", "weight", "bias", "linear"))
    if _is_returned(linear):
        # A view of the merged product has other strides and keeps the whole product alive.
        return "its value, or a view of it, is returned by the model"
    if _reaches(linear, (aten.view.dtype, aten.as_strided.default)):
        return "its value, or a view of it, is read by an operator that depends on strides"
    siblings = [user for user in x.users if user.target is aten.linear.default]
    if traced(weight).shape[0] % 2 and any(_reaches(each, (aten.view_as_complex.default,)) for each in siblings):
        return "its odd number of features would misalign others that are read as complex numbers"
    return linear_refusal(x, weight, bias)


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
    linears, bindings = [], []
    for member in match.members:
        held = {name: member.captures[name] for name in ("weight", "bias") if member.captures[name] is not None}
        live = {name: tensor(node) for name, node in held.items()}
        linears.append(FusedLinear.from_tensors(live["weight"], live.get("bias")))
        bindings += [(linears[-1], name, node) for name, node in held.items()]
    module = FusedMergedLinear(*linears)
    return Replacement(module, (match.captures["x"],), tuple(bindings), match.nodes)


class _Attention(nn.Module):
    """Three projections, one of which may lack a bias, be smaller, or read another input."""

    def __init__(self, key_bias: bool = True, key_features: int = 16, separate: bool = False):
        super().__init__()
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key = nn.Linear(16, key_features, bias=key_bias)
        self.separate = separate

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.query(x), self.value(x)
        key = self.key(x.sin() if self.separate else x)
        heads = [t.view(*x.shape[:-1], -1, 8).transpose(1, 2) for t in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)  # type: ignore[misc]  # three heads
        return mixed.transpose(1, 2).reshape(x.shape)


_Function = Callable[[Tensor, nn.Module, nn.Module], Tensor | tuple[Tensor, ...]]


class _Branches(nn.Module):
    """``forward`` is a function of x and two layers."""

    def __init__(self, function: _Function, tied: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x, self.first, self.second)


def _branches(function: _Function, tied: bool = False):
    return lambda: _Branches(function, tied)


def _scaled(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return first(x).sin() + nn.functional.linear(x, second.weight * 2)


def _parallel(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return torch.relu(first(x)) + second(x)


def _chained(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    """Applies the second layer twice, to x and to its result."""
    return second(first(x)) + second(x)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs()


class _Rotated(nn.Module):
    """Two projections that are read as complex numbers, between projections to ``features``."""

    def __init__(self, features: int):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.value = nn.Linear(16, features)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x).sin().sum(-1, keepdim=True)
        return _complex(self.query(x)) * _complex(self.key(x)) * value


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, 16),)


PATTERNS = (
    Pattern(
        name="merged_linear",
        tree=_LINEAR,
        anchor="linear",
        numerics="reassociated",
        refusal=_refusal,
        build=_build,
        siblings="x",
        cases=(
            Case(_Attention, _tokens),
            Case(lambda: _Attention(key_bias=False), _tokens),
            Case(lambda: _Attention(key_features=8), _tokens),
            Case(lambda: _Attention(separate=True), _tokens),
            Case(_branches(lambda x, f, s: f(x).sin() + s(x).cos()), lambda: (torch.randn(16),)),
            Case(_branches(lambda x, f, s: f(x).sin() + s(x).cos(), tied=True), _tokens),
            Case(_branches(_chained), _tokens),
            Case(lambda: _Rotated(4), _tokens),
            Case(lambda: _Rotated(5), _tokens, 1),
            Case(_branches(lambda x, f, s: f(x) + s(x.sin())), _tokens, 0),
            Case(_branches(_parallel), _tokens, 0),
            Case(_branches(_scaled), _tokens, 0, "computed in the forward"),
            Case(_branches(lambda x, f, s: (f(x).sin(), s(x))), _tokens, 0, "returned by the model"),
            Case(_branches(lambda x, f, s: (f(x).sin(), s(x).view(2, 5, 2, 8)[0])), _tokens, 0, "returned by"),
        ),
    ),
)
