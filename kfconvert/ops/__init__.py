"""Functional operators: each works on any device, with or without the compiled library."""

from .act_mul import act_mul
from .activations import ACTIVATIONS, Activation, apply_activation
from .bias_act import bias_act
from .conv_act import conv_act
from .dropout_act import bias_dropout_add, fused_gelu_dropout, gelu_dropout
from .elementwise import (
    add_mul_exp,
    add_relu,
    add_sigmoid,
    bias_gelu,
    bias_relu,
    bias_silu,
    elementwise_add_relu,
    elementwise_mul_tanh,
    fused_bias_gelu,
    geglu,
    mish_scale,
    mul_tanh,
    multiply_relu,
    swish_multiply,
)
from .group_norm_act import group_norm_act
from .layer_norm_act import layer_norm_act
from .linear_act import linear_act
from .prelu_bias import prelu_bias
from .quantize import dequantize_int8, quantize_int8
from .rms_norm_act import rms_norm_act
from .scale_shift_act import scale_shift_act

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "act_mul",
    "add_mul_exp",
    "add_relu",
    "add_sigmoid",
    "apply_activation",
    "bias_act",
    "bias_dropout_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "conv_act",
    "dequantize_int8",
    "elementwise_add_relu",
    "elementwise_mul_tanh",
    "fused_bias_gelu",
    "fused_gelu_dropout",
    "geglu",
    "gelu_dropout",
    "group_norm_act",
    "layer_norm_act",
    "linear_act",
    "mish_scale",
    "mul_tanh",
    "multiply_relu",
    "prelu_bias",
    "quantize_int8",
    "rms_norm_act",
    "scale_shift_act",
    "swish_multiply",
]
