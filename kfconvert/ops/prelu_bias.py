"""prelu_bias: ``prelu(x + bias, weight)`` in one pass over memory; its backward is ATen's, with one pass more."""

import torch
from torch import Tensor

from .bias_act import check_channels, check_terms, spread
from .registration import LIBRARY, autocast, cast_to_widest, define_with_twin, has_kernels, require_same_options


def prelu_bias(x: Tensor, bias: Tensor, weight: Tensor, dim: int = -1) -> Tensor:
    """``v = x + bias`` where it is positive, else ``v * weight``, in x's dtype, shape and memory format.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (the half types are computed in float32).
        bias: (x.shape[dim],), along ``dim``; x's dtype and device (autocast aligns the dtypes).
        weight: the same, or one element for all channels.

    The formula is that of He et al., "Delving Deep into Rectifiers" (2015). RuntimeError: shapes, dtypes or devices
    that do not fit.
    """
    if weight.numel() == 1 and weight.dim() <= 1:
        weight = weight.expand(bias.shape)
    if not has_kernels(x):
        check_prelu(x, bias, weight, dim)
        return reference(x, bias, weight, dim)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, bias, weight)):
        return _OPERATOR(x, bias, weight, dim)
    return _INFERENCE(x, bias, weight, dim)


def reference(x: Tensor, bias: Tensor, weight: Tensor, dim: int = -1) -> Tensor:
    """The definition of :func:`prelu_bias` in plain ATen, differentiable."""
    weight = weight.expand(bias.shape) if weight.numel() == 1 else weight
    v = x + spread(bias, x, dim)
    return torch.where(v > 0, v, v * spread(weight, x, dim))


def check_prelu(x, bias, weight, dim):
    """RuntimeError unless the kernels take them."""
    check_terms("prelu_bias", x, bias, None, dim)
    require_same_options("prelu_bias", "weight", x, weight)
    check_channels("prelu_bias", "weight", x, weight, dim)


def _compose(x, bias, weight, dim):
    check_prelu(x, bias, weight, dim)
    return torch.empty_like(x).copy_(reference(x, bias, weight, dim))


def _fake(x, bias, weight, dim):
    check_prelu(x, bias, weight, dim)
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, bias, weight, ctx.dim = inputs
    ctx.save_for_backward(x, bias, weight)


def _differentiate(ctx, grad):
    x, bias, weight = ctx.saved_tensors
    v = x + spread(bias, x, ctx.dim)
    along = spread(weight, x, ctx.dim)
    of_x, of_weight = torch.ops.aten._prelu_kernel_backward(grad, v, along.expand_as(v))
    x_needs, bias_needs, weight_needs, _ = ctx.needs_input_grad
    return (
        of_x if x_needs else None,
        of_x.sum_to_size(along.shape).reshape(-1) if bias_needs else None,
        of_weight.sum_to_size(along.shape).reshape(-1) if weight_needs else None,
        None,
    )


_OPERATOR, _INFERENCE = define_with_twin(
    "prelu_bias(Tensor x, Tensor bias, Tensor weight, int dim) -> Tensor", _compose, _fake
)
torch.library.register_autograd("kfconvert::prelu_bias", _differentiate, setup_context=_save, lib=LIBRARY)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
