"""group_norm_act: ``y = act(group_norm(x))``, one pass over memory less than the two operators.

group_norm(x) = (x - mean) / sqrt(var + eps) * weight + bias, mean and (biased) variance over the
channels of a group and all positions (Wu and He, arXiv:1803.08494).

Backward, with xhat = (x - mean) rstd, v = xhat weight + bias, g = grad * act'(v):
    grad_x = rstd (g weight - mean(g weight) - xhat mean(g weight xhat))    (means as of x)
    grad_weight = sum over images and positions of g xhat;  grad_bias = sum over images and positions of g
v is recomputed from x. Only x and the two statistics of each group are saved.
"""

import torch

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..norms import accumulator, is_channels_last
from ..registration import (
    autocast,
    cast_as_norms,
    define,
    define_with_twin,
    differentiate,
    differentiate_by_decomposition,
    has_kernels,
    require,
    require_float,
    require_same_options,
    wants_gradient,
)
from .bias_act import check_channels, spread

__all__ = ["group_norm_act"]


def _laid_out(y, x):
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last(x) else y


def _normalise(x, num_groups, weight, bias, eps):
    if x.numel() > 0:
        # Not F.group_norm, which rejects groups of one value.
        return _laid_out(torch.group_norm(x.contiguous(), num_groups, weight, bias, eps), x)
    # ATen rejects some of these. The gradients of weight and bias are zeros.
    y = x.clone() if weight is None else x * spread(weight, x, 1)
    return y if bias is None else y + spread(bias, x, 1)


