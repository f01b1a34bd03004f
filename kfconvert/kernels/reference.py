"""The operators in plain ATen: their definitions, on any device and differentiable."""

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
