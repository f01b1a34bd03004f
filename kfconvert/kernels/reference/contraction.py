"""Sums of products over indices in plain ATen."""

import torch
from torch import Tensor


def contract(equation: str, *tensors: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    y = torch.einsum(equation, *tensors)
    return y if shape is None else y.reshape(shape)
