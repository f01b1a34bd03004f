"""prelu_bias: ``prelu(x + bias, weight)`` in one pass over memory.

Backward, with v = x + bias: g = grad where v is positive, else grad * weight, is the gradient of x and,
summed over all other dimensions, of bias. The gradient of weight is the sum of grad * v where v is not
positive.
"""

import torch
from torch import Tensor

from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..fused.bias_act import check_channels, check_terms, spread, sum_by_channel
from ..registration import (
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require_same_options,
    wants_gradient,
)

__all__ = ["prelu_bias"]


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns), t(columns), t(columns)))
def prelu_bias(x: Tensor, weight: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    """Computes ``v = x + bias`` where it is positive, else ``v * weight``, in x's dtype, shape and memory format.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        weight: the slopes, (x.shape[dim],) along ``dim``, or one element for all channels; x's dtype and device
            (autocast aligns the dtypes). It follows x, as in ``F.prelu``.
        bias: (x.shape[dim],); the same dtype and device.

    The formula is that of He et al., "Delving Deep into Rectifiers" (2015). RuntimeError: incompatible shapes, dtypes
    or devices.
    """
    if weight.numel() == 1 and weight.dim() <= 1:
        weight = weight.expand(bias.shape)
    if not has_kernels(x):
        check_prelu(x, bias, weight, dim)
        return _plain(x, bias, weight, dim)
    operator = _DIFFERENTIABLE if wants_gradient(x, bias, weight) else _INFERENCE
    return operator(x, bias, weight, dim)


def _plain(x, bias, weight, dim):
    v = x + spread(bias, x, dim)
    return torch.where(v > 0, v, v * spread(weight, x, dim))


def check_prelu(x, bias, weight, dim):
    """Raises RuntimeError unless the kernels accept the arguments."""
    check_terms("prelu_bias", x, bias, None, dim)
    require_same_options("prelu_bias", "weight", x, weight)
    check_channels("prelu_bias", "weight", x, weight, dim)


def _compose(x, bias, weight, dim):
    check_prelu(x, bias, weight, dim)
    return torch.empty_like(x).copy_(_plain(x, bias, weight, dim))


def _save(ctx, inputs, output):
    x, bias, weight, ctx.dim = inputs
    ctx.save_for_backward(x, bias, weight)


def _compose_gradients(grad, x, bias, weight, dim):
    v = x + spread(bias, x, dim)
    of_x, of_weight = torch.ops.aten._prelu_kernel_backward(grad, v, spread(weight, x, dim).expand_as(v))
    return torch.empty_like(x).copy_(of_x), sum_by_channel(of_x, dim), sum_by_channel(of_weight, dim)


def _differentiate(ctx, grad):
    if is_differentiated():
        gradients = differentiable_gradients(lambda *given: _plain(*given, ctx.dim), ctx.saved_tensors, grad)
    else:
        gradients = _GRADIENTS(grad, *ctx.saved_tensors, ctx.dim)
    return *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad)), None


_OPERATOR, _INFERENCE = define_with_twin(
    "prelu_bias(Tensor x, Tensor bias, Tensor weight, int dim) -> Tensor", _compose
)
_GRADIENTS = define(
    "prelu_bias_gradients(Tensor grad, Tensor x, Tensor bias, Tensor weight, int dim) -> (Tensor, Tensor, Tensor)",
    _compose_gradients,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
