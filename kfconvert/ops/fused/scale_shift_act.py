"""scale_shift_act: ``y = act(x * scale + shift)`` by channel, one pass over memory in place of two.

It computes a batch norm in eval mode. If a gradient is needed, plain ATen calls run, with their backward formulas.
"""

import torch

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare, wants_gradients
from ..registration import (
    define_with_twin,
    differentiate_by_decomposition,
    has_kernels,
    require,
    require_float,
    require_same_device,
    wants_gradient,
)
from .bias_act import check_channels

__all__ = ["scale_shift_act"]


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(2, 6, 5), t(6), t(6), "relu"),
    why_aten=wants_gradients,
    timed_as="conv2d_bn_act",
)
def scale_shift_act(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, activation: str = "none", negative_slope: float = 0.01
) -> torch.Tensor:
    """Computes ``act(x * scale[c] + shift[c])`` with c along dimension 1, in x's dtype, shape and memory format.

    Args:
        x: (N, C, ...), any strides; contiguous and channels-last are both read without a copy; float64,
            float32, float16 or bfloat16 (half types are computed in float32).
        scale, shift: (C,), on x's device; float64 for a float64 x, else float32, because the rounding error of
            half types would be as large as that of the result.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code = CODES[activation]
    if not has_kernels(x):
        _check(x, scale, shift)
        return apply_activation(_scaled(x, scale, shift), activation, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, scale, shift) else _INFERENCE
    return operator(x, scale, shift, code, negative_slope)


def batch_norm_scale_and_shift(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scale and shift of a batch norm in eval mode, ``y = x * scale + shift`` per channel: float64, (C,).

    scale = weight / sqrt(running_var + eps), shift = bias - running_mean * scale (Ioffe and Szegedy,
    arXiv:1502.03167, algorithm 2). All arguments: (C,), weight and bias may be None.
    """
    scale = torch.rsqrt(running_var.double() + eps)
    if weight is not None:
        scale = scale * weight.double()
    shift = -running_mean.double() * scale
    return scale, shift if bias is None else shift + bias.double()


def _scaled(x, scale, shift):
    shape = (-1, *[1] * (x.dim() - 2))
    return (x.to(scale.dtype) * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)


def _check(x, scale, shift):
    operator = "scale_shift_act"
    require_float(operator, x)
    require(x.dim() >= 2, operator, f"x has shape {tuple(x.shape)}, expected (N, C, ...)")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, tensor in (("scale", scale), ("shift", shift)):
        require_same_device(operator, name, x, tensor)
        require(tensor.dtype == wide, operator, f"{name} must be {str(wide).removeprefix('torch.')}")
        check_channels(operator, name, x, tensor, 1)


def _compose(x, scale, shift, code, negative_slope):
    _check(x, scale, shift)
    return _decompose(x, scale, shift, code, negative_slope)


def _fake(x, scale, shift, code, negative_slope):
    _check(x, scale, shift)
    return torch.empty_like(x)


def _decompose(x, scale, shift, code, negative_slope):
    return BY_CODE[code].reference(_scaled(x, scale, shift), negative_slope)


_OPERATOR, _INFERENCE = define_with_twin(
    "scale_shift_act(Tensor x, Tensor scale, Tensor shift, int activation, float negative_slope) -> Tensor",
    _compose,
    _fake,
)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
