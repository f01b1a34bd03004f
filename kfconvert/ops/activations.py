"""The activations of all operators in this package, in plain ATen.

An activation has a name, a code for the compiled kernels (the same number as in ``csrc/common/activation.h``) and a
reference implementation, which defines the result in tests of the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .declaration import declare

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function ``reference(x, negative_slope)``. Only leaky_relu uses the slope.

    ``backward(grad, saved, negative_slope)`` is grad * act'(x). ``saves_output``: the derivative depends only on the
    output, so ``saved`` is the output and the input is not saved; otherwise ``saved`` is x.
    """

    name: str
    code: int
    reference: Callable[[torch.Tensor, float], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    saves_output: bool = False


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("none", 0, lambda x, _: x, lambda g, x, _: g),
        Activation(
            "relu", 1, lambda x, _: F.relu(x), lambda g, y, _: _aten.threshold_backward(g, y, 0), saves_output=True
        ),
        Activation("gelu", 2, lambda x, _: F.gelu(x), lambda g, x, _: _aten.gelu_backward(g, x)),
        Activation(
            "gelu_tanh",
            3,
            lambda x, _: F.gelu(x, approximate="tanh"),
            lambda g, x, _: _aten.gelu_backward(g, x, approximate="tanh"),
        ),
        Activation("silu", 4, lambda x, _: F.silu(x), lambda g, x, _: _aten.silu_backward(g, x)),
        Activation("tanh", 5, lambda x, _: torch.tanh(x), lambda g, y, _: _aten.tanh_backward(g, y), saves_output=True),
        Activation(
            "sigmoid", 6, lambda x, _: torch.sigmoid(x), lambda g, y, _: _aten.sigmoid_backward(g, y), saves_output=True
        ),
        Activation(
            "relu6", 7, lambda x, _: F.relu6(x), lambda g, y, _: _aten.hardtanh_backward(g, y, 0, 6), saves_output=True
        ),
        Activation("hardswish", 8, lambda x, _: F.hardswish(x), lambda g, x, _: _aten.hardswish_backward(g, x)),
        Activation(
            "leaky_relu",
            9,
            lambda x, slope: F.leaky_relu(x, slope),
            lambda g, x, slope: _aten.leaky_relu_backward(g, x, slope, False),
        ),
        # quick_gelu(x) is silu(1.702 x) / 1.702; models write x sigmoid(1.702 x).
        Activation(
            "quick_gelu",
            10,
            lambda x, _: x * torch.sigmoid(1.702 * x),
            lambda g, x, _: _aten.silu_backward(g, 1.702 * x),
        ),
        Activation("hardsigmoid", 11, lambda x, _: F.hardsigmoid(x), lambda g, x, _: _aten.hardsigmoid_backward(g, x)),
    )
}

# Activations of a single operator, without a public name: exp((x + y) * 2) and mish(x) * scale.
EXP_TWICE = Activation("exp_twice", 12, lambda x, _: torch.exp(x * 2), lambda g, y, _: 2 * g * y, saves_output=True)
MISH = Activation("mish", 13, lambda x, _: F.mish(x), lambda g, x, _: _aten.mish_backward(g, x))

BY_CODE: dict[int, Activation] = {
    activation.code: activation for activation in (*ACTIVATIONS.values(), EXP_TWICE, MISH)
}


class _Codes(dict):
    """A dict from names to codes. An unknown name raises an error that lists the known names."""

    def __missing__(self, name):
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")


CODES: dict[str, int] = _Codes({name: activation.code for name, activation in ACTIVATIONS.items()})


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), "relu"), runs="PyTorch's activations")
def apply_activation(x: torch.Tensor, name: str, negative_slope: float = 0.01) -> torch.Tensor:
    """Computes ``act(x)`` in plain ATen, differentiable; x is any float tensor. ValueError: unknown name."""
    return BY_CODE[CODES[name]].reference(x, negative_slope)
