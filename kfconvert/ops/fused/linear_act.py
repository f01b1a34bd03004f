"""linear_act: ``y = act(x W^T + b)``: the library's matrix product, then one in-place epilogue.

If a gradient is needed, ``linear`` and ``bias_act`` run, with their backward formulas.
"""

import torch
import torch.nn.functional as F

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare
from ..registration import (
    autocast,
    cast_to_lower,
    define,
    define_with_twin,
    differentiate_by_decomposition,
    has_kernels,
    require,
    require_same_options,
    require_shape,
    wants_gradient,
)

__all__ = ["linear_act"]


@declare(
    group="block",
    example=lambda t, rows, columns: (t(rows, columns), t(7, columns), t(7), "gelu"),
    timed_as="fused_linear_activation",
)
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> torch.Tensor:
    """Computes ``act(x W^T + b)``, of shape (..., out).

    Args:
        x: (..., in); float64, float32, float16 or bfloat16.
        weight: (out, in), any strides: a transposed view of an (in, out) weight is not copied.
        bias: (out,). weight and bias have x's dtype and device (autocast aligns the dtypes).
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code = CODES[activation]
    if not has_kernels(x):
        check("linear_act", x, weight, bias)
        return apply_activation(F.linear(x, weight, bias), activation, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, weight, bias) else _INFERENCE
    return operator(x, weight, bias, code, negative_slope)


def check(operator, x, weight, bias):
    """Raises RuntimeError unless the kernels accept x, weight and bias."""
    require_same_options(operator, "weight", x, weight)
    require(
        weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1],
        operator,
        f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)} (out, in)",
    )
    if bias is not None:
        require_same_options(operator, "bias", x, bias)
        require_shape(operator, "bias", bias, weight.shape[:1])


def _compose(x, weight, bias, code, negative_slope):
    check("linear_act", x, weight, bias)
    return BY_CODE[code].reference(F.linear(x, weight, bias), negative_slope).contiguous()


def _decompose(x, weight, bias, code, negative_slope):
    y = F.linear(x, weight, bias)
    return y if code == 0 else torch.ops.kfconvert.bias_act.default(y, None, None, code, negative_slope, -1)


_OPERATOR, _INFERENCE = define_with_twin(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, int activation, float negative_slope) -> Tensor", _compose
)
# Without gradients. kernels.triton has its kernel for CUDA and many rows, which needs float32 or a half type.
linear_triton = define(
    "linear_triton(Tensor x, Tensor weight, Tensor? bias, int activation, float negative_slope) -> Tensor", _compose
)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
autocast((_OPERATOR, _INFERENCE), cast_to_lower)
