"""Triton kernels of some operators, forward only: float32, float16 and bfloat16 on CUDA, computed in float32.

Signatures and results are those of kfconvert.ops. What it takes and these do not is a RuntimeError of one
line: float64, a gradient, autocast, and for norms and softmax rows of more than 131072 elements (beyond 32768
they are slow: a program keeps its row in registers). Tensors that do not lie in memory as the result does are
copied first. With ``TRITON_INTERPRET=1`` in the environment before the import the kernels run in Triton's
interpreter, on CPU tensors as well.
"""

from .bias import bias_gelu, bias_relu, bias_silu, prelu_bias
from .combine import (
    act_mul,
    add_mul_exp,
    add_relu,
    add_sigmoid,
    geglu,
    mish_scale,
    mul_tanh,
    multiply_relu,
    swish_multiply,
)
from .norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm_act,
    layer_norm_gelu,
    layer_norm_relu,
    layer_norm_silu,
    rms_norm,
    rms_norm_act,
    rms_norm_gelu,
)
from .quantize import dequantize_int8, quantize_int8
from .rope import rope
from .softmax import softmax

__all__ = [
    "act_mul",
    "add_layer_norm",
    "add_mul_exp",
    "add_relu",
    "add_rms_norm",
    "add_sigmoid",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "dequantize_int8",
    "geglu",
    "layer_norm_act",
    "layer_norm_gelu",
    "layer_norm_relu",
    "layer_norm_silu",
    "mish_scale",
    "mul_tanh",
    "multiply_relu",
    "prelu_bias",
    "quantize_int8",
    "rms_norm",
    "rms_norm_act",
    "rms_norm_gelu",
    "rope",
    "softmax",
    "swish_multiply",
]
