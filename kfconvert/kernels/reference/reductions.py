"""Reductions in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor


def reduce_sum_squared(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    return (x * x).sum(dim, keepdim)


def reduce_mean_abs(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    return x.abs().mean(dim, keepdim)


def mse_loss(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(*torch.broadcast_tensors(x, y), reduction=reduction)
