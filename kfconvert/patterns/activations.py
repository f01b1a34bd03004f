"""The dataflow of each activation that may end a fused operator, and families of patterns with one activation each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Number, Op, Tree, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from .cases import Make, net

Activation = Callable[[Any], Any]

_PLAIN = "relu silu tanh sigmoid relu6 hardswish hardsigmoid"
# Activation name of kfconvert.ops -> the call that applies it to a value.
_TREES: dict[str, Activation] = {
    **{name: partial(Op, getattr(aten, name).default) for name in _PLAIN.split()},
    "none": lambda x: x,
    "gelu": lambda x: Op(aten.gelu.default, x, "none"),
    "gelu_tanh": lambda x: Op(aten.gelu.default, x, "tanh"),
    # There is no ATen operator for this activation. Its input occurs twice, so it needs a name.
    "quick_gelu": lambda x: Op(aten.mul.Tensor, x, Op(aten.sigmoid.default, Op(aten.mul.Tensor, x, Number(1.702)))),
    "leaky_relu": lambda x: Op(aten.leaky_relu.default, x, Var("negative_slope")),
}
_MODULES: dict[str, Make] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "quick_gelu": net(lambda self, x: x * (1.702 * x).sigmoid()),
    "hardsigmoid": nn.Hardsigmoid,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


def family(
    name: str,
    tree: Callable[[Activation], Tree],
    activations: str,
    build: Callable[[Match, Callable[[fx.Node], Tensor], str], Replacement],
    cases: Callable[[Make], tuple[Case, ...]],
    special: Mapping[str, tuple[Case, ...]] = {},
    **common: Any,
) -> tuple[Pattern, ...]:
    """Returns a pattern for each of the ``activations``: ``<name>_<activation>``, or ``name`` for "none".

    Args:
        tree: returns the dataflow, for a function that applies the activation to a tree.
        activations: names, with spaces between them.
        build: as in ``Pattern``. It receives the name of the activation too.
        cases: returns the cases, for a function that creates the activation's module.
        special: further cases by activation.
        common: other attributes of all patterns.
    """

    def builder(activation: str) -> Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]:
        return lambda match, tensor: build(match, tensor, activation)

    return tuple(
        Pattern(
            name=name if activation == "none" else f"{name}_{activation}",
            tree=tree(_TREES[activation]),
            build=builder(activation),
            cases=(*cases(_MODULES[activation]), *special.get(activation, ())),
            **common,
        )
        for activation in activations.split()
    )


def negative_slope(captures: dict[str, Any]) -> float:
    """Returns the slope of a captured leaky ReLU, or its default for other activations."""
    return float(captures.get("negative_slope", 0.01))
