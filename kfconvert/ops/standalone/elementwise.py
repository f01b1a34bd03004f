"""Elementwise functions of two tensors, each in one pass over memory, under their common names.

All functions take float64, float32, float16 or bfloat16 (half types are computed in float32), any shapes that broadcast
and any strides, and have a backward pass. The arguments must have one dtype and device, else RuntimeError. The result
has the memory format of the first argument with its shape.
"""

import torch.nn.functional as F
from torch import Tensor

from ..activations import CODES, EXP_TWICE, MISH
from ..arguments import as_number
from ..declaration import declare
from ..fused.act_mul import act_mul
from ..fused.bias_act import bias_act
from ..fused.combine_act import Combination, combine_act
from ..registration import require_float

__all__ = [
    "add_mul_exp",
    "add_relu",
    "add_sigmoid",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "geglu",
    "mish_scale",
    "mul_tanh",
    "multiply_relu",
    "swish_multiply",
]


def _scales_halves(x, scale):
    halved = x.element_size() == 2 and not isinstance(scale, Tensor)
    return "of half types the kernel takes a tensor as scale" if halved else None


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(rows, columns)))
def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``relu(x + y)``."""
    return combine_act(x, y, Combination.SUM, CODES["relu"])


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns)))
def multiply_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``relu(x * y)``."""
    return combine_act(x, y, Combination.PRODUCT, CODES["relu"])


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(rows, 1)))
def add_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``sigmoid(x + y)``."""
    return combine_act(x, y, Combination.SUM, CODES["sigmoid"])


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns)))
def mul_tanh(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``tanh(x * y)``."""
    return combine_act(x, y, Combination.PRODUCT, CODES["tanh"])


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns)))
def add_mul_exp(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``exp((x + y) * 2)``."""
    return combine_act(x, y, Combination.SUM, EXP_TWICE.code)


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(rows, columns)))
def swish_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Computes ``silu(gate) * up``, the middle of SwiGLU. Halves of one packed tensor are read without a copy."""
    return act_mul(gate, up, "silu")


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(rows, columns)))
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Computes ``gelu(gate) * up`` with the exact (erf) GELU. Halves of one packed tensor are read without a copy.

    The formula is that of Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    return act_mul(gate, up, "gelu")


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns)), why_aten=_scales_halves)
def mish_scale(x: Tensor, scale: Tensor | float) -> Tensor:
    """Computes ``mish(x) * scale`` with ``mish(x) = x tanh(softplus(x))``.

    scale: a tensor or a number. Half types are multiplied by a number in a separate pass, ``F.mish(x) * scale``,
    because the number would be rounded to a half type.

    The formula is that of Misra, "Mish: A Self Regularized Non-Monotonic Activation Function" (2019).
    """
    if not isinstance(scale, Tensor):
        require_float("mish_scale", x)
        scale = as_number("mish_scale", "scale", scale)
        if x.element_size() == 2:
            return F.mish(x) * scale
        scale = x.new_full((), scale)
    return combine_act(x, scale, Combination.GATED, MISH.code)


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns, 3), t(columns), 1))
def bias_relu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    """Computes ``relu(x + bias)`` with ``bias`` of shape (x.shape[dim],) along ``dim``."""
    return bias_act(x, bias, activation="relu", dim=dim)


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns)))
def bias_gelu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    """Computes ``gelu(x + bias)``, the exact (erf) GELU, with ``bias`` of shape (x.shape[dim],) along ``dim``."""
    return bias_act(x, bias, activation="gelu", dim=dim)


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(rows), 0))
def bias_silu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    """Computes ``silu(x + bias)`` with ``bias`` of shape (x.shape[dim],) along ``dim``."""
    return bias_act(x, bias, activation="silu", dim=dim)
