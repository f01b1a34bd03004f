"""Replaces activations written in elementary operations with their calls."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..graph import Aliases, Either, Number, Op, Tree, Var, aten, unify

_X = Var("x")


def _add(a: Tree, b: Tree) -> Op:
    return Op(aten.add.Tensor, a, b)


def _mul(a: Tree, b: Tree) -> Op:
    return Op(aten.mul.Tensor, a, b)


def _halved_product(factor: Tree) -> Either:
    """0.5 * x * factor, in any order of the two products."""
    half = Number(0.5)
    return Either(_mul(_mul(_X, half), factor), _mul(_mul(_X, factor), half), _mul(_X, _mul(factor, half)))


_ROOT = Number(math.sqrt(2 / math.pi))
_CUBE = Either(Op(aten.pow.Tensor_Scalar, _X, Number(3)), _mul(_mul(_X, _X), _X))
_SQUARE = Either(Op(aten.pow.Tensor_Scalar, _X, Number(2)), _mul(_X, _X))
_TANH_ARGUMENT = Either(
    _mul(_add(_X, _mul(_CUBE, Number(0.044715))), _ROOT),
    _mul(
        _mul(_X, _ROOT),
        Either(_add(_mul(_SQUARE, Number(0.044715)), Number(1)), _add(_mul(_mul(_X, Number(0.044715)), _X), Number(1))),
    ),
)
_ERF_ARGUMENT = Either(Op(aten.div.Tensor, _X, Number(math.sqrt(2))), _mul(_X, Number(math.sqrt(0.5))))

# (dataflow, equivalent operator, further arguments); GELU as in Hendrycks and Gimpel, arXiv:1606.08415.
SPELLINGS: tuple[tuple[Tree, Any, tuple[Any, ...]], ...] = (
    (_halved_product(_add(Op(aten.tanh.default, _TANH_ARGUMENT), Number(1))), aten.gelu.default, ("tanh",)),
    (_halved_product(_add(Op(aten.erf.default, _ERF_ARGUMENT), Number(1))), aten.gelu.default, ("none",)),
    (_mul(_X, Op(aten.sigmoid.default, _X)), aten.silu.default, ()),
    (
        Either(
            Op(aten.div.Tensor, _mul(_X, Op(aten.relu6.default, _add(_X, Number(3)))), Number(6)),
            _mul(_X, Op(aten.div.Tensor, Op(aten.relu6.default, _add(_X, Number(3))), Number(6))),
        ),
        aten.hardswish.default,
        (),
    ),
)


def rewrite_spellings(graph: fx.Graph) -> None:
    """Replaces each written-out activation with its call. Inner values with other users keep their calls."""
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        for tree, target, extra in SPELLINGS:
            found = next(unify(tree, node), None)
            if found is None or aliases.reads_written(found):
                continue
            x = found.captures["x"]
            if not isinstance(x, fx.Node) or not x.meta["val"].is_floating_point():
                continue
            with graph.inserting_before(node):
                if target is aten.gelu.default:
                    call = graph.call_function(target, (x,), {"approximate": extra[0]})
                else:
                    call = graph.call_function(target, (x, *extra))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            break
