"""conv_act: ``y = act(conv(x, W) + b + residual)``: the library's convolution, then at most one in-place
epilogue.

On CUDA, relu with a bias is one cuDNN call (cudnn_convolution_relu, cudnn_convolution_add_relu). A depthwise weight
with the memory order (kernel, channels) selects kfconvert's kernels, for channels-last images of a half type and
kernels of 3, 5 and 7. Where a gradient is needed, the convolution and ``bias_act`` run, with their backward formulas.
"""

import torch
import torch.nn.functional as F

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare
from ..registration import (
    autocast,
    cast_to_lower,
    define_with_twin,
    differentiate_by_decomposition,
    has_kernels,
    require,
    require_same_options,
    require_shape,
    wants_gradient,
)

__all__ = ["conv_act"]

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


@declare(group="block", example=lambda t, rows, columns: (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4)), timed_as="conv2d_bn_act")
def conv_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> torch.Tensor:
    """Computes ``act(conv(x, W) + b + residual)``; 1d, 2d or 3d by the dimensions of weight.

    Args:
        x: (batch, in, *size) or (in, *size); contiguous or channels-last; float64, float32, float16 or
            bfloat16.
        weight: (out, in / groups, *kernel).
        bias: (out,).
        residual: the output's shape; another memory layout than the output's costs a copy.
        stride, padding, dilation, groups: as in torch.nn.functional.conv2d; padding also "valid" or, with a
            stride of 1, "same".
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation or padding. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code = CODES[activation]
    if x.dim() == weight.dim() - 1:
        batched = x.unsqueeze(0), weight, bias, None if residual is None else residual.unsqueeze(0)
        return conv_act(*batched, stride, padding, dilation, groups, activation, negative_slope).squeeze(0)
    if isinstance(padding, str):
        x, padding = _explicit_padding(x, weight, stride, padding, dilation)
    if not has_kernels(x):
        _check(x, weight, bias, residual, groups)
        y = _CONVOLUTIONS[weight.dim()](x, weight, bias, stride, padding, dilation, groups)
        return apply_activation(y if residual is None else y + residual, activation, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, weight, bias, residual) else _INFERENCE
    strides, paddings, dilations = ((n,) if isinstance(n, int) else n for n in (stride, padding, dilation))
    return operator(x, weight, bias, residual, strides, paddings, dilations, groups, code, negative_slope)


def _explicit_padding(x, weight, stride, padding, dilation):
    """Returns (x, numbers) for "valid" and "same". An odd total is padded in x, with the larger part at the end."""
    if padding == "valid":
        return x, 0
    if padding != "same":
        raise ValueError(f'padding must be numbers, "valid" or "same", not {padding!r}')
    strided = stride != 1 if isinstance(stride, int) else any(n != 1 for n in stride)
    require(not strided, "conv_act", f'padding "same" needs a stride of 1, not {stride}')
    dilations = _one_each("dilation", dilation, weight.dim() - 2)
    totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [part for total in reversed(totals) for part in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _one_each(name: str, value: int | tuple[int, ...], spatial: int) -> list[int]:
    """Returns a number for each of the ``spatial`` dimensions."""
    numbers = [value] if isinstance(value, int) else list(value)
    require(len(numbers) in (1, spatial), "conv_act", f"{name} needs 1 or {spatial} numbers, got {value}")
    return numbers * (spatial if len(numbers) == 1 else 1)


def _check(x, weight, bias, residual, groups):
    require(
        3 <= weight.dim() <= 5 and x.dim() == weight.dim(),
        "conv_act",
        f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)} (out, in / groups, kernel...)",
    )
    require(
        groups > 0 and x.shape[1] == weight.shape[1] * groups,
        "conv_act",
        f"x has {x.shape[1]} channels, expected {weight.shape[1] * groups}",
    )
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None:
            require_same_options("conv_act", name, x, tensor)
    if bias is not None:
        require_shape("conv_act", "bias", bias, weight.shape[:1])


def _convolve(x, weight, bias, residual, stride, padding, dilation, groups):
    y = _CONVOLUTIONS[weight.dim()](x, weight, bias, *map(_numbers, (stride, padding, dilation)), groups)
    if residual is not None:
        require_shape("conv_act", "residual", residual, y.shape)
    return y


def _numbers(value):
    return value[0] if len(value) == 1 else value


def _compose(x, weight, bias, residual, stride, padding, dilation, groups, code, negative_slope):
    _check(x, weight, bias, residual, groups)
    y = _convolve(x, weight, bias, residual, stride, padding, dilation, groups)
    return BY_CODE[code].reference(y if residual is None else y + residual, negative_slope)


def _decompose(x, weight, bias, residual, stride, padding, dilation, groups, code, negative_slope):
    _check(x, weight, bias, residual, groups)
    y = _convolve(x, weight, bias, residual, stride, padding, dilation, groups)
    if code == 0 and residual is None:
        return y
    return torch.ops.kfconvert.bias_act.default(y, None, residual, code, negative_slope, 1)


_OPERATOR, _INFERENCE = define_with_twin(
    "conv_act(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
    "int[] dilation, int groups, int activation, float negative_slope) -> Tensor",
    _compose,
)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
autocast((_OPERATOR, _INFERENCE), cast_to_lower)
