"""combine_act: ``act(x + other)``, ``act(x * other)`` or ``act(x) * other``, broadcast, in one pass.

Backward: of the sum, d = grad * act'(x + other) is the gradient of both; of the product, it is d * other and
d * x with d = grad * act'(x * other); of the gated combination, grad * other * act'(x) and grad * act(x).
Each is summed over the dimensions in which its operand was repeated.
"""

from enum import IntEnum

import torch

from ..activations import BY_CODE, EXP_TWICE
from ..double_backward import differentiable_gradients, is_differentiated
from ..registration import (
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require_broadcast,
    require_float,
    require_same_options,
    wants_gradient,
)


class Combination(IntEnum):
    """The kind of combination, with the numbers of csrc/common/arguments.h."""

    SUM = 0  # act(x + other)
    PRODUCT = 1  # act(x * other)
    GATED = 2  # act(x) * other


def combine_act(
    x: torch.Tensor, other: torch.Tensor, combination: Combination, code: int, negative_slope: float = 0.01
) -> torch.Tensor:
    """Combines x and other. :mod:`.elementwise` has names for some combinations and activations.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        other: x's dtype and device (autocast aligns the dtypes), a shape that broadcasts with x's.
        code: code of the activation, a key of ``activations.BY_CODE``.
        negative_slope: slope of leaky_relu.

    Returns:
        A tensor of the broadcast shape, in the memory format of the first argument with that shape.

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
    """
    if not has_kernels(x):
        check_pair("combine_act", x, other)
        return reference(x, other, combination, code, negative_slope)
    operator = _DIFFERENTIABLE if wants_gradient(x, other) else _INFERENCE
    return operator(x, other, combination, code, negative_slope)


def reference(x, other, combination, code, negative_slope=0.01):
    """Computes :func:`combine_act` in plain ATen, differentiable."""
    act = BY_CODE[code].reference
    if combination == Combination.GATED:
        return act(x, negative_slope) * other
    return act(x * other if combination == Combination.PRODUCT else x + other, negative_slope)


def check_pair(operator, x, other):
    """Raises RuntimeError unless the kernels accept x and other."""
    require_float(operator, x)
    require_same_options(operator, "other", x, other)
    require_broadcast(operator, x, other)


def empty_result(x, other):
    """Returns an empty tensor for the result, with its broadcast shape and memory format."""
    shape = torch.broadcast_shapes(x.shape, other.shape)
    like = next((tensor for tensor in (x, other) if tensor.shape == shape), None)
    return x.new_empty(shape) if like is None else torch.empty_like(like)


def _compose(x, other, combination, code, negative_slope):
    check_pair("combine_act", x, other)
    return empty_result(x, other).copy_(reference(x, other, combination, code, negative_slope))


def _compose_backward(grad, x, other, combination, code, negative_slope):
    activation = BY_CODE[code]
    gated = combination == Combination.GATED
    v = x if gated else x * other
    activated = activation.reference(v, negative_slope)
    saved = activated if activation.saves_output else v
    g = activation.backward(grad * other if gated else grad, saved, negative_slope)
    grads = (g, grad * activated) if gated else (g * other, g * x)
    return tuple(empty_result(x, other).copy_(gradient) for gradient in grads)


def _save(ctx, inputs, output):
    x, other, ctx.combination, code, ctx.negative_slope = inputs
    ctx.activation, ctx.shapes = BY_CODE[code], (x.shape, other.shape)
    ctx.saves_output = ctx.combination == Combination.SUM and ctx.activation.saves_output
    if ctx.saves_output:
        ctx.save_for_backward(output)
    else:
        ctx.save_for_backward(x, other)


def _grad_of_sum(grad, y, activation, negative_slope):
    """The gradient of x + other from y = act(x + other), for activations that save their output."""
    if activation is EXP_TWICE and not is_differentiated():  # ATen's backward of the others is also one pass
        options = activation.code, negative_slope, -1
        return torch.ops.kfconvert.bias_act_backward(grad, y, None, None, *options)
    return activation.backward(grad, y, negative_slope)


def _differentiate(ctx, grad):
    options = ctx.combination, ctx.activation.code, ctx.negative_slope
    if ctx.saves_output:
        grads = (_grad_of_sum(grad, *ctx.saved_tensors, ctx.activation, ctx.negative_slope),) * 2
    elif is_differentiated():
        grads = differentiable_gradients(lambda *pair: reference(*pair, *options), ctx.saved_tensors, grad)
    elif ctx.combination == Combination.SUM:
        x, other = ctx.saved_tensors
        grads = (ctx.activation.backward(grad, x + other, ctx.negative_slope),) * 2
    else:
        grads = _BACKWARD(grad, *ctx.saved_tensors, *options)
    wanted = (
        (g if g.shape == shape else g.sum_to_size(shape)) if needed else None
        for g, shape, needed in zip(grads, ctx.shapes, ctx.needs_input_grad)
    )
    return *wanted, None, None, None


_OPERATOR, _INFERENCE = define_with_twin(
    "combine_act(Tensor x, Tensor other, int combination, int activation, float negative_slope) -> Tensor", _compose
)
_BACKWARD = define(
    "combine_act_backward(Tensor grad, Tensor x, Tensor other, int combination, int activation, "
    "float negative_slope) -> (Tensor, Tensor)",
    _compose_backward,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
