"""act_mul: ``y = act(gate) * up``, the middle of a gated MLP, in one pass over memory.

Backward: grad_gate = grad * up * act'(gate), grad_up = grad * act(gate); gate and up are kept, act(gate) is
computed again.
"""

import torch

from .activations import BY_CODE, CODES, apply_activation
from .registration import (
    LIBRARY,
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    has_kernels,
    require,
    require_float,
    require_same_options,
)


def reference(gate, up, activation, negative_slope=0.01):
    """The definition of :func:`act_mul` in plain ATen, differentiable."""
    return apply_activation(gate, activation, negative_slope) * up


def act_mul(
    gate: torch.Tensor, up: torch.Tensor, activation: str, negative_slope: float = 0.01
) -> torch.Tensor:
    """``act(gate) * up``, contiguous.

    Args:
        gate: any shape; float64, float32, float16 or bfloat16 (the half types are computed in float32).
        up: gate's shape, dtype and device (autocast aligns the dtypes). Both may be views whose rows lie
        apart, such as the two halves ``h.chunk(2, -1)`` of one packed tensor: these are read without a copy.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: shapes, dtypes or devices that do not fit.
    """
    code = CODES[activation]
    if not has_kernels(gate):
        _check("act_mul", gate, up)
        return reference(gate, up, activation, negative_slope)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _OPERATOR(gate, up, code, negative_slope)
    return _INFERENCE(gate, up, code, negative_slope)


def _check(operator, gate, up):
    require_float(operator, gate)
    require_same_options(operator, "up", gate, up)
    require(
        up.shape == gate.shape, operator, f"up has shape {tuple(up.shape)}, expected {tuple(gate.shape)}"
    )


def _compose(gate, up, code, negative_slope):
    _check("act_mul", gate, up)
    return (BY_CODE[code].reference(gate, negative_slope) * up).contiguous()


def _fake(gate, up, code, negative_slope):
    _check("act_mul", gate, up)
    return gate.new_empty(gate.shape)


def _compose_backward(grad, gate, up, code, negative_slope):
    activation = BY_CODE[code]
    activated = activation.reference(gate, negative_slope)
    saved = activated if activation.saves_output else gate
    grad_gate = activation.backward(grad * up, saved, negative_slope)
    return grad_gate.contiguous(), (grad * activated).contiguous()


def _fake_backward(grad, gate, up, code, negative_slope):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save(ctx, inputs, output):
    gate, up, ctx.code, ctx.negative_slope = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, grad):
    grad_gate, grad_up = _BACKWARD(grad, *ctx.saved_tensors, ctx.code, ctx.negative_slope)
    gate_needs, up_needs = ctx.needs_input_grad[:2]
    return grad_gate if gate_needs else None, grad_up if up_needs else None, None, None


_OPERATOR, _INFERENCE = define_with_twin(
    "act_mul(Tensor gate, Tensor up, int activation, float negative_slope) -> Tensor", _compose, _fake
)
_BACKWARD = define(
    "act_mul_backward(Tensor grad, Tensor gate, Tensor up, int activation, float negative_slope) "
    "-> (Tensor, Tensor)",
    _compose_backward,
    _fake_backward,
)
torch.library.register_autograd("kfconvert::act_mul", _differentiate, setup_context=_save, lib=LIBRARY)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
