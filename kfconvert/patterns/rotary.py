"""Rotary position embedding: ``x * cos + [-x[..., D/2:], x[..., :D/2]] * sin``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import AnyNumber, Op, Var, aten, fixed_size
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedRotary
from .cases import net, random
from .checks import dtype_refusal, same_shape, traced


def rotary_tree(name: str) -> Op:
    """Returns the rotation of a value, captured as ``name``, by ``cos`` and ``sin``. Its numbers have this prefix."""
    x, half = Var(name), AnyNumber(f"{name}_half")
    upper = Op(aten.slice.Tensor, x, AnyNumber(f"{name}_upper_dim"), half, AnyNumber(f"{name}_end"))
    lower = Op(aten.slice.Tensor, x, AnyNumber(f"{name}_lower_dim"), Var(f"{name}_start"), half)
    rotated = Op(
        aten.cat.default, [Op(aten.neg.default, upper), lower], AnyNumber(f"{name}_dim"), name=f"{name}_rotated"
    )
    product = Op(aten.mul.Tensor, x, Var("cos"))
    return Op(aten.add.Tensor, product, Op(aten.mul.Tensor, rotated, Var("sin")), name=f"{name}_result")


def rotary_refusal(captures: dict[str, Any], name: str) -> str | None:
    """Returns the reason why captures of ``rotary_tree(name)`` do not rotate the two halves of the columns, or None."""
    x, cos, sin, result = (captures[key] for key in (name, "cos", "sin", f"{name}_result"))
    if not (isinstance(cos, fx.Node) and isinstance(sin, fx.Node)):
        return "a constant angle"
    rank, width = traced(x).dim(), fixed_size(traced(x).shape[-1])
    if any(captures[f"{name}_{each}"] % rank != rank - 1 for each in ("dim", "upper_dim", "lower_dim")):
        return "the rotated dimension is not the last one"
    halves = width is not None and 2 * captures[f"{name}_half"] == width
    if not halves or captures[f"{name}_start"] not in (0, None) or captures[f"{name}_end"] < width:
        return f"the rotated parts are not the two halves of {width} columns"
    if str(traced(sin).shape[-1]) != str(width) or not same_shape(x, result):
        return "the angles have other columns, or a larger shape, than the rotated value"
    return dtype_refusal(x, cos, sin)


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    inputs = tuple(match.captures[name] for name in ("x", "cos", "sin"))
    return Replacement(FusedRotary(), inputs, (), (match.root,))


def _rotated(x: Tensor, half: int = 4, dim: int = -1) -> Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), dim)


def turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Rotates ``x`` as models of transformers do."""
    return x * c + _rotated(x, x.shape[-1] // 2) * s


def _found(function: Callable[..., Tensor], *shape: int) -> Case:
    return Case(net(lambda self, x, cos, sin: function(x, cos, sin)), random((2, 3, 5, 8), shape, shape))


def _refused(function: Callable[..., Tensor], reason: str, columns: int = 8) -> Case:
    shapes = (2, 3, 5, 8), (2, 1, 5, columns), (2, 1, 5, columns)
    return Case(net(lambda self, x, cos, sin: function(x, cos, sin)), random(*shapes), 0, reason)


PATTERNS = (
    Pattern(
        name="rotary",
        tree=rotary_tree("x"),
        anchor="x_rotated",
        refusal=lambda match: rotary_refusal(match.captures, "x"),
        build=_build,
        cases=(
            _found(turned, 2, 1, 5, 8),
            _found(lambda x, c, s: s * _rotated(x) + c * x, 5, 8),
            _found(lambda x, c, s: turned(x.transpose(1, 2), c, s), 3, 8),
            _found(lambda x, c, s: turned(x[..., :6], c, s), 5, 6),
            _refused(lambda x, c, s: x * c + _rotated(x, 3) * s, "the two halves of 8 columns"),
            _refused(turned, "other columns", columns=1),
            _refused(lambda x, c, s: turned(x[:1], c, s), "or a larger shape"),
            _refused(lambda x, c, s: x * c + _rotated(x) * s.double(), "mixed dtypes"),
            _refused(lambda x, c, s: x * 0.5 + _rotated(x) * s, "a constant angle"),
            _refused(lambda x, c, s: x * c + _rotated(x).sin() * s, "its value goes to aten.sin"),
        ),
    ),
)
