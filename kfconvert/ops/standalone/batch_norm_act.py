"""batch_norm_act: ``y = act(batch_norm(x))`` with given statistics, one pass over memory in place of two.

With rstd = 1 / sqrt(variance + eps): y = act(x scale + shift), scale = weight rstd, shift = bias - mean scale
(Ioffe and Szegedy, arXiv:1502.03167, algorithm 2).

Backward, also in one pass: g = grad * act'(x scale + shift). The gradient of x is g scale, of weight the sum of
g (x - mean) rstd per channel, of bias the sum of g. The statistics have no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..fused.bias_act import check_channels, spread, sum_by_channel
from ..norms import accumulator
from ..registration import (
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    require_float,
    require_same_device,
    wants_gradient,
)

__all__ = ["batch_norm_act"]


def _normalise(x, mean, variance, weight, bias, eps):
    # ATen's backward of (N, C) on the CPU is wrong with a strided weight or strided statistics.
    given = (None if t is None else t.contiguous() for t in (mean, variance, weight, bias))
    return F.batch_norm(x, *given, False, 0.0, eps)


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(2, 6, 5), t(6), t(6).abs(), t(6), t(6), 1e-5, "relu"),
    timed_as="batch_norm_relu",
)
def batch_norm_act(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> Tensor:
    """Computes ``act(batch_norm(x))`` as in eval mode, in x's dtype, shape and memory format.

    Args:
        x: (N, C, ...), any strides; contiguous and channels-last are both read without a copy; float64,
            float32, float16 or bfloat16 (half types are computed in float32).
        mean, variance, weight, bias: (C,), on x's device and of one dtype: x's, or float32 for a half
            type. Weight and bias may be None: 1 and 0. The statistics have no gradient.
        eps: added to the variance.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code, eps = CODES[activation], float(eps)
    if not has_kernels(x):
        _check(x, mean, variance, weight, bias)
        y = _normalise(x, mean, variance, weight, bias, eps)
        return apply_activation(y, activation, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, weight, bias) else _INFERENCE
    return operator(x, mean, variance, weight, bias, eps, code, negative_slope)


def _check(x, mean, variance, weight, bias):
    operator = "batch_norm_act"
    require_float(operator, x)
    require(x.dim() >= 2, operator, f"x has shape {tuple(x.shape)}, expected (N, C, ...)")
    fits = mean.dtype == x.dtype or (x.element_size() == 2 and mean.dtype == torch.float32)
    require(fits, operator, "mean has another dtype than x")
    for name, tensor in (("mean", mean), ("variance", variance), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        require_same_device(operator, name, x, tensor)
        require(tensor.dtype == mean.dtype, operator, f"{name} has another dtype than mean")
        check_channels(operator, name, x, tensor, 1)


def _compose(x, mean, variance, weight, bias, eps, code, negative_slope):
    _check(x, mean, variance, weight, bias)
    y = BY_CODE[code].reference(_normalise(x, mean, variance, weight, bias, eps), negative_slope)
    return torch.empty_like(x).copy_(y)


def _compose_gradients(grad, x, mean, variance, weight, bias, eps, code, negative_slope):
    wide = accumulator(x.dtype)
    rstd = (variance.to(wide) + eps).rsqrt()
    scale = spread(rstd if weight is None else weight.to(wide) * rstd, x, 1)
    centred = x.to(wide) - spread(mean, x, 1).to(wide)
    v = centred * scale if bias is None else centred * scale + spread(bias, x, 1)
    activation = BY_CODE[code]
    saved = activation.reference(v, negative_slope) if activation.saves_output else v
    g = activation.backward(grad.to(wide), saved, negative_slope)
    of_weight = sum_by_channel(g * centred, 1) * rstd
    return torch.empty_like(x).copy_(g * scale), of_weight.to(mean.dtype), sum_by_channel(g, 1).to(mean.dtype)


def _save(ctx, inputs, output):
    *tensors, ctx.eps, ctx.code, ctx.negative_slope = inputs
    ctx.save_for_backward(*tensors)


def _differentiable_backward(ctx, grad):
    x, mean, variance, weight, bias = ctx.saved_tensors

    def in_aten(x, weight, bias):
        y = _normalise(x, mean, variance, weight, bias, ctx.eps)
        return BY_CODE[ctx.code].reference(y, ctx.negative_slope)

    return differentiable_gradients(in_aten, (x, weight, bias), grad)


def _differentiate(ctx, grad):
    if is_differentiated():
        of_x, of_weight, of_bias = _differentiable_backward(ctx, grad)
    else:
        of_x, of_weight, of_bias = _GRADIENTS(grad, *ctx.saved_tensors, ctx.eps, ctx.code, ctx.negative_slope)
    x_needs, _, _, weight_needs, bias_needs = ctx.needs_input_grad[:5]
    return (
        of_x if x_needs else None,
        None,
        None,
        of_weight if weight_needs else None,
        of_bias if bias_needs else None,
        *[None] * 3,
    )


_ARGUMENTS = (
    "Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps, int activation, "
    "float negative_slope"
)
_OPERATOR, _INFERENCE = define_with_twin(f"batch_norm_act({_ARGUMENTS}) -> Tensor", _compose)
_GRADIENTS = define(
    f"batch_norm_act_gradients(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _compose_gradients
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
