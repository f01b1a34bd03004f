"""Elementwise operators in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.bias_act import reference as bias_act
from ...ops.fused.bias_act import spread
from ...ops.standalone.normalize_image import reference as normalize_image
from ...ops.standalone.prelu_bias import reference as prelu_bias
from ...ops.standalone.quantize import reference_dequantize as dequantize_int8
from ...ops.standalone.quantize import reference_quantize as quantize_int8

__all__ = [
    "add_mul_exp",
    "add_relu",
    "add_sigmoid",
    "bias_dropout_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "dequantize_int8",
    "geglu",
    "gelu_dropout",
    "mish_scale",
    "mul_tanh",
    "multiply_relu",
    "normalize_image",
    "prelu_bias",
    "quantize_int8",
    "swish_multiply",
]


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def multiply_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x * y)


def add_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x + y)


def mul_tanh(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y)


def add_mul_exp(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp((x + y) * 2)


def swish_multiply(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def bias_relu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return bias_act(x, bias, activation="relu", dim=dim)


def bias_gelu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return bias_act(x, bias, activation="gelu", dim=dim)


def bias_silu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return bias_act(x, bias, activation="silu", dim=dim)


def mish_scale(x: Tensor, scale: Tensor) -> Tensor:
    return F.mish(x) * scale


def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(F.gelu(x), p, training)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True, dim: int = -1
) -> Tensor:
    return F.dropout(x if bias is None else x + spread(bias, x, dim), p, training) + residual
