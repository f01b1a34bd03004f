"""The dataflow of each activation that a fused operator may end in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph import Either, Number, Op, Tree, Var, aten

# Activation name of kfconvert.ops -> the call that applies it to a value.
ACTIVATION_TREES: dict[str, Callable[[Tree], Op]] = {
    "relu": lambda x: Op(aten.relu.default, x),
    "gelu": lambda x: Op(aten.gelu.default, x, "none"),
    "gelu_tanh": lambda x: Op(aten.gelu.default, x, "tanh"),
    "silu": lambda x: Op(aten.silu.default, x),
    "tanh": lambda x: Op(aten.tanh.default, x),
    "sigmoid": lambda x: Op(aten.sigmoid.default, x),
    "relu6": lambda x: Op(aten.relu6.default, x),
    "hardswish": lambda x: Op(aten.hardswish.default, x),
    # No ATen operator stands for this one: the value that it is applied to needs a name, since it occurs twice.
    "quick_gelu": lambda x: Op(aten.mul.Tensor, x, Op(aten.sigmoid.default, Op(aten.mul.Tensor, x, Number(1.702)))),
    "hardsigmoid": lambda x: Op(aten.hardsigmoid.default, x),
    "leaky_relu": lambda x: Op(aten.leaky_relu.default, x, Var("negative_slope")),
}


def with_activation(name: str, tree: Op | Either) -> Op | Either:
    """``tree`` followed by the activation ``name``; "none" is ``tree`` itself."""
    return tree if name == "none" else ACTIVATION_TREES[name](tree)


def negative_slope(captures: dict[str, Any]) -> float:
    """The slope of a captured leaky ReLU; its default where another activation was captured."""
    return float(captures.get("negative_slope", 0.01))
