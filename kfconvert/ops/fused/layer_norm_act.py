"""layer_norm_act: ``s = x + residual; y = act((s - mean(s)) / sqrt(var(s) + eps) * weight + bias)``.

Backward, with xhat = (s - mean) rstd, v = xhat w + b, g = grad * act'(v):
    grad_s = rstd (g w - mean(g w) - xhat mean(g w xhat)) + grad of the returned sum    (of x and of residual
    alike) grad_w = sum over rows of g xhat;  grad_b = sum over rows of g
v is computed again from s, which is all that is kept besides the two statistics of a row.
"""

import torch
import torch.nn.functional as F

from ..activations import BY_CODE, CODES, apply_activation
from ..arguments import as_number
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..norms import accumulator, as_shape, autocast_norm, check_norm, grad_of_residual, row_count, sum_requires_grad
from ..registration import (
    autocast,
    define,
    define_with_twin,
    differentiate,
    differentiate_by_decomposition,
    has_kernels,
    wants_gradient,
)

__all__ = ["layer_norm_act"]


def reference(
    x,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    activation="none",
    residual=None,
    return_sum=False,
    negative_slope=0.01,
):
    """The definition of :func:`layer_norm_act` in plain ATen, differentiable."""
    s = x if residual is None else x + residual
    y = F.layer_norm(s, as_shape(normalized_shape), weight, bias, eps)
    y = apply_activation(y, activation, negative_slope)
    return (y, s) if return_sum else y


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), t(columns)),
    reference=reference,
)
def layer_norm_act(
    x: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    return_sum: bool = False,
    negative_slope: float = 0.01,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``act(layer_norm(x + residual))``, contiguous, in x's dtype; with ``return_sum`` also x + residual.

    Args:
        x: (..., *normalized_shape); float64, float32, float16 or bfloat16. Other strides than contiguous cost
        a copy. normalized_shape: the last dimensions of x, over which it is normalised.
        weight, bias: normalized_shape; x's dtype, or both float32 beside a half type.
        eps: added to the variance.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        residual: x's dtype and device, and x's shape or one that repeats over its leading dimensions
            (position embeddings). The half types are added and normalised in float32; the returned sum is
            rounded to x's dtype. Where a gradient is wanted that rounded sum is normalised, as the backward
            has no other.
        return_sum: return (y, x + residual): the residual stream of a pre-norm transformer.
        negative_slope: of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: shapes, dtypes or devices that do not fit.
    """
    code, eps = CODES[activation], as_number("layer_norm_act", "eps", eps)
    shape = as_shape(normalized_shape)
    if not has_kernels(x):
        check_norm("layer_norm_act", x, residual, shape, weight, bias)
        return reference(x, shape, weight, bias, eps, activation, residual, return_sum, negative_slope)
    needs_grad = wants_gradient(x, weight, bias, residual)
    if return_sum and residual is not None:
        operator = _ADD_DIFFERENTIABLE if needs_grad else _ADD_INFERENCE
        return operator(x, residual, shape, weight, bias, eps, code, negative_slope)
    operator = _DIFFERENTIABLE if needs_grad else _INFERENCE
    y = operator(x, residual, shape, weight, bias, eps, code, negative_slope)
    return (y, x) if return_sum else y


def _compose(x, residual, shape, weight, bias, eps, code, negative_slope):
    return _compose_add(x, residual, shape, weight, bias, eps, code, negative_slope)[0]


def _compose_add(x, residual, shape, weight, bias, eps, code, negative_slope):
    check_norm("layer_norm_act", x, residual, shape, weight, bias)
    s = (x if residual is None else x + residual).contiguous()
    if weight is not None or bias is not None:
        affine = (weight if weight is not None else bias).dtype
    else:
        affine = s.dtype
    # ATen normalises mixed dtypes on the CPU only; in the wider one it does on every device.
    y = F.layer_norm(s.to(affine), shape, weight, bias, eps).to(s.dtype)
    return BY_CODE[code].reference(y, negative_slope), s


def _fake(x, residual, shape, weight, bias, eps, code, negative_slope):
    check_norm("layer_norm_act", x, residual, shape, weight, bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add(x, residual, shape, weight, bias, eps, code, negative_slope):
    return tuple(_fake(x, residual, shape, weight, bias, eps, code, negative_slope) for _ in range(2))


def _compose_training(x, residual, shape, weight, bias, eps, code, negative_slope):
    y, s = _compose_add(x, residual, shape, weight, bias, eps, code, negative_slope)
    wide = s.to(accumulator(s.dtype)).flatten(-len(shape))
    mean = wide.mean(-1)
    rstd = (wide.var(-1, correction=0) + eps).rsqrt()
    return y, s.new_empty(0) if residual is None else s, mean.flatten(), rstd.flatten()


def _fake_training(x, residual, shape, weight, bias, eps, code, negative_slope):
    y = _fake(x, residual, shape, weight, bias, eps, code, negative_slope)
    statistics = [x.new_empty(row_count(x, shape), dtype=accumulator(x.dtype)) for _ in range(2)]
    return y, x.new_empty(0) if residual is None else torch.empty_like(y), *statistics


def _compose_backward(grad, grad_sum, s, mean, rstd, weight, bias, cols, code, negative_slope):
    wide = accumulator(s.dtype)
    mean, rstd = mean.unsqueeze(-1), rstd.unsqueeze(-1)
    xhat = (s.reshape(-1, cols).to(wide) - mean) * rstd
    w = torch.ones(cols, dtype=wide, device=s.device) if weight is None else weight.reshape(-1).to(wide)
    activation = BY_CODE[code]
    v = xhat * w if bias is None else xhat * w + bias.reshape(-1).to(wide)
    saved = activation.reference(v, negative_slope) if activation.saves_output else v
    g = activation.backward(grad.reshape(-1, cols).to(wide), saved, negative_slope)
    gw = g * w
    grad_s = rstd * (gw - gw.mean(-1, keepdim=True) - xhat * (gw * xhat).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_s = grad_s + grad_sum.reshape(-1, cols)
    return (
        grad_s.to(s.dtype).reshape(s.shape),
        s.new_empty(0) if weight is None else (g * xhat).sum(0).to(weight.dtype),
        s.new_empty(0) if bias is None else g.sum(0).to(bias.dtype),
    )


def _fake_backward(grad, grad_sum, s, mean, rstd, weight, bias, cols, code, negative_slope):
    return (
        torch.empty_like(s, memory_format=torch.contiguous_format),
        *(s.new_empty(0) if given is None else given.new_empty(cols) for given in (weight, bias)),
    )


def _save(ctx, inputs, output):
    x, residual, shape, weight, bias, ctx.eps, ctx.code, ctx.negative_slope = inputs
    _, s, mean, rstd = output
    ctx.shape = tuple(shape)
    ctx.residual_shape = None if residual is None else residual.shape
    ctx.mark_non_differentiable(*((mean, rstd) if sum_requires_grad(x, residual) else (s, mean, rstd)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else s, mean, rstd, weight, bias)


def _differentiable_backward(ctx, grad, grad_sum, s, weight, bias):
    """The gradients of s, weight and bias."""

    def definition(s, weight, bias):
        return _compose(s, None, ctx.shape, weight, bias, ctx.eps, ctx.code, ctx.negative_slope)

    grad_s, *affine = differentiable_gradients(definition, (s, weight, bias), grad)
    return grad_s if grad_sum is None else grad_s + grad_sum, *affine


def _differentiate(ctx, grad, grad_sum, *_):
    s, mean, rstd, weight, bias = ctx.saved_tensors
    cols = 1
    for size in ctx.shape:
        cols *= size
    if ctx.residual_shape is None:
        grad_sum = None
    if grad is None:  # only the sum was used
        return grad_sum, grad_of_residual(grad_sum, ctx.residual_shape), *[None] * 6
    if is_differentiated():
        grad_s, *affine = _differentiable_backward(ctx, grad, grad_sum, s, weight, bias)
        return grad_s, grad_of_residual(grad_s, ctx.residual_shape), None, *affine, *[None] * 3
    grad_s, grad_weight, grad_bias = _BACKWARD(
        grad, grad_sum, s, mean, rstd, weight, bias, cols, ctx.code, ctx.negative_slope
    )
    grad_weight = None if weight is None else grad_weight.reshape(ctx.shape)
    grad_bias = None if bias is None else grad_bias.reshape(ctx.shape)
    return grad_s, grad_of_residual(grad_s, ctx.residual_shape), None, grad_weight, grad_bias, *[None] * 3


def _decompose(x, residual, shape, weight, bias, eps, code, negative_slope):
    return _DIFFERENTIABLE_TRAINING(x, residual, shape, weight, bias, eps, code, negative_slope)[0]


def _decompose_add(x, residual, shape, weight, bias, eps, code, negative_slope):
    return _DIFFERENTIABLE_TRAINING(x, residual, shape, weight, bias, eps, code, negative_slope)[:2]


_REST = (
    "SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, int activation, float negative_slope"
)
_OPERATOR, _INFERENCE = define_with_twin(
    f"layer_norm_act(Tensor x, Tensor? residual, {_REST}) -> Tensor", _compose, _fake
)
_ADD_OPERATOR, _ADD_INFERENCE = define_with_twin(
    f"add_layer_norm_act(Tensor x, Tensor residual, {_REST}) -> (Tensor, Tensor)", _compose_add, _fake_add
)
_TRAINING = define(
    f"layer_norm_act_training(Tensor x, Tensor? residual, {_REST}) -> (Tensor, Tensor, Tensor, Tensor)",
    _compose_training,
    _fake_training,
)
_BACKWARD = define(
    "layer_norm_act_backward(Tensor grad, Tensor? grad_sum, Tensor s, Tensor mean, Tensor rstd, "
    "Tensor? weight, Tensor? bias, SymInt cols, int activation, float negative_slope) "
    "-> (Tensor, Tensor, Tensor)",
    _compose_backward,
    _fake_backward,
)
_DIFFERENTIABLE_TRAINING = differentiate(_TRAINING, _differentiate, _save)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
_ADD_DIFFERENTIABLE = differentiate_by_decomposition(_ADD_OPERATOR, _decompose_add)
autocast((_OPERATOR, _INFERENCE, _ADD_OPERATOR, _ADD_INFERENCE), autocast_norm)
