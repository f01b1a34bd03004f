"""quantize_int8 and dequantize_int8: float to int8 by scale and zero point and back, in one pass."""

import torch
from torch import Tensor

from ..arguments import as_number
from ..declaration import declare
from ..fused.bias_act import check_channels, spread
from ..norms import accumulator
from ..registration import define, has_kernels, require, require_float, require_same_device

__all__ = ["dequantize_int8", "quantize_int8"]


def _learns_the_scale(q, scale, *args, **kwargs):
    learned = torch.is_grad_enabled() and isinstance(scale, Tensor) and scale.requires_grad
    return "the kernel has no backward" if learned else None


@declare(group="image", example=lambda t, rows, columns: (t(rows, columns), 0.03, 2))
def quantize_int8(x: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, dim: int = -1) -> Tensor:
    """Computes ``clamp(round(x / scale + zero_point), -128, 127)`` as int8, in x's shape and memory format.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16. Half types are computed in
            float32.
        scale: a number or a tensor of one element for all, or (x.shape[dim],), one for each channel along
            ``dim``.
        zero_point: as scale, of any dtype.

    The division is exact, while ATen on CUDA multiplies by the reciprocal of a Python number. Half-way cases are
    rounded to even. NaN, such as 0 / 0, becomes 0, and infinite values from a scale of 0 are clamped. A zero_point
    may be outside the int8 range. Not differentiable. RuntimeError: incompatible shapes, dtypes or devices.
    """
    operator = "quantize_int8"
    require_float(operator, x)
    scale, zero_point = parameters(operator, x, scale, zero_point, accumulator(x.dtype), dim)
    if not has_kernels(x):
        return _quantized(x, scale, zero_point, dim)
    return _QUANTIZE(x, *_arguments(scale, zero_point), dim)


@declare(
    group="image",
    example=lambda t, rows, columns: (t(rows, columns).to(torch.int8), 0.5, 3),
    why_aten=_learns_the_scale,
)
def dequantize_int8(
    q: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, dim: int = -1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Computes ``(q - zero_point) * scale`` in ``dtype`` (half types are computed in float32); the arguments are
    those of :func:`quantize_int8`, q int8 of any shape and strides. Differentiable in a ``scale`` that
    requires a gradient."""
    operator = "dequantize_int8"
    require(q.dtype == torch.int8, operator, "expected int8")
    empty = q.new_empty(0, dtype=dtype)
    require_float(operator, empty)
    scale, zero_point = parameters(operator, q, scale, zero_point, accumulator(dtype), dim)
    learned = torch.is_grad_enabled() and isinstance(scale, Tensor) and scale.requires_grad
    if not has_kernels(q) or learned:
        return _dequantized(q, scale, zero_point, dim, dtype)
    return _DEQUANTIZE(q, *_arguments(scale, zero_point), dim, empty)


def parameters(operator, x, scale, zero_point, wide, dim):
    """Returns each as a number, or a tensor of one element or of x.shape[dim] in the computation dtype.

    CUDA kernels read zero points of int32 and int64 directly.
    """
    values = []
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if isinstance(value, Tensor):
            require_same_device(operator, name, x, value)
            as_it_is = name == "zero_point" and value.is_cuda and value.dtype in (torch.int32, torch.int64)
            value = value if as_it_is else value.to(wide)  # on CUDA a separate kernel
            if value.numel() == 1 and value.dim() <= 1:
                value = value.reshape(1)
            else:
                check_channels(operator, name, x, value, dim)
        values.append(value if isinstance(value, Tensor) else as_number(operator, name, value))
    sizes = [value.numel() for value in values if isinstance(value, Tensor)]
    size = next((size for size in sizes if size != 1), 1)
    return [value.expand(size) if isinstance(value, Tensor) else value for value in values]


def _arguments(scale, zero_point):
    """Returns the tensor and number arguments of the operators."""
    tensors = (value if isinstance(value, Tensor) else None for value in (scale, zero_point))
    numbers = (0.0 if isinstance(value, Tensor) else value for value in (scale, zero_point))
    return *tensors, *numbers


def _spread(value, x, dim):
    if not isinstance(value, Tensor):
        return value
    return value.reshape(()) if value.numel() == 1 else spread(value, x, dim)


def _quantized(x, scale, zero_point, dim):
    wide = x.to(accumulator(x.dtype))
    # A tensor, because ATen divides by a number on CUDA as a product with its reciprocal, which rounds differently.
    scale = torch.as_tensor(_spread(scale, x, dim), dtype=wide.dtype, device=x.device)
    scaled = wide / scale + _spread(zero_point, x, dim)
    return scaled.round().clamp(-128, 127).nan_to_num(0).to(torch.int8)


def _dequantized(q, scale, zero_point, dim, dtype):
    return ((q.to(accumulator(dtype)) - _spread(zero_point, q, dim)) * _spread(scale, q, dim)).to(dtype)


def _compose(x, scale, zero_point, scale_value, zero_point_value, dim):
    values = scale_value if scale is None else scale, zero_point_value if zero_point is None else zero_point
    return torch.empty_like(x, dtype=torch.int8).copy_(_quantized(x, *values, dim))


def _compose_back(q, scale, zero_point, scale_value, zero_point_value, dim, like):
    values = scale_value if scale is None else scale, zero_point_value if zero_point is None else zero_point
    return torch.empty_like(q, dtype=like.dtype).copy_(_dequantized(q, *values, dim, like.dtype))


_PARAMETERS = "Tensor? scale, Tensor? zero_point, float scale_value, float zero_point_value, int dim"
_QUANTIZE = define(f"quantize_int8(Tensor x, {_PARAMETERS}) -> Tensor", _compose)
_DEQUANTIZE = define(f"dequantize_int8(Tensor q, {_PARAMETERS}, Tensor like) -> Tensor", _compose_back)
