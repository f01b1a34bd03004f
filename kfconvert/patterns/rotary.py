"""Rotary position embedding: ``x * cos + [-x[..., D/2:], x[..., :D/2]] * sin``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import AnyNumber, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedRotary
from .checks import dtype_refusal, same_shape, traced

_UPPER = Op(aten.slice.Tensor, Var("x"), AnyNumber("upper_dim"), AnyNumber("half"), AnyNumber("end"))
_LOWER = Op(aten.slice.Tensor, Var("x"), AnyNumber("lower_dim"), Var("start"), AnyNumber("half"))
_ROTATED = Op(aten.cat.default, [Op(aten.neg.default, _UPPER), _LOWER], AnyNumber("dim"), name="rotated")
_TREE = Op(
    aten.add.Tensor,
    Op(aten.mul.Tensor, Var("x"), Var("cos")),
    Op(aten.mul.Tensor, _ROTATED, Var("sin")),
    name="result",
)


def _refusal(match: Match) -> str | None:
    captures = match.captures
    x, cos, sin, result = (captures[name] for name in ("x", "cos", "sin", "result"))
    if not (isinstance(cos, fx.Node) and isinstance(sin, fx.Node)):
        return "a constant angle"
    rank, width = traced(x).dim(), traced(x).shape[-1]
    if any(captures[name] % rank != rank - 1 for name in ("dim", "upper_dim", "lower_dim")):
        return "other dimensions are rotated than the last one"
    halves = isinstance(width, int) and 2 * captures["half"] == width
    if not halves or captures["start"] not in (0, None) or captures["end"] < width:
        return f"other parts are rotated than the two halves of {width} columns"
    if str(traced(sin).shape[-1]) != str(width) or not same_shape(x, result):
        return "the angles have other columns, or a larger shape, than what is rotated"
    return dtype_refusal(x, cos, sin)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    inputs = tuple(match.captures[name] for name in ("x", "cos", "sin"))
    return Replacement(FusedRotary(), inputs, (), (match.root,))


class _Rotary(nn.Module):
    """A function of x, cos and sin."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.function(x, cos, sin)


def _rotated(x: Tensor, half: int = 4, dim: int = -1) -> Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), dim)


def _turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + _rotated(x, x.shape[-1] // 2) * s


def _found(function: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> Case:
    return Case(lambda: _Rotary(function), lambda: (torch.randn(2, 3, 5, 8), torch.randn(shape), torch.randn(shape)))


def _refused(function: Callable[[Tensor, Tensor, Tensor], Tensor], reason: str, columns: int = 8) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, columns), torch.randn(2, 1, 5, columns)

    return Case(lambda: _Rotary(function), inputs, 0, reason)


PATTERNS = (
    Pattern(
        name="rotary",
        tree=_TREE,
        anchor="rotated",
        numerics="reassociated",
        refusal=_refusal,
        build=_build,
        cases=(
            _found(_turned, 2, 1, 5, 8),
            _found(lambda x, c, s: s * _rotated(x) + c * x, 5, 8),
            _found(lambda x, c, s: _turned(x.transpose(1, 2), c, s), 3, 8),
            _found(lambda x, c, s: _turned(x[..., :6], c, s), 5, 6),
            _refused(lambda x, c, s: x * c + _rotated(x, 3) * s, "the two halves of 8 columns"),
            _refused(_turned, "other columns", columns=1),
            _refused(lambda x, c, s: _turned(x[:1], c, s), "or a larger shape"),
            _refused(lambda x, c, s: x * c + _rotated(x) * s.double(), "mixed dtypes"),
            _refused(lambda x, c, s: x * 0.5 + _rotated(x) * s, "a constant angle"),
            _refused(lambda x, c, s: x * c + _rotated(x).sin() * s, "its value goes to aten.sin"),
        ),
    ),
)
