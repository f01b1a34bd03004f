"""The dataflow of each activation that may end a fused operator."""

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
    # There is no ATen operator for this activation. Its input occurs twice, so it needs a name.
    "quick_gelu": lambda x: Op(aten.mul.Tensor, x, Op(aten.sigmoid.default, Op(aten.mul.Tensor, x, Number(1.702)))),
    "hardsigmoid": lambda x: Op(aten.hardsigmoid.default, x),
    "leaky_relu": lambda x: Op(aten.leaky_relu.default, x, Var("negative_slope")),
}


def with_activation(name: str, tree: Op | Either) -> Op | Either:
    """Returns ``tree`` followed by the activation ``name``, or ``tree`` for "none"."""
    return tree if name == "none" else ACTIVATION_TREES[name](tree)


def negative_slope(captures: dict[str, Any]) -> float:
    """Returns the slope of a captured leaky ReLU, or its default for other activations."""
    return float(captures.get("negative_slope", 0.01))
