"""softmax and cross_entropy in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax(x: Tensor, dim: int = -1, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    v = x * scale
    if mask is not None:
        v = v.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else v + mask
    return torch.softmax(v, dim)


def cross_entropy(
    x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(x, target, None, None, ignore_index, None, reduction, label_smoothing)
