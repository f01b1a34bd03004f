"""The operators in plain ATen: their definitions, on any device and differentiable."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
