"""rms_norm_act: ``s = x + residual; y = act(s / sqrt(mean(s^2) + eps) * (offset + weight))``.

Root mean square layer normalisation, Zhang and Sennrich, arXiv:1910.07467.

Backward, with xhat = s rstd, w = offset + weight, v = xhat w, g = grad * act'(v):
    grad_s = rstd (g w - xhat mean(g w xhat)) + grad of the returned sum    (of x and of residual alike)
    grad_weight = sum over rows of g xhat
v is computed again from s, which is all that is kept besides the rstd of a row.
"""

import torch

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

__all__ = ["rms_norm_act"]


def reference(
    x,
    normalized_shape,
    weight=None,
    eps=1e-6,
    activation="none",
    residual=None,
    return_sum=False,
    offset=0.0,
    negative_slope=0.01,
):
    """The definition of :func:`rms_norm_act` in plain ATen, differentiable."""
    s = x if residual is None else x + residual
    y = apply_activation(
        _normalise(s, as_shape(normalized_shape), weight, eps, offset), activation, negative_slope
    )
    return (y, s) if return_sum else y


def _normalise(s, shape, weight, eps, offset):
    wide = s.to(accumulator(s.dtype))
    y = wide * (wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(s.dtype)


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), 1e-6, "silu"),
    timed_as="rms_norm, add_rms_norm and rms_norm_gelu",
    reference=reference,
)
def rms_norm_act(
    x: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    return_sum: bool = False,
    offset: float = 0.0,
    negative_slope: float = 0.01,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``act(rms_norm(x + residual))``, contiguous, in x's dtype; with ``return_sum`` also x + residual.

    The half types are computed in float32 and rounded once, at the end. Models that round the normalised
    values before they multiply by the weight (Llama, T5) have one rounding more; those that multiply in
    float32 (Gemma, OLMo 2) have the same one.

    Args:
        x: (..., *normalized_shape); float64, float32, float16 or bfloat16. Other strides than contiguous cost
        a copy. normalized_shape: the last dimensions of x, over which it is normalised.
        weight: normalized_shape; x's dtype, or float32 beside a half type.
        eps: added to the mean of the squares.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        residual: x's dtype and device, and x's shape or one that repeats over its leading dimensions. The
            half types are added and normalised in float32; the returned sum is rounded to x's dtype.
        return_sum: return (y, x + residual): the residual stream of a pre-norm transformer.
        offset: added to the weight: 1 in Gemma, whose weights are stored around 0.
        negative_slope: of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: shapes, dtypes or devices that do not fit.
    """
    code, eps = CODES[activation], as_number("rms_norm_act", "eps", eps)
    shape = as_shape(normalized_shape)
    if not has_kernels(x):
        check_norm("rms_norm_act", x, residual, shape, weight)
        return reference(x, shape, weight, eps, activation, residual, return_sum, offset, negative_slope)
    needs_grad = wants_gradient(x, weight, residual)
    if return_sum and residual is not None:
        operator = _ADD_DIFFERENTIABLE if needs_grad else _ADD_INFERENCE
        return operator(x, residual, shape, weight, eps, code, negative_slope, offset)
    operator = _DIFFERENTIABLE if needs_grad else _INFERENCE
    y = operator(x, residual, shape, weight, eps, code, negative_slope, offset)
    return (y, x) if return_sum else y


def _compose(x, residual, shape, weight, eps, code, negative_slope, offset):
    return _compose_add(x, residual, shape, weight, eps, code, negative_slope, offset)[0]


def _compose_add(x, residual, shape, weight, eps, code, negative_slope, offset):
    check_norm("rms_norm_act", x, residual, shape, weight)
    s = (x if residual is None else x + residual).contiguous()
    return BY_CODE[code].reference(_normalise(s, shape, weight, eps, offset), negative_slope), s


def _fake(x, residual, shape, weight, eps, code, negative_slope, offset):
    check_norm("rms_norm_act", x, residual, shape, weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add(x, residual, shape, weight, eps, code, negative_slope, offset):
    return tuple(_fake(x, residual, shape, weight, eps, code, negative_slope, offset) for _ in range(2))


def _compose_training(x, residual, shape, weight, eps, code, negative_slope, offset):
    y, s = _compose_add(x, residual, shape, weight, eps, code, negative_slope, offset)
    wide = s.to(accumulator(s.dtype)).flatten(-len(shape))
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    return y, s.new_empty(0) if residual is None else s, rstd.flatten()


def _fake_training(x, residual, shape, weight, eps, code, negative_slope, offset):
    y = _fake(x, residual, shape, weight, eps, code, negative_slope, offset)
    rstd = x.new_empty(row_count(x, shape), dtype=accumulator(x.dtype))
    return y, x.new_empty(0) if residual is None else torch.empty_like(y), rstd


def _compose_backward(grad, grad_sum, s, rstd, weight, cols, code, negative_slope, offset):
    wide = accumulator(s.dtype)
    rstd = rstd.unsqueeze(-1)
    xhat = s.reshape(-1, cols).to(wide) * rstd
    if weight is None:
        w = torch.ones(cols, dtype=wide, device=s.device)
    else:
        w = weight.reshape(-1).to(wide) + offset
    activation = BY_CODE[code]
    v = xhat * w
    saved = activation.reference(v, negative_slope) if activation.saves_output else v
    g = activation.backward(grad.reshape(-1, cols).to(wide), saved, negative_slope)
    gw = g * w
    grad_s = rstd * (gw - xhat * (gw * xhat).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_s = grad_s + grad_sum.reshape(-1, cols)
    grad_weight = s.new_empty(0) if weight is None else (g * xhat).sum(0).to(weight.dtype)
    return grad_s.to(s.dtype).reshape(s.shape), grad_weight


def _fake_backward(grad, grad_sum, s, rstd, weight, cols, code, negative_slope, offset):
    return (
        torch.empty_like(s, memory_format=torch.contiguous_format),
        s.new_empty(0) if weight is None else weight.new_empty(cols),
    )


def _save(ctx, inputs, output):
    x, residual, shape, weight, ctx.eps, ctx.code, ctx.negative_slope, ctx.offset = inputs
    _, s, rstd = output
    ctx.shape = tuple(shape)
    ctx.residual_shape = None if residual is None else residual.shape
    ctx.mark_non_differentiable(*((rstd,) if sum_requires_grad(x, residual) else (s, rstd)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else s, rstd, weight)


def _differentiable_backward(ctx, grad, grad_sum, s, weight):
    """The gradients of s and weight."""

    def definition(s, weight):
        return _compose(s, None, ctx.shape, weight, ctx.eps, ctx.code, ctx.negative_slope, ctx.offset)

    grad_s, grad_weight = differentiable_gradients(definition, (s, weight), grad)
    return grad_s if grad_sum is None else grad_s + grad_sum, grad_weight


def _differentiate(ctx, grad, grad_sum, *_):
    s, rstd, weight = ctx.saved_tensors
    cols = 1
    for size in ctx.shape:
        cols *= size
    if ctx.residual_shape is None:
        grad_sum = None
    if grad is None:  # only the sum was used
        return grad_sum, grad_of_residual(grad_sum, ctx.residual_shape), *[None] * 6
    if is_differentiated():
        grad_s, grad_weight = _differentiable_backward(ctx, grad, grad_sum, s, weight)
        return grad_s, grad_of_residual(grad_s, ctx.residual_shape), None, grad_weight, *[None] * 4
    grad_s, grad_weight = _BACKWARD(
        grad, grad_sum, s, rstd, weight, cols, ctx.code, ctx.negative_slope, ctx.offset
    )
    grad_weight = None if weight is None else grad_weight.reshape(ctx.shape)
    return grad_s, grad_of_residual(grad_s, ctx.residual_shape), None, grad_weight, *[None] * 4


def _decompose(*args):
    return _DIFFERENTIABLE_TRAINING(*args)[0]


def _decompose_add(*args):
    return _DIFFERENTIABLE_TRAINING(*args)[:2]


_REST = (
    "SymInt[] normalized_shape, Tensor? weight, float eps, int activation, float negative_slope, float offset"
)
_OPERATOR, _INFERENCE = define_with_twin(
    f"rms_norm_act(Tensor x, Tensor? residual, {_REST}) -> Tensor", _compose, _fake
)
_ADD_OPERATOR, _ADD_INFERENCE = define_with_twin(
    f"add_rms_norm_act(Tensor x, Tensor residual, {_REST}) -> (Tensor, Tensor)", _compose_add, _fake_add
)
_TRAINING = define(
    f"rms_norm_act_training(Tensor x, Tensor? residual, {_REST}) -> (Tensor, Tensor, Tensor)",
    _compose_training,
    _fake_training,
)
_BACKWARD = define(
    "rms_norm_act_backward(Tensor grad, Tensor? grad_sum, Tensor s, Tensor rstd, Tensor? weight, "
    "SymInt cols, int activation, float negative_slope, float offset) -> (Tensor, Tensor)",
    _compose_backward,
    _fake_backward,
)
_DIFFERENTIABLE_TRAINING = differentiate(_TRAINING, _differentiate, _save)
_DIFFERENTIABLE = differentiate_by_decomposition(_OPERATOR, _decompose)
_ADD_DIFFERENTIABLE = differentiate_by_decomposition(_ADD_OPERATOR, _decompose_add)
autocast((_OPERATOR, _INFERENCE, _ADD_OPERATOR, _ADD_INFERENCE), autocast_norm)