@declare(
    group="norm", example=lambda t, rows, columns: (t(2, 6, 5), 3, t(6), t(6), 1e-5, "relu"), timed_as="group_norm_silu"
)
def group_norm_act(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> torch.Tensor:
    """Computes ``act(group_norm(x))`` in x's dtype and shape, channels-last if x is, else contiguous.

    Args:
        x: (N, C, ...); float64, float32, float16 or bfloat16 (half types are computed in float32); contiguous, or on
            CUDA without gradients channels-last. Any other layout costs copies.
        num_groups: divides C.
        weight, bias: (C,), x's dtype and device.
        eps: added to the variance.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code, eps = CODES[activation], float(eps)
    if not has_kernels(x):
        _check(x, num_groups, weight, bias)
        y = _normalise(x, num_groups, weight, bias, eps)
        return apply_activation(y, activation, negative_slope)
    if wants_gradient(x, weight, bias):
        return _DIFFERENTIABLE(x, num_groups, weight, bias, eps, code, negative_slope)
    return _INFERENCE(x, num_groups, weight, bias, eps, code, negative_slope)


def _check(x, num_groups, weight, bias):
    operator = "group_norm_act"
    require_float(operator, x)
    require(x.dim() >= 2, operator, f"x has shape {tuple(x.shape)}, expected (N, C, ...)")
    channels = x.shape[1]
    require(
        num_groups >= 1 and channels % num_groups == 0, operator, f"{channels} channels do not make {num_groups} groups"
    )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            require_same_options(operator, name, x, tensor)
            check_channels(operator, name, x, tensor, 1)


def _compose(x, num_groups, weight, bias, eps, code, negative_slope):
    _check(x, num_groups, weight, bias)
    y = _normalise(x, num_groups, weight, bias, eps)
    return BY_CODE[code].reference(y, negative_slope)


def _fake(x, num_groups, weight, bias, eps, code, negative_slope):
    _check(x, num_groups, weight, bias)
    return _laid_out(torch.empty_like(x, memory_format=torch.contiguous_format), x)


def _rows(x, num_groups):
    """Returns x in the accumulation type, as (images, groups, elements of a group)."""
    images, channels, *inner = x.shape
    cols = channels // num_groups
    for size in inner:
        cols = cols * size
    return x.to(accumulator(x.dtype)).reshape(images, num_groups, cols)


def _compose_training(x, num_groups, weight, bias, eps, code, negative_slope):
    y = _compose(x, num_groups, weight, bias, eps, code, negative_slope)
    rows = _rows(x, num_groups)
    mean = rows.mean(-1, keepdim=True)
    rstd = ((rows - mean).square().mean(-1) + eps).rsqrt()
    return y, mean.flatten(), rstd.flatten()


def _fake_training(x, num_groups, weight, bias, eps, code, negative_slope):
    y = _fake(x, num_groups, weight, bias, eps, code, negative_slope)
    statistics = (x.new_empty(x.shape[0] * num_groups, dtype=accumulator(x.dtype)) for _ in range(2))
    return y, *statistics


def _compose_backward(grad, x, mean, rstd, weight, bias, num_groups, code, negative_slope):
    rows = _rows(x, num_groups)
    shape = rows.shape[:2]
    xhat = (rows - mean.reshape(shape).unsqueeze(-1)) * rstd.reshape(shape).unsqueeze(-1)
    xhat = xhat.reshape(x.shape)
    w = xhat.new_ones(x.shape[1]) if weight is None else weight.to(xhat.dtype)
    v = xhat * spread(w, x, 1)
    if bias is not None:
        v = v + spread(bias, x, 1)
    activation = BY_CODE[code]
    saved = activation.reference(v, negative_slope) if activation.saves_output else v
    g = activation.backward(grad.to(xhat.dtype), saved, negative_slope)
    gw, xhat_rows = _rows(g * spread(w, x, 1), num_groups), _rows(xhat, num_groups)
    grad_x = gw - gw.mean(-1, keepdim=True) - xhat_rows * (gw * xhat_rows).mean(-1, keepdim=True)
    grad_x = rstd.reshape(shape).unsqueeze(-1) * grad_x
    of_channels = [0, *range(2, x.dim())]
    return (
        grad_x.to(x.dtype).reshape(x.shape),
        x.new_empty(0) if weight is None else (g * xhat).sum(of_channels).to(x.dtype),
        x.new_empty(0) if bias is None else g.sum(of_channels).to(x.dtype),
    )


def _save(ctx, inputs, output):
    x, ctx.num_groups, weight, bias, ctx.eps, ctx.code, ctx.negative_slope = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, rstd, weight, bias)


def _differentiate(ctx, grad, *_):
    x, mean, rstd, weight, bias = ctx.saved_tensors
    options = (ctx.code, ctx.negative_slope)
    if grad is None:
        return (None,) * 7
    if is_differentiated():

        def in_aten(x, weight, bias):
            return _compose(x, ctx.num_groups, weight, bias, ctx.eps, *options)

        grad_x, grad_weight, grad_bias = differentiable_gradients(in_aten, (x, weight, bias), grad)
    else:
        grad_x, grad_weight, grad_bias = _BACKWARD(grad, x, mean, rstd, weight, bias, ctx.num_groups, *options)
        grad_weight = None if weight is None else grad_weight
        grad_bias = None if bias is None else grad_bias
    return grad_x, None, grad_weight, grad_bias, None, None, None


def _decompose(x, num_groups, weight, bias, eps, code, negative_slope):
    # The backward saves the copy that the kernels need.
    y, *_ = _DIFFERENTIABLE_TRAINING(x.contiguous(), num_groups, weight, bias, eps, code, negative_slope)
    return _laid_out(y, x)


_REST = "int num_groups, Tensor? weight, Tensor? bias, float eps, int activation, float negative_slope"
_OPERATOR, _INFERENCE = define_with_twin(f"group_norm_act(Tensor x, {_REST}) -> Tensor", _compose, _fake)
_TRAINING = define(
    f"group_norm_act_training(Tensor x, {_REST}) -> (Tensor, Tensor, Tensor)", _compose_training, _fake_training
)
_BACKWARD = define(
    "group_norm_act_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "int num_groups, int activation, float negative_slope) -> (Tensor, Tensor, Tensor)",
    _compose_backward,
)
_DIFFERENTIABLE_TRAINING = differentiate(_TRAINING, _differentiate, _save)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
autocast((_OPERATOR, _INFERENCE), cast_as_norms)
