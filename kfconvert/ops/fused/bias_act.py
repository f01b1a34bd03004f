"""bias_act: ``y = act(x + bias + residual)``, one pass over memory in place of up to three.

Backward: ``g = grad * act'(x + bias + residual)`` is the gradient of x and of residual. The gradient of bias is g
summed over all other dimensions, in the same pass over memory.
"""

import torch

from ..activations import BY_CODE, CODES, apply_activation
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..registration import (
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    require_float,
    require_same_options,
    require_shape,
    wants_gradient,
)

__all__ = ["bias_act"]


@declare(
    group="elementwise",
    example=lambda t, rows, columns: (t(rows, columns), t(columns), t(rows, columns), "gelu"),
    timed_as="bias_gelu, bias_relu and bias_silu",
)
def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dim: int = -1,
) -> torch.Tensor:
    """Computes ``act(x + bias + residual)``, in x's dtype, shape and memory format.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        bias: (x.shape[dim],), added along ``dim``; same dtype and device as x.
        residual: x's shape, dtype and device; any strides.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.
        dim: 1 for the output of a convolution; contiguous and channels-last inputs are both read without a
            copy.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code = CODES[activation]
    if not has_kernels(x):
        check_terms("bias_act", x, bias, residual, dim)
        return apply_activation(_sum(x, bias, residual, dim), activation, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, bias, residual) else _INFERENCE
    return operator(x, bias, residual, code, negative_slope, dim)


def spread(values: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshapes ``values``, one for each channel of x along ``dim``, so that they broadcast with x."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return values.reshape(shape)


def check_terms(operator: str, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, dim: int):
    """Raises RuntimeError unless the kernels accept x + bias + residual."""
    require_float(operator, x)
    if bias is not None:
        require_same_options(operator, "bias", x, bias)
        check_channels(operator, "bias", x, bias, dim)
    if residual is not None:
        require_same_options(operator, "residual", x, residual)
        require_shape(operator, "residual", residual, x.shape)


def check_channels(operator: str, name: str, x: torch.Tensor, values: torch.Tensor, dim: int) -> None:
    """Raises RuntimeError unless ``values`` are (x.shape[dim],)."""
    require(-x.dim() <= dim < x.dim(), operator, f"dim {dim} is out of range for x of shape {tuple(x.shape)}")
    require(
        values.dim() == 1 and values.shape[0] == x.shape[dim],
        operator,
        f"{name} has shape {tuple(values.shape)}, but x has {x.shape[dim]} channels in dim {dim}",
    )


def _sum(x, bias, residual, dim):
    if bias is not None:
        x = x + spread(bias, x, dim)
    return x if residual is None else x + residual


def _compose(x, bias, residual, code, negative_slope, dim):
    check_terms("bias_act", x, bias, residual, dim)
    y = BY_CODE[code].reference(_sum(x, bias, residual, dim), negative_slope)
    return y.clone() if y is x else y


def _fake(x, bias, residual, code, negative_slope, dim):
    check_terms("bias_act", x, bias, residual, dim)
    return torch.empty_like(x)


def _compose_in_place(x, bias, residual, code, negative_slope, dim=-1):
    x.copy_(_compose(x, bias, residual, code, negative_slope, dim))


def _compose_backward(grad, saved, bias, residual, code, negative_slope, dim):
    activation = BY_CODE[code]
    g = activation.backward(grad, _sum(saved, bias, residual, dim), negative_slope)
    return torch.empty_like(saved).copy_(g)


def sum_by_channel(values, dim):
    """Sums ``values`` over all dimensions except ``dim``; returns shape (values.shape[dim],)."""
    others = [d for d in range(values.dim()) if d != dim % values.dim()]
    # ATen treats a sum over no dimensions (a vector with its bias) as a sum over all dimensions.
    return values.sum(others) if others else values.clone()


def _compose_gradients(grad, saved, bias, residual, code, negative_slope, dim):
    if code == 0:
        return saved.new_empty(0), sum_by_channel(grad, dim)
    g = _compose_backward(grad, saved, bias, residual, code, negative_slope, dim)
    return g, sum_by_channel(g, dim)


def _save(ctx, inputs, output):
    x, bias, residual, code, ctx.negative_slope, ctx.dim = inputs
    ctx.activation = BY_CODE[code]
    if ctx.activation.name == "none":
        ctx.save_for_backward(None, None, None)
    elif ctx.activation.saves_output:
        ctx.save_for_backward(output, None, None)
    else:
        ctx.save_for_backward(x, bias, residual)


def _differentiable_backward(ctx, grad, saved, bias, residual):
    activation, negative_slope = ctx.activation, ctx.negative_slope
    if activation.saves_output:
        return activation.backward(grad, saved, negative_slope)
    with torch.enable_grad():
        v = _sum(saved, bias, residual, ctx.dim)
    return differentiable_gradients(lambda v: activation.reference(v, negative_slope), (v,), grad)[0]


def _gradients(ctx, grad):
    """The gradients of x + bias + residual, and of bias or None."""
    plain, bias_needs = ctx.activation.name == "none", ctx.needs_input_grad[1]
    saved, bias, residual = ctx.saved_tensors
    if is_differentiated():
        g = grad if plain else _differentiable_backward(ctx, grad, saved, bias, residual)
        return g, sum_by_channel(g, ctx.dim) if bias_needs else None
    options = ctx.activation.code, ctx.negative_slope, ctx.dim
    if bias_needs:
        g, of_bias = _GRADIENTS(grad, grad if plain else saved, bias, residual, *options)
        return grad if plain else g, of_bias
    return grad if plain else _BACKWARD(grad, saved, bias, residual, *options), None


def _differentiate(ctx, grad):
    x_needs, _, residual_needs = ctx.needs_input_grad[:3]
    g, of_bias = _gradients(ctx, grad)
    return g if x_needs else None, of_bias, g if residual_needs else None, None, None, None


_ARGUMENTS = "Tensor? bias, Tensor? residual, int activation, float negative_slope, int dim"
_OPERATOR, _INFERENCE = define_with_twin(f"bias_act(Tensor x, {_ARGUMENTS}) -> Tensor", _compose, _fake)
_IN_PLACE = define(f"bias_act_(Tensor(a!) x, {_ARGUMENTS}=-1) -> ()", _compose_in_place)
_BACKWARD = define(f"bias_act_backward(Tensor grad, Tensor saved, {_ARGUMENTS}) -> Tensor", _compose_backward)
_GRADIENTS = define(
    f"bias_act_gradients(Tensor grad, Tensor saved, {_ARGUMENTS}) -> (Tensor, Tensor)", _compose_gradients
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
