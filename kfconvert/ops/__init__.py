"""Functional operators: each works on any device, with or without the compiled library."""

import types

from .. import second_names
from .act_mul import act_mul
from .activations import ACTIVATIONS, Activation, apply_activation
from .attention import (
    attention_dropout,
    attention_score,
    chunked_attention,
    flash_attention,
    fused_multihead_attention,
    rope_attention,
)
from .batch_norm_act import batch_norm_act
from .bias_act import bias_act
from .block_sparse import block_sparse_attention
from .blocks import conv2d_bn_act, conv2d_gelu_dropout, depthwise_pointwise, ffn_block, fused_linear_activation
from .contraction import contract
from .conv_act import conv_act
from .cross_entropy import cross_entropy
from .dropout_act import bias_dropout_add, gelu_dropout
from .elementwise import (
    add_mul_exp,
    add_relu,
    add_sigmoid,
    bias_gelu,
    bias_relu,
    bias_silu,
    geglu,
    mish_scale,
    mul_tanh,
    multiply_relu,
    swish_multiply,
)
from .embedding_layer_norm import embedding_layer_norm
from .group_norm_act import group_norm_act
from .kinds import checked
from .layer_norm_act import layer_norm_act
from .linear_act import linear_act
from .norm_names import (
    add_layer_norm,
    add_rms_norm,
    batch_norm_relu,
    group_norm_silu,
    layer_norm_gelu,
    layer_norm_relu,
    layer_norm_silu,
    rms_norm,
    rms_norm_gelu,
)
from .normalize_image import normalize_image
from .optimizers import fused_adam, fused_adamw, fused_sgd
from .prelu_bias import prelu_bias
from .quantize import dequantize_int8, quantize_int8
from .reduce import mse_loss, reduce_mean_abs, reduce_sum_squared
from .rms_norm_act import rms_norm_act
from .rotary import rope
from .scale_shift_act import scale_shift_act
from .series import sliding_window, sliding_window_mean_std
from .softmax import SoftMaxOp, get_cuda_softmax, softmax

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "SoftMaxOp",
    "act_mul",
    "add_layer_norm",
    "add_mul_exp",
    "add_relu",
    "add_rms_norm",
    "add_sigmoid",
    "apply_activation",
    "attention_dropout",
    "attention_score",
    "batch_norm_act",
    "batch_norm_relu",
    "bias_act",
    "bias_dropout_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "block_sparse_attention",
    "chunked_attention",
    "contract",
    "conv2d_bn_act",
    "conv2d_gelu_dropout",
    "conv_act",
    "cross_entropy",
    "depthwise_pointwise",
    "dequantize_int8",
    "embedding_layer_norm",
    "ffn_block",
    "flash_attention",
    "fused_adam",
    "fused_adamw",
    "fused_linear_activation",
    "fused_multihead_attention",
    "fused_sgd",
    "geglu",
    "gelu_dropout",
    "get_cuda_softmax",
    "group_norm_act",
    "group_norm_silu",
    "layer_norm_act",
    "layer_norm_gelu",
    "layer_norm_relu",
    "layer_norm_silu",
    "linear_act",
    "mish_scale",
    "mse_loss",
    "mul_tanh",
    "multiply_relu",
    "normalize_image",
    "prelu_bias",
    "quantize_int8",
    "reduce_mean_abs",
    "reduce_sum_squared",
    "rms_norm",
    "rms_norm_act",
    "rms_norm_gelu",
    "rope",
    "rope_attention",
    "scale_shift_act",
    "sliding_window",
    "sliding_window_mean_std",
    "softmax",
    "swish_multiply",
]

for _name in __all__:
    if isinstance(globals()[_name], types.FunctionType):
        globals()[_name] = checked(globals()[_name])
        globals()[_name].__module__ = __name__  # where it is found by its name, as pickle does

globals().update(second_names.of(__name__))
__all__ = sorted([*__all__, *second_names.TABLE[__name__]])
