"""Elementwise operators in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kfconvert.ops.bias_act import reference as bias_act


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


def prelu_bias(x: Tensor, bias: Tensor, weight: Tensor, dim: int = -1) -> Tensor:
    v = x + _along(bias, x, dim)
    return torch.where(v > 0, v, v * _along(weight, x, dim))


def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(F.gelu(x), p, training)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True, dim: int = -1
) -> Tensor:
    return F.dropout(x if bias is None else x + _along(bias, x, dim), p, training) + residual


def quantize_int8(x: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, dim: int = -1) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # A tensor: by a number ATen divides on CUDA as the product with its reciprocal, which rounds otherwise.
    scale = torch.as_tensor(scale, dtype=wide.dtype, device=x.device)
    scale, zero_point = (_along(value, x, dim) for value in (scale, zero_point))
    return torch.clamp(torch.round(wide / scale + zero_point), -128, 127).to(torch.int8)


def dequantize_int8(
    q: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, dim: int = -1, dtype: torch.dtype = torch.float32
) -> Tensor:
    scale, zero_point = (_along(value, q, dim) for value in (scale, zero_point))
    return ((q.to(torch.promote_types(dtype, torch.float32)) - zero_point) * scale).to(dtype)


def _along(values: float | Tensor, x: Tensor, dim: int) -> float | Tensor:
    """Values of the channels of x along ``dim`` in the shape in which they broadcast with x."""
    if not isinstance(values, Tensor) or values.numel() == 1:
        return values
    return values.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
